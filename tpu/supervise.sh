#!/usr/bin/env bash
# Runs `jrl train` on one host and starts it again where another host was lost, until the run is done.
#   tpu/supervise.sh CONFIG [NAME=VALUE ...] --run DIR
# With EXIT_CODE=FILE the code that it ends with is written there.
# Exit codes of jrl: 76, another process is gone: again. 75, asked to stop, and saved: not again. Others: not again.
set -uo pipefail
JRL=${JRL:-.venv/bin/jrl}
most=${MOST_RESTARTS:-20} pause=${RESTART_SECONDS:-10}
child=
trap 'code=$?; [[ -z ${EXIT_CODE:-} ]] || echo "$code" > "$EXIT_CODE"' EXIT
trap '[[ -n $child ]] && kill -TERM "$child"' TERM INT HUP

for ((tries = 0; ; tries++)); do
    "$JRL" train "$@" &
    child=$!
    while true; do # a signal ends `wait`, and not the process it waits for
        wait "$child"
        code=$?
        kill -0 "$child" 2> /dev/null || break
    done
    ((code == 76)) || exit "$code"
    if ((tries >= most)); then
        echo "supervise: another host was lost $((tries + 1)) times; giving up" >&2
        exit "$code"
    fi
    echo "supervise: another host was lost; starting again in $pause s" >&2
    sleep "$pause"
done
