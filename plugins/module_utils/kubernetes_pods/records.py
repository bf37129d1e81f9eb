# Copyright (c) 2026, gpufarm contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What is asked for, and what came of each pod."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from ansible_collections.gpufarm.core.plugins.module_utils.nomad_jobs import Result
from ansible_collections.gpufarm.core.plugins.module_utils.problem import Finding, problem_of

# The container toolkit brings nvidia-smi. The registry is named, because CRI-O takes no short names.
IMAGE = "docker.io/nvidia/cuda:12.8.1-base-ubuntu24.04"
TOLERATIONS = ({"key": "nvidia.com/gpu", "operator": "Exists"},)


@dataclasses.dataclass(frozen=True)
class Settings:
    """How the pods run."""

    namespace: str = "default"
    image: str = IMAGE
    runtime_class: str | None = None
    priority_class: str | None = None
    tolerations: Sequence[Mapping[str, Any]] = TOLERATIONS
    sample: int | None = None
    timeout: float = 600
    parallel: int = 50
    skip_busy: bool = True


@dataclasses.dataclass(frozen=True)
class Slot:
    """One GPU of a kind, of which it is not known which one it will be."""

    node: str
    resource: str
    number: int
    model: str = ""
    shared: bool = False
    total: int = 0
    """How many of the kind pods could get when the proof began."""
    named: bool = False
    """Whether somebody has named the node."""


@dataclasses.dataclass(frozen=True)
class PodResult(Result):
    """What came of one GPU; C(uuid) is empty where no pod could say it."""

    resource: str = ""
    pod: str | None = None


def result_of(slot: Slot, finding: Finding | None, verdict: str | None = None, **more: Any) -> PodResult:
    given = {"uuid": "", **more, "node": slot.node, "model": slot.model, "resource": slot.resource}
    if finding is None:
        return PodResult(verdict=verdict or "ok", **given)
    found, expected = finding.found, finding.expected
    told = problem_of(slot.node, finding.code, found, expected, finding.next_step)
    given.update(code=finding.code, expected=expected, found=found, message=told.message)
    return PodResult(verdict=verdict or "failed", **given)
