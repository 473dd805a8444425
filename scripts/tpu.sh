#!/usr/bin/env bash
# Manages a slice of Google Cloud's TPUs from your own machine: creates it, copies the code to it, trains,
# watches, restarts the run after a preemption, and deletes the slice.
#
#   export NAME=trm ZONE=us-central2-b TYPE=v4-32 SPOT=1
#   scripts/tpu.sh keep train.py config/baseline.py --data_path=gs://BUCKET/DATA --gcs_dir=gs://BUCKET/RUN
#
# The hosts run the functions host_* of this same file, which is copied to them.
set -euo pipefail

NAME=${NAME:-}                   # of the TPU VM, and of the queued resource that requests it
ZONE=${ZONE:-}                   # of your quota, such as us-central2-b; the bucket should be in its region
PROJECT=${PROJECT:-}             # if empty, gcloud's default
TYPE=${TYPE:-}                   # v4-32 (32 cores: 16 chips, 4 hosts), v5e-8 (8 chips, 1 host), v6e-8, ...
SPOT=${SPOT:-0}                  # 1: cheaper, and preempted when others need the chips
RUNTIME=${RUNTIME:-}             # the hosts' image; if empty, the default for TYPE
CREATE_FLAGS=${CREATE_FLAGS:-}   # more flags for the request: --network=... --service-account=... --reserved
SSH_FLAGS=${SSH_FLAGS:-}         # more flags for ssh and scp: --internal-ip or --tunnel-through-iap
LIBTPU_INIT_ARGS=${LIBTPU_INIT_ARGS:-}  # options of the TPU's compiler and runtime for the run
NETRC=${NETRC:-}                 # file with W&B's login (~/.netrc after `wandb login`), copied to the hosts
POLL=${POLL:-60}                 # seconds between two checks of the slice
TIMEOUT=${TIMEOUT:-300}          # seconds until keep and run end a gcloud that hangs; four times it for setup
MAX_FAILURES=${MAX_FAILURES:-3}  # keep gives up after so many without a new checkpoint, preemptions aside
STOP_WAIT=${STOP_WAIT:-120}      # seconds that stop gives a run to save and upload

# On the hosts: seconds since the user's keep (or run) began. A stop holds for those that began before it, and
# only the hosts' clocks say so: the machines of two users may differ.
age=${age:-0}

unset CDPATH  # cd would look for the folders below in other places

usage() {
  cat <<'END'
usage: [SETTING=value ...] scripts/tpu.sh COMMAND [...]

  run SCRIPT [ARG ...]     request the slice, wait until it is ready, copy the files that git does not ignore
                           (code, not data) to ~/trm of every host, install the requirements and start
                           python SCRIPT ARG ... there, detached; train.py gets --init_from=auto, if no other
  keep SCRIPT [ARG ...]    the same, and again after each preemption or failure, until the run is complete
  status                   show the state and health of the slice, and the end of each host's output
  logs                     follow what all hosts print (Ctrl-C does not stop the run)
  ssh COMMAND              run COMMAND on every host
  stop                     send SIGTERM: the run saves, uploads and ends, and so does keep (exit code 3)
  delete                   delete the slice with everything on its disks

settings, as environment variables, with their defaults:
END
  sed -nE 's/^([A-Z_]+)=\$\{[A-Z_]+:-([^}]*)\} *# (.*)/\1=\2 \3/p' "$0" |
    while read -r setting text; do printf '  %-17s %s\n' "$setting" "$text"; done
}

