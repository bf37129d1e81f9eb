# Copyright (c) 2026, gpufarm contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What GPUs did at their acceptances, from the file that playbooks/accept.yml keeps."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ansible_collections.gpufarm.core.plugins.module_utils.gpu_benchmark import records as accepted
from ansible_collections.gpufarm.core.plugins.module_utils.gpu_benchmark.comparing import shared_serials
from ansible_collections.gpufarm.core.plugins.module_utils.problem import FoundError
from ansible_collections.gpufarm.core.plugins.module_utils.text import clean, first_of
from ansible_collections.gpufarm.core.plugins.plugin_utils.report.records import (
    Benchmark,
    BenchmarkBefore,
    Node,
    Notice,
    notice,
)

if TYPE_CHECKING:
    Measured = tuple[accepted.Record, Mapping[str, Any]]

BEFORE_MAX = 10
# So many nodes are named in a notice.
NAMED = 5
# Left alone, or not to be tried, it says nothing of the GPU.
NOT_MEASURED = ("busy", "unknown", None)


def add_benchmarks(
    nodes: Sequence[Node], text: str, failure: str, path: str | None
) -> tuple[list[Notice], Notice | None]:
    """Give GPUs and MIG devices their newest acceptance; what is told of it, and why not all could be read.

    C(failure) is why nothing could.
    """
    where = path or "the file of acceptances"
    wanted = "the records that playbooks/accept.yml keeps"
    if failure:
        step = "let who makes the report read it, or correct accept_records"
        return [], notice(f"{where} could not be read: {clean(failure)}", wanted, step)
    try:
        # Ansible has what is no UTF-8 as surrogates.
        lines, skipped = accepted.parse(text.encode(errors="surrogateescape"), where)
    except FoundError as error:
        return [], notice(error.found, wanted, "correct accept_records")
    found = _by_gpu(lines)
    for node in nodes:
        shared = shared_serials(node["gpus"])
        for gpu in node["gpus"]:
            serial = "" if gpu["serial"] in shared else gpu["serial"] or ""
            own = found.get(gpu["uuid"] or "") or found.get(("serial", serial))
            gpu["benchmark"] = _benchmark(own) if own else None
            for device in gpu["mig_devices"]:
                own = found.get(device["uuid"] or "")
                device["benchmark"] = _benchmark(own) if own else None
    spoiled = (
        notice(
            f"{where} has {len(skipped)} lines that are no records of an acceptance, the first in line {skipped[0]}",
            "whole lines only",
            "take them out; a run that was killed while it wrote leaves such a line",
        )
        if skipped
        else None
    )
    return _not_measured(nodes, lines, where), spoiled


def _by_gpu(lines: Sequence[accepted.Record]) -> dict[Any, list[Measured]]:
    """What was measured of each GPU, the newest last, by its UUID and a whole one by its serial number as well."""
    found: dict[Any, list[Measured]] = defaultdict(list)
    for record in lines:
        shared = shared_serials(record["gpus"])
        for gpu in record["gpus"]:
            if gpu.get("verdict") in NOT_MEASURED:
                continue
            found[gpu["uuid"]].append((record, gpu))
            if gpu["serial"] and gpu["serial"] not in shared and not gpu["uuid"].startswith("MIG-"):
                found["serial", gpu["serial"]].append((record, gpu))
    return found


def _not_measured(nodes: Iterable[Node], lines: Sequence[accepted.Record], where: str) -> list[Notice]:
    """Nodes that failed without figures: what is shown of their GPUs is of an earlier acceptance."""
    newest = {record["node"]: record for record in lines}
    silent = [
        f"{clean(node['name'])} ({record['date'][:10]})"
        for node in nodes
        if (record := newest.get(node["nomad_name"]))
        and record["verdict"] != "accepted"
        and all(gpu.get("verdict") in NOT_MEASURED for gpu in record["gpus"])
    ]
    if not silent:
        return []
    return [
        notice(
            f"The newest acceptance of {first_of(silent, NAMED)} failed and has no figures of GPUs; any that are shown "
            "are of an earlier one",
            "an acceptance that has measured the GPUs of its node",
            f"read in {where} why it has not, mend it, and run playbooks/accept.yml again",
        )
    ]


def _benchmark(measured: Sequence[Measured]) -> Benchmark:
    record, gpu = measured[-1]
    outliers = [
        {"code": clean(str(problem.get("code"))), "found": clean(str(problem.get("found")))}
        for problem in _problems(record, gpu)
    ]
    before = [_before(*each) for each in reversed(measured[-BEFORE_MAX - 1 : -1])]
    return {**_before(record, gpu), "node": clean(record["node"]), "outliers": outliers, "before": before}


def _problems(record: accepted.Record, gpu: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """What the acceptance has against the GPU. A problem of no single one may be of any."""
    return [
        problem
        for problem in record.get("problems") or ()
        if isinstance(problem, dict) and problem.get("uuid") in (gpu["uuid"], None)
    ]


def _before(record: accepted.Record, gpu: Mapping[str, Any]) -> BenchmarkBefore:
    return {
        "date": record["date"],
        "level": clean(record["level"]),
        "verdict": "ok" if gpu.get("verdict") == "ok" and not _problems(record, gpu) else "failed",
        "accepted": record["verdict"] == "accepted",
        "figures": {
            clean(name): value if isinstance(value, (int, float)) else None for name, value in _figures(gpu).items()
        },
    }


def _figures(gpu: Mapping[str, Any]) -> Mapping[str, Any]:
    return gpu["figures"] if isinstance(gpu["figures"], dict) else {}
