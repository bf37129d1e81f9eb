# Copyright (c) 2026, gpufarm contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What the GPUs cost, and what they return."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from ansible_collections.gpufarm.core.plugins.plugin_utils.report.records import (
    Cost,
    CostRow,
    CostTotal,
    Gpu,
    Node,
    Notice,
    notice,
)
from ansible_collections.gpufarm.core.plugins.plugin_utils.report.sums import known_numbers, number_of, one_line


@dataclasses.dataclass(frozen=True)
class Price:
    """What the user says of one GPU model; None where nothing usable was said."""

    relative_throughput: float | None
    price_per_hour: float | None


def read_prices(models: Any) -> tuple[dict[str, Price], list[Notice]]:
    """The user's numbers, and a notice for each that cannot be used."""
    example = "{'Tesla T4': {'relative_throughput': 0.3, 'price_per_hour': 0.4}}"
    if not isinstance(models, Mapping):
        return {}, [
            notice(f"report_gpu_models is {one_line(models)!r}", f"models with their numbers, such as {example}")
        ]
    prices = {}
    notices = []
    for model, given in models.items():
        if not isinstance(given, Mapping):
            notices.append(
                notice(f"report_gpu_models has {one_line(given)!r} for {model}", f"two numbers, such as {example}")
            )
            given = {}  # noqa: PLW2901
        for key in set(given) - {"relative_throughput", "price_per_hour"}:
            notices.append(
                notice(
                    f"report_gpu_models has the key {one_line(key)!r} for {model}",
                    "relative_throughput and price_per_hour",
                )
            )
        numbers = {}
        for key in ("relative_throughput", "price_per_hour"):
            numbers[key] = number_of(given.get(key))
            if given.get(key) is not None and numbers[key] is None:
                notices.append(
                    notice(f"report_gpu_models has {one_line(given[key])!r} as {key} of {model}", "a number from 0 on")
                )
        prices[str(model)] = Price(**numbers)
    return prices, notices


def _ratio(above: float | None, below: float | None) -> float | None:
    return None if above is None or not below else round(above / below, 4)


def _times(*factors: float | None) -> float | None:
    product = 1.0
    for factor in factors:
        if factor is None:
            return None
        product *= factor
    return round(product, 4)


def cost_of(nodes: list[Node], prices: Mapping[str, Price], productivity: float, with_nomad: bool) -> Cost:
    by_model: dict[str, list[Gpu]] = defaultdict(list)
    for node in nodes:
        for gpu in node["gpus"]:
            by_model[gpu["model"] or "unknown"].append(gpu)
    rows = [
        _cost_row(model, gpus, prices.get(model, Price(None, None)), productivity, with_nomad)
        for model, gpus in sorted(by_model.items(), key=lambda item: (-len(item[1]), item[0]))
    ]
    priced = [row for row in rows if row["relative_throughput"] is not None and row["price_per_hour"] is not None]
    return {
        "models": rows,
        "total": _cost_total(priced, productivity) if priced else None,
        "unpriced": [row["model"] for row in rows if row not in priced],
        "unmatched": sorted(set(prices) - set(by_model)),
    }


def _cost_row(model: str, gpus: list[Gpu], price: Price, productivity: float, with_nomad: bool) -> CostRow:
    count = len(gpus)
    allocatable = sum(1 for gpu in gpus if not gpu["hidden"]) if with_nomad else None
    allocated = round(sum(known_numbers(gpu["allocated_share"] for gpu in gpus)), 4) if with_nomad else None
    free = None if allocatable is None or allocated is None else allocatable - allocated
    told = known_numbers(gpu["utilization_gpu_percent"] for gpu in gpus)
    utilized = round(sum(told) / 100, 4) if told else None
    throughput = _times(count, price.relative_throughput)
    cost = _times(count, price.price_per_hour)
    gain = _ratio(_times(throughput, productivity), cost)
    return {
        "model": model,
        "gpus": count,
        "gpus_critical": sum(1 for gpu in gpus if gpu["verdict"] == "critical"),
        "relative_throughput": price.relative_throughput,
        "throughput": throughput,
        "price_per_hour": price.price_per_hour,
        "cost_per_hour": cost,
        "return": gain,
        "allocatable_gpus": allocatable,
        "allocated_gpus": allocated,
        "utilized_gpus": utilized,
        "utilization_gpus": len(told),
        "idle_cost_per_hour": _times(price.price_per_hour, free),
        "unused_cost_per_hour": _times(price.price_per_hour, None if utilized is None else len(told) - utilized),
        "return_allocated": _times(gain, _ratio(allocated, allocatable)),
        "return_utilized": _times(gain, _ratio(utilized, len(told))),
    }


def _cost_total(rows: Sequence[Mapping[str, Any]], productivity: float) -> CostTotal:
    def weighted(each: str, share: str, of: str | None = None) -> float | None:
        """What is used: each model's own share of its own number; None when one model's is unknown."""
        parts = [_times(row[each], _ratio(row[share], row[of]) if of else row[share]) for row in rows]
        return None if any(part is None for part in parts) else sum(part for part in parts if part is not None)

    def complete(key: str) -> float | None:
        return None if any(row[key] is None for row in rows) else round(sum(row[key] for row in rows), 4)

    cost = complete("cost_per_hour")
    return {
        "gpus": sum(row["gpus"] for row in rows),
        "gpus_critical": sum(row["gpus_critical"] for row in rows),
        "throughput": complete("throughput"),
        "cost_per_hour": cost,
        "return": _ratio(_times(complete("throughput"), productivity), cost),
        "allocatable_gpus": complete("allocatable_gpus"),
        "allocated_gpus": complete("allocated_gpus"),
        "utilized_gpus": complete("utilized_gpus"),
        "utilization_gpus": sum(row["utilization_gpus"] for row in rows),
        "idle_cost_per_hour": complete("idle_cost_per_hour"),
        "unused_cost_per_hour": complete("unused_cost_per_hour"),
        "return_allocated": _ratio(
            _times(weighted("relative_throughput", "allocated_gpus"), productivity),
            weighted("price_per_hour", "allocatable_gpus"),
        ),
        "return_utilized": _ratio(
            _times(weighted("throughput", "utilized_gpus", "utilization_gpus"), productivity), cost
        ),
    }
