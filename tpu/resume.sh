#!/usr/bin/env bash
# Goes on with a run whose folder is on the machine: jrl train on an existing folder resumes it. Unproven: never run.
#   tpu/resume.sh NAME ZONE CONFIG RUN [NAME=VALUE ...]
set -euo pipefail
exec "$(dirname "${BASH_SOURCE[0]}")/launch.sh" "$@"
