#!/usr/bin/env bash
# Starts a run on every host of all slices, in the background, under tpu/supervise.sh. RUN is a folder that all hosts see.
# Its environment has the variables of ~/.jrl.env there, if that file exists.
#   NAME=jrl ZONE=us-central2-b tpu/launch.sh CONFIG RUN [--yes] [NAME=VALUE ...]
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
config=${1:?CONFIG} folder=${2:?RUN, a folder that all hosts see}
shift 2
bindings=()
for argument; do
    if [[ $argument == --yes ]]; then yes=true; else bindings+=("$argument"); fi
done

command=$(printf '%q ' tpu/supervise.sh "$config" ${bindings[@]+"${bindings[@]}"} --run "$folder")
keys='{ test ! -e ~/.jrl.env || { set -a && . ~/.jrl.env && set +a; }; }' # of a tracker or a judge
on_all "cd jrl && rm -f exit_code && $keys && { EXIT_CODE=exit_code nohup $command > train.log 2>&1 < /dev/null & sleep 1; }"
echo "follow it with: NAME=$NAME ZONE=$ZONE tpu/follow.sh"
