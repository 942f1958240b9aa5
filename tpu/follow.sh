#!/usr/bin/env bash
# Shows the log of host 0 while it grows, or the last lines of all hosts.
#   NAME=jrl ZONE=us-central2-b tpu/follow.sh [--all]
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
yes=true # reading costs nothing
if [[ ${1:-} == --all ]]; then
    # shellcheck disable=SC2016 # the hosts expand it
    on_all 'tail -n 5 jrl/train.log | sed "s/^/$(hostname): /"'
else
    on_first 'tail -n 40 -F jrl/train.log'
fi
