#!/usr/bin/env bash
# Manages a slice of Google Cloud's TPUs from your own machine: creates it, copies the code to it, trains,
# watches, restarts the run after a preemption, and deletes the slice.
#
#   export NAME=trm ZONE=us-central2-b TYPE=v4-32 SPOT=1
#   scripts/tpu.sh keep train.py config/baseline.py --data_path=gs://BUCKET/DATA --gcs_dir=gs://BUCKET/RUN
#
# The hosts run the functions host_* of this same file, which push copies to them.
set -euo pipefail

NAME=${NAME:-}                   # of the TPU VM, and of the queued resource that requests it
ZONE=${ZONE:-}                   # of your quota, as us-central2-b; the bucket should be in its region
PROJECT=${PROJECT:-}             # empty: gcloud's default
TYPE=${TYPE:-}                   # v4-32 (32 cores: 16 chips, 4 hosts), v5e-8 (8 chips, 1 host), v6e-8, ...
SPOT=${SPOT:-0}                  # 1: cheaper, and preempted when others need the chips
RUNTIME=${RUNTIME:-}             # the hosts' image; empty: the default for TYPE
CREATE_FLAGS=${CREATE_FLAGS:-}   # more flags for the request: --network=... --service-account=... --reserved
SSH_FLAGS=${SSH_FLAGS:-}         # more flags for ssh and scp: --internal-ip or --tunnel-through-iap
LIBTPU_INIT_ARGS=${LIBTPU_INIT_ARGS:-}  # the TPU compiler's options for the run: see docs/performance.md
NETRC=${NETRC:-}                 # file with W&B's login (~/.netrc after `wandb login`); push copies it
WORKER=${WORKER:-}               # host for ssh, logs and pull; empty: rank 0's (ssh: all, its shell: 0)
POLL=${POLL:-60}                 # seconds between two checks of the slice
MAX_FAILURES=${MAX_FAILURES:-3}  # keep gives up after so many without a new checkpoint, preemptions aside
STOP_WAIT=${STOP_WAIT:-120}      # seconds that stop gives a run to save and upload
DRY_RUN=${DRY_RUN:-0}            # 1: print every gcloud command, run none, write nothing

usage() {
  cat <<'END'
usage: [SETTING=value ...] scripts/tpu.sh COMMAND [...]

  create                   request the slice, and wait until it is ready
  push                     copy the files that git does not ignore (code, not data) to ~/trm of every host
  setup                    make a virtual environment with the requirements on every host; after push
  run SCRIPT [ARG ...]     start python SCRIPT ARG ... on every host, detached; train.py gets --init_from=auto
  keep SCRIPT [ARG ...]    all of these, and again after each preemption or failure, until the run is complete
  status                   show the state of the slice and of each host, and the end of its output
  logs                     follow what the host of rank 0 prints (Ctrl-C does not stop the run)
  ssh [COMMAND]            run COMMAND on every host; without one, open a shell on host 0
  pull                     fetch out/ and the output of the host of rank 0 to out/NAME/
  pull gs://DIR [REGEX]    fetch a folder of a bucket to out/, without the files that match REGEX
  stop                     send SIGTERM: the run saves, uploads and ends, and so does keep (exit code 3)
  delete                   delete the slice with everything on its disks

settings, as environment variables, with their defaults:
END
  sed -nE 's/^([A-Z_]+)=\$\{[A-Z_]+:-([^}]*)\} *# (.*)/\1=\2 \3/p' "$0" |
    while read -r setting text; do printf '  %-17s %s\n' "$setting" "$text"; done
}

main() {
  local command=${1:-help}
  (($# == 0)) || shift
  case $command in
    help|-h|--help) usage; return ;;
    create|push|setup|run|keep|status|logs|ssh|pull|stop|delete|host_*) ;;
    *) die "unknown command $command: --help lists them" ;;
  esac
  [[ $command == host_* ]] || check_settings "$command"
  cd "$(dirname "$0")/.."
  if [[ $command == run || $command == keep ]]; then
    [[ -f ${1:-} ]] || die "$command needs a script of this folder, as $command train.py config/baseline.py"
    [[ $1 != train.py || "$*" == *--init_from=* ]] || set -- "$@" --init_from=auto
  fi
  exec 3>&1  # run_gcloud prints DRY_RUN's commands here, also where gcloud's output is captured
  "$command" "$@"
}