main() {
  local command=${1:-help} argument error
  (($# == 0)) || shift
  case $command in
    help|-h|--help) usage; return ;;
    run|keep|status|logs|ssh|stop|delete|host_*) ;;
    *) die "unknown command $command: --help lists them" ;;
  esac
  [[ $command == host_* ]] || check_settings "$command"
  cd "$(dirname "$0")/.."
  if [[ $command == run || $command == keep ]]; then
    [[ $command == run || " $* " != *" --init_from=scratch "* ]] ||
      die "keep goes on with a run after a preemption: leave out --init_from=scratch, and choose an empty --gcs_dir"
    [[ -f ${1:-} ]] ||
      die "$command needs a script of this folder, such as $command train.py config/baseline.py"
    for argument in "$@"; do
      [[ $argument == -* || $argument != *.py || -f $argument ]] || die "$argument: no such file in this folder"
    done
    git rev-parse >/dev/null 2>&1 ||
      die "this folder is no git checkout, and the hosts get the files that git does not ignore: run git init"
    if [[ $1 == train.py ]]; then
      # it refuses a mistyped flag here, before a slice costs money, if this machine has what it imports
      error=$(python3 "$@" --help 2>&1 >/dev/null) || (($? != 2)) || die "${error##*$'\n'}"
      # a config file or a flag may name another
      set -- "$1" --init_from=auto "${@:2}"
    fi
  fi
  # the login first, whose errors of gcloud's have several lines
  [[ $command != @(logs|ssh|stop|delete) ]] || find_state >/dev/null
  "$command" "$@"
}

# Commands

run() { MAX_FAILURES=1 keep "$@"; }

keep() {  # keeps no state of its own: it can be stopped and started again at any time
  local state run previous='' silent=0 started=0 argument limit=$TIMEOUT
  bucket='' failures=0 checkpoints=''
  for argument in "$@"; do [[ $argument != --gcs_dir=* ]] || bucket=${argument#--gcs_dir=}; done
  [[ $command == run || $bucket == gs://?* ]] ||
    die "keep needs --gcs_dir=gs://BUCKET/...: a preemption deletes the disks"
  command -v timeout >/dev/null ||
    { limit=; log "no timeout (macOS: brew install coreutils): an ssh that hangs would not be ended"; }
  scratch=$(mktemp -d) || exit
  trap 'rm -rf "$scratch"' EXIT
  checkpoints=$(list_checkpoints)
  while true; do
    state=$(find_state) || exit
    run=
    [[ $state != READY ]] || run=$(find_run "$@")
    [[ "$state $run" == "$previous" ]] || { log "$NAME: $state${run:+, run: $run}"; silent=0; }
    previous="$state $run"
    # How an earlier run ended says nothing about this one.
    case $run in running) started=1 ;; wrong|failed|complete) ((started)) || run=new ;; esac
    case $state${run:+ $run} in
      NONE) request_slice || count_failure "the request was refused" ;;
      CREATING|ACCEPTED|WAITING_FOR_RESOURCES|PROVISIONING|STARTING|RESTARTING|REPAIRING) ;;
      SUSPENDING|STOPPING|DELETING|NO_ANSWER) ;;
      PREEMPTED|TERMINATED|STOPPED|SUSPENDED) delete || log "not deleted yet" ;;
      FAILED) count_failure "the request failed"; delete || log "not deleted yet" ;;
      'READY complete') log "complete; the slice costs money until you delete it"; return ;;
      'READY stop_requested') log "stopped on request"; exit 3 ;;
      'READY running') [[ $command == keep ]] || die "a run is in progress: stop it first" ;;
      'READY busy') die "$NAME runs something else: see status" ;;
      'READY wrong'|'READY failed')
        status || true
        call_hosts host_stop || true  # other hosts wait for the one that failed
        [[ $run != wrong ]] || die "wrong input, see above: a restart would not help"
        count_failure "the run failed"
        started=0
        # host_stop has ended what held the chips. A second failure needs other chips.
        if ((failures > 1)) && has_sick_chips; then
          log "chips are busy or unhealthy: replacing the slice"
          delete || log "not deleted yet"
        fi ;;
      'READY new'|'READY stopped')
        if start "$@"; then
          started=1
          [[ $command == keep ]] || return 0
        elif [[ $(find_state) == READY ]]; then
          call_hosts host_stop || true  # hosts that did start wait for the others
          count_failure "the start failed"
        fi ;;
      *)  # READY silent, or a state that gcloud's reference does not have
        silent=$((silent + 1))
        [[ -z $run ]] || ((silent % 5 != 1)) || show_ssh_error
        if ((silent % 5)); then
          :
        elif has_new_checkpoint; then  # only ssh is broken, on this machine maybe
          log "$state${run:+, run: $run}, but the run goes on writing checkpoints: waiting"
        elif [[ -n $run ]] && is_locked_out; then
          die "the hosts are not at fault, and the slice stays: mend the keys of this machine, then repeat the command"
        else
          count_failure "$state${run:+, run: $run} at 5 checks"
          delete || log "not deleted yet"
        fi ;;
    esac
    sleep "$POLL"
  done
}

