# Copyright (c) 2026, gpufarm contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What is asked for, and what came of each GPU."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from ansible_collections.gpufarm.core.plugins.module_utils.gpu_proof import ProofSettings, Result
from ansible_collections.gpufarm.core.plugins.module_utils.problem import Finding, problem_of

# Nomad preempts only what is at least ten below, and nothing is below 1.
PRIORITY_MAX = 10


@dataclasses.dataclass(frozen=True)
class Settings(ProofSettings):
    """How the jobs run."""

    driver: str = "docker"
    namespace: str | None = None
    priority: int = PRIORITY_MAX
    cpu_mhz: int = 100


@dataclasses.dataclass(frozen=True)
class Pin:
    """One GPU that a task is pinned to."""

    node_id: str
    node: str
    uuid: str
    model: str


@dataclasses.dataclass(frozen=True)
class JobResult(Result):
    """What came of one GPU."""

    assigned: Sequence[str] | None = None
    allocation_id: str | None = None


def result_of(pin: Pin, finding: Finding | None, verdict: str | None = None, **more: Any) -> JobResult:
    if finding is None:
        return JobResult(pin.node, pin.uuid, pin.model, verdict or "ok", **more)
    found, expected = finding.found, finding.expected
    told = problem_of(pin.node, finding.code, found, expected, finding.next_step, uuid=pin.uuid, named=True)
    more.update(code=finding.code, expected=expected, found=found, message=told.message)
    return JobResult(pin.node, pin.uuid, pin.model, verdict or "failed", **more)