# Commands

keep() {  # keeps no state of its own: it can be stopped and started again at any time
  local state run previous='' silent=0 started=0 arg
  bucket='' failures=0 checkpoints=''
  for arg in "$@"; do [[ $arg != --gcs_dir=* ]] || bucket=${arg#--gcs_dir=}; done
  [[ $bucket == gs://?* ]] || die "keep needs --gcs_dir=gs://BUCKET/...: a preemption deletes the disks"
  if [[ $DRY_RUN == 1 ]]; then
    show_keep "$@" >/dev/null
    return
  fi
  checkpoints=$(list_checkpoints)
  while true; do
    state=$(find_state) || exit
    run=
    [[ $state != READY ]] || run=$(find_run "$@")
    [[ "$state $run" == "$previous" ]] || log "$NAME: $state${run:+, run: $run}"
    previous="$state $run"
    # How an earlier run ended says nothing about this one.
    case $run in running) started=1 ;; wrong|failed|stop_requested|complete) ((started)) || run=new ;; esac
    [[ $run == silent ]] || silent=0
    case $state${run:+ $run} in
      NONE) request_slice || count_failure "the request was refused" ;;
      PREEMPTED|TERMINATED|STOPPED|UNKNOWN|QUEUE_SUSPENDED) delete || log "not deleted yet" ;;
      QUEUE_FAILED) count_failure "the request failed"; delete || log "not deleted yet" ;;
      'READY complete') log "complete; the slice costs money until you delete it"; return ;;
      'READY stop_requested') log "stopped on request"; exit 3 ;;
      'READY busy') die "$NAME runs something else: see status" ;;
      'READY wrong'|'READY failed')
        status || true
        call_hosts host_stop || true  # other hosts wait for the one that failed
        [[ $run != wrong ]] || die "wrong input, see above: a restart would not help"
        count_failure "the run failed"
        started=0 ;;
      'READY new'|'READY stopped')
        if start_all "$@"; then
          started=1
        elif [[ $(find_state) == READY ]]; then
          call_hosts host_stop || true  # hosts that did start wait for the others
          count_failure "the start failed"
        fi ;;
      'READY silent')
        silent=$((silent + 1))
        if ((silent % 5)); then
          :
        elif has_new_checkpoint; then  # only ssh is broken, on this machine maybe
          log "not all hosts answer ssh, but the run may go on writing checkpoints: waiting"
        else
          count_failure "not all hosts answer"
          delete || log "not deleted yet"
        fi ;;
    esac
    sleep "$POLL"
  done
}

show_keep() {  # for DRY_RUN
  note "where there is no slice"
  request_slice
  note "where the slice is ready, at the start and after each failure"
  start_all "$@"
  note "every $POLL s"
  find_state
  find_run "$@"
  note "only after a failure"
  status
  call_hosts host_stop
  list_checkpoints
  note "only after a preemption, or where hosts do not answer; then everything again"
  delete
}

create() {
  local state='' previous=''
  request_slice
  until [[ $DRY_RUN == 1 || $state == READY ]]; do
    state=$(find_state) || exit
    [[ $state == "$previous" ]] || log "$NAME: $state"
    case $state in QUEUE_FAILED|QUEUE_SUSPENDED|PREEMPTED|TERMINATED|STOPPED)
      log "see gcloud compute tpus queued-resources describe $NAME --zone=$ZONE, then delete"
      exit 1 ;;
    esac
    [[ $state == READY ]] || sleep "$POLL"
    previous=$state
  done
}

push() {
  local archive=${TMPDIR:-/tmp}/trm-$NAME.tar.gz
  if [[ $DRY_RUN == 0 ]]; then
    git ls-files -z --cached --others --exclude-standard |  # names files that were deleted since, too
      while IFS= read -r -d '' file; do [[ ! -e $file ]] || printf '%s\0' "$file"; done |
      COPYFILE_DISABLE=1 tar --null -T - -czf "$archive" || { log "push: see above"; return 1; }
    (($(wc -c <"$archive") < 64000000)) ||
      die "push: $archive is over 64 MB, too much for code: add the data in it to .gitignore"
  fi
  copy "$archive" "$NAME:trm.tar.gz" --worker=all &&
    { [[ -z $NETRC ]] || copy "$NETRC" "$NAME:.netrc" --worker=all; } &&
    ssh_hosts 'mkdir -p trm && tar -xzf trm.tar.gz -C trm'
}

