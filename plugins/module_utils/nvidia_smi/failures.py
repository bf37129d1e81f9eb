# Copyright (c) gpufarm contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Why nvidia-smi gave no answer, and what to do then."""

from __future__ import annotations

from ansible_collections.gpufarm.core.plugins.module_utils.commands import Command
from ansible_collections.gpufarm.core.plugins.module_utils.text import clean

REASONS = (
    "not_installed",
    "driver_not_loaded",
    "library_not_found",
    "library_mismatch",
    "no_devices",
    "access_blocked",
    "permission_denied",
    "gpu_lost",
    "reset_required",
    "interrupt_issue",
    "timeout",
    "crashed",
    "unsupported",
    "invalid_output",
    "unknown_error",
)


class NvidiaSmiError(Exception):
    """nvidia-smi gave no usable answer; C(reason) is one of REASONS, C(message) says what was found."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason
        self.message = message


def damaged(message: str) -> NvidiaSmiError:
    return NvidiaSmiError("invalid_output", message)


_MESSAGES = (
    ("driver/library version mismatch", "library_mismatch"),
    ("couldn't communicate with the nvidia driver", "driver_not_loaded"),
    ("driver not loaded", "driver_not_loaded"),
    ("couldn't find libnvidia-ml", "library_not_found"),
    ("couldn't find nvml", "library_not_found"),
    ("nvml shared library not found", "library_not_found"),
    ("error while loading shared libraries", "library_not_found"),
    ("gpu access blocked by the operating system", "access_blocked"),
    ("gpu is lost", "gpu_lost"),
    ("fallen off the bus", "gpu_lost"),
    ("gpu requires reset", "reset_required"),
    ("interrupt request issue", "interrupt_issue"),
    ("not receiving interrupts", "interrupt_issue"),
    ("insufficient permissions", "permission_denied"),
    ("is not a valid field to query", "unsupported"),
    ("is not recognized. please run", "unsupported"),
    ("unable to determine the device handle for gpu", "gpu_lost"),
    ("unable to determine the product name for gpu", "gpu_lost"),
    # That may be the end of such a list.
    ("no devices were found", "no_devices"),
    ("no devices found", "no_devices"),
)


# nvidia-smi exits with NVML's own error numbers.
_EXIT_CODES = {
    2: "unsupported",
    3: "unsupported",
    4: "permission_denied",
    6: "no_devices",
    9: "driver_not_loaded",
    10: "interrupt_issue",
    11: "interrupt_issue",
    12: "library_not_found",
    13: "library_mismatch",
    15: "gpu_lost",
    16: "reset_required",
    17: "access_blocked",
    18: "library_mismatch",
}


NEXT_STEPS = {
    "not_installed": "Install the NVIDIA driver.",
    "driver_not_loaded": "Load the kernel module (modprobe nvidia), or reboot if the driver was just installed.",
    "library_not_found": "Reinstall the driver's NVML library (libnvidia-ml.so.1) and run ldconfig.",
    "library_mismatch": "Reboot, so that the kernel module becomes the version of the installed libraries.",
    "no_devices": "Check that lspci shows the GPU and that the kernel log has no NVRM error about it.",
    "access_blocked": "Check that /dev/nvidiactl exists and may be opened.",
    "permission_denied": "Run with become, or give the user access to /dev/nvidia*.",
    "gpu_lost": "Look for Xid 79 in the kernel log; drain the node, then reboot it or reseat the GPU.",
    "reset_required": "Drain the node and reset the GPU (nvidia-smi --gpu-reset) or reboot.",
    "interrupt_issue": "Check the kernel log for interrupt errors of the GPU and the firmware's PCI settings.",
    "timeout": "Look for Xid lines in the kernel log, or give more time with the option timeout.",
    "crashed": "Check that nvidia-smi and libnvidia-ml.so.1 are of the same driver.",
    "unsupported": "Update the NVIDIA driver; this nvidia-smi does not know the call.",
    "invalid_output": "Run the call by hand; report it with its output if it looks whole.",
    "unknown_error": "Run the call by hand; in a container, check that its devices are still allowed.",
}


# There the driver is Windows', and the libraries of a Linux driver hide it. One card in TCC mode may take the others
# along (WSL#13027).
_SHUTDOWN = "run wsl.exe --shutdown there, which ends every distribution."
_IN_WINDOWS = f"Check in Windows that nvidia-smi.exe lists the GPU and no card is in TCC mode, then {_SHUTDOWN}"
WSL_STEPS = {
    "not_installed": f"Install the NVIDIA driver in Windows, then {_SHUTDOWN}",
    "driver_not_loaded": "Remove what is here of a Linux driver; if there is nothing of it, update the driver in "
    f"Windows, and {_SHUTDOWN}",
    "library_not_found": "Run ldconfig, and check that /usr/lib/wsl/lib has libnvidia-ml.so.1; install or update the "
    "driver in Windows, never one here.",
    "library_mismatch": f"Remove what is here of a Linux driver; if there is nothing, go to Windows and {_SHUTDOWN}",
    "no_devices": _IN_WINDOWS,
    "access_blocked": _IN_WINDOWS,
    "permission_denied": "Run with become, or give the user access to /dev/dxg.",
    "gpu_lost": _IN_WINDOWS,
    "reset_required": "Drain the node and restart Windows.",
    "interrupt_issue": "Drain the node and restart Windows.",
    "timeout": f"Run nvidia-smi.exe in Windows; if it hangs as well, restart Windows, otherwise {_SHUTDOWN}",
    "crashed": "Check that nvidia-smi and libnvidia-ml.so.1 are those of /usr/lib/wsl/lib.",
    "unsupported": "Update the NVIDIA driver in Windows; this nvidia-smi does not know the call.",
}


def next_step(reason: str, platform: str | None) -> str:
    return WSL_STEPS.get(reason, NEXT_STEPS[reason]) if platform == "wsl" else NEXT_STEPS[reason]


def classify(returncode: int | None, text: str) -> str | None:
    """The reason behind an exit code and the words that came with it; None when neither speaks of a failure.

    The words come first: they are more exact than the code, and some versions exit with 0 after them.
    """
    lowered = text.lower()
    for needle, reason in _MESSAGES:
        if needle in lowered:
            return reason
    # 14: an infoROM is corrupted, a warning after a full answer.
    if returncode in (0, 14):
        return None
    if returncode is not None and returncode < 0:
        return "crashed"
    return _EXIT_CODES.get(returncode if returncode is not None else -1, "unknown_error")


def explain(command: Command, reason: str, words: str, platform: str | None) -> str:
    """One sentence on what was found, one on the next step."""
    return f"{outcome(command, words)}. {next_step(reason, platform)}"


def outcome(command: Command, words: str) -> str:
    """How a call ended that gave no answer, and what it said."""
    call = " ".join(command.argv)
    said = " ".join(clean(words).split())[:400]
    if command.timed_out:
        found = f"{call} gave no answer within {command.limit:.3g} s and was killed"
    elif command.error:
        found = f"{call} could not be started: {command.error}"
    elif command.returncode is not None and command.returncode < 0:
        found = f"{call} was ended by signal {-command.returncode}"
    else:
        found = f"{call} ended with exit code {command.returncode}"
    if said:
        found += f" and said: {said}"
    return found.rstrip(".")
