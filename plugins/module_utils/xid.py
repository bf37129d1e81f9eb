# Copyright (c) 2026, gpufarm contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The Xid catalogue as data.

An Xid is the number under which the driver reports a fault of a GPU in the kernel log; SXid is the same for an
NVSwitch. What to do about each follows NVIDIA's catalogue for Ampere and newer (docs.nvidia.com/deploy/xid-errors), as
it was on 29 October 2025, and its list for older GPUs where that one says that a number is no longer used. The words
are our own. C(tests/xids.py) reads a newer one, by which the rows are tested.

The severity says what an Xid means for the next job on the GPU, not for the one that met it: C(ignore) for a fault of
the job itself, C(critical) where the GPU must be reset or worse before it can be trusted, C(warning) for the rest.
Nothing here needs Ansible, and nothing beyond Python's standard library.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace

IGNORE, WARNING, CRITICAL = "ignore", "warning", "critical"

# What to do, and how that is said.
ACTIONS = {
    "none": "nothing needs to be done",
    "restart_app": "restart the job; if it comes back with other jobs too, drain the node and run 'dcgmi diag -r 3'",
    "check_app": "look for the fault in the job and its CUDA version",
    "reset_gpu": "drain the node, then reset the GPU (nvidia-smi --gpu-reset) or reboot",
    "drain_and_reset": "drain the node, wait until its jobs have ended, then reset the GPU or reboot",
    "reboot": "drain the node and power-cycle it; if it comes back, reseat or replace the GPU",
    "check_hardware": "drain the node and check power cables, cooling and seating of the GPU",
    "check_nvlink": "drain the node, reset the GPUs at both ends of the link, and check Fabric Manager and the links",
    "check_configuration": "correct the configuration of the node or of the farm",
    "update_driver": "drain the node and update the driver and firmware",
    "contact_support": "drain the node, run 'dcgmi diag -r 3', and send nvidia-bug-report.sh's output to the vendor",
    "watch": "watch whether it grows; run 'dcgmi diag -r 3' at the next opportunity",
}


@dataclass(frozen=True)
class Xid:
    """One number of the catalogue; with C(by_text) the message itself says how bad it is."""

    number: int
    name: str
    action: str
    severity: str
    by_text: bool = False


def _each(numbers: Iterable[int], name: str, action: str, severity: str) -> tuple[Xid, ...]:
    return tuple(Xid(number, name, action, severity) for number in numbers)


