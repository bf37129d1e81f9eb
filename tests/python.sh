#!/bin/sh
# python.sh VERSION...: prints the first interpreter of these that this machine has and that makes environments.
set -eu
for version in "$@"; do
    for candidate in "python$version" "$HOME"/.pyenv/versions/"$version".*/bin/python; do
        if "$candidate" -c "import sys, venv, ensurepip; sys.exit('%d.%d' % sys.version_info[:2] != '$version')" 2>/dev/null
        then
            command -v "$candidate"
            exit 0
        fi
    done
done
