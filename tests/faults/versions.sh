#!/usr/bin/env bash
# A short run of everything that needs no extra, under other versions of Python and of what crosel depends on.
#
#   tests/faults/versions.sh FOLDER PYTHON:lowest PYTHON:newest PYTHON:torch==2.9.1 ...
#
# `lowest` takes the lower bound of every dependency in pyproject.toml, `newest` the newest release there is, anything
# else is a requirement of its own beside the newest. Each case has a virtual environment in FOLDER (gigabytes: torch
# from PyPI brings CUDA); one line of JSON a case goes to standard output. Needs PyPI.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
folder=$(mkdir -p "$1" && cd "$1" && pwd)
shift
test -x "$folder/tools/bin/uv" || {
    python3 -m venv "$folder/tools"
    "$folder/tools/bin/pip" install --quiet --disable-pip-version-check uv build hatchling
}
"$folder/tools/bin/python" -m build --quiet --wheel --no-isolation --outdir "$folder/dist" "$here/../.." >&2
wheel=$(ls -t "$folder"/dist/*.whl | head -1)
failed=0
for case in "$@"; do
    python=${case%%:*} wanted=${case#*:}
    env="$folder/env-$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')-${wanted//[^a-z0-9.]/-}"
    extra=() resolution=highest
    case $wanted in
        lowest) resolution=lowest-direct ;;
        newest) ;;
        *) extra=("$wanted") ;;
    esac
    if "$folder/tools/bin/uv" venv --quiet --allow-existing --python "$("$python" -c 'import sys; print(sys.executable)')" "$env" >&2 &&
        "$folder/tools/bin/uv" pip install --quiet --python "$env/bin/python" --resolution "$resolution" \
            --requirement "$here/../../pyproject.toml" ${extra[@]+"${extra[@]}"} >&2 &&
        "$folder/tools/bin/uv" pip install --quiet --python "$env/bin/python" --no-deps --reinstall "$wheel" >&2; then
        OMP_NUM_THREADS=1 PYTHONWARNINGS=error::DeprecationWarning:crosel "$env/bin/python" "$here/short_run.py" \
            "$wanted" || failed=1
    else
        echo "{\"wanted\": \"$wanted\", \"python\": \"$python\", \"installed\": false}"
        failed=1
    fi
done
exit $failed
