#!/usr/bin/env bash
# A slice of Google Cloud's TPUs, from your own machine: create it, put the code on it, train, watch, start again after preemption, delete.
#
#   export NAME=trm ZONE=us-central2-b TYPE=v4-32 SPOT=1
#   scripts/tpu.sh keep train.py config/baseline.py --data_path=gs://BUCKET/data/NAME --gcs_dir=gs://BUCKET/runs/baseline
#
# What runs on the hosts is this same file, which push takes there: the functions host_*.
set -euo pipefail

NAME=${NAME:-}                   # of the TPU VM, and of the queued resource that asks for it
ZONE=${ZONE:-}                   # of your quota, as us-central2-b; the bucket should be in its region
PROJECT=${PROJECT:-}             # empty: gcloud's own
TYPE=${TYPE:-}                   # v4-32 (32 cores: 16 chips, 4 hosts), v5e-8 (8 chips, 1 host), v5p-8, v6e-8, ...
SPOT=${SPOT:-0}                  # 1: cheaper, and preempted when others want it
RUNTIME=${RUNTIME:-}             # the hosts' image; empty: the one for TYPE
NETRC=${NETRC:-}                 # file with W&B's login (`wandb login` writes ~/.netrc), which push copies to the hosts
WORKER=${WORKER:-0}              # host whose output logs follows (or all), and that pull fetches from
POLL=${POLL:-60}                 # seconds between two looks at the slice
MAX_FAILURES=${MAX_FAILURES:-3}  # keep gives up after so many without a new checkpoint; preemptions do not count
STOP_WAIT=${STOP_WAIT:-120}      # seconds that stop gives a run to save and upload
DRY_RUN=${DRY_RUN:-0}            # 1: print every gcloud command, run none

usage() {
  cat <<'END'
usage: [SETTING=value ...] scripts/tpu.sh COMMAND [...]

  create                   ask for the slice, and wait until it is there
  push                     this folder's files that git does not ignore (code, not data), to ~/trm of every host
  setup                    a virtual environment with the requirements, on every host; after push
  run SCRIPT [ARG ...]     start python SCRIPT ARG ... on every host, detached; train.py gets --init_from=auto
  keep SCRIPT [ARG ...]    all of these, and again after each preemption or failure, until the run is complete
  status                   the slice's state, each host's, and the end of its output
  logs                     follow what host WORKER prints (Ctrl-C leaves the run alone)
  pull                     host WORKER's out/ and output, to out/NAME/hostWORKER
  pull gs://DIR [REGEX]    that folder of a bucket, to out/; files that match REGEX are left out
  stop                     SIGTERM: the run saves, uploads and ends; and with it keep
  delete                   the slice, and all that is on its disks

settings, as environment variables, and their defaults:
END
  sed -nE 's/^([A-Z_]+)=\$\{[A-Z_]+:-([^}]*)\} *# (.*)/\1=\2 \3/p' "$0" |
    while read -r setting text; do printf '  %-15s %s\n' "$setting" "$text"; done
}

say() { echo "tpu.sh: $*" >&2; }
refuse() { say "$*"; exit 2; }

# gcloud: https://cloud.google.com/sdk/gcloud/reference/compute/tpus

run_gcloud() {
  if [[ $DRY_RUN == 1 ]]; then { printf gcloud; printf ' %q' "$@"; echo; } >&3; else gcloud "$@" </dev/null; fi
}
tpus() { run_gcloud compute tpus "$@" --zone="$ZONE" ${PROJECT:+"--project=$PROJECT"} --quiet; }
on_hosts() { tpus tpu-vm ssh "$NAME" --worker="${2:-all}" --command="$1"; }
on_host() { echo "STOP_WAIT=$STOP_WAIT bash trm/scripts/tpu.sh$(printf ' %q' "$@")"; }
call_hosts() { on_hosts "$(on_host "$@")"; }

