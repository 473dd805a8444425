#!/usr/bin/env bash
# The commands of first_chip.py's parts, each of which it runs by
#
#     DEVICE=cuda OUT=out/first_chip PYTHON=python bash scripts/first_chip.sh PART
#
# in the folder of the project. OUT/PART.log gets the output, and OUT/PART.err the errors; the folder OUT exists.
# shellcheck disable=SC2086  # sizes are several words
set -euo pipefail
cd "$(dirname "$0")/.."
part=$1
exec >"$OUT/$part.log" 2>"$OUT/$part.err"
export -n DEVICE OUT PYTHON  # the commands do not see them

# How Python starts: on one chip with one process, and on all chips

python() { "$PYTHON" "$@"; }
one_chip() { python "$@"; }
all_chips() { python "$@"; }
case $DEVICE in
  cuda) all_chips() { python -m torch.distributed.run --standalone --nproc-per-node=gpu "$@"; } ;;
  cpu) all_chips() { python -m torch.distributed.run --standalone --nproc-per-node=2 "$@"; } ;;
  # train.py and bench.py start a process for each chip of a TPU, unless these variables ask for one
  xla)
    one_chip() {
      TPU_PROCESS_BOUNDS=1,1,1 TPU_CHIPS_PER_PROCESS_BOUNDS=1,1,1 CPU_NUM_DEVICES=1 python "$@"
    } ;;
  tpu)
    one_chip() {
      TORCH_TPU_SLICEBUILDER_ADDRESSES=localhost:8476 TORCH_TPU_TOPOLOGY=1,1,1 python "$@"
    } ;;
esac

# The sizes: a chip's share of the paper's Sudokus, and of its mazes, which have 11 times the cells

if [[ $DEVICE == xla || $DEVICE == tpu ]]; then
  checks=
  sudoku='--replica_batch_size=96 --micro_batch_size=32'
  maze='--replica_batch_size=12 --micro_batch_size=4 --size=30'
else
  checks=--compile=off  # torch.compile may choose other kernels in the next run
  sudoku='--replica_batch_size=768 --micro_batch_size=192'
  maze='--replica_batch_size=96 --micro_batch_size=24 --size=30'
fi
baseline="$sudoku --replica_batch_size=384"  # 16 chips share the batch of the study's baseline
puzzles='--size=6 --num_train=3000 --num_test=1000 --num_aug=100'  # the demo's
model=
if [[ $DEVICE == cpu || ${PJRT_DEVICE:-} == CPU ]]; then  # a rehearsal
  sudoku='--size=4 --replica_batch_size=8 --micro_batch_size=4 --steps=2'
  maze=$sudoku
  baseline=$sudoku
  puzzles='--size=4 --num_train=64 --num_test=40 --num_aug=5'
  model='--hidden_size=32 --multiple_of=32 --H_cycles=1 --L_cycles=1'
fi

# What the parts have in common

# demo ONE_OR_ALL RUN [FLAG ...] trains the demo
demo() {
  local start=$1 run=$2
  shift 2
  "$start" train.py config/demo.py --device="$DEVICE" --data_path="$OUT/data" $checks $model \
    --out_dir="$OUT/$run" "$@"
}

# 20 steps of it, at full depth and a constant rate
train() {
  demo "$1" "$2" --curriculum_epochs=0 --lr_min_ratio=1 --max_steps=20 --checkpoint_interval=10 \
    --log_interval=1 --eval_interval=0 --eval_final_max_puzzles=32 "${@:3}"
}

# compare RUN REFERENCE LIMIT
compare() { python scripts/compare.py "$OUT/$1" "$OUT/$2" "$3"; }

bench() { all_chips bench.py --device="$DEVICE" --data_path=missing --steps=20 $model "$@"; }

case $part in
  puzzles)
    python prepare_sudoku.py --source=generate $puzzles --output_dir="$OUT/data" ;;
  'parity of one chip, float32')
    python scripts/parity.py --device="$DEVICE" ;;
  'losses of the CPU')
    train python cpu --device=cpu --forward_dtype=float32 ;;
  'losses of one chip, float32')
    train one_chip one --forward_dtype=float32
    compare one cpu 1e-3 ;;
  'losses of one chip, --compile=off')
    train one_chip off --forward_dtype=float32 --compile=off
    compare off one 1e-3 ;;
  'losses of all chips, float32')
    train all_chips all --forward_dtype=float32
    compare all one 1e-3 ;;
  'losses of all chips, bfloat16')
    train all_chips bfloat16 --forward_dtype=bfloat16
    compare bfloat16 cpu 0.05 ;;
  'commit, versions, hardware')
    echo "$(git rev-parse HEAD) $(python -m pip freeze | grep -E '^(torch|libtpu)' | tr '\n' ' ')" \
      "$(head -n 1 "$OUT/all/log.txt")" ;;
  sudoku)
    bench config/sudoku.py $sudoku ;;
  'ten steps again')
    train all_chips again --forward_dtype=bfloat16 --max_steps=10
    compare again bfloat16 0 ;;
  'resumed from there')
    train all_chips again --forward_dtype=bfloat16 --init_from=resume
    compare again bfloat16 0 ;;
  SIGTERM)
    exec_python() { exec "$PYTHON" "$@"; }  # in the place of the shell in the background, whose id is $!
    train exec_python stopped --max_steps=100 &
    until grep -qs 'step 2/' "$OUT/stopped/log.txt"; do
      sleep 0.1
      kill -0 $! || exit
    done
    kill $!
    code=0
    wait $! || code=$?
    test $code = 3 ;;
  'resumed after it')
    train python stopped --max_steps=100 --init_from=resume ;;
  demo)
    demo python demo ;;
  baseline)
    bench config/baseline.py $baseline ;;
  'sudoku, --compile=off')
    bench config/sudoku.py $sudoku --compile=off ;;
  sudoku_att)
    bench config/sudoku_att.py $sudoku ;;
  maze)
    bench config/maze.py $maze ;;
  *)
    echo "no part $part" >&2
    exit 2 ;;
esac