# main calls a command's function by its name. So ssh is one here: the ssh program itself is gcloud's to start.
logs() { ssh_hosts 'tail -n 100 -F trm/run/output.txt'; }
ssh() { ssh_hosts "$*"; }
delete() { tpus queued-resources delete "$NAME" --force; }

stop() {  # before anything was copied to the hosts, too
  ssh_hosts "mkdir -p trm/run && date +%s >trm/run/stop_requested && $(if_pushed host_stop)"
}

status() {
  local state
  state=$(find_state) || exit
  echo "$NAME: $state"
  case $state in
    READY)
      echo "health: $(find_health)"
      call_hosts host_status ;;
    NO_ANSWER) return 1 ;;
  esac
}

# The slice, through gcloud: https://cloud.google.com/sdk/gcloud/reference/compute/tpus

start() {
  local limit=${limit:+$((4 * limit))}
  push && call_hosts host_setup && call_hosts host_start "$@"
}

push() {
  git ls-files -z --cached --others --exclude-standard |  # names files that were deleted since, too
    while IFS= read -r -d '' file; do [[ ! -e $file ]] || printf '%s\0' "$file"; done |
    COPYFILE_DISABLE=1 tar --null -T - -czf "$scratch/trm.tar.gz" || return
  (($(wc -c <"$scratch/trm.tar.gz") < 64000000)) ||
    die "the files that git does not ignore are over 64 MB, too much for code: add the data to .gitignore"
  copy "$scratch/trm.tar.gz" "$NAME:trm.tar.gz" &&
    { [[ -z $NETRC ]] || copy "$NETRC" "$NAME:.netrc"; } &&
    ssh_hosts 'mkdir -p trm && tar -xzf trm.tar.gz -C trm'
}

find_state() {  # of the VM, else of its request, else NONE; NO_ANSWER where gcloud fails
  local error
  ! error=$(tpus tpu-vm describe "$NAME" --format='value(state)' 2>&1 >&3) || return 0
  if [[ $error == *NOT_FOUND* ]]; then
    ! error=$(tpus queued-resources describe "$NAME" --format='value(state.state)' 2>&1 >&3) || return 0
  fi
  if [[ $error == *NOT_FOUND* ]]; then
    echo NONE
  else
    show_error "$error"
    echo NO_ANSWER
  fi
} 3>&1

# HEALTHY, TIMEOUT, UNHEALTHY_TENSORFLOW, UNHEALTHY_MAINTENANCE, or nothing
find_health() { tpus tpu-vm describe "$NAME" --format='value(health)' 2>/dev/null || true; }

# A slice can be READY and unhealthy. Some hosts never free the chips of a process that was killed.
has_sick_chips() {
  local busy='resource busy|TPU is already in use|TPU initialization failed'
  [[ $(find_health) =~ UNHEALTHY|TIMEOUT ||
    $(ssh_hosts 'tail -n 50 trm/run/output.txt' 2>/dev/null) =~ $busy ]]
}

# $1: gcloud's message, whose ERROR line says what is wrong; advice of several lines may follow. Exits with 2
# where only the user can help. A name server that does not answer is reported as a problem with the login.
show_error() {
  local line
  line=$(grep -m 1 ERROR <<<"$1") || line=${1##*$'\n'}
  log "${line:-gcloud did not answer}"
  case $1 in
    *'Unable to find the server'*) ;;
    *'gcloud auth login'*|*UNAUTHENTICATED*|*PERMISSION_DENIED*) exit 2 ;;
  esac
}

# The most serious state of the run on any host: complete only where every host says so. silent: a host does
# not answer. gcloud exits with an error for it, since host_state itself never fails.
find_run() {
  local words word
  words=$(ssh_hosts "$(if_pushed host_state "$@")" 2>"$scratch/ssh.txt") || words+=$'\nsilent'
  for word in busy wrong stop_requested silent failed running stopped new complete; do
    if grep -qx "$word" <<<"$words"; then echo "$word"; return; fi
  done
  echo silent
}

