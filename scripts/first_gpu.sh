#!/usr/bin/env bash
# The first measurements on a GPU: what docs/gpu.md estimates.
#
#   scripts/first_gpu.sh                 all parts, then their figures; run it again after a cut: it goes on
#   scripts/first_gpu.sh sudoku maze_24  only the parts of these names; --help lists them
#   DEVICE=cpu FLAGS="--hidden_size=32 --L_cycles=3 --global_batch_size=192" scripts/first_gpu.sh    a rehearsal
#
# A part takes 9 minutes at most. OUT, by default out/first_gpu, keeps the log of each; PYTHON is the Python.
set -uo pipefail
unset CDPATH  # cd would look for the folder in other places
cd "$(dirname "$0")/.." || exit 1
PYTHON=${PYTHON:-python} DEVICE=${DEVICE:-cuda} OUT=${OUT:-out/first_gpu}
read -ra flags <<< "${FLAGS:-}"
wanted=("$@") parts=() failed=()

part() {  # NAME COMMAND...: runs it, unless it is done or not wanted; notes its name until all are listed
    local name=$1 began=$SECONDS code
    shift
    [[ -n ${listed:-} ]] || { parts+=("$name"); return; }
    [[ ${#wanted[@]} == 0 || " ${wanted[*]} " == *" $name "* ]] || return 0
    if [[ -e $OUT/$name.done ]]; then
        echo "$name: done"
        return 0
    fi
    echo "$name: at most 9 minutes: $*"
    timeout --signal=TERM --kill-after=60 480 "$@" > "$OUT/$name.log" 2>&1 &
    wait $!  # in the background, or bash would run the trap after the part
    code=$?
    if [[ $code == 0 || $code == 124 && $name == begin ]]; then  # a run that was stopped has saved
        touch "$OUT/$name.done"
        echo "$name: $((SECONDS - began)) s"
    else
        failed+=("$name")
        echo "$name: failed with $code after $((SECONDS - began)) s: $(tail -n 1 "$OUT/$name.log" | cut -c 1-200)"
    fi
}

measure() {
    local bench=("$PYTHON" bench.py) config size
    part smoke "$PYTHON" -m pytest -q test_smoke.py
    part demo "$PYTHON" train.py config/demo.py "--device=$DEVICE" "--out_dir=$OUT/demo" --init_from=auto \
        "${flags[@]}"
    part demo_cpu "$PYTHON" train.py config/demo.py --device=cpu "--out_dir=$OUT/demo_cpu" --init_from=auto \
        "${flags[@]}"
    for config in sudoku sudoku_fast; do
        part "$config" "${bench[@]}" "config/$config.py" "--device=$DEVICE" "${flags[@]}"
    done
    part sudoku_eager "${bench[@]}" config/sudoku.py "--device=$DEVICE" --compile=off "${flags[@]}"
    for size in 24 48 96 192; do
        part "maze_$size" "${bench[@]}" config/maze.py "--device=$DEVICE" --size=30 "--micro_batch_size=$size" \
            "${flags[@]}"
    done
    if [[ -z ${listed:-} || $("$PYTHON" -c "import torch; print(torch.cuda.device_count())") -gt 1 ]]; then
        part two "$PYTHON" -m torch.distributed.run --nproc-per-node=2 train.py config/demo.py \
            "--out_dir=$OUT/two" --init_from=auto "${flags[@]}"
    fi
    part begin "$PYTHON" train.py config/sudoku_fast.py "--device=$DEVICE" "--out_dir=$OUT/begin" \
        --init_from=auto --data_prepare=prepare_sudoku.py "${flags[@]}"
}

measure
listed=1
for name in "${wanted[@]}"; do
    if [[ $name == -h || $name == --help ]]; then
        sed -n '2,/^set/s/^# \{0,1\}//p' scripts/first_gpu.sh
        echo "parts: ${parts[*]}"
        exit
    elif [[ " ${parts[*]} " != *" $name "* ]]; then
        echo "first_gpu.sh: no such part: $name; --help lists them" >&2
        exit 2
    fi
done
if [[ $DEVICE == cuda ]] && ! "$PYTHON" -c "import sys, torch; sys.exit(not torch.cuda.is_available())"; then
    echo "first_gpu.sh: torch sees no CUDA GPU; DEVICE=cpu rehearses" >&2
    exit 2
fi
trap 'kill $! 2> /dev/null; wait $!; exit 3' INT TERM
mkdir -p "$OUT"
measure
# what bench.py measured, and what the runs came to
grep -sH '^{' "$OUT"/*.log
grep -sH 'evaluation:' "$OUT"/*/log.txt
if [[ ${#failed[@]} -gt 0 ]]; then
    echo "first_gpu.sh: failed: ${failed[*]}; $OUT/NAME.log has the reason, the same command tries again" >&2
    exit 1
fi
