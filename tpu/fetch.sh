#!/usr/bin/env bash
# Copies a run's folder from host 0 to this machine. A copy made in the middle of a save holds the save before.
#   NAME=jrl ZONE=us-central2-b tpu/fetch.sh RUN [TO]
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
folder=${1:?RUN} to=${2:-.}
gcloud compute tpus tpu-vm scp --recurse "$NAME:$folder" "$to" "${scope[@]}" --worker=0
