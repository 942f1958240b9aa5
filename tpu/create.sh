#!/usr/bin/env bash
# Asks for a TPU slice as a queued resource, and waits until it is there.
#   NAME=jrl ZONE=us-central2-b tpu/create.sh TYPE RUNTIME [--spot | --on-demand | --flex-start DURATION] [--yes]
#   for example: tpu/create.sh v5litepod-16 v2-alpha-tpuv5-lite --spot --yes
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
type=${1:?TYPE, such as v5litepod-16} runtime=${2:?RUNTIME, such as v2-alpha-tpuv5-lite}
shift 2
kind=(--spot)
while (($#)); do
    case $1 in
        --spot) kind=(--spot) ;;
        --on-demand) kind=() ;;
        --flex-start)
            kind=(--provisioning-model flex-start --max-run-duration "${2:?--flex-start DURATION, such as 4h}")
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

run gcloud compute tpus queued-resources create "$NAME" --node-id "$NAME" "${scope[@]}" \
    --accelerator-type "$type" --runtime-version "$runtime" ${kind[@]+"${kind[@]}"}
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
