#!/usr/bin/env bash
# Runs `jrl train` on one host and starts it again where another host was lost, until the run is done.
#   tpu/supervise.sh CONFIG [NAME=VALUE ...] --run DIR
# With EXIT_CODE=FILE the code that it ends with is written there.
# Exit codes of jrl: 76, another process is gone: again. 75, asked to stop, and saved: not again. Others: not again.
# Asked to stop itself (TERM), it passes that on and starts nothing more: 75, or the error that jrl ended with.
set -uo pipefail
if [[ ${1:-} == -h || ${1:-} == --help ]]; then
    sed -n '2,/^[^#]/s/^# \{0,1\}//p' "$0"
    exit 0
fi
JRL=${JRL:-.venv/bin/jrl}
most=${MOST_RESTARTS:-20} pause=${RESTART_SECONDS:-10}
child='' stopping=''
trap 'code=$?; [[ -z ${EXIT_CODE:-} ]] || echo "$code" > "$EXIT_CODE"' EXIT
trap 'stopping=1; [[ -z $child ]] || kill -TERM "$child" 2> /dev/null' TERM INT HUP

for ((tries = 0; ; tries++)); do
    "$JRL" train "$@" &
    child=$!
    [[ -z $stopping ]] || kill -TERM "$child" # asked before there was a child
    # Not `wait` alone: where a signal interrupts it while the child ends, bash has lost the child's exit code.
    while kill -0 "$child" 2> /dev/null; do sleep 0.2; done
    wait "$child"
    code=$?
    child=''
    ((code == 76)) || exit "$code"
    [[ -z $stopping ]] || exit 75
    if ((tries >= most)); then
        echo "supervise: another host was lost $((tries + 1)) times; giving up" >&2
        exit "$code"
    fi
    echo "supervise: another host was lost; starting again in $pause s" >&2
    for ((second = 0; second < pause; second++)); do
        [[ -z $stopping ]] || exit 75
        sleep 1
    done
done