find_runtime() {  # https://cloud.google.com/tpu/docs/runtimes
  case $TYPE in
    v4-*) echo tpu-ubuntu2204-base ;;
    v5litepod-*) echo v2-alpha-tpuv5-lite ;;
    v5p-*) echo v2-alpha-tpuv5 ;;
    v6e-*) echo v2-alpha-tpuv6e ;;
  esac
}

# A queued resource waits for capacity, where `tpu-vm create` fails at once: the documentation's advice for Spot slices
# (https://cloud.google.com/tpu/docs/spot). It outlives a preempted slice, and has to be deleted before the next request.
request_slice() {
  local spot=${SPOT#0}
  tpus queued-resources create "$NAME" --node-id="$NAME" --accelerator-type="$TYPE" \
    --runtime-version="${RUNTIME:-$(find_runtime)}" ${spot:+--spot}
}

delete() { tpus queued-resources delete "$NAME" --force; }

find_state() {  # of the VM, else QUEUE_ and that of the request; NONE without either, NO_ANSWER where gcloud fails
  local answer
  if answer=$(tpus tpu-vm describe "$NAME" --format='value(state)' 2>&1); then echo "${answer##*$'\n'}"
  elif [[ $answer != *NOT_FOUND* ]]; then say "${answer##*$'\n'}"; echo NO_ANSWER
  elif answer=$(tpus queued-resources describe "$NAME" --format='value(state.state)' 2>&1); then echo "QUEUE_${answer##*$'\n'}"
  elif [[ $answer == *NOT_FOUND* ]]; then echo NONE
  else say "${answer##*$'\n'}"; echo NO_ANSWER; fi
}

create() {
  local state='' last=''
  request_slice
  until [[ $DRY_RUN == 1 || $state == READY ]]; do
    state=$(find_state)
    [[ $state == "$last" ]] || say "$NAME: $state"
    [[ $state != QUEUE_FAILED ]] || { say "see gcloud compute tpus queued-resources describe $NAME --zone=$ZONE, then delete"; exit 1; }
    [[ $state == READY ]] || sleep "$POLL"
    last=$state
  done
}

push() {
  local archive=${TMPDIR:-/tmp}/trm-$NAME.tar.gz
  git ls-files -z --cached --others --exclude-standard |
    COPYFILE_DISABLE=1 tar --null -T - -czf "$archive" || { say "push: see above"; return 1; }
  (($(wc -c <"$archive") < 64000000)) || refuse "push: $archive is over 64 MB, too much for code: name what is data in .gitignore"
  tpus tpu-vm scp "$archive" "$NAME:trm.tar.gz" --worker=all &&
    { [[ -z $NETRC ]] || tpus tpu-vm scp "$NETRC" "$NAME:.netrc" --worker=all; } &&
    on_hosts 'mkdir -p trm && tar -xzf trm.tar.gz -C trm'
}

find_run() {  # of all hosts the gravest word; silent without one
  local words word
  words=$(on_hosts "if [ -e trm/run ]; then $(on_host host_state "$@"); else echo new; fi" 2>/dev/null) || true
  for word in busy wrong failed asked running stopped new complete; do
    if grep -qx "$word" <<<"$words"; then echo "$word"; return; fi
  done
  echo silent
}

list_checkpoints() { run_gcloud storage ls "$bucket" --recursive 2>/dev/null | grep -E 'ckpt_[0-9]+\.json$' || true; }  # their order is fixed

note_failure() {  # $1: what happened
  local now
  now=$(list_checkpoints)
  [[ -z $now || $now == "$seen" ]] || failures=0
  seen=${now:-$seen} failures=$((failures + 1))
  say "$1 ($failures of $MAX_FAILURES without a new checkpoint)"
  ((failures < MAX_FAILURES)) || { say "giving up; the slice costs on: see status and logs, then delete"; exit 1; }
}

setup() { call_hosts host_setup; }
run() { call_hosts host_start "$@"; }
stop() { call_hosts host_stop asked; }
logs() { on_hosts 'tail -n 100 -F trm/run/output.txt' "$WORKER"; }
start_all() { push && setup && run "$@"; }

keep() {  # remembers nothing that matters: it can be ended and started again at any time
  local state run last='' silent=0 started=0 arg
  bucket='' failures=0 seen=''
  for arg in "$@"; do [[ $arg != --gcs_dir=* ]] || bucket=${arg#--gcs_dir=}; done
  [[ $bucket == gs://?* ]] || refuse "keep needs --gcs_dir=gs://BUCKET/...: a preempted slice takes its disks along"
  if [[ $DRY_RUN == 1 ]]; then  # one round
    { find_state; request_slice; start_all "$@"; find_run "$@"; list_checkpoints; delete; } >/dev/null
    return
  fi
  seen=$(list_checkpoints)
  while true; do
    state=$(find_state) run=
    [[ $state != READY ]] || run=$(find_run "$@")
    [[ "$state $run" == "$last" ]] || say "$NAME: $state${run:+, run: $run}"
    last="$state $run"
    # How an earlier run ended says nothing about this one.
    case $run in running) started=1 ;; wrong|failed|asked|complete) ((started)) || run=new ;; esac
    [[ $run == silent ]] || silent=0
    case $state${run:+ $run} in
      NONE) request_slice || note_failure "the request was refused" ;;
      PREEMPTED|TERMINATED|STOPPED|UNKNOWN|QUEUE_SUSPENDED) delete || say "not deleted yet" ;;
      QUEUE_FAILED) note_failure "the request failed"; delete || say "not deleted yet" ;;
      'READY complete') say "complete; the slice costs on until it is deleted"; return ;;
      'READY asked') say "stopped, as asked"; return ;;
      'READY busy') refuse "$NAME runs something else: see status" ;;
      'READY wrong'|'READY failed')
        status
        call_hosts host_stop || true  # the hosts that wait for the one that died
        [[ $run != wrong ]] || refuse "wrong input, see above: no restart would mend it"
        note_failure "the run failed"
        started=0 ;;
      'READY new'|'READY stopped')
        if start_all "$@"; then started=1; elif [[ $(find_state) == READY ]]; then note_failure "the start failed"; fi ;;
      'READY silent')
        silent=$((silent + 1))
        ((silent % 5)) || { note_failure "the hosts do not answer"; delete || say "not deleted yet"; } ;;
    esac
    sleep "$POLL"
  done
}

