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

# gone: whether a host neither runs the run nor has ended it. Of several slices Cloud TPU makes a lost one again by itself
# and starts the others anew: then nothing runs there, though the queued resource is ACTIVE all the time. A host that
# cannot be asked has not said so.
gone() {
    local said
    said=$(on_all "pgrep -f '[t]pu/supervise.sh' > /dev/null || test -e jrl/exit_code || echo jrl-is-gone" 2> /dev/null) || return 1
    grep jrl-is-gone <<< "$said" > /dev/null
}

# stop: asks the run on all hosts to stop, and waits until it has, at most some minutes: another one must not start beside
# it, on the same chips and the same files.
stop() {
    local said tries
    "$here/stop.sh" --yes
    for ((tries = 0; tries < 20; tries++)); do
        if said=$(on_all "pgrep -f '[t]pu/supervise.sh|[j]rl train' > /dev/null && echo jrl-still-runs || true" 2> /dev/null); then
            grep jrl-still-runs <<< "$said" > /dev/null || return 0
        fi
        sleep "${POLL_SECONDS:-30}"
    done
    echo "$NAME: jrl still runs on a host, or hosts cannot be asked; nothing was started" >&2
    return 1
}

start() {
    "$here/install.sh" ${agreed[@]+"${agreed[@]}"}
    "$here/launch.sh" "$config" "$folder" ${agreed[@]+"${agreed[@]}"} ${bindings[@]+"${bindings[@]}"}
}

ended_for=0 # polls in a row at which the run had ended
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
        "$here/create.sh" "$type" "$runtime" ${slices[@]+"${slices[@]}"} ${kind[@]+"${kind[@]}"} ${agreed[@]+"${agreed[@]}"} || {
            code=$?
            ((code != 2)) || exit 2 # the arguments are refused: asking again does not help
            sleep "${POLL_SECONDS:-30}"
            continue
        }
        start
    fi
    $yes || exit 0
    if [[ $now == ACTIVE ]]; then
        finished && exit 0
        code=$(ended)
        [[ $code =~ ^[0-9]+$ ]] && ended_for=$((ended_for + 1)) || ended_for=0
        # 75, stopped, and 76, hosts lost too often, come before a preemption too: then the slices go soon.
        if ((ended_for > 0)) && { ((code != 75 && code != 76)) || ((ended_for > 10)); }; then
            echo "$NAME: the run has ended with exit code $code; tpu/follow.sh shows why" >&2
            exit "$code"
        fi
        if gone; then
            echo "$NAME: a host was started anew; launching again"
            stop && start
        fi
    fi
    sleep "${POLL_SECONDS:-30}"
done
