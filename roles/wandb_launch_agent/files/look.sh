#!/bin/sh
# look.sh PYTHON VENV FILE...: what the host has of the agent and for it, a line each.
python=$1
venv=$2
shift 2
"$python" -c 'import importlib.util as util, sys
print("python %d.%d" % sys.version_info[:2])
print("ensurepip", "yes" if util.find_spec("ensurepip") else "no")' 2>/dev/null
"$venv/bin/python" -c 'from importlib import metadata
print("wandb", metadata.version("wandb"))' 2>/dev/null
getent group docker >/dev/null && echo "group docker"
for file; do
    [ -e "$file" ] && echo "file $file"
done
true
