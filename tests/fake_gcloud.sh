#!/usr/bin/env bash
# A gcloud for tests: a cloud with one slice, whose hosts are folders and whose ssh runs real shells there.
#
# The folder $CLOUD holds the cloud:
#   slice            the state of the request, then of the TPU VM
#   environments/N   environment variables of host N
#   hosts/N          the home folder of host N: its whole disk
#   host_bin         programs of the hosts' image
#   calls            the commands so far
# These files change the answers: bucket, health, logged_out and no_ssh (may hold the message), refuse, and hang
# (ssh connects and never ends). As with the real gcloud, only stdout is the answer; a notice stands on stderr.
# Any flag is taken: fake_gcloud.py's refusals() asks the real gcloud about those.
set -u

main() {
  local state format='' command='' operands=() argument
  { printf '%q ' "$@"; echo; } >>"$CLOUD/calls"
  echo "Updates are available for some Google Cloud CLI components." >&2
  for argument in "$@"; do
    case $argument in
      --command=*) command=${argument#*=} ;;
      --format=*) format=${argument#*=} ;;
      --*) ;;
      *) operands+=("$argument") ;;
    esac
  done
  state=$(cat "$CLOUD/slice" 2>/dev/null)
  [[ ! -e $CLOUD/logged_out ]] || log_out

  case ${operands[*]} in
    *get-value*) echo "(unset)" >&2 ;;
    "storage ls"*) grep . "$CLOUD/bucket" 2>/dev/null || fail "One or more URLs matched no objects." ;;
    *" create "*) create ;;
    *" delete "*)
      kill_hosts
      rm -rf "$CLOUD/hosts" "$CLOUD/slice" "$CLOUD/health" ;;
    *"queued-resources describe "*)
      [[ -n $state ]] || fail "NOT_FOUND: Resource 'projects/p/locations/z/queuedResources/slice' was not found"
      echo "$state"
      echo READY >"$CLOUD/slice" ;;
    *)
      [[ -n $state && $state != WAITING* ]] || fail "NOT_FOUND: Resource 'projects/p/nodes/slice' was not found"
      case "$format ${operands[*]}" in
        "value(health) "*) cat "$CLOUD/health" 2>/dev/null || echo HEALTHY ;;
        *" describe "*) echo "$state" ;;
        *)
          [[ $state == READY ]] || fail "the TPU is in state $state, and cannot be used"
          on_all_workers "${operands[@]}" ;;
      esac ;;
  esac
}

fail() { echo "ERROR: (gcloud) $1" >&2; exit "${2:-1}"; }

log_out() {
  local message="ERROR: (gcloud) There was a problem refreshing your current auth tokens: Reauthentication failed.
Please run:

  \$ gcloud auth login"
  message=$(grep . "$CLOUD/logged_out" || echo "$message")
  echo "$message" >&2
  exit 1
}

create() {
  local host
  [[ ! -e $CLOUD/refuse ]] || fail "RESOURCE_EXHAUSTED: quota limit 'TPUV4sPreemptiblePodPerProjectPerZone' exceeded"
  for host in "$CLOUD"/environments/*; do mkdir -p "$CLOUD/hosts/${host##*/}"; done
  echo WAITING_FOR_RESOURCES >"$CLOUD/slice"
}

kill_hosts() {
  local pids
  while pids=$(grep -lsz "^FAKE_HOST=$CLOUD/hosts" /proc/[0-9]*/environ | cut -d/ -f3); [[ -n $pids ]]; do
    # shellcheck disable=SC2086  # several numbers
    kill -KILL $pids 2>/dev/null
    sleep 0.01
  done
}

on_all_workers() {  # does ssh or scp; exits with the code of the last host that failed
  local source=${*: -2:1} target=${*: -1} host home pid pids=() variables code=0
  [[ ! -e $CLOUD/hang ]] || exec sleep 3600
  for host in "$CLOUD"/environments/*; do
    home=$CLOUD/hosts/${host##*/}
    mapfile -t variables <"$host"
    if [[ ! -d $home || -e $CLOUD/no_ssh ]]; then
      echo "SSH: Attempting to connect to worker ${host##*/}...
$(grep -s . "$CLOUD/no_ssh" || echo "ssh: connect to host 10.0.0.1 port 22: Connection refused")
Retrying: SSH command error: [/usr/bin/ssh] exited with return code [255]." >&2
      (exit 255) &
    elif [[ -z $command ]]; then
      cp "$source" "$home/${target#*:}" &
    else
      (cd "$home" && exec env -i PATH="$CLOUD/host_bin:/usr/local/bin:/usr/bin:/bin" HOME="$home" CLOUD="$CLOUD" \
        FAKE_HOST="$home" "${variables[@]}" bash -c "$command") &
    fi
    pids+=($!)
  done
  for pid in "${pids[@]}"; do
    wait "$pid" || code=$?
  done
  ((code < 128)) || fail "[/usr/bin/ssh] exited with return code [255]." 255  # no connection, or the host died
  exit "$code"
}

main "$@"
