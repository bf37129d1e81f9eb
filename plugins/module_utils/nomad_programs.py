# Copyright (c) 2026, gpufarm contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What Nomad has started on this machine and still runs, also while its agent does not, and whom others gave GPUs.

And what computes on them that no scheduler has started, such as C(docker run --gpus all) of somebody who logged in.
"""

from __future__ import annotations

import dataclasses
import errno
import functools
import os
import pwd
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ansible_collections.gpufarm.core.plugins.module_utils.gpu_benchmark.measuring import Worker, attend
from ansible_collections.gpufarm.core.plugins.module_utils.text import clean


@dataclasses.dataclass(frozen=True)
class Program:
    """One process of an allocation."""

    allocation: str
    """ID of the allocation; empty where it is none of Nomad's."""
    name: str
    """Name and PID, for people."""
    devices: str | None
    """NVIDIA_VISIBLE_DEVICES, in which Nomad's device plugin names what the task has; None where there is none.

    Docker's C(--gpus) with devices names them there as well.
    """
    pid: str = ""
    computes: bool = False
    """Whether it has a context of CUDA's, where that was asked for."""


READ_S = 5.0
STUCK_MAX = 3
"""So many that cannot be read are told; the rest is not looked at then."""
UNKNOWN = "unknown"
# A context alone maps it: whoever asks NVML has it open too, as the device plugin does, and whoever has called cuInit
# (seen with driver 580.159 on H200). MPS' server has one without work; its clients have their own.
_CONTEXT = re.compile(rb" /dev/nvidia-uvm(?: \(deleted\))?\n")
DAEMONS = ("nvidia-cuda-mps", "nv-hostengine", "dcgm-exporter")
# Pods; what Nomad has started and has no environment of its; and the gate's measurement.
_SCHEDULED = re.compile(r"kubepods|nomad|gpufarm-health\.service")
_CONTAINER = re.compile("[0-9a-f]{64}")


def strangers(proc: Path = Path("/proc")) -> list[str]:
    """Who computes on GPUs and was started by no scheduler, by name, PID, user and container."""
    found = nomad_programs(proc, others=True, computing=True)
    told = [_stranger(proc / program.pid) for program in found if program.computes and not program.allocation]
    return [each for each in told if each]


def _stranger(folder: Path) -> str | None:
    name = _name(folder)
    try:
        cgroup, uid = (folder / "cgroup").read_text(encoding="utf-8", errors="replace"), folder.stat().st_uid
    except OSError:
        # It has ended meanwhile.
        return None
    if name in DAEMONS or _SCHEDULED.search(cgroup):
        return None
    try:
        user = pwd.getpwuid(uid).pw_name
    except KeyError:
        user = f"user {uid}"
    container = _CONTAINER.search(cgroup)
    return clean(f"{name} (process {folder.name} of {user}{f', container {container[0][:12]}' if container else ''})")


def nomad_programs(proc: Path = Path("/proc"), *, others: bool = False, computing: bool = False) -> Iterator[Program]:
    """Every process with NOMAD_ALLOC_ID in its environment, and those of C(others) whose environment names GPUs.

    With C(computing) those that compute on one as well.

    A process that hangs in the driver can hold up who reads its environment, so another process does that. One that
    cannot be read is told too, of an allocation C(unknown) and with all GPUs.
    """
    pids = [folder.name for folder in proc.iterdir() if folder.name.isdigit()]
    for _stuck in range(STUCK_MAX):
        reader = Worker("programs", functools.partial(_read, proc, pids, computing), None, READ_S)
        attend([reader])
        for line in reader.lines:
            if line["denied"]:
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), line["denied"])
            if line["allocation"] or others:
                name = clean(f"{line['name']} (process {line['pid']})")
                yield Program(line["allocation"], name, line["devices"], line["pid"], line["computes"])
        failure = reader.failure()
        if not failure:
            return
        if failure["code"] != "timeout" or reader.step not in pids:
            raise OSError(f"{proc} cannot be read: {failure['message']}")
        name = _name(proc / reader.step)
        yield Program(UNKNOWN, clean(f"{name} (process {reader.step}), whose environment cannot be read,"), "all")
        pids = pids[pids.index(reader.step) + 1 :]


def _read(proc: Path, pids: Sequence[str], computing: bool, tell: Callable[[Mapping[str, Any]], None]) -> None:
    for pid in pids:
        tell({"step": pid})
        folder = proc / pid
        try:
            environment = (folder / "environ").read_bytes().split(b"\0")
            computes = computing and bool(_CONTEXT.search((folder / "maps").read_bytes()))
        except (FileNotFoundError, ProcessLookupError):
            # It has ended meanwhile.
            continue
        except PermissionError:
            if os.geteuid() != 0:
                tell({"denied": str(folder / "environ")})
                return
            # What the kernel keeps from root is none of Nomad's.
            continue
        known = {
            key: value.decode("utf-8", "replace") for key, _equals, value in (e.partition(b"=") for e in environment)
        }
        allocation, devices = known.get(b"NOMAD_ALLOC_ID"), known.get(b"NVIDIA_VISIBLE_DEVICES")
        # Images have "all" in them, whether they are given GPUs or not.
        if allocation or computes or set((devices or "").split(",")) - {"all", "none", "void", ""}:
            told = {"allocation": clean(allocation or ""), "name": _name(folder), "pid": pid, "devices": devices}
            tell({**told, "computes": computes, "denied": None})


def _name(folder: Path) -> str:
    try:
        return (folder / "comm").read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return "a process"
