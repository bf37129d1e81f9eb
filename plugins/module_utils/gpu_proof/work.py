# Copyright (c) 2026, gpufarm contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What a GPU did in a task or a pod."""

from __future__ import annotations

import dataclasses
from typing import Any

from ansible_collections.gpufarm.core.plugins.module_utils import gpu_benchmark
from ansible_collections.gpufarm.core.plugins.module_utils.gpu_benchmark.judging import percents
from ansible_collections.gpufarm.core.plugins.module_utils.gpu_proof.answer import read_answer
from ansible_collections.gpufarm.core.plugins.module_utils.gpu_proof.listing import Listing
from ansible_collections.gpufarm.core.plugins.module_utils.gpu_proof.records import ProofSettings
from ansible_collections.gpufarm.core.plugins.module_utils.problem import Finding
from ansible_collections.gpufarm.core.plugins.module_utils.text import one_line

# The shell's own, where it finds no such program.
NO_PROGRAM = 127


def empty_gpu(uuid: str) -> Finding:
    return Finding(
        "mig_empty",
        f"MIG mode Enabled and no MIG device on GPU {uuid}, so that nothing can compute there",
        "a whole GPU or a MIG device",
        "divide the GPU or turn its MIG mode off on the node, then restart what hands it out there",
    )


def judge_work(
    uuid: str, listing: Listing, settings: ProofSettings, stderr: str, *, image: str | None
) -> tuple[Finding | None, dict[str, Any] | None]:
    """What is wrong with what the GPU did, and its figures; without C(image) it was a task that has none.

    Ways to the host are shared by tasks side by side, and are told and not judged; so are clocks, of which a task does
    not know why they are low, and the bandwidth of MIG devices, whose share of their GPU it does not know.
    """
    if listing.answer is None:
        return _no_answer(listing, settings, stderr, image), None
    card = gpu_benchmark.Card()
    try:
        device = read_answer(listing.answer, uuid, settings.level)
        findings = gpu_benchmark.judge_device(device, card, gpu_benchmark.Thresholds(), settings.level)
        if listing.computed != 0 and (listing.computed != 1 or not findings):
            raise ValueError("after an answer without an error it ends with 0, after others with 1")
        limits = gpu_benchmark.limits_of(device, card)
        # Of which no share can be said, so that nothing would be judged.
        if 0 in limits.values():
            raise ValueError("it tells of a card that could do next to nothing")
    # Numbers of any size may be in it.
    except (ValueError, ArithmeticError) as error:
        return _no_answer(listing, settings, stderr, image, str(error)), None
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


def _no_answer(
    listing: Listing, settings: ProofSettings, stderr: str, image: str | None, flaw: str | None = None
) -> Finding:
    if listing.computed == NO_PROGRAM:
        return Finding(
            "no_python",
            f"no python3 in the {f'image {image}' if image else 'PATH of the Nomad client'}",
            f"Python 3.8 or newer, which level {settings.level} needs",
            "name an image that has it, and a C library as Debian has it" if image else "install python3 on the node",
        )
    end = one_line(stderr)
    return Finding(
        "no_answer",
        f"that the program that measures ended with {listing.computed} and "
        + (f"with an answer that cannot be used ({one_line(flaw)})" if flaw else "without an answer")
        + (f"; its stderr ends with '{end}'" if end else ""),
        "what the GPU does",
        "look at the memory of the task or pod (memory_mib) and at its Python, which must be 3.8 or newer",
    )
