#!/bin/sh
# All trials that need a GPU, side by side: they take little of the card. Three minutes.
#
#     sh tests/faults/on_a_gpu.sh [OUT] [PYTHON]      # OUT: a folder for the raw output, trials-out unless given
set -eu
cd "$(dirname "$0")/../.."
out=${1:-trials-out} python=${2:-python3}
mkdir -p "$out"
export PYTHONPATH="$PWD/src:$PWD/tests:$PWD/tests/faults${PYTHONPATH:+:$PYTHONPATH}"
trial() {  # name, arguments of pytest
    name=$1
    shift
    "$python" -m pytest "$@" -p no:cacheprovider -vv --junitxml "$out/$name.xml" >"$out/$name.log" 2>&1
}
nvidia-smi --query-gpu=name,memory.total,memory.used,driver_version --format=csv,noheader >"$out/gpu.txt"
trial on_a_gpu tests/faults/test_on_a_gpu.py -k "not killed and not legs" & first=$!
trial kills tests/faults/test_on_a_gpu.py -k "killed or legs" & second=$!
trial waits tests/faults/test_waits_on_a_gpu.py & fourth=$!
trial gpu_memory tests/faults/test_gpu_memory.py & third=$!
trial kernels tests/faults/test_convolution_on_a_gpu.py tests/faults/test_recording.py tests/maths/test_fused.py \
    tests/maths/test_casts.py -k "gpu or cuda" & fifth=$!
failed=0
for job in $first $second $third $fourth $fifth; do wait "$job" || failed=1; done
tail -n 1 "$out"/*.log
exit $failed
