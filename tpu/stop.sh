#!/usr/bin/env bash
# Asks the run to stop: all hosts end the same step, save and exit with 75. The slices stay.
#   NAME=jrl ZONE=us-central2-b tpu/stop.sh [--yes]
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
[[ ${1:-} == --yes ]] && yes=true
on_all "pkill -TERM -f '[t]pu/supervise.sh' || true"
