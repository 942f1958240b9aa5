#!/usr/bin/env bash
# Asks for a TPU slice as a queued resource, or for N slices with the data center's network between them, and waits
# until all of them are there.
#   NAME=jrl ZONE=us-central2-b tpu/create.sh TYPE RUNTIME [--slices N] [--spot | --on-demand | --flex-start DURATION] [--yes]
#   for example: tpu/create.sh v5litepod-16 v2-alpha-tpuv5-lite --slices 2 --spot --yes
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
type=${1:?TYPE, such as v5litepod-16} runtime=${2:?RUNTIME, such as v2-alpha-tpuv5-lite}
shift 2
read -ra create_flags <<< "${CREATE_FLAGS:-}"
kind=(--spot) nodes=(--node-id "$NAME") track=()
while (($#)); do
    case $1 in
        --spot) kind=(--spot) track=() ;;
        --on-demand) kind=() track=() ;;
        --flex-start)
            kind=(--provisioning-model flex-start --max-run-duration "${2:?--flex-start DURATION, such as 4h}")
            track=(alpha) # gcloud 528 refuses both flags elsewhere
            shift
            ;;
        --slices)
            slices=${2:?--slices N, such as 2}
            [[ $slices =~ ^[1-9][0-9]*$ ]] || {
                echo "create.sh: --slices $slices is no count of slices" >&2
                exit 2
            }
            # Their names are NAME-0, NAME-1 ...
            ((slices > 1)) && nodes=(--node-count "$slices" --node-prefix "$NAME")
            shift
            ;;
        --yes) yes=true ;;
        *)
            echo "create.sh: $1 is not known" >&2
            exit 2
            ;;
    esac
    shift
done

run gcloud ${track[@]+"${track[@]}"} compute tpus queued-resources create "$NAME" "${nodes[@]}" "${scope[@]}" \
    --accelerator-type "$type" --runtime-version "$runtime" ${kind[@]+"${kind[@]}"} ${create_flags[@]+"${create_flags[@]}"}
$yes || exit 0

while true; do
    now=$(state)
    echo "$NAME: $now"
    case $now in
        ACTIVE) exit 0 ;;
        FAILED | SUSPENDED | NONE) exit 4 ;;
    esac
    sleep "${POLL_SECONDS:-30}"
done
