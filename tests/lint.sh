#!/bin/sh
# lint.sh BIN: every linter; each one's findings are errors.
set -eu
bin=$(cd "$1" && pwd)
root=$(pwd)
PATH="$bin:$PATH"
export ANSIBLE_COLLECTIONS_PATH="$root/.collections"

echo "lint: ruff"
ruff check --quiet .
ruff format --check --quiet .
echo "lint: mypy"
export MYPYPATH="$root/.collections:$root"
mypy --cache-dir .cache/mypy -p tests.simulator -p tests.testinfra -p tests.scenarios -p tests.machine
mypy --cache-dir .cache/mypy -p ansible_collections.gpufarm.core.plugins
echo "lint: yamllint"
yamllint --strict .
echo "lint: shellcheck"
git ls-files -- '*.sh' tests/simulator/node/gpufarm-node-init tests/simulator/gpu/gpufarm-gpu-devices \
    tests/simulator/gpu/nv-fabricmanager tests/simulator/tuning/setpci tests/simulator/tuning/update-grub \
    tests/simulator/tuning/systemd-detect-virt tests/simulator/guest/gpufarm-guest-network \
    tests/machine/guest/gpufarm-bus tests/machine/guest/gpufarm-module .ci/run |
    xargs shellcheck --external-sources
echo "lint: ansible-lint"
# It starts Ansible for each playbook.
(cd .collections/ansible_collections/gpufarm/core && PYTHONPATH="$root/tests/simulator/quick" ansible-lint --offline --profile production)
echo "lint: antsibull-docs"
# It takes the name of its own temporary folder for a link of reStructuredText where that ends with an underscore.
(cd .collections/ansible_collections/gpufarm/core && python -c 'import sys, tempfile
tempfile._RandomNameSequence.characters = "abcdefghijklmnopqrstuvwxyz"
from antsibull_docs.cli.antsibull_docs import main
sys.exit(main())' lint-collection-docs --plugin-docs --validate-collection-refs=self .)
echo "lint: changelog"
antsibull-changelog lint