show_ssh_error() {  # the last error of ssh itself; the rest of the lines are gcloud's
  local line
  line=$(grep -E '^(ssh|kex_|Connection|Host key|ERROR)|denied' "$scratch/ssh.txt" | grep -v 'return code \[' |
    tail -n 1) || true
  log "hosts do not answer: ${line:-no error from ssh within $TIMEOUT s}"
}

# The hosts answer ssh, and a key of this machine is wrong. A host that was repaired has another key than the one
# in ~/.ssh/google_compute_known_hosts; gcloud wants its own key in an agent.
is_locked_out() { grep -Eq 'Host key verification failed|Permission denied \(|in the SSH agent' "$scratch/ssh.txt"; }

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
  [[ -z $bucket ]] || run_gcloud storage ls "$bucket" --recursive 2>/dev/null | grep -E 'ckpt_[0-9]+\.json$' || true
}

call_hosts() { ssh_hosts "$(host_command "$@")"; }
host_command() {
  local settings=(age="$SECONDS" STOP_WAIT="$STOP_WAIT")
  [[ -z $LIBTPU_INIT_ARGS ]] || settings+=(LIBTPU_INIT_ARGS="$LIBTPU_INIT_ARGS")
  echo "env$(printf ' %q' "${settings[@]}" bash trm/scripts/tpu.sh "$@")"
}
if_pushed() { echo "if [ -e trm/scripts/tpu.sh ]; then $(host_command "$@"); else echo new; fi"; }

# gcloud tries ten times, and ssh alone would take minutes each time to find out that a host is dead.
ssh_hosts() {
  # shellcheck disable=SC2086  # several flags
  tpus tpu-vm ssh "$NAME" --worker=all --command="$1" \
    --ssh-flag=-oConnectTimeout=20 --ssh-flag=-oServerAliveInterval=20 $SSH_FLAGS
}

