# Copyright (c) 2026, gpufarm contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What nodes should have and the verdict on each, in the same words for every scheduler."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from ansible_collections.gpufarm.core.plugins.module_utils.problem import FoundError, Problem
from ansible_collections.gpufarm.core.plugins.module_utils.text import columns, numbered

# The whole truth is in the returned values; a message that scrolls away helps nobody.
MESSAGE_NODES = 30
MESSAGE_PROBLEMS = 20


@dataclasses.dataclass(frozen=True)
class Expected:
    """What one node should have; None asks nothing."""

    node: str
    count: int | None = None
    uuids: tuple[str, ...] | None = None
    models: tuple[str, ...] | None = None
    model_counts: Mapping[str, int] | None = None
    memory_mib_min: int | None = None
    driver_version: str | None = None
    mig: bool | None = None
    mig_profiles: Mapping[str, int] | None = None
    mig_unknown: tuple[str, ...] = ()
    """GPUs whose MIG devices nobody tells: they may be there beside the others, so that numbers are the least."""

    @property
    def number(self) -> int | None:
        """How many GPUs that makes."""
        number = self.count
        if number is None and self.uuids is not None:
            number = len(self.uuids)
        if number is None and self.model_counts is not None:
            number = sum(self.model_counts.values())
        # A node has one of them at least.
        return max(1, number or 0) if self.mig_unknown else number

    @property
    def wish(self) -> str:
        """The number in words."""
        if self.number is None or (self.mig_unknown and self.number == 1):
            return "at least one GPU"
        return ("at least " if self.mig_unknown else "") + gpus_in_words(self.number)

    def is_number(self, found: int) -> bool:
        """Whether this is as many as there should be."""
        return self.number is None or found == self.number or (bool(self.mig_unknown) and found > self.number)

    def is_layout(self, found: Mapping[str, int], layout: Mapping[str, int]) -> bool:
        """Whether these are the MIG devices, by profile, that there should be."""
        if self.mig_unknown:
            return all(found.get(profile, 0) >= number for profile, number in layout.items())
        return dict(found) == dict(layout)

    def layout_in_words(self, layout: Mapping[str, int]) -> str:
        return ("at least " if self.mig_unknown else "") + counted(layout)


def may_be(uuid: str, known: Collection[str], unknown: Collection[str]) -> bool:
    """Whether it is a known GPU of a node, or may be of one whose MIG devices nobody tells; both in small letters."""
    key = uuid.lower()
    return key in known or key in unknown or (bool(unknown) and key.startswith("mig-"))


EXPECTED: dict[str, Any] = {
    "type": "list",
    "elements": "dict",
    "required": True,
    "options": {
        "node": {"type": "str", "required": True},
        "count": {"type": "int"},
        "uuids": {"type": "list", "elements": "str"},
        "models": {"type": "raw"},
        "memory_mib_min": {"type": "int"},
        "driver_version": {"type": "str"},
        "mig": {"type": "bool"},
        "mig_profiles": {"type": "dict"},
        "mig_unknown": {"type": "list", "elements": "str"},
    },
}
"""The option C(expected) of a module."""


def _read_counts(option: str, node: str, value: dict[str, Any]) -> dict[str, int]:
    try:
        return {str(name): int(number) for name, number in value.items()}
    except (TypeError, ValueError):
        raise FoundError(
            found=f"'{option}' of node {node} is {value}",
            expected="a dictionary of names with whole numbers",
            next_step=f"correct 'expected[].{option}'",
        ) from None


