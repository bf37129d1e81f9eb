"""``python -m tests.readmes``: the README of every role, made from its specification and its example."""

from __future__ import annotations

import sys

from tests import readmes

if __name__ == "__main__":
    for role in readmes.roles():
        readmes.path(role).write_text(readmes.text(role), encoding="utf-8")
    sys.stdout.write(f"{len(readmes.roles())} READMEs written\n")
