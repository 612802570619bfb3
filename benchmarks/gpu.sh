#!/bin/bash
# One NVIDIA GPU, ten minutes, one table: large random transformers exported, compiled for this
# GPU, compared, timed alone by batch size, and end to end over large slides.
#
#   benchmarks/gpu.sh                       everything; stops itself after nine minutes
#   benchmarks/gpu.sh --device cpu --small  every step in small on a CPU, to see that it runs
#
# Needs the package's dependencies with a CUDA build of torch, a C++ compiler, the CUDA toolkit,
# nvidia-smi, about 12 GB of disk in $TMPDIR, and no network. Whether results are right on many
# threads, without memory and after a fault, tests/test_on_gpu.py tells before it.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-$([ -x .venv/bin/python ] && echo .venv/bin/python || echo python3)}
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1
exec "$python" -m benchmarks.gpu "$@"
