#!/bin/sh
# run.sh [CHECKOUT ...]: what `make bench` runs, with PYTHON. All of it, and 1 at the end where a limit is exceeded.
set -u
unit=tests/unit/plugins
failed=0
"$PYTHON" tests/bench/nvidia_smi.py || failed=1
PYTHONPATH=.collections "$PYTHON" "$unit/module_utils/nomad_helper.py" --nodes 5000 --gpus 8 --cores 192 --limit 3 || failed=1
PYTHONPATH=.collections "$PYTHON" "$unit/plugin_utils/report_helper.py" --nodes 5000 --gpus 8 --limit 5 || failed=1
"$PYTHON" tests/bench/wsl.py || failed=1
"$PYTHON" tests/bench/second_run.py "$@" || failed=1
exit "$failed"
