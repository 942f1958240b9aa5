#!/usr/bin/env bash
# What the scripts here share: gcloud, the slices, and the dry run. Sourced by each of them, never run.
#
# Nothing happens without --yes: a command that would spend money, change a machine or remove one is printed instead.
# Environment: NAME ZONE (of the queued resource), PROJECT (gcloud's own where it is not set), and further flags of
# gcloud, separated by spaces: CREATE_FLAGS for the slices, such as '--reserved --network mine', and SSH_FLAGS for what
# reaches their hosts, such as --tunnel-through-iap.

set -euo pipefail

if [[ ${1:-} == -h || ${1:-} == --help ]]; then
    sed -n '2,/^[^#]/s/^# \{0,1\}//p' "$0"
    exit 0
fi

: "${NAME:?set NAME, that of the queued resource}" "${ZONE:?set ZONE, such as us-central2-b}"
scope=(--zone "$ZONE" ${PROJECT:+--project "$PROJECT"})
read -ra ssh_flags <<< "${SSH_FLAGS:-}"
yes=false

# run COMMAND...: runs it with --yes, prints it without.
run() {
    if $yes; then
        "$@"
    else
        printf 'would run:'
        printf ' %q' "$@"
        printf '\n'
    fi
}

# on_all COMMAND: on every host of all slices at once. gcloud shows the output when all have ended.
on_all() {
    run gcloud compute tpus queued-resources ssh "$NAME" "${scope[@]}" ${ssh_flags[@]+"${ssh_flags[@]}"} \
        --node=all --worker=all --command "$1"
}

# on_first COMMAND: on host 0 of slice 0, where process 0 of the run is. It asks only: --yes or not.
on_first() {
    gcloud compute tpus queued-resources ssh "$NAME" "${scope[@]}" ${ssh_flags[@]+"${ssh_flags[@]}"} \
        --node=0 --worker=0 --command "$1"
}

# state: of the queued resource, such as ACTIVE, WAITING_FOR_RESOURCES, SUSPENDED; NONE where there is none, and UNKNOWN
# where gcloud cannot say. Fails where it never will.
state() {
    local why
    { why=$(gcloud compute tpus queued-resources describe "$NAME" "${scope[@]}" --format 'value(state.state)' 2>&1 >&3); } 3>&1 && return
    case $why in
        *NOT_FOUND* | *"was not found"*) echo NONE ;;
        *)
            echo "$why" >&2
            ! hopeless "$why" || return 2
            echo UNKNOWN
            ;;
    esac
}

# hopeless TEXT: whether gcloud has said what it says again however often it is asked. Hosts that refuse a connection, and
# zones without capacity, are not that.
hopeless() {
    local said='unrecognized arguments|[Ii]nvalid (choice|value)|[Mm]ust be specified|INVALID_ARGUMENT|Error parsing'
    said+='|PERMISSION_DENIED|does not have permission|active account|Reauthentication'
    [[ $1 =~ ERROR:\ \(gcloud.*($said) || $1 =~ gcloud:\ (command\ )?not\ found ]]
}
