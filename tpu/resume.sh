#!/usr/bin/env bash
# Makes preempted slices again and goes on with their run, without a person. Ends when the run does. What fails is tried
# again after a growing pause; what no other try mends, such as a permission that is missing, ends it with exit code 2, and
# so do ten starts in a row that fail on slices that are there, since those are billed.
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

# summary: yes or no, whether the run has its summary, as host 0 sees it, or as it is committed to its bucket; nothing
# where that cannot be asked, or where the run is not in its bucket yet.
summary() {
    local said
    if [[ $folder == gs://* ]]; then
        said=$(gcloud storage cat "${folder%/}/run.json" 2> /dev/null) || return 0
        [[ $said == *'"summary.json"'* ]] && echo yes || echo no
    else
        on_first "test -e $(printf %q "$folder")/summary.json && echo yes || echo no" 2> /dev/null || true
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

# try COMMAND...: whether it has worked. Its stderr is shown when it has ended. Ends this script where trying again does
# not help.
try() {
    local why code=0
    { why=$("$@" 2>&1 >&3); } 3>&1 || code=$?
    [[ -z $why ]] || echo "$why" >&2
    ((code)) || return 0
    echo "$NAME: ${1##*/} failed with exit code $code" >&2
    if hopeless "$why" || [[ $code == 2 && $1 == */create.sh ]]; then give_up; fi
    # Slices that were just deleted may count against the quota for a while.
    if ((failed >= 3)) && [[ $why =~ Quota\ .*(exceeded|exhausted) && $why != *"per minute"* ]]; then give_up; fi
    return 1
}

give_up() {
    echo "$NAME: trying again does not mend this. The slices stay as they are; mend it, and start resume.sh again" >&2
    exit 2
}

# give_up_starting: after starts that failed, whatever the reason, on slices that cost money meanwhile.
give_up_starting() {
    echo "$NAME: $failed_starts starts in a row have failed. The slices are ACTIVE and still billed; give them back with" >&2
    echo "  NAME=$NAME ZONE=$ZONE ${PROJECT:+PROJECT=$PROJECT }tpu/delete.sh --yes" >&2
    give_up
}

# stop: asks the run on all hosts to stop, and waits until it has, at most some minutes: another one must not start beside
# it, on the same chips and the same files.
stop() {
    local said tries
    try "$here/stop.sh" --yes || return
    for ((tries = 0; tries < 20; tries++)); do
        if said=$(on_all "pgrep -f '[t]pu/supervise.sh|[j]rl train' > /dev/null && echo jrl-still-runs || true" 2> /dev/null); then
            grep jrl-still-runs <<< "$said" > /dev/null || return 0
        fi
        sleep "$poll"
    done
    echo "$NAME: jrl still runs on a host, or hosts cannot be asked; nothing was started" >&2
    return 1
}

start() {
    due=true
    tried=true
    try "$here/install.sh" ${agreed[@]+"${agreed[@]}"} || return
    try "$here/launch.sh" "$config" "$folder" ${agreed[@]+"${agreed[@]}"} ${bindings[@]+"${bindings[@]}"} || return
    due=false
    failed_starts=0
}

# look: at the slices and their run, and does what is due. Fails where something that it tried has failed.
look() {
    local now code has_summary
    now=$(state) || give_up
    echo "$NAME: $now"
    # Of a run that was seen without one the summary is that of its end. Else it may be of a run that gets more steps.
    if $seen && [[ $now =~ ^(SUSPENDED|FAILED|NONE)$ && $folder == gs://* && $(summary) == yes ]]; then
        echo "$NAME: the run has finished; no slices are made for it" >&2
        exit 0
    fi
    case $now in
        UNKNOWN) return 1 ;;
        SUSPENDED | FAILED) # preempted: what is left of it is in the way
            try "$here/delete.sh" ${agreed[@]+"${agreed[@]}"} || return
            now=NONE
            ;;
    esac
    if [[ $now == NONE ]]; then
        try "$here/create.sh" "$type" "$runtime" ${slices[@]+"${slices[@]}"} ${kind[@]+"${kind[@]}"} ${agreed[@]+"${agreed[@]}"} || return
        start
        return
    fi
    $yes && [[ $now == ACTIVE ]] || return 0
    has_summary=$(summary)
    [[ $has_summary != no ]] || seen=true
    code=$(ended)
    # A run that goes on with more steps has its old summary until it has begun, also where it was stopped, was refused, or
    # lost a host, before that. 5: there was nothing to do.
    if [[ $has_summary == yes ]] && { [[ $code == [05] ]] || { [[ -z $code ]] && $seen && gone; }; }; then
        echo "$NAME: the run has finished; tpu/launch.sh begins more steps on these slices" >&2
        exit 0
    fi
    [[ $code =~ ^[0-9]+$ ]] && ended_for=$((ended_for + 1)) || ended_for=0
    # 75, stopped, and 76, hosts lost too often, come before a preemption too: then the slices go soon. A start that is
    # due was preceded by a stop.
    if ((ended_for > 0)) && { ((code != 75 && code != 76)) || { ((ended_for > 10)) && ! $due; }; }; then
        echo "$NAME: the run has ended with exit code $code; tpu/follow.sh shows why" >&2
        exit "$code"
    fi
    # Only a start after which the slices are still there counts: one that a preemption cut short is made again.
    if $due && $tried; then
        failed_starts=$((failed_starts + 1))
        ((failed_starts < 10)) || give_up_starting
    fi
    tried=false
    if $due || gone; then
        $due && echo "$NAME: launching again" || echo "$NAME: a host was started anew; launching again"
        stop && start
    fi
}

trap 'exit 130' INT # gcloud ends by itself, and this script would try again
poll=${POLL_SECONDS:-30}
ended_for=0 # polls in a row at which the run had ended
failed=0    # looks in a row at which something failed
due=false   # whether a start was begun and not finished
tried=false # whether the last look began one
failed_starts=0
seen=false # whether the run was without a summary at an earlier look, on slices that were there
while true; do
    look && failed=0 || failed=$((failed + 1))
    $yes || exit 0
    sleep $((poll << (failed < 4 ? failed : 4)))
done
