# Copyright (c) 2026, gpufarm contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""How GPUs are proven, what came of each, and how that is shown."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar

from ansible_collections.gpufarm.core.plugins.module_utils.gpu_verdicts import MESSAGE_NODES, MESSAGE_PROBLEMS
from ansible_collections.gpufarm.core.plugins.module_utils.problem import Problem
from ansible_collections.gpufarm.core.plugins.module_utils.text import columns, numbered

VERDICTS = ("ok", "failed", "busy", "skipped")

# What is done on a GPU besides listing it; the first is nothing.
LEVELS = ("list", "start", "quick")

# What of the figures the table has.
SHARES = {"memory": "MEMORY%", "fp32": "FP32%", "tensor": "TENSOR%"}

MEMORY_MIB = 256
MEMORY_TO_COMPUTE_MIB = 1024


@dataclasses.dataclass(frozen=True)
class ProofSettings:
    """How a GPU is proven, whoever hands it out."""

    # The container toolkit brings nvidia-smi and the driver's library, and so neither needs anything of CUDA.
    IMAGE: ClassVar[str] = "nvidia/cuda:12.8.1-base-ubuntu24.04"
    IMAGE_WITH_PYTHON: ClassVar[str] = "python:3.13.7-slim-bookworm"

    level: str = LEVELS[0]
    image: str | None = None
    memory_mib: int | None = None
    timeout: float = 600
    parallel: int = 50
    skip_busy: bool = True

    @property
    def computes(self) -> bool:
        return self.level != LEVELS[0]

    @property
    def image_to_run(self) -> str:
        return self.image or (self.IMAGE_WITH_PYTHON if self.computes else self.IMAGE)

    @property
    def memory_to_have_mib(self) -> int:
        return self.memory_mib or (MEMORY_TO_COMPUTE_MIB if self.computes else MEMORY_MIB)


@dataclasses.dataclass(frozen=True)
class Result:
    """What came of one GPU. C(message) is for people, and None where all is well."""

    node: str
    uuid: str
    model: str
    verdict: str
    code: str | None = None
    seen: Sequence[str] | None = None
    isolated: bool | None = None
    duration_s: float | None = None
    benchmark: Mapping[str, Any] | None = None
    expected: str | None = None
    found: str | None = None
    message: str | None = None


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
    """A line for each node in columns, failed nodes first; C(limit) counts those lines.

    Where GPUs computed, with the lowest that one of the node's reached of what it can do.
    """
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
    measured = any(result.benchmark for of_node in by_node.values() for result in of_node)
    shares = SHARES if measured else {}
    rows = []
    for node in sorted(by_node, key=lambda node: (node not in failed, node)):
        figures = (str(number) for number in counts(by_node[node]).values())
        lowest = (_lowest(by_node[node], share) for share in shares)
        rows.append((node, str(len(by_node[node])), *figures, *lowest, numbered(codes.get(node, {}))))
    names = (*(verdict.upper() for verdict in VERDICTS), *shares.values())
    return columns(("NODE", "GPUS", *names, "REASONS"), rows, limit)


def message(results: Sequence[Result], problems: Sequence[Problem], waited: float) -> str:
    """The table and the sentences, as long as somebody still reads them."""
    told = ", ".join(f"{number} {verdict}" for verdict, number in counts(results).items())
    found = f"{len(problems)} problem{'' if len(problems) == 1 else 's'} after {waited:.0f} s"
    lines = [f"{found}; of {len(results)} GPUs {told}:", "", table(results, problems, MESSAGE_NODES), ""]
    # One cause, such as an image that nobody can pull, is on every GPU of the farm.
    alike: dict[tuple[str, str], list[Problem]] = {}
    for problem in problems:
        alike.setdefault((problem.code, problem.found), []).append(problem)
    for group in list(alike.values())[:MESSAGE_PROBLEMS]:
        more = f" The same on {len(group) - 1} more." if len(group) > 1 else ""
        lines.append(group[0].message + more)
    if len(alike) > MESSAGE_PROBLEMS:
        lines.append(f"... and {len(alike) - MESSAGE_PROBLEMS} more kinds of problems, see 'problems' in the result.")
    return "\n".join(lines)


def _lowest(results: Iterable[Result], share: str) -> str:
    told = (result.benchmark["percent"][share] for result in results if result.benchmark)
    lowest = min((percent for percent in told if percent is not None), default=None)
    return "-" if lowest is None else f"{lowest:.0f}"
