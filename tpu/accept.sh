#!/usr/bin/env bash
# The first ten minutes on a new machine: one JSON file and one page of what works here, how exactly and how fast.
#   tpu/accept.sh OUT [--devices N]        from a checkout; N virtual CPU devices try the command itself
set -euo pipefail
if [[ ${1:--} == -* ]]; then
    sed -n '2,3s/^# //p' "${BASH_SOURCE[0]}"
    exit 2
fi
out=$(realpath -m "$1")
shift
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python=${PYTHON:-.venv/bin/python} # the environment that install.sh makes
[[ -n ${PYTHON:-} || -x $python ]] || python=python3
exec "$python" -m benchmarks.accept --out "$out" "$@"
