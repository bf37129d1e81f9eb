# Copyright (c) 2026, gpufarm contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What else tells of the GPUs of a node: Fabric Manager, the processes on them, and who declared them repaired."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ansible_collections.gpufarm.core.plugins.module_utils.commands import Command, program_path, run_commands
from ansible_collections.gpufarm.core.plugins.module_utils.health.options import PROCESS_WAIT
from ansible_collections.gpufarm.core.plugins.module_utils.nvidia_smi.facts import Facts, Gpu
from ansible_collections.gpufarm.core.plugins.module_utils.nvidia_smi.node import HOST_PID_NAMESPACE
from ansible_collections.gpufarm.core.plugins.module_utils.nvidia_smi.values import version_of
from ansible_collections.gpufarm.core.plugins.module_utils.text import clean, utc

FABRIC_MANAGER = "nvidia-fabricmanager.service"
# How a state ends of one that was stopped, or never started, and did not fail.
STOPPED = " is inactive (result success)"
COMM_CHARS = 15


def fabric_manager_state(root: Path, search: str | None, timeout: float) -> tuple[str, str | None]:
    """Whether Fabric Manager runs, as a unit or in a container, on a host that has NVSwitches, and the version that is
    installed there.
    """
    if not _entries(root / "proc/driver/nvidia-nvswitch/devices") and not any(
        (root / "dev").glob("nvidia-nvswitch[0-9]*")
    ):
        return "not_needed", None
    program = program_path("systemctl", search)
    if program is None:
        return "skipped: there is no systemctl", None
    asked = [[program, "show", FABRIC_MANAGER, "--property=LoadState,ActiveState,Result"]]
    manager = program_path("nv-fabricmanager", search)
    if manager is not None:
        asked.append([manager, "--version"])
    command, *others = run_commands(asked, timeout)
    version = next((version_of(other.stdout.partition(":")[2]) for other in others if other.returncode == 0), None)
    state = _state_of_unit(command)
    # While its unit starts, ends or has failed, a process of it says nothing.
    if (state == "not_installed" or state.endswith(STOPPED)) and _runs("nv-fabricmanager", root):
        state = "ok"
    return state, version


def _runs(name: str, root: Path) -> bool:
    """Whether a process of this program lives: /proc cuts its name, and has no command line of one that ended.

    The command line alone waits for the memory of a process that hangs in the driver, so only one of that name is read.
    """
    for path in (root / "proc").glob("[0-9]*/comm"):
        try:
            if path.read_text(encoding="utf-8", errors="replace").rstrip("\n") != name[:COMM_CHARS]:
                continue
            program = path.with_name("cmdline").read_text(encoding="utf-8", errors="replace").partition("\0")[0]
        # One that ended meanwhile.
        except OSError:
            continue
        if Path(program).name == name:
            return True
    return False


def _state_of_unit(command: Command) -> str:
    state = dict(line.partition("=")[::2] for line in command.stdout.splitlines())
    if "ActiveState" not in state:
        return f"skipped: systemctl says {command.words[:120] or 'nothing'!r}"
    if state.get("LoadState") == "not-found":
        return "not_installed"
    if state["ActiveState"] == "active":
        return "ok"
    return clean(f"failed: {FABRIC_MANAGER} is {state['ActiveState']} (result {state.get('Result', 'unknown')})")


def _entries(path: Path) -> list[Path]:
    try:
        return list(path.iterdir())
    except OSError:
        return []


def dead_pids(gpus: Sequence[Gpu], root: Path) -> dict[int, list[int]]:
    """Pids that nvidia-smi lists and /proc has not, by position of the GPU."""
    dead = {
        position: [pid for pid in pids if not (root / f"proc/{pid}").exists()]
        for position, gpu in enumerate(gpus)
        for pids in [[process["pid"] for process in gpu["processes"] or [] if process["pid"]]]
    }
    return {position: pids for position, pids in dead.items() if pids}


def processes_without_owner(
    facts: Facts, root: Path, again: Callable[[], Mapping[str, Any]], wait: float = PROCESS_WAIT
) -> tuple[str, dict[int, list[int]]]:
    """Pids that hold memory of a GPU though they ended, and whether that can be told here.

    The driver names processes by the host's pids. In another pid namespace, as a container has, they mean nothing.
    """
    if facts["platform"] == "wsl":
        return "skipped: under WSL the driver names processes of Windows", {}
    try:
        # Path.readlink needs Python 3.9, which not all nodes have.
        namespace = os.readlink(root / "proc/self/ns/pid")  # noqa: PTH115
    except OSError as error:
        return f"skipped: the pid namespace is unknown ({error.strerror})", {}
    if namespace != HOST_PID_NAMESPACE:
        return "skipped: not in the pid namespace of the host", {}
    # Who may not see the processes of others in /proc would take them for dead.
    if not (root / "proc/1").exists():
        return "skipped: /proc hides the processes of others", {}
    dead = dead_pids(facts["gpus"], root)
    if dead:
        # One that ended between the call and the look into /proc is gone from the next call.
        time.sleep(wait)
        still = {gpu["uuid"]: gpu for gpu in again()["gpus"]}
        listed = [still.get(gpu["uuid"], {"processes": None}) for gpu in facts["gpus"]]
        later = dead_pids(listed, root)
        both = {position: [pid for pid in pids if pid in later.get(position, ())] for position, pids in dead.items()}
        dead = {position: pids for position, pids in both.items() if pids}
    return "ok", dead


def acknowledged_of(path: str, uuids: Iterable[str | None], now: float) -> dict[str, tuple[str, float]]:
    """The same of single GPUs, by their UUIDs: such a file's name ends in one. Those without a file are left out."""
    found = {uuid: acknowledged_at(f"{path}-{uuid}", now) for uuid in uuids if uuid}
    return {uuid: told for uuid, told in found.items() if told[0] != "none"}


def acknowledged_at(path: str, now: float) -> tuple[str, float]:
    """When somebody declared the GPUs repaired: the time of the file's last change."""
    try:
        at = Path(path).stat().st_mtime
    except OSError:
        return "none", 0.0
    # A time to come would hide every Xid until then.
    return (f"ignored: {path} is of {utc(at)}, which is in the future", 0.0) if at > now + 60 else (utc(at), at)
