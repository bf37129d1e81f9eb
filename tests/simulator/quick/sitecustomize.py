"""Where PYTHONPATH has this folder, a test's Python begins here: runs of Ansible and their modules share work."""

from __future__ import annotations

import os
import sys

import archives  # type: ignore[import-not-found] # in this folder
import spare  # type: ignore[import-not-found]

# pathlib would be imported in every task.
# ruff: noqa: PTH118, PTH119, PTH120, PTH103
kept = os.path.normpath(os.path.join(os.path.dirname(__file__), "../../../.cache/archives"))
os.makedirs(kept, exist_ok=True)
archives.keep(kept)
spare.instead(kept)
if any(os.path.basename(word) == "ansible-playbook" for word in getattr(sys, "orig_argv", ())[1:3]):
    import warm  # type: ignore[import-not-found]

    warm.instead(kept)
    # What Ansible is imported by.
    import copies  # type: ignore[import-not-found]

    copies.share()
