#!/bin/sh
# run.sh BIN: what `make test` runs. The last line is pytest's summary.
set -eu
bin=$1
root=$(pwd)
farms="gpufarm-test gpufarm-farm"
interpreter_minor=$("$bin/python" -c 'import sys; print(sys.version_info.minor)')

sh tests/lint.sh "$bin"

# The collection promises two generations of Python and ansible-core; the other one runs the unit tests.
other=$(sh tests/other-python.sh "$interpreter_minor")
if [ -n "$other" ]; then
    venv=.venv-$("$other" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
    if [ ! -e "$venv/.installed" ] || [ pyproject.toml -nt "$venv/.installed" ]; then
        PYTHON="$other" sh tests/setup.sh "$venv" unit
        touch "$venv/.installed"
    fi
    echo "test: unit tests with $("$venv/bin/python" --version) and $("$venv/bin/ansible" --version | head -n 1)"
    "$venv/bin/python" -m pytest --quiet -n 2 tests/unit
else
    echo "test: no second Python interpreter here; unit tests run with one"
fi

# Docker, the artefacts, the images and the mirror that all scenarios share.
"$bin/python" -m tests.simulator.farm mirror gpufarm-test
status=0
PYTHONPATH="$root" "$bin/python" -m pytest -n "${GPUFARM_TEST_PROCESSES:-3}" --dist worksteal \
    tests/scenarios tests/unit || status=$?
for farm in $farms; do "$bin/python" -m tests.simulator.farm down "$farm" >/dev/null || true; done
exit $status
