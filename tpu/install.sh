#!/usr/bin/env bash
# Copies this checkout to every host of all slices and installs it there.
#   NAME=jrl ZONE=us-central2-b tpu/install.sh [--yes]
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
[[ ${1:-} == --yes ]] && yes=true
cd "$(dirname "${BASH_SOURCE[0]}")/.."

archive=$(mktemp)
trap 'rm -f "$archive"' EXIT
git archive --format tar.gz --prefix jrl/ HEAD > "$archive"
on_all true # makes and spreads the SSH key before the hosts are asked all at once
run gcloud compute tpus queued-resources scp "$archive" "$NAME:jrl.tar.gz" "${scope[@]}" --node=all --worker=all
on_all "tar xzf jrl.tar.gz && cd jrl && python3 -m venv .venv && .venv/bin/pip install -q '.[tpu]'"