copy() {
  # shellcheck disable=SC2086  # several flags
  tpus tpu-vm scp "$@" --worker=all --scp-flag=-oConnectTimeout=20 ${SSH_FLAGS//--ssh-flag/--scp-flag}
}

tpus() {
  local track='' only_alpha='--(tunnel-through-iap|reservation[= ]|provisioning-model)'  # by the reference
  [[ ! "$*" =~ $only_alpha ]] || track=alpha
  run_gcloud ${track:+"$track"} compute tpus "$@" --zone="$ZONE" --project="$PROJECT" --quiet
}

limit=  # seconds
run_gcloud() {
  if [[ -z $limit ]]; then
    gcloud "$@" </dev/null
  else  # in a process group of its own, which Ctrl-C reaches by the trap alone
    timeout -k 5 "$limit" gcloud "$@" </dev/null &
    trap 'kill $!; exit 130' INT
    wait $!
  fi
}

# On a host, in ~/trm. run/ holds the command, the process that waits for it, its output and its exit code.

host_setup() {
  if cat requirements.txt requirements-tpu.txt | cmp -s - venv/requirements; then return; fi
  echo "$(hostname): installing the requirements"
  [[ -x venv/bin/pip ]] || python3 -m venv --clear venv || {  # some images lack it
    # A new host updates its own lists, and apt-get update does not wait for their lock.
    for _ in {1..10}; do sudo apt-get update -q && break; sleep 30; done
    sudo apt-get -o DPkg::Lock::Timeout=300 install -qy python3-venv
    python3 -m venv --clear venv
  }
  rm -f venv/requirements
  venv/bin/pip install --quiet --no-cache-dir -r requirements-tpu.txt
  cat requirements.txt requirements-tpu.txt >venv/requirements
}

host_start() {
  ! host_is_running || die "a run is in progress: stop it first"
  host_kill
  mkdir -p run
  rm -f run/exit
  : >run/output.txt
  echo "$*" >run/command
  # A session of its own, which host_kill ends as a whole. An open file would keep the ssh connection open.
  setsid nohup bash scripts/tpu.sh host_run "$@" >run/output.txt 2>&1 </dev/null &
  echo $! >run/pid
}

host_run() {
  local code=0
  export PJRT_DEVICE=TPU  # without it a TPU VM can train on its CPU
  if stop_requested; then code=3; else venv/bin/python -u "$@" || code=$?; fi
  echo $code >run/exit
}

host_is_running() { [[ -f run/pid ]] && ps -o args= -p "$(<run/pid)" | grep -q 'tpu.sh host_'; }

stop_requested() { [[ -f run/stop_requested && $(<run/stop_requested) -ge $(($(date +%s) - age)) ]]; }

host_state() {  # of the run with these arguments, by train.py's exit codes
  local code
  if host_is_running; then
    if [[ $(printf %s "$*") == "$(<run/command)" ]]; then echo running; else echo busy; fi
    return
  fi
  code=$(cat run/exit 2>/dev/null) || true  # only now: a run that ends meanwhile has not failed
  if [[ $code == 0 ]]; then
    echo complete
  elif stop_requested; then
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
  echo "$(hostname): $(age=$(date +%s) host_state "$(<run/command)"), python $(<run/command)"
  tail -n 10 run/output.txt
}

host_stop() {
  local deadline=$((SECONDS + STOP_WAIT))
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
  local number key=~/.ssh/google_compute_engine
  [[ $NAME =~ ^[a-z]([a-z0-9-]*[a-z0-9])?$ ]] ||
    die "NAME=$NAME: set it to the slice's name: lower-case letters, digits and hyphens"
  [[ $ZONE =~ ^[a-z]+-[a-z]+[0-9]+-[a-z]$ ]] ||
    die "ZONE=$ZONE: set it to the slice's zone, such as us-central2-b"
  [[ $SPOT =~ ^[01]$ ]] || die "SPOT=$SPOT: set it to 0 or 1"
  [[ $POLL =~ ^[0-9]+(\.[0-9]+)?$ ]] || die "POLL=$POLL: set it to a number of seconds, such as 60"
  for number in TIMEOUT MAX_FAILURES STOP_WAIT; do
    [[ ${!number} =~ ^[1-9][0-9]*$ ]] || die "$number=${!number}: set it to a whole number above 0"
  done
  [[ -z $NETRC || -f $NETRC ]] || die "NETRC=$NETRC: no such file"
  if [[ $1 == run || $1 == keep ]]; then
    check_type
    # Their ssh runs in the background, where nobody can type the passphrase of gcloud's key.
    [[ ! -f $key || $SSH_FLAGS == *--ssh-key-file* ]] || ssh-keygen -y -P '' -f "$key" &>/dev/null ||
      ssh-add -T "$key.pub" &>/dev/null ||
      die "$key has a passphrase: run eval \"\$(ssh-agent)\" and ssh-add $key first"
  fi
  command -v gcloud >/dev/null || die "gcloud is not installed: https://cloud.google.com/sdk/docs/install"
  PROJECT=${PROJECT:-$(gcloud config get-value project 2>/dev/null)} || true
  [[ -n $PROJECT ]] || die "PROJECT is empty, and gcloud has no default: set it to your project's ID"
}

# v4 and v5p count cores, two on each chip; v5e and v6e count chips.
check_type() {
  local n=${TYPE##*-}
  TYPE=${TYPE/#v5e-/v5litepod-}
  [[ $TYPE =~ ^(v4|v5litepod|v5p|v6e)-[1-9][0-9]*$ ]] ||
    die "TYPE=$TYPE: set it to v4-N, v5e-N, v5p-N or v6e-N, such as v4-32"
  case $TYPE in
    v4-*|v5p-*)
      ((n % 128 == 0 || n >= 8 && 64 % n == 0)) || die "TYPE=$TYPE: N is 8, 16, 32, 64 or a multiple of 128" ;;
    *) ((n != 2 && 256 % n == 0)) || die "TYPE=$TYPE: N is 1, 4, 8, 16, 32, 64, 128 or 256" ;;
  esac
}

log() { echo "tpu.sh: $*" >&2; }
die() { log "$*"; exit 2; }

main "$@"
