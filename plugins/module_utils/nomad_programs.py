# Copyright (c) 2026, gpufarm contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What Nomad has started on this machine and still runs, also while its agent does not."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator
from pathlib import Path

from ansible_collections.gpufarm.core.plugins.module_utils.text import clean


@dataclasses.dataclass(frozen=True)
class Program:
    """One process of an allocation."""

    allocation: str
    """ID of the allocation."""
    name: str
    """Name and PID, for people."""
    devices: str | None
    """NVIDIA_VISIBLE_DEVICES, in which Nomad's device plugin names what the task has; None where there is none."""


def nomad_programs(proc: Path = Path("/proc")) -> Iterator[Program]:
    """Every process with NOMAD_ALLOC_ID in its environment."""
    for folder in proc.iterdir():
        if not folder.name.isdigit():
            continue
        try:
            environment = (folder / "environ").read_bytes().split(b"\0")
            name = (folder / "comm").read_text(encoding="utf-8", errors="replace").strip()
        except (FileNotFoundError, ProcessLookupError):
            # It has ended meanwhile.
            continue
        except PermissionError:
            if os.geteuid() != 0:
                raise
            # What the kernel keeps from root is none of Nomad's.
            continue
        known = {
            key: value.decode("utf-8", "replace") for key, _equals, value in (e.partition(b"=") for e in environment)
        }
        allocation = known.get(b"NOMAD_ALLOC_ID")
        if allocation is not None:
            told = clean(f"{name} (process {folder.name})")
            yield Program(clean(allocation), told, known.get(b"NVIDIA_VISIBLE_DEVICES"))
