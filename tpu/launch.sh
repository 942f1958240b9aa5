#!/usr/bin/env bash
# Copies the checkout to a TPU machine, installs it there, and starts a run in the background. Unproven: never run.
#   tpu/launch.sh NAME ZONE CONFIG RUN [NAME=VALUE ...]
set -euo pipefail
name=${1:?NAME} zone=${2:?ZONE} config=${3:?CONFIG} run=${4:?RUN}
shift 4
cd "$(dirname "${BASH_SOURCE[0]}")/.."

on_machine() { gcloud compute tpus tpu-vm ssh "$name" --zone "$zone" --command "$1"; }

archive=$(mktemp)
trap 'rm -f "$archive"' EXIT
git archive --format tar.gz --prefix jrl/ HEAD > "$archive"
gcloud compute tpus tpu-vm scp "$archive" "$name:jrl.tar.gz" --zone "$zone"
on_machine "tar xzf jrl.tar.gz && cd jrl && python3 -m venv .venv && .venv/bin/pip install -q '.[tpu]'"

command=$(printf '%q ' .venv/bin/jrl train "$config" "$@" --run "$run")
on_machine "cd jrl && nohup $command > train.log 2>&1 < /dev/null & sleep 5; tail -n 3 jrl/train.log"
echo "follow it with: gcloud compute tpus tpu-vm ssh $name --zone $zone --command 'tail -f jrl/train.log'"