CATALOGUE: dict[int, Xid] = {
    row.number: row
    for row in (
        Xid(8, "the GPU stopped working on a channel", "restart_app", WARNING),
        Xid(11, "malformed commands from a job", "check_app", IGNORE),
        Xid(13, "exception of a job's kernel", "check_app", IGNORE),
        Xid(14, "driver's own marker", "none", IGNORE),
        Xid(25, "illegal commands from a job", "check_app", IGNORE),
        Xid(31, "page fault of a job", "check_app", IGNORE),
        Xid(32, "damaged commands on their way to the GPU", "restart_app", WARNING),
        Xid(37, "unknown request to the GPU's firmware", "check_app", IGNORE),
        Xid(38, "watchdog of the GPU's firmware", "watch", WARNING),
        *_each((39, 40, 41), "exception of a copy engine", "restart_app", WARNING),
        Xid(43, "the driver ended a job that had failed", "check_app", IGNORE),
        Xid(44, "fault while jobs were switched", "watch", WARNING),
        Xid(45, "clean-up after a job that was ended", "none", IGNORE),
        Xid(46, "the GPU no longer answers the driver", "reset_gpu", CRITICAL),
        Xid(48, "memory error that ECC could not correct", "drain_and_reset", CRITICAL),
        Xid(54, "no auxiliary power on the board", "check_hardware", CRITICAL),
        Xid(57, "link to the memory could not be trained (older than Ampere)", "check_hardware", CRITICAL),
        Xid(58, "memory interface unstable (older than Ampere)", "check_hardware", CRITICAL),
        Xid(60, "exception of the security or video processor", "restart_app", WARNING),
        Xid(61, "the GPU's power controller stopped at a breakpoint", "reset_gpu", CRITICAL),
        Xid(62, "the GPU's power controller halted", "reset_gpu", CRITICAL),
        # Whether a reset is due is in the counters: row_remap_pending and retired_pages_pending.
        Xid(63, "a memory row or page was marked to be replaced", "none", IGNORE),
        Xid(64, "a memory row or page could not be replaced", "reset_gpu", CRITICAL),
        Xid(66, "the driver met a forbidden register", "none", IGNORE),
        Xid(67, "the driver met a forbidden register", "watch", WARNING),
        Xid(68, "exception of video decoder 0", "check_app", IGNORE),
        Xid(69, "wrong class of command from a job", "check_app", IGNORE),
        *_each((70, 71, 72, 75, 76, 77, 85), "exception of a copy engine", "restart_app", WARNING),
        Xid(74, "NVLink error", "check_nvlink", CRITICAL),
        Xid(78, "a vGPU could not be started", "update_driver", WARNING),
        Xid(79, "the GPU fell off the bus", "reboot", CRITICAL),
        Xid(80, "damaged data on its way to the GPU", "restart_app", WARNING),
        *_each((82, *range(99, 106)), "exception of a JPEG engine", "restart_app", WARNING),
        *_each((83, 84, 88, 89, 96, 97, 98), "exception of a video decoder", "restart_app", WARNING),
        *_each((86, 139), "exception of an optical flow engine", "restart_app", WARNING),
        Xid(92, "many corrected memory errors in a short time", "watch", WARNING),
        Xid(93, "the board's memory for its history is written too often", "watch", WARNING),
        Xid(94, "memory error that hit one job only", "restart_app", WARNING),
        Xid(95, "memory error that may have hit every job", "reset_gpu", CRITICAL),
        *_each((106, 107), "test message of the board management", "none", IGNORE),
        Xid(108, "NVLink address could not be translated at the far end", "check_nvlink", WARNING),
        Xid(109, "jobs could not be switched in time", "reset_gpu", CRITICAL),
        Xid(110, "security fault", "reset_gpu", CRITICAL),
        Xid(119, "the GPU's system processor (GSP) does not answer", "reset_gpu", CRITICAL),
        Xid(120, "the GPU's system processor (GSP) failed", "reset_gpu", CRITICAL),
        Xid(121, "corrected error of the link between CPU and GPU", "watch", WARNING),
        *_each(range(126, 136), "exception of a copy engine", "restart_app", WARNING),
        Xid(136, "NVLink could not be trained", "check_nvlink", CRITICAL),
        Xid(137, "access over NVLink that was not allowed", "check_nvlink", WARNING),
        Xid(140, "memory error from which the GPU did not recover", "reset_gpu", CRITICAL),
        Xid(141, "CUDA's fast path failed", "watch", WARNING),
        Xid(142, "exception of a video encoder", "restart_app", WARNING),
        Xid(143, "the GPU could not be initialised", "reset_gpu", CRITICAL),
        Xid(144, "NVLink 5 error: switch access window", "check_nvlink", CRITICAL, by_text=True),
        Xid(145, "NVLink 5 error: receive wrapper", "check_nvlink", CRITICAL, by_text=True),
        Xid(146, "NVLink 5 error: transport wrapper", "check_nvlink", CRITICAL, by_text=True),
        Xid(147, "NVLink 5 error: test exerciser", "check_nvlink", CRITICAL, by_text=True),
        Xid(148, "NVLink 5 error: port controller", "check_nvlink", CRITICAL, by_text=True),
        Xid(149, "NVLink 5 error: network interface", "check_nvlink", CRITICAL, by_text=True),
        Xid(150, "NVLink 5 error: management engine", "check_nvlink", CRITICAL, by_text=True),
        Xid(151, "encryption keys could not be changed", "reboot", CRITICAL),
        *_each((152, 153), "fault of the deep learning accelerator", "watch", WARNING),
        Xid(154, "the driver changed what it wants done to the GPU", "reset_gpu", CRITICAL, by_text=True),
        Xid(155, "NVLink error found by software", "reset_gpu", CRITICAL),
        Xid(156, "a part of the chip was marked to be retired", "reset_gpu", CRITICAL),
        Xid(157, "a part of the chip could not be retired", "contact_support", WARNING),
        Xid(158, "the GPU timed out for good", "reset_gpu", CRITICAL),
        Xid(159, "error of the coherent link", "watch", WARNING),
        *_each((160, 161), "a memory channel was retired, or could not be", "watch", WARNING),
        *_each((162, 163), "power smoothing was switched", "none", IGNORE),
        *_each((164, 165), "power smoothing wears out", "contact_support", WARNING),
        Xid(166, "traffic over NVLink before its encryption was ready", "check_nvlink", WARNING),
        Xid(167, "the PCI Express link timed out for good", "reboot", CRITICAL),
        Xid(168, "the GPU has less memory because of errors", "contact_support", WARNING),
        Xid(169, "the GPU's security controller halted", "reset_gpu", CRITICAL),
        Xid(170, "interrupt of an encrypted NVLink", "check_nvlink", WARNING),
        Xid(171, "memory error in DRAM that ECC could not correct", "drain_and_reset", CRITICAL),
        Xid(172, "memory error in SRAM that ECC could not correct", "drain_and_reset", CRITICAL),
    )
}

# What Xid 154 names by number, from NVML's recovery actions.
_RECOVERY = {0: "none", 1: "reset_gpu", 2: "reboot", 3: "drain_and_reset", 4: "drain_and_reset"}
# What comes last in the message: before it may stand a process, whose name may be anything.
_RECOVERY_TEXT = re.compile(r".* from 0x[0-9a-fA-F]+(?: \([^)]*\))? to 0x([0-9a-fA-F]{1,8})\b(.*)")


def lookup(number: int, text: str = "", fatal: bool | None = None) -> Xid:
    """What the catalogue says of a Xid, and of this message where the number alone does not tell."""
    row = CATALOGUE.get(number)
    if row is None:
        return Xid(number, "not in the catalogue", "watch", WARNING)
    if not row.by_text:
        return row
    if number == 154:
        match = _RECOVERY_TEXT.match(text)
        wanted, said = (int(match.group(1), 16), match.group(2)) if match else (None, "")
        # IMEX serves NVLink between nodes only. An earlier list has a reset of the bus by the same number.
        if wanted == 5 and (not said.startswith(" (") or "imex" in said.lower()):
            return replace(row, action="check_configuration", severity=WARNING)
        action = _RECOVERY.get(wanted, "reset_gpu") if wanted is not None else "reset_gpu"
        return replace(row, action=action, severity=IGNORE if action == "none" else CRITICAL)
    # Only what says that it is harmless counts as such.
    return replace(row, action="watch", severity=WARNING) if fatal is False else row