status() {
  echo "$NAME: $(find_state)"
  call_hosts host_status || true
}

pull() {
  local to=out/$NAME/host$WORKER
  (($# == 0)) || to=out/$(basename "$1")
  [[ $DRY_RUN == 1 ]] || mkdir -p "$to"
  if (($#)); then
    run_gcloud storage rsync "$1" "$to" --recursive ${2:+"--exclude=$2"}
  else
    tpus tpu-vm scp "$NAME:trm/out" "$NAME:trm/run" "$to" --recurse --worker="$WORKER"
  fi
}

# On a host, in ~/trm. run/ holds the command, the process that waits for it, its output and its exit code.

host_setup() {
  [[ -x venv/bin/pip ]] || python3 -m venv --clear venv || {  # some images lack it
    sudo apt-get -o DPkg::Lock::Timeout=300 update -q
    sudo apt-get -o DPkg::Lock::Timeout=300 install -qy python3-venv
    python3 -m venv --clear venv
  }
  venv/bin/pip install --quiet --no-cache-dir -r requirements.txt 'torch_xla[tpu]==2.9.0'  # [tpu] brings libtpu
}

host_is_running() { [[ -f run/pid ]] && ps -o args= -p "$(<run/pid)" | grep -q 'tpu.sh host_'; }

host_start() {
  ! host_is_running || refuse "a run is on: stop it first"
  mkdir -p run
  rm -f run/exit run/asked
  echo "$*" >run/command
  setsid nohup bash scripts/tpu.sh host_run "$@" >run/output.txt 2>&1 </dev/null 3>&- &  # an open file would hold the connection
  echo $! >run/pid
}

host_run() {
  local code=0
  export PJRT_DEVICE=TPU  # without it a TPU VM can train on its CPU
  venv/bin/python -u "$@" || code=$?
  echo $code >run/exit
}

host_state() {  # of the run of these arguments
  if host_is_running; then if [[ $* == "$(<run/command)" ]]; then echo running; else echo busy; fi
  elif [[ -f run/asked ]]; then echo asked
  elif [[ ! -f run/pid ]]; then echo new
  else
    case $(cat run/exit 2>/dev/null) in
      2) echo wrong ;;
      0) if grep -q 'the same command with --init_from=resume' run/output.txt; then echo stopped; else echo complete; fi ;;
      *) echo failed ;;  # or the host was restarted
    esac
  fi
}

host_status() {
  [[ -f run/command ]] || { echo "$(hostname): nothing has run"; return; }
  echo "$(hostname): $(host_state "$(<run/command)"), python $(<run/command)"
  tail -n 10 run/output.txt
}

host_stop() {  # [asked]: by the user, so that keep ends too
  local i
  mkdir -p run
  (($# == 0)) || touch "run/$1"
  for ((i = 0; i < STOP_WAIT; i++)); do
    host_is_running || return 0
    ((i)) || pkill -TERM -P "$(<run/pid)"
    sleep 1
  done
  say "no end after $STOP_WAIT s: killing it; the next run goes on from the last checkpoint"
  pkill -KILL -P "$(<run/pid)"
}

main() {
  local command=${1:-help}
  (($# == 0)) || shift
  case $command in
    help|-h|--help) usage; return ;;
    create|push|setup|run|keep|status|logs|pull|stop|delete|host_*) ;;
    *) refuse "unknown command $command: --help lists them" ;;
  esac
  [[ $command == host_* ]] || check_settings
  cd "$(dirname "$0")/.."
  if [[ $command == run || $command == keep ]]; then
    [[ -f ${1:-} ]] || refuse "$command needs a script of this folder, as $command train.py config/baseline.py"
    if [[ $1 == train.py && "$*" != *--init_from=* ]]; then set -- "$@" --init_from=auto; fi
  fi
  exec 3>&1  # DRY_RUN's commands, where gcloud's output would be read
  "$command" "$@"
}

check_settings() {
  TYPE=${TYPE/#v5e-/v5litepod-}
  [[ $NAME =~ ^[a-z]([a-z0-9-]*[a-z0-9])?$ ]] || refuse "NAME=$NAME: set it to the slice's name: lower-case letters, digits and hyphens"
  [[ $ZONE =~ ^[a-z]+-[a-z]+[0-9]+-[a-z]$ ]] || refuse "ZONE=$ZONE: set it to the slice's zone, as us-central2-b"
  [[ ! $command =~ ^(create|keep)$ || $TYPE =~ ^(v4|v5litepod|v5p|v6e)-[0-9]+$ ]] ||
    refuse "TYPE=$TYPE: set it to v4-N, v5e-N, v5p-N or v6e-N, as v4-32"
  [[ $SPOT$DRY_RUN =~ ^[01][01]$ ]] || refuse "SPOT=$SPOT DRY_RUN=$DRY_RUN: each must be 0 or 1"
  [[ $MAX_FAILURES$STOP_WAIT =~ ^[0-9]+$ ]] || refuse "MAX_FAILURES=$MAX_FAILURES STOP_WAIT=$STOP_WAIT: must be numbers"
  [[ -z $NETRC || -f $NETRC ]] || refuse "NETRC=$NETRC: no such file"
  [[ $DRY_RUN == 1 ]] || command -v gcloud >/dev/null || refuse "gcloud is not installed: https://cloud.google.com/sdk/docs/install"
}

main "$@"
