# Copyright (c) 2026, gpufarm contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Has one of a thousand runs of Ansible do once what each would do again; it changes when work is done, not which.

A module that one run has packed is there for the next, as it is for the next task of the same run. Plugins of
templates, which each process of a task would load for itself, are loaded by its parent. Nobody looks for garbage in
a run that ends soon.
"""

from __future__ import annotations

import gc
import hashlib
import importlib
import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from ansible import constants
from ansible.plugins.callback import CallbackBase
from ansible.plugins.loader import filter_loader, test_loader
from ansible.release import __version__

PACKED = Path(__file__).resolve().parents[3] / ".cache" / "packed"
COLLECTION = "ansible_collections.gpufarm.core.plugins"
OLD_S = 24 * 3600


def packed_from() -> Iterator[str]:
    """Yield what decides of a packed module: Ansible, the collections that come with it, and each file of ours."""
    yield f"{__version__} {sys.version} {sys.prefix}"
    for folder in ("modules", "module_utils"):
        for path in importlib.import_module(f"{COLLECTION}.{folder}").__path__:
            for file in sorted(Path(path).resolve().rglob("*.py")):
                state = file.stat()
                yield f"{file} {state.st_size} {state.st_mtime_ns} {state.st_ino}"


def folder() -> Path:
    """Return where packed modules are kept as long as nothing of theirs changes, and forget older ones."""
    kept = PACKED / hashlib.sha256("\n".join(packed_from()).encode()).hexdigest()[:16]
    kept.mkdir(parents=True, exist_ok=True)
    for other in PACKED.iterdir():
        if other != kept and other.stat().st_mtime < time.time() - OLD_S:
            shutil.rmtree(other, ignore_errors=True)
    return kept


class CallbackModule(CallbackBase):  # type: ignore[misc]
    CALLBACK_VERSION = 2.0
    CALLBACK_TYPE = "aggregate"
    CALLBACK_NAME = "quick"

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        gc.disable()
        gc.freeze()
        # One of a collection has all of it read.
        for name in ("ansible.builtin.default", "gpufarm.core.has_path", "community.crypto.x509_certificate_info"):
            with suppress(KeyError):
                filter_loader.get(name)
        test_loader.get("ansible.builtin.defined")
        of_this_run = Path(constants.DEFAULT_LOCAL_TMP) / "ansiballz_cache"
        if not of_this_run.exists():
            of_this_run.symlink_to(folder())