setup() { call_hosts host_setup; }
run() { call_hosts host_start "$@"; }
stop() { call_hosts host_stop stop_requested; }
delete() { tpus queued-resources delete "$NAME" --force; }

status() {
  local state
  state=$(find_state) || exit
  echo "$NAME: $state"
  case $state in
    READY|'') call_hosts host_status ;;  # '': DRY_RUN
    NO_ANSWER) return 1 ;;
  esac
}

logs() {
  find_rank_0
  if [[ -n $WORKER ]]; then
    ssh_hosts 'tail -n 100 -F trm/run/output.txt' "$WORKER"
  else
    call_hosts host_logs
  fi
}

ssh() {
  if (($#)); then
    ssh_hosts "$*" "$WORKER"
  else
    input=/dev/stdin
    # shellcheck disable=SC2086  # several flags
    tpus tpu-vm ssh "$NAME" --worker="${WORKER:-0}" $SSH_FLAGS
  fi
}

pull() {
  local target=out/$NAME
  if (($#)); then
    target=out/$(basename "$1")
  else
    find_rank_0
    target+=/${WORKER:+host}${WORKER:-rank0}
  fi
  [[ $DRY_RUN == 1 ]] || mkdir -p "$target"
  if (($#)); then
    run_gcloud storage rsync "$1" "$target" --recursive ${2:+"--exclude=$2"}
  elif [[ -n $WORKER ]]; then
    copy "$NAME:trm/out" "$NAME:trm/run" "$target" --recurse --worker="$WORKER"
  else
    call_hosts host_archive | tar -xf - -C "$target"
  fi
}

# The slice, through gcloud: https://cloud.google.com/sdk/gcloud/reference/compute/tpus

start_all() { push && setup && run "$@"; }

find_state() {  # of the VM, else QUEUE_ and that of the request, else NONE; NO_ANSWER where gcloud fails
  local answer
  if answer=$(tpus tpu-vm describe "$NAME" --format='value(state)' 2>&1); then
    echo "${answer##*$'\n'}"
  elif [[ $answer != *NOT_FOUND* ]]; then
    show_error "$answer"
    echo NO_ANSWER
  elif answer=$(tpus queued-resources describe "$NAME" --format='value(state.state)' 2>&1); then
    echo "QUEUE_${answer##*$'\n'}"
  elif [[ $answer == *NOT_FOUND* ]]; then
    echo NONE
  else
    show_error "$answer"
    echo NO_ANSWER
  fi
}

# $1: gcloud's message, whose ERROR line says what is wrong; advice of several lines may follow. Exits with 2
# where only the user can help. A name server that does not answer is reported as a problem with the login.
show_error() {
  local line
  line=$(grep -m 1 ERROR <<<"$1") || line=${1##*$'\n'}
  log "$line"
  case $1 in
    *'Unable to find the server'*) ;;
    *'gcloud auth login'*|*UNAUTHENTICATED*|*PERMISSION_DENIED*) exit 2 ;;
  esac
}

# The most serious state of the run on any host: complete only where every host says so. silent: a host does
# not answer. gcloud exits with an error for it, since host_state itself never fails.
find_run() {
  local command words word
  command="if [ -e trm/run ]; then $(host_command host_state "$@"); else echo new; fi"
  words=$(ssh_hosts "$command" 2>/dev/null) || words+=$'\nsilent'
  for word in busy wrong stop_requested silent failed running stopped new complete; do
    if grep -qx "$word" <<<"$words"; then echo "$word"; return; fi
  done
  echo silent
}

# A queued resource waits for capacity, where `tpu-vm create` fails at once: the documentation's advice for
# Spot slices (https://cloud.google.com/tpu/docs/spot). It outlives a preempted slice, and must be deleted
# before the next request.
request_slice() {
  local spot=${SPOT#0} answer
  # shellcheck disable=SC2086  # several flags
  if answer=$(tpus queued-resources create "$NAME" --node-id="$NAME" --accelerator-type="$TYPE" \
      --runtime-version="${RUNTIME:-$(find_runtime)}" ${spot:+--spot} $CREATE_FLAGS 2>&1); then
    return
  elif [[ $answer == *ALREADY_EXISTS* ]]; then
    log "$NAME was requested before: waiting for that"
  else
    show_error "$answer"
    return 1
  fi
}

find_runtime() {  # https://cloud.google.com/tpu/docs/runtimes
  case $TYPE in
    v4-*) echo tpu-ubuntu2204-base ;;
    v5litepod-*) echo v2-alpha-tpuv5-lite ;;
    v5p-*) echo v2-alpha-tpuv5 ;;
    v6e-*) echo v2-alpha-tpuv6e ;;
  esac
}

count_failure() {  # $1: what happened
  has_new_checkpoint || true
  failures=$((failures + 1))
  log "$1 ($failures of $MAX_FAILURES without a new checkpoint)"
  ((failures < MAX_FAILURES)) || {
    log "giving up; the slice still costs money: see status and logs, then delete"
    exit 1
  }
}

# Since the last time that it was asked; a new one ends the count of failures. An empty list after a full one
# is a bucket that does not answer, and no reason to delete a slice.
has_new_checkpoint() {
  local found
  found=$(list_checkpoints)
  [[ $found != "$checkpoints" ]] || return 1
  [[ -z $found ]] || checkpoints=$found failures=0
}

list_checkpoints() {  # in a fixed order
  run_gcloud storage ls "$bucket" --recursive 2>/dev/null | grep -E 'ckpt_[0-9]+\.json$' || true
}

# Chooses host 0, unless WORKER is set or some host shows the lines that only rank 0 prints: its number is its
# own secret, but a command for all hosts finds it.
find_rank_0() {
  [[ -z $WORKER ]] || return 0
  [[ -n $(call_hosts host_has_rank_0) ]] || {
    note "if no host shows rank 0's lines"
    WORKER=0
  }
}

call_hosts() { ssh_hosts "$(host_command "$@")"; }
host_command() {
  local settings=(STOP_WAIT="$STOP_WAIT" ${LIBTPU_INIT_ARGS:+LIBTPU_INIT_ARGS="$LIBTPU_INIT_ARGS"})
  echo "env$(printf ' %q' "${settings[@]}" bash trm/scripts/tpu.sh "$@")"
}

# gcloud tries ten times, and ssh alone would take minutes each time to find out that a host is dead.
ssh_hosts() {
  # shellcheck disable=SC2086  # several flags
  tpus tpu-vm ssh "$NAME" --worker="${2:-all}" --command="$1" \
    --ssh-flag=-oConnectTimeout=20 --ssh-flag=-oServerAliveInterval=20 $SSH_FLAGS
}

copy() {
  # shellcheck disable=SC2086  # several flags
  tpus tpu-vm scp "$@" --scp-flag=-oConnectTimeout=20 ${SSH_FLAGS//--ssh-flag/--scp-flag}
}

tpus() {
  local track='' only_alpha='--(tunnel-through-iap|reservation[= ]|provisioning-model)'  # by the reference
  [[ ! "$*" =~ $only_alpha ]] || track=alpha
  run_gcloud ${track:+"$track"} compute tpus "$@" --zone="$ZONE" ${PROJECT:+"--project=$PROJECT"} --quiet
}

input=/dev/null  # of gcloud
run_gcloud() {
  if [[ $DRY_RUN == 1 ]]; then
    { printf gcloud; printf ' %q' "$@"; echo; } >&3
  else
    gcloud "$@" <"$input"
  fi
}

# On a host, in ~/trm. run/ holds the command, the process that waits for it, its output and its exit code.

host_setup() {
  local began=$SECONDS
  if cat requirements.txt requirements-tpu.txt | cmp -s - venv/requirements; then return; fi
  echo "$(hostname): installing the requirements"
  [[ -x venv/bin/pip ]] || python3 -m venv --clear venv || {  # some images lack it
    sudo apt-get -o DPkg::Lock::Timeout=300 update -q
    sudo apt-get -o DPkg::Lock::Timeout=300 install -qy python3-venv
    python3 -m venv --clear venv
  }
  rm -f venv/requirements
  venv/bin/pip install --quiet --no-cache-dir -r requirements-tpu.txt
  cat requirements.txt requirements-tpu.txt >venv/requirements
  echo "$(hostname): installed in $((SECONDS - began)) s"
}

host_start() {
  ! host_is_running || die "a run is in progress: stop it first"
  host_kill
  mkdir -p run
  rm -f run/exit run/stop_requested
  : >run/output.txt
  echo "$*" >run/command
  # A session of its own, which host_kill ends as a whole. An open file would keep the ssh connection open.
  setsid nohup bash scripts/tpu.sh host_run "$@" >run/output.txt 2>&1 </dev/null 3>&- &
  echo $! >run/pid
}

host_run() {
  local code=0
  export PJRT_DEVICE=TPU  # without it a TPU VM can train on its CPU
  venv/bin/python -u "$@" || code=$?
  echo $code >run/exit
}

host_is_running() { [[ -f run/pid ]] && ps -o args= -p "$(<run/pid)" | grep -q 'tpu.sh host_'; }

host_state() {  # of the run with these arguments, by train.py's exit codes
  local code
  code=$(cat run/exit 2>/dev/null) || true
  if host_is_running; then
    if [[ $* == "$(<run/command)" ]]; then echo running; else echo busy; fi
  elif [[ $code == 0 ]]; then
    echo complete
  elif [[ -f run/stop_requested ]]; then
    echo stop_requested
  elif [[ ! -f run/pid ]]; then
    echo new
  else
    case $code in
      2) echo wrong ;;
      3) echo stopped ;;
      *) echo failed ;;  # or the host was restarted
    esac
  fi
}

