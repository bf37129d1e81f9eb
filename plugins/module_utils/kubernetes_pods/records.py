# Copyright (c) 2026, gpufarm contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What is asked for, and what came of each pod."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from ansible_collections.gpufarm.core.plugins.module_utils.gpu_proof import LEVELS, ProofSettings, Result
from ansible_collections.gpufarm.core.plugins.module_utils.problem import Finding, problem_of

TOLERATIONS = ({"key": "nvidia.com/gpu", "operator": "Exists"},)


@dataclasses.dataclass(frozen=True)
class Settings(ProofSettings):
    """How the pods run."""

    # CRI-O takes no short names.
    IMAGE: ClassVar[str] = f"docker.io/{ProofSettings.IMAGE}"
    IMAGE_WITH_PYTHON: ClassVar[str] = f"docker.io/library/{ProofSettings.IMAGE_WITH_PYTHON}"

    namespace: str = "default"
    runtime_class: str | None = None
    priority_class: str | None = None
    tolerations: Sequence[Mapping[str, Any]] = TOLERATIONS
    sample: int | None = None

    def on(self, slot: Slot) -> Settings:
        """How this GPU is proven. One that is shared is only listed.

        With MPS the client of another user hangs in cuInit, and with time slices others have the memory.
        """
        return dataclasses.replace(self, level=LEVELS[0]) if slot.shared else self


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
    ended: bool = False
    """Whether the pod was over by then, so that Kubernetes may have given its GPU to another."""


def result_of(slot: Slot, finding: Finding | None, verdict: str | None = None, **more: Any) -> PodResult:
    given = {"uuid": "", **more, "node": slot.node, "model": slot.model, "resource": slot.resource}
    if finding is None:
        return PodResult(verdict=verdict or "ok", **given)
    found, expected = finding.found, finding.expected
    uuid = given["uuid"]
    named = bool(uuid) and uuid not in found
    told = problem_of(slot.node, finding.code, found, expected, finding.next_step, uuid=uuid, named=named)
    given.update(code=finding.code, expected=expected, found=found, message=told.message)
    return PodResult(verdict=verdict or "failed", **given)