def read_expected(items: list[dict[str, Any]]) -> list[Expected]:
    """The option C(expected), checked."""
    if not items:
        raise FoundError(
            found="the option 'expected' is empty, so nothing would be compared",
            expected="at least one node",
            next_step="name the nodes that must be there, or look why no node told its GPUs",
        )
    wanted = []
    names: set[str] = set()
    for item in items:
        name = item["node"]
        if name in names:
            raise FoundError(
                found=f"node {name} is twice in the option 'expected'",
                expected="one entry a node",
                next_step="merge the two entries, or check the inventory for hosts with the same name there",
            )
        names.add(name)
        models = item["models"]
        if not (models is None or isinstance(models, (dict, list))):
            models = [str(models)]
        profiles = item["mig_profiles"]
        wanted.append(
            Expected(
                node=name,
                count=item["count"],
                uuids=None if item["uuids"] is None else tuple(item["uuids"]),
                models=tuple(str(model) for model in models) if isinstance(models, list) else None,
                model_counts=_read_counts("models", name, models) if isinstance(models, dict) else None,
                memory_mib_min=item["memory_mib_min"],
                driver_version=item["driver_version"],
                mig=item["mig"],
                mig_profiles=None if profiles is None else _read_counts("mig_profiles", name, profiles),
                mig_unknown=tuple(item["mig_unknown"] or ()),
            )
        )
    return wanted


@dataclasses.dataclass
class NodeVerdict:
    """The judgement on one node."""

    name: str
    id: str | None
    status: str | None
    gpus_expected: int | None
    gpus_found: int
    problems: list[Problem]

    @property
    def verdict(self) -> str:
        return "failed" if self.problems else "ok"


def gpus_in_words(number: int) -> str:
    return f"{number} GPU" if number == 1 else f"{number} GPUs"


def counted(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{number} x {model}" for model, number in sorted(counts.items()) if number) or "none"


def table(verdicts: Iterable[NodeVerdict], limit: int | None = None) -> str:
    """The verdicts as text in columns, failed nodes first; C(limit) counts lines of nodes."""
    ordered = sorted(verdicts, key=lambda verdict: (not verdict.problems, verdict.name))
    rows = [
        (
            verdict.name,
            verdict.status or "-",
            "-" if verdict.gpus_expected is None else str(verdict.gpus_expected),
            str(verdict.gpus_found),
            verdict.verdict,
            numbered(Counter(problem.code for problem in verdict.problems)),
        )
        for verdict in ordered
    ]
    return columns(("NODE", "STATUS", "EXPECTED", "FOUND", "VERDICT", "PROBLEMS"), rows, limit)


@dataclasses.dataclass(frozen=True)
class Look:
    """One comparison of the farm with what is expected."""

    verdicts: list[NodeVerdict]
    extra_nodes: list[str]

    @property
    def problems(self) -> list[Problem]:
        return [problem for verdict in self.verdicts for problem in verdict.problems]


def message(look: Look, waited: float) -> str:
    """The table and the sentences, as long as somebody still reads them."""
    failed = sum(1 for verdict in look.verdicts if verdict.problems)
    problems = look.problems
    lines = [f"{failed} of {len(look.verdicts)} nodes failed after {waited:.0f} s:", ""]
    lines += [table(look.verdicts, MESSAGE_NODES), ""]
    lines += [problem.message for problem in problems[:MESSAGE_PROBLEMS]]
    if len(problems) > MESSAGE_PROBLEMS:
        lines.append(f"... and {len(problems) - MESSAGE_PROBLEMS} more problems, see 'problems' in the result.")
    return "\n".join(lines)


def result_of(look: Look, waited: float) -> dict[str, Any]:
    nodes = [
        {
            "name": verdict.name,
            "id": verdict.id,
            "status": verdict.status,
            "verdict": verdict.verdict,
            "gpus_expected": verdict.gpus_expected,
            "gpus_found": verdict.gpus_found,
            "problems": [dataclasses.asdict(problem) for problem in verdict.problems],
        }
        for verdict in look.verdicts
    ]
    return {
        "changed": False,
        "nodes": nodes,
        "problems": [dataclasses.asdict(problem) for problem in look.problems],
        "extra_nodes": look.extra_nodes,
        "table": table(look.verdicts),
        "waited_s": round(waited, 1),
    }
