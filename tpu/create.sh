#!/usr/bin/env bash
# Asks for a spot TPU machine as a queued resource, and waits until it is there. Unproven: never run.
#   tpu/create.sh NAME ZONE TYPE RUNTIME        for example: jrl us-central1-a v5litepod-8 v2-alpha-tpuv5-lite
set -euo pipefail
name=${1:?NAME} zone=${2:?ZONE} type=${3:?TYPE} runtime=${4:?RUNTIME}

gcloud compute tpus queued-resources create "$name" --node-id "$name" --zone "$zone" \
    --accelerator-type "$type" --runtime-version "$runtime" --spot

while true; do
    state=$(gcloud compute tpus queued-resources describe "$name" --zone "$zone" --format 'value(state.state)')
    echo "$name: $state"
    case $state in
        ACTIVE) exit 0 ;;
        FAILED | SUSPENDED) exit 4 ;;
    esac
    sleep 30
done
