#!/usr/bin/env bash
# Copies a run's folder from host 0 (of slice 0) to this machine. A copy made in the middle of a save holds the save before.
#   NAME=jrl ZONE=us-central2-b tpu/fetch.sh RUN [TO]
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
folder=${1:?RUN} to=${2:-.}
if [[ $folder == gs://* ]]; then
    echo "fetch.sh: $folder is in a bucket: jrl fingerprint, rollouts, eval, compare ... read it there" >&2
    exit 2
fi
gcloud compute tpus queued-resources scp --recurse "$NAME:$folder" "$to" "${scope[@]}" ${ssh_flags[@]+"${ssh_flags[@]}"} --node=0 --worker=0
