#!/usr/bin/env bash
# Makes a preempted slice again and goes on with its run, without a person. Ends when the run does.
#   NAME=jrl ZONE=us-central2-b tpu/resume.sh TYPE RUNTIME CONFIG RUN [--yes] [create's kind] [NAME=VALUE ...]
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
here=$(dirname "${BASH_SOURCE[0]}")
type=${1:?TYPE} runtime=${2:?RUNTIME} config=${3:?CONFIG} folder=${4:?RUN, a folder that outlives the slice}
shift 4
kind=() bindings=()
while (($#)); do
    case $1 in
        --yes) yes=true ;;
        --spot | --on-demand) kind=("$1") ;;
        --flex-start)
            kind=("$1" "${2:?DURATION}")
            shift
            ;;
        *) bindings+=("$1") ;;
    esac
    shift
done
agreed=()
$yes && agreed=(--yes)

# done_steps: whether the run has its summary, as host 0 sees it.
finished() {
    gcloud compute tpus tpu-vm ssh "$NAME" "${scope[@]}" --worker=0 --command "test -e $(printf %q "$folder")/summary.json" 2> /dev/null
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
        "$here/create.sh" "$type" "$runtime" ${kind[@]+"${kind[@]}"} ${agreed[@]+"${agreed[@]}"} || continue
        "$here/install.sh" ${agreed[@]+"${agreed[@]}"}
        "$here/launch.sh" "$config" "$folder" ${agreed[@]+"${agreed[@]}"} ${bindings[@]+"${bindings[@]}"}
    fi
    $yes || exit 0
    [[ $now == ACTIVE ]] && finished && exit 0
    sleep "${POLL_SECONDS:-30}"
done