host_status() {
  [[ -f run/command ]] || { echo "$(hostname): nothing has run"; return; }
  echo "$(hostname): $(host_state "$(<run/command)"), python $(<run/command)"
  tail -n 10 run/output.txt
}

host_has_rank_0() { ! grep -qs '^# python' run/output.txt || echo "rank 0"; }
host_logs() { [[ -z $(host_has_rank_0) ]] || exec tail -n 100 -F run/output.txt; }
host_archive() { [[ -z $(host_has_rank_0) ]] || tar -cf - out run; }

host_stop() {  # [stop_requested]: by the user, so that keep ends too
  local deadline=$((SECONDS + STOP_WAIT))
  mkdir -p run
  (($# == 0)) || touch "run/$1"
  if host_is_running; then
    pkill -TERM -P "$(<run/pid)" || true  # Python alone, which lets its workers save
    while host_is_running && ((SECONDS < deadline)); do sleep 0.2; done
    ! host_is_running ||
      log "still running after $STOP_WAIT s: killing it; the next run resumes from the last checkpoint"
  fi
  host_kill
}

# Workers of xmp.spawn that wait in a collective outlive a main process that was killed, and hold the TPU. The
# pattern spares another session that got the same number after a reboot.
host_kill() {
  [[ ! -f run/pid ]] || pkill -KILL -s "$(<run/pid)" -f 'tpu.sh host_run|venv/' || true
}

check_settings() {  # $1: the command
  TYPE=${TYPE/#v5e-/v5litepod-}
  [[ $NAME =~ ^[a-z]([a-z0-9-]*[a-z0-9])?$ ]] ||
    die "NAME=$NAME: set it to the slice's name: lower-case letters, digits and hyphens"
  [[ $ZONE =~ ^[a-z]+-[a-z]+[0-9]+-[a-z]$ ]] || die "ZONE=$ZONE: set it to the slice's zone, as us-central2-b"
  [[ ! $1 =~ ^(create|keep)$ || $TYPE =~ ^(v4|v5litepod|v5p|v6e)-[0-9]+$ ]] ||
    die "TYPE=$TYPE: set it to v4-N, v5e-N, v5p-N or v6e-N, as v4-32"
  [[ $SPOT$DRY_RUN =~ ^[01][01]$ ]] || die "SPOT=$SPOT DRY_RUN=$DRY_RUN: each must be 0 or 1"
  [[ $MAX_FAILURES$STOP_WAIT =~ ^[0-9]+$ ]] ||
    die "MAX_FAILURES=$MAX_FAILURES STOP_WAIT=$STOP_WAIT: must be numbers"
  [[ -z $NETRC || -f $NETRC ]] || die "NETRC=$NETRC: no such file"
  [[ $DRY_RUN == 1 ]] || command -v gcloud >/dev/null ||
    die "gcloud is not installed: https://cloud.google.com/sdk/docs/install"
}

note() { [[ $DRY_RUN == 0 ]] || echo "# $*" >&3; }
log() { echo "tpu.sh: $*" >&2; }
die() { log "$*"; exit 2; }

main "$@"
