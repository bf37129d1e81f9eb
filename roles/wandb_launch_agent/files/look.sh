#!/bin/sh
# look.sh PYTHON VENV UNIT FILE...: what the host has of the agent and for it, a line each.
python=$1
venv=$2
unit=$3
shift 3
"$python" -c 'import importlib.util as util, sys
print("python %d.%d" % sys.version_info[:2])
print("ensurepip", "yes" if util.find_spec("ensurepip") else "no")' 2>/dev/null
"$venv/bin/python" -c 'from importlib import metadata
import sys
print("wandb", metadata.version("wandb"))
print("venv %d.%d" % sys.version_info[:2])' 2>/dev/null
getent group docker >/dev/null && echo "group docker"
for file; do
    [ -e "$file" ] && echo "file $file"
done
# What a run has brought that was cut off before it started the agent anew.
started=$(systemctl show --timestamp=us+utc --property=ExecMainStartTimestamp --value "$unit" 2>/dev/null)
[ -z "$started" ] || find "$venv/bin/wandb" "$@" -newermt "$started" -printf 'newer %p\n' 2>/dev/null
true
