#!/bin/sh
# run.sh BIN: what `make test` runs. Its last lines are what was left out and pytest's summary.
set -eu
bin=$1

# Where they cannot be installed, tests that need them skip, which is told.
"$bin/python" -m tests.simulator.tools || true

# Also where this is interrupted: what still runs ends, what was not told is told, and no node of a scenario stays.
untold=""
# shellcheck disable=SC2086,SC2329 # names without spaces; the trap calls it
ended() {
    [ -z "$untold" ] || cat $untold
    for each in $beside; do kill -- "-$each" 2>/dev/null || true; done
    for scenario in molecule/*/; do
        "$bin/python" -m tests.simulator.farm down "gpufarm-$(basename "$scenario")" >/dev/null || true
    done
}
beside=""
trap ended EXIT
trap 'exit 130' INT TERM

# Neither needs Docker, so they run while the artefacts and the images that all scenarios share are built. That waits for
# downloads, and goes on beside the first tests (tests/conftest.py).
echo "test: linters and the other Python's unit tests run meanwhile, logs in .cache"
mkdir -p .cache
GPUFARM_BUILT=$PWD/.cache/built
rm -f "$GPUFARM_BUILT"
# Each is a group of processes, which end together.
# shellcheck disable=SC2016 # the other shell's
setsid sh -c '"$0" -m tests.simulator.farm build && built=0 || built=$?; touch "$1"; exit "$built"' \
    "$bin/python" "$GPUFARM_BUILT" &
build=$!
setsid sh tests/other-generation.sh "$bin" >.cache/other-generation.log 2>&1 &
other_generation=$!
setsid sh tests/lint.sh "$bin" >.cache/lint.log 2>&1 &
lint=$!
beside="$build $other_generation $lint"
untold=".cache/lint.log .cache/other-generation.log"
if wait "$lint"; then cat .cache/lint.log; untold=.cache/other-generation.log; fi
if wait "$other_generation"; then cat .cache/other-generation.log; untold=${untold%.cache/other-generation.log}; fi
beside=$build
[ -z "$untold" ] || exit 1

# Whatever runs a command in a node runs it by this client.
GPUFARM_DOCKER=$("$bin/python" -m tests.simulator.exec)
GPUFARM_LEFT_OUT=$(grep "^left out:" .cache/other-generation.log || true)
export GPUFARM_DOCKER GPUFARM_LEFT_OUT
# Each unit test is run by one of the two generations, if both are there.
grep -q "^left out: the unit tests on a second Python" .cache/other-generation.log || export GPUFARM_GENERATION=this
# In the order of tests/conftest.py.
passed=0
GPUFARM_BUILT=$GPUFARM_BUILT "$bin/python" -m pytest -n "${GPUFARM_TEST_PROCESSES:-4}" --dist load --maxschedchunk 1 \
    --durations 40 --durations-min 5 tests/scenarios tests/unit || passed=$?
wait "$build" || { echo "test: FAILED above: what scenarios are made of could not be built" && passed=1; }
exit "$passed"
