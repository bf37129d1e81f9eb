# Copyright (c) 2026, gpufarm contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What a task saw, and what its GPU did."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from typing import Any

from ansible_collections.gpufarm.core.plugins.module_utils import gpu_benchmark
from ansible_collections.gpufarm.core.plugins.module_utils.gpu_benchmark.judging import percents
from ansible_collections.gpufarm.core.plugins.module_utils.nomad_jobs.answer import read_answer
from ansible_collections.gpufarm.core.plugins.module_utils.nomad_jobs.jobspec import MARK
from ansible_collections.gpufarm.core.plugins.module_utils.nomad_jobs.obstacles import one_line
from ansible_collections.gpufarm.core.plugins.module_utils.nomad_jobs.records import Pin, Settings
from ansible_collections.gpufarm.core.plugins.module_utils.problem import Finding
from ansible_collections.gpufarm.core.plugins.module_utils.text import clean


@dataclasses.dataclass(frozen=True)
class Listing:
    """What a task printed: each GPU with its MIG devices, its environment, and how nvidia-smi ended."""

    gpus: Sequence[tuple[str, tuple[str, ...]]]
    visible: str | None
    wsl: bool
    exit_code: int | None
    """None where the end of the log is missing."""
    computed: int | None = None
    """How the program that measures ended, None where it was not started."""
    answer: str | None = None
    """What it said, not yet read: whether the log is whole comes first."""


_GPU_LINE = re.compile(r"^GPU [0-9]+: .*\(UUID: (GPU-[^)\s]+)\)")


_MIG_LINE = re.compile(r"^\s*MIG .*\(UUID: (MIG-[^)\s]+)\)")


_END_LINE = re.compile(rf"^{MARK} (end|computed) ([0-9]{{1,3}})$")


_ANSWER_LINE = re.compile(rf"^{MARK} answer (\{{.*\}})$")


def read_listing(text: str) -> Listing:
    gpus: list[tuple[str, tuple[str, ...]]] = []
    visible, wsl, ends, answer = None, False, dict[str, int](), None
    for raw in text.splitlines():
        line = clean(raw.rstrip())
        gpu, mig, end = _GPU_LINE.match(line), _MIG_LINE.match(line), _END_LINE.match(line)
        said = _ANSWER_LINE.match(line)
        if gpu:
            gpus.append((gpu.group(1), ()))
        elif mig and gpus:
            gpus[-1] = (gpus[-1][0], (*gpus[-1][1], mig.group(1)))
        elif line.startswith(f"{MARK} visible"):
            visible = line[len(f"{MARK} visible") :].strip()
        elif line == f"{MARK} wsl":
            wsl = True
        elif end:
            ends[end.group(1)] = int(end.group(2))
        elif said:
            answer = said.group(1)
    return Listing(gpus, visible, wsl, ends.get("end"), ends.get("computed"), answer)


def devices_seen(listing: Listing, uuid: str) -> list[str]:
    """What of the listing competes with this device: MIG devices stand for their GPU where one of them is meant."""
    if not uuid.startswith("MIG-"):
        return [gpu for gpu, _migs in listing.gpus]
    return [device for gpu, migs in listing.gpus for device in (migs or (gpu,))]


