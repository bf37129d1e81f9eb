#!/bin/sh
# other-python.sh MINOR: prints an interpreter of the other generation (3.11, or 3.12 and newer), if one is found.
set -eu
if [ "$1" -eq 11 ]; then wanted="3.14 3.13 3.12"; else wanted="3.11"; fi
for version in $wanted; do
    for candidate in "python$version" "$HOME"/.pyenv/versions/"$version".*/bin/python; do
        if "$candidate" -c "import sys, ensurepip; sys.exit('%d.%d' % sys.version_info[:2] != '$version')" 2>/dev/null
        then
            echo "$candidate"
            exit 0
        fi
    done
done
