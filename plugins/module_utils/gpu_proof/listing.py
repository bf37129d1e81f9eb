# Copyright (c) 2026, gpufarm contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What a task or a pod printed of its GPUs. Pods have this file with them, so it needs Python 3.8 only, and C(text)."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence

from ansible_collections.gpufarm.core.plugins.module_utils.text import clean

MARK = "gpufarm-verify:"


@dataclasses.dataclass(frozen=True)
class Listing:
    """What was printed: each GPU with its MIG devices, its environment, and how nvidia-smi ended."""

    gpus: Sequence[tuple[str, tuple[str, ...]]]
    visible: str | None
    """None where this was not said yet, and then the list of GPUs may be cut off too."""
    wsl: bool
    exit_code: int | None
    """None where the end of the log is missing."""
    computed: int | None = None
    """How the program that measures ended, None where it was not started."""
    answer: str | None = None
    """What it said, not yet read: whether the log is whole comes first."""
    empty: Sequence[str] = ()
    """GPUs whose MIG mode is on, without a MIG device: nothing can compute there."""


_GPU_LINE = re.compile(r"^GPU [0-9]+: .*\(UUID: (GPU-[^)\s]+)\)")
_MIG_LINE = re.compile(r"^\s*MIG .*\(UUID: (MIG-[^)\s]+)\)")
_DIVIDED_LINE = re.compile(rf"^{MARK} divided (GPU-\S+)$")
_END_LINE = re.compile(rf"^{MARK} (end|computed) ([0-9]{{1,3}})$")
_ANSWER_LINE = re.compile(rf"^{MARK} answer (\{{.*\}})$")


def read_listing(text: str) -> Listing:
    gpus: list[tuple[str, tuple[str, ...]]] = []
    divided: set[str] = set()
    ends: dict[str, int] = {}
    visible, wsl, answer = None, False, None
    for raw in text.splitlines():
        line = clean(raw.rstrip())
        gpu, mig, end = _GPU_LINE.match(line), _MIG_LINE.match(line), _END_LINE.match(line)
        said, mode = _ANSWER_LINE.match(line), _DIVIDED_LINE.match(line)
        if gpu:
            gpus.append((gpu.group(1), ()))
        elif mig and gpus:
            gpus[-1] = (gpus[-1][0], (*gpus[-1][1], mig.group(1)))
        elif mode:
            divided.add(mode.group(1))
        elif line.startswith(f"{MARK} visible"):
            visible = line[len(f"{MARK} visible") :].strip()
        elif line == f"{MARK} wsl":
            wsl = True
        elif end:
            ends[end.group(1)] = int(end.group(2))
        elif said:
            answer = said.group(1)
    empty = tuple(gpu for gpu, migs in gpus if gpu in divided and not migs)
    return Listing(gpus, visible, wsl, ends.get("end"), ends.get("computed"), answer, empty)


def devices_in(listing: Listing) -> list[str]:
    """MIG devices stand for the GPU that they are on."""
    return [device for gpu, migs in listing.gpus for device in (migs or (gpu,))]


def own_device(listing: Listing) -> str | None:
    """The one that a container was given, where it was not asked for by its UUID.

    Where nothing separates GPUs, its environment may still say which of those that it sees it is.
    """
    seen = devices_in(listing)
    if listing.wsl and listing.visible in seen:
        return listing.visible
    return seen[0] if len(seen) == 1 else None
