#!/bin/sh
# other-generation.sh BIN: the collection promises two generations of Python and ansible-core; BIN's is one of them, and
# here the other one runs the unit tests.
set -eu
case $("$1/python" -c 'import sys; print(sys.version_info.minor)') in
    11) other=$(sh tests/python.sh 3.14 3.13 3.12) ;;
    *) other=$(sh tests/python.sh 3.11) ;;
esac
if [ -z "$other" ]; then
    echo "left out: the unit tests on a second Python; none of the other generation was found." \
        "Next step: install one where tests/python.sh looks for it."
    [ "${CI:-false}" = false ] || exit 1
    exit 0
fi
venv=.venv-$("$other" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
if [ ! -e "$venv/.installed" ] || [ pyproject.toml -nt "$venv/.installed" ]; then
    PYTHON="$other" sh tests/setup.sh "$venv" unit windows
    touch "$venv/.installed"
fi
echo "test: unit tests with $("$venv/bin/python" --version) and $("$venv/bin/ansible" --version | sed -n 1p)"
# What the tests themselves are made of is no part of the collection and promises nothing of the kind. Collections for
# Windows and for certificates come with the package ansible, whose 500 MB are not worth a second time. Nomad's plugin for
# volumes is run by a node's own Python, and is tried with that one. Nomad is being built meanwhile, so that what runs it
# waits for the tests that follow. Turns of servers cost minutes, and what they are made of, loops and conditions, is in all
# other playbooks, too. Of all others one in six is run (tests/conftest.py).
GPUFARM_GENERATION=other "$venv/bin/python" -m pytest --quiet -n 2 --dist load --maxschedchunk 1 tests/unit --ignore=tests/unit/simulator \
    --ignore=tests/unit/test_left_out.py --ignore=tests/unit/roles/test_sized_volumes.py \
    --ignore=tests/unit/playbooks/test_wsl_hosts.py --ignore=tests/unit/playbooks/test_wsl_setup.py \
    --ignore=tests/unit/playbooks/test_ended_certificates.py --ignore=tests/unit/roles/test_nomad_tls.py \
    --ignore=tests/unit/roles/test_turns.py --ignore=tests/unit/roles/test_nomad_device_plugin.py
