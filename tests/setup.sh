#!/bin/sh
# setup.sh VENV GROUP...: a virtual environment with dependency groups of pyproject.toml.
set -eu
venv=$1
shift
new_enough() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; }

# The distribution's is built with all optimisations; one that pyenv has built is a third slower.
python=${PYTHON:-/usr/bin/python3}
[ -n "${PYTHON:-}" ] || new_enough "$python" || python=python3
new_enough "$python" || {
    echo "setup: $("$python" --version) is too old. Expected: Python 3.11 or newer." \
        "Next step: make PYTHON=/path/to/python3 ..." >&2
    exit 1
}
if ! "$python" -m venv --help >/dev/null 2>&1 || ! "$python" -c 'import ensurepip' 2>/dev/null; then
    echo "setup: installing python3-venv" >&2
    apt-get update -q >/dev/null && DEBIAN_FRONTEND=noninteractive apt-get -o DPkg::Lock::Timeout=600 install -qy python3-venv >/dev/null
fi
[ -x "$venv/bin/python" ] || "$python" -m venv "$venv"
groups=""
windows=""
for group; do
    if [ "$group" = windows ]; then windows=$venv/windows; else groups="$groups --group $group"; fi
done
echo "setup: $("$venv/bin/python" --version), installing$groups into $venv"
"$venv/bin/python" -m pip install --quiet --upgrade "pip>=25.1"
# Of Ansible's collections few are used; Python compiles what is.
# shellcheck disable=SC2086 # a list of options
"$venv/bin/python" -m pip install --quiet --no-compile $groups
[ -z "$windows" ] || "$venv/bin/python" -m pip install --quiet --upgrade --target "$windows" --group windows

# Molecule looks for Ansible's commands on PATH; here it finds them although nobody has activated this environment.
if [ -e "$venv/bin/molecule" ]; then
    bin=$(cd "$venv/bin" && pwd)
    cat >"$venv/bin/molecule" <<EOF
#!/bin/sh
PATH="$bin:\$PATH" exec "$bin/python" -m molecule "\$@"
EOF
fi
