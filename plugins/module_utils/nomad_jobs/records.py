# Copyright (c) 2026, gpufarm contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What is asked for, what came of each GPU, and how that is shown."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from ansible_collections.gpufarm.core.plugins.module_utils.problem import Finding, Problem, problem_of
from ansible_collections.gpufarm.core.plugins.module_utils.text import columns, numbered

# Nomad preempts only what is at least ten below, and nothing is below 1.
PRIORITY_MAX = 10


VERDICTS = ("ok", "failed", "busy", "skipped")


@dataclasses.dataclass(frozen=True)
class Settings:
    """How the jobs run."""

    driver: str = "docker"
    image: str = "nvidia/cuda:12.8.1-base-ubuntu24.04"
    namespace: str | None = None
    priority: int = PRIORITY_MAX
    cpu_mhz: int = 100
    memory_mib: int = 256
    timeout: float = 600
    parallel: int = 50
    skip_busy: bool = True


@dataclasses.dataclass(frozen=True)
class Pin:
    """One GPU that a task is pinned to."""

    node_id: str
    node: str
    uuid: str
    model: str


@dataclasses.dataclass(frozen=True)
class Result:
    """What came of one GPU. C(message) is for people, and None where all is well."""

    node: str
    uuid: str
    model: str
    verdict: str
    code: str | None = None
    assigned: Sequence[str] | None = None
    seen: Sequence[str] | None = None
    isolated: bool | None = None
    allocation_id: str | None = None
    duration_s: float | None = None
    expected: str | None = None
    found: str | None = None
    message: str | None = None


def result_of(pin: Pin, finding: Finding | None, verdict: str | None = None, **more: Any) -> Result:
    if finding is None:
        return Result(pin.node, pin.uuid, pin.model, verdict or "ok", **more)
    found, expected = finding.found, finding.expected
    told = problem_of(pin.node, finding.code, found, expected, finding.next_step, uuid=pin.uuid, named=True)
    more.update(code=finding.code, expected=expected, found=found, message=told.message)
    return Result(pin.node, pin.uuid, pin.model, verdict or "failed", **more)


def problems_of(results: Iterable[Result]) -> list[Problem]:
    return [
        Problem(each.node, each.code or "", each.expected or "", each.found or "", each.message or "", each.uuid)
        for each in results
        if each.verdict == "failed"
    ]


def counts(results: Iterable[Result]) -> dict[str, int]:
    numbers = Counter(result.verdict for result in results)
    return {verdict: numbers[verdict] for verdict in VERDICTS}


def table(results: Iterable[Result], problems: Iterable[Problem], limit: int | None = None) -> str:
    """A line for each node in columns, failed nodes first; C(limit) counts those lines."""
    by_node: dict[str, list[Result]] = {}
    codes: dict[str, Counter[str]] = {}
    for result in results:
        by_node.setdefault(result.node, []).append(result)
        # Those of failures are among the problems.
        if result.code and result.verdict != "failed":
            codes.setdefault(result.node, Counter())[result.code] += 1
    failed = set()
    for problem in problems:
        by_node.setdefault(problem.node, [])
        codes.setdefault(problem.node, Counter())[problem.code] += 1
        failed.add(problem.node)
    rows = []
    for node in sorted(by_node, key=lambda node: (node not in failed, node)):
        figures = (str(number) for number in counts(by_node[node]).values())
        rows.append((node, str(len(by_node[node])), *figures, numbered(codes.get(node, {}))))
    return columns(("NODE", "GPUS", *(verdict.upper() for verdict in VERDICTS), "REASONS"), rows, limit)
