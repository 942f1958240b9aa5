#!/usr/bin/env bash
# Makes preempted slices again and goes on with their run, without a person. Ends when the run does.
#   NAME=jrl ZONE=us-central2-b tpu/resume.sh TYPE RUNTIME CONFIG RUN [--yes] [--slices N] [create's kind] [NAME=VALUE ...]
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
here=$(dirname "${BASH_SOURCE[0]}")
type=${1:?TYPE} runtime=${2:?RUNTIME} config=${3:?CONFIG} folder=${4:?RUN, a folder that outlives the slices}
shift 4
kind=() slices=() bindings=()
while (($#)); do
    case $1 in
        --yes) yes=true ;;
        --spot | --on-demand) kind=("$1") ;;
        --flex-start)
            kind=("$1" "${2:?DURATION}")
            shift
            ;;
        --slices)
            slices=("$1" "${2:?--slices N}")
            shift
            ;;
        *) bindings+=("$1") ;;
    esac
    shift
done
agreed=()
$yes && agreed=(--yes)

# finished: whether the run has its summary, as host 0 sees it, or as it is committed to its bucket.
finished() {
    if [[ $folder == gs://* ]]; then
        gcloud storage cat "${folder%/}/run.json" 2> /dev/null | grep '"summary.json"' > /dev/null
    else
        on_first "test -e $(printf %q "$folder")/summary.json" 2> /dev/null
    fi
}

# ended: the exit code that the run has ended with on host 0; empty while it runs.
ended() {
    on_first 'cat jrl/exit_code' 2> /dev/null || true
}

# running: whether every host runs the run, or has ended it. Of several slices Cloud TPU makes a lost one again by itself
# and starts the others anew: then nothing runs there, though the queued resource is ACTIVE all the time.
running() {
    on_all "pgrep -f '[t]pu/supervise.sh' > /dev/null || test -e jrl/exit_code" > /dev/null 2>&1
}

start() {
    "$here/install.sh" ${agreed[@]+"${agreed[@]}"}
    "$here/launch.sh" "$config" "$folder" ${agreed[@]+"${agreed[@]}"} ${bindings[@]+"${bindings[@]}"}
}

while true; do
    now=$(state)
    echo "$NAME: $now"
    case $now in
        SUSPENDED | FAILED) # preempted: what is left of it is in the way
            run gcloud compute tpus queued-resources delete "$NAME" "${scope[@]}" --force --quiet
            now=NONE
            ;;
    esac
    if [[ $now == NONE ]]; then
        "$here/create.sh" "$type" "$runtime" ${slices[@]+"${slices[@]}"} ${kind[@]+"${kind[@]}"} ${agreed[@]+"${agreed[@]}"} || continue
        start
    fi
    $yes || exit 0
    if [[ $now == ACTIVE ]]; then
        finished && exit 0
        code=$(ended)
        if [[ $code =~ ^[0-9]+$ ]] && ((code != 75 && code != 76)); then # 75: before a preemption too
            echo "$NAME: the run has ended with exit code $code; tpu/follow.sh shows why" >&2
            exit "$code"
        fi
        if ! running; then
            echo "$NAME: a host was started anew; launching again"
            "$here/stop.sh" --yes
            start
        fi
    fi
    sleep "${POLL_SECONDS:-30}"
done
