#!/usr/bin/env bash
# Copies the last commit of this checkout to every host of all slices and installs it there. Hosts whose Python is older
# than 3.11, or has no venv, get a Python 3.13 from uv. EXTRAS are those of pyproject.toml.
#   NAME=jrl ZONE=us-central2-b EXTRAS=tpu,hf tpu/install.sh [--yes]
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
[[ ${1:-} == --yes ]] && yes=true
cd "$(dirname "${BASH_SOURCE[0]}")/.."

if [[ -n $(git status --porcelain) ]]; then
    echo "install.sh: only what is committed is copied; these files are not, or not as they are now:" >&2
    git status --short >&2
fi
archive=$(mktemp)
trap 'rm -f "$archive"' EXIT
git archive --format tar.gz --prefix jrl/ HEAD > "$archive"
on_all true # makes and spreads the SSH key before the hosts are asked all at once
run gcloud compute tpus queued-resources scp "$archive" "$NAME:jrl.tar.gz" "${scope[@]}" ${ssh_flags[@]+"${ssh_flags[@]}"} \
    --node=all --worker=all
venv="{ python3 -c 'import sys; sys.exit(sys.version_info < (3, 11))' && python3 -m venv .venv; }"
venv+=" || { PIP_BREAK_SYSTEM_PACKAGES=1 python3 -m pip install -q --user uv && python3 -m uv venv -q --seed --allow-existing --python 3.13 .venv; }"
on_all "tar xzf jrl.tar.gz && cd jrl && { $venv; } && .venv/bin/pip install -q '.[${EXTRAS:-tpu,hf}]'"