def judge_listing(
    pin: Pin, assigned: Sequence[str], listing: Listing, driver: str
) -> tuple[Finding | None, list[str], bool | None]:
    """What is wrong, which devices were seen, and whether the task was kept to its own."""
    seen = devices_seen(listing, pin.uuid)
    wanted = pin.uuid.lower()
    there = {uuid.lower() for uuid in seen}
    separates = driver == "docker" and not listing.wsl
    isolated = separates and there == {wanted} if seen else None
    task = "the container" if driver == "docker" else "the task"
    if [uuid.lower() for uuid in assigned] != [wanted]:
        finding = Finding(
            "wrong_gpu",
            f"that Nomad assigned {', '.join(assigned) or 'no GPU'}",
            f"GPU {pin.uuid}, which the job is pinned to",
            "check with 'nomad node status -verbose' for two nodes or devices with the same ID",
        )
    elif not seen:
        finding = Finding(
            "gpu_not_seen",
            f"no GPU that nvidia-smi lists in {task}",
            f"GPU {pin.uuid} alone" if separates else f"GPU {pin.uuid}",
            "run nvidia-smi on the node, then check the container toolkit's mode and its CDI specification"
            if driver == "docker"
            else "run nvidia-smi on the node as the user of the Nomad client",
        )
    elif wanted not in there:
        finding = Finding(
            "wrong_gpu" if separates else "gpu_not_seen",
            f"that {task} sees {', '.join(seen)}",
            f"GPU {pin.uuid} alone" if separates else f"GPU {pin.uuid} among them",
            "restart Nomad on the node, and write the CDI specification anew, because GPUs changed after it was made",
        )
    elif separates and there != {wanted}:
        others = [uuid for uuid in seen if uuid.lower() != wanted]
        finding = Finding(
            "extra_gpus_seen",
            f"that {task} also sees {', '.join(others)}",
            f"GPU {pin.uuid} alone",
            "check that the image does not set NVIDIA_VISIBLE_DEVICES, that the container is not privileged, and the "
            "mode of the container toolkit",
        )
    elif driver != "docker" and (listing.visible or "").lower() != wanted:
        finding = Finding(
            "wrong_gpu",
            f"NVIDIA_VISIBLE_DEVICES={listing.visible or ''} in the task",
            f"NVIDIA_VISIBLE_DEVICES={pin.uuid}",
            "check the version of the device plugin, and that nothing else sets this variable",
        )
    else:
        return None, seen, isolated
    return finding, seen, isolated


# The shell's own, where it finds no such program.
NO_PROGRAM = 127


def judge_work(
    pin: Pin, listing: Listing, settings: Settings, stderr: str
) -> tuple[Finding | None, dict[str, Any] | None]:
    """What is wrong with what the GPU did, and its figures.

    Ways to the host are shared by tasks side by side, and are told and not judged; so are clocks, of which a task does
    not know why they are low, and the bandwidth of MIG devices, whose share of their GPU it does not know.
    """
    if listing.answer is None:
        return _no_answer(listing, settings, stderr), None
    card = gpu_benchmark.Card()
    try:
        device = read_answer(listing.answer, pin, settings.level)
        findings = gpu_benchmark.judge_device(device, card, gpu_benchmark.Thresholds(), settings.level)
        if listing.computed != 0 and (listing.computed != 1 or not findings):
            raise ValueError("after an answer without an error it ends with 0, after others with 1")
        limits = gpu_benchmark.limits_of(device, card)
        # Of which no share can be said, so that nothing would be judged.
        if 0 in limits.values():
            raise ValueError("it tells of a card that could do next to nothing")
    # Numbers of any size may be in it.
    except (ValueError, ArithmeticError) as error:
        return _no_answer(listing, settings, stderr, str(error)), None
    figures = {key: value for key, value in device.items() if key not in ("uuid", "error", "soak")}
    benchmark = {**figures, "limits": limits, "percent": percents(device["figures"], limits)}
    if not findings:
        return None, benchmark
    # One verdict, by the worst; what else is wrong is told with it.
    found, expected = ("; ".join(texts) for texts in zip(*((each.found, each.expected) for each in findings)))
    step = findings[0].next_step
    if findings[0].code == "crashed":
        step = f"raise memory_mib ({settings.memory_to_have_mib}) if signal 9 ended it; otherwise {step}"
    return dataclasses.replace(findings[0], found=found, expected=expected, next_step=step), benchmark


def _no_answer(listing: Listing, settings: Settings, stderr: str, flaw: str | None = None) -> Finding:
    docker = settings.driver == "docker"
    where = f"image {settings.image_to_run}" if docker else "PATH of the Nomad client"
    if listing.computed == NO_PROGRAM:
        return Finding(
            "no_python",
            f"no python3 in the {where}",
            f"Python 3.8 or newer, which level {settings.level} needs",
            "name an image that has it, and a C library as Debian has it" if docker else "install python3 on the node",
        )
    end = one_line(stderr)
    return Finding(
        "no_answer",
        f"that the program that measures ended with {listing.computed} and "
        + (f"with an answer that cannot be used ({one_line(flaw)})" if flaw else "without an answer")
        + (f"; its stderr ends with '{end}'" if end else ""),
        "what the GPU does",
        "look at the task's memory (memory_mib) and at its Python, which must be 3.8 or newer",
    )
