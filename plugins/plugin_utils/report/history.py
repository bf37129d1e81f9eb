# Copyright (c) 2026, gpufarm contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The history: one line for each report."""

from __future__ import annotations

import json
from collections.abc import Sequence

from ansible_collections.gpufarm.core.plugins.plugin_utils.report.records import (
    Document,
    Gpu,
    HistoryLine,
    Notice,
    Point,
    Sums,
    notice,
)
from ansible_collections.gpufarm.core.plugins.plugin_utils.report.sums import known_numbers, number_of, parse_time

HISTORY_LINES = 500


HISTORY_BYTES = 4 << 20


def _sums(gpus: list[Gpu]) -> Sums:
    utilization = known_numbers(gpu["utilization_gpu_percent"] for gpu in gpus)
    power = known_numbers(gpu["power_draw_w"] for gpu in gpus)
    return {
        "gpus": len(gpus),
        "utilization_sum_percent": sum(utilization),
        "utilization_gpus": len(utilization),
        "power_draw_w": round(sum(power), 1),
        "power_gpus": len(power),
    }


def history_line(data: Document) -> HistoryLine:
    """What one run adds to the history."""
    return {
        "made_at": data["made_at"],
        **_sums([gpu for node in data["nodes"] for gpu in node["gpus"]]),
        "allocated_gpus": data["summary"]["allocated_gpus"],
        "nodes": {node["name"]: _sums(node["gpus"]) for node in data["nodes"]},
    }


_HISTORY_KEYS = ("utilization_sum_percent", "utilization_gpus", "power_draw_w", "power_gpus", "gpus")


def read_history(text: str, path: str | None = None) -> tuple[list[HistoryLine], Notice | None]:
    """The lines of a history, or the notice why it is none; such a file is somebody else's and stays as it is."""
    lines = []
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.strip():
            continue
        try:
            entry = json.loads(line)
            good = isinstance(entry, dict) and all(
                number_of(entry.get(key)) is not None and not isinstance(entry[key], str) for key in _HISTORY_KEYS
            )
            if good:
                parse_time(entry["made_at"])
        except (ValueError, KeyError, TypeError, RecursionError):
            good = False
        if not good:
            return [], notice(
                f"line {number} of {path or 'the history'} is not one of a report's history",
                "a file of JSON lines that only reports wrote, or no file; nothing was written to it",
                "move the file away, or give another report_history",
            )
        lines.append(entry)
    return lines, None


def extend_history(lines: Sequence[HistoryLine], line: HistoryLine) -> str:
    """The text of the history with one more line, bounded in lines and in bytes."""
    texts: list[str] = []
    size = 0
    for entry in reversed([*lines, line][-HISTORY_LINES:]):
        text = json.dumps(entry, separators=(",", ":"), sort_keys=False)
        if texts and size + len(text) > HISTORY_BYTES:
            text = json.dumps({key: value for key, value in entry.items() if key != "nodes"}, separators=(",", ":"))
        texts.append(text)
        size += len(text) + 1
    return "".join(f"{text}\n" for text in reversed(texts))


def points_of(lines: Sequence[HistoryLine]) -> list[Point]:
    return [
        {
            "made_at": line["made_at"],
            "gpus": line["gpus"],
            "utilization_percent": (
                round(line["utilization_sum_percent"] / line["utilization_gpus"], 1)
                if line["utilization_gpus"]
                else None
            ),
            "power_draw_w": line["power_draw_w"] if line["power_gpus"] else None,
            "allocated_gpus": line.get("allocated_gpus"),
        }
        for line in sorted(lines, key=lambda line: parse_time(line["made_at"]))
    ]
