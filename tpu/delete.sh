#!/usr/bin/env bash
# Gives the slices back, with the disks of its hosts. What the run saved there is gone: fetch it first.
#   NAME=jrl ZONE=us-central2-b tpu/delete.sh [--yes]
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
[[ ${1:-} == --yes ]] && yes=true
run gcloud compute tpus queued-resources delete "$NAME" "${scope[@]}" --force --quiet
