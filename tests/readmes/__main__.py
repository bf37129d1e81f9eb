"""``python -m tests.readmes``: the README of every role, and docs/packages.md, made from the roles."""

from __future__ import annotations

import sys

from tests import readmes
from tests.readmes import packages

if __name__ == "__main__":
    for role in readmes.roles():
        readmes.path(role).write_text(readmes.text(role), encoding="utf-8")
    packages.PATH.write_text(packages.text(), encoding="utf-8")
    sys.stdout.write(f"{len(readmes.roles())} READMEs and {packages.PATH.name} written\n")
