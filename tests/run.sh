#!/bin/sh
# run.sh BIN: what `make test` runs. The last line is pytest's summary.
set -eu
bin=$1
interpreter_minor=$("$bin/python" -c 'import sys; print(sys.version_info.minor)')

# The collection promises two generations of Python and ansible-core; the other one runs the unit tests.
other_generation() {
    other=$(sh tests/other-python.sh "$interpreter_minor")
    if [ -z "$other" ]; then
        echo "test: no second Python interpreter here; unit tests run with one"
        return
    fi
    venv=.venv-$("$other" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
    if [ ! -e "$venv/.installed" ] || [ pyproject.toml -nt "$venv/.installed" ]; then
        PYTHON="$other" sh tests/setup.sh "$venv" unit
        touch "$venv/.installed"
    fi
    echo "test: unit tests with $("$venv/bin/python" --version) and $("$venv/bin/ansible" --version | sed -n 1p)"
    "$venv/bin/python" -m pytest --quiet -n 2 tests/unit
}

# Neither needs Docker, so they run while the artefacts and the images that all scenarios share are built.
echo "test: linters and the other Python's unit tests run meanwhile, logs in .cache"
mkdir -p .cache
other_generation >.cache/other-generation.log 2>&1 &
other_generation=$!
sh tests/lint.sh "$bin" >.cache/lint.log 2>&1 &
lint=$!
# A scenario removes its own nodes, unless it is interrupted.
down() { for scenario in molecule/*/; do "$bin/python" -m tests.simulator.farm down "gpufarm-$(basename "$scenario")" >/dev/null || true; done; }
trap down EXIT
failed=""
"$bin/python" -m tests.simulator.farm build || failed=/dev/null
if wait "$lint"; then cat .cache/lint.log; else failed="$failed .cache/lint.log"; fi
if wait "$other_generation"; then cat .cache/other-generation.log; else failed="$failed .cache/other-generation.log"; fi
# shellcheck disable=SC2086 # names without spaces; what failed is told last
[ -z "$failed" ] || { cat $failed; exit 1; }

"$bin/python" -m pytest -n "${GPUFARM_TEST_PROCESSES:-3}" --dist worksteal tests/scenarios tests/unit
