# Copyright (c) 2026, gpufarm contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Judgement of what was measured, by other cards like it and by what the same card did before."""

from __future__ import annotations

import bisect
import dataclasses
import statistics
from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ansible_collections.gpufarm.core.plugins.module_utils.problem import Finding

if TYPE_CHECKING:
    Accepted = tuple[Mapping[str, Any], Mapping[str, Any]]

# Copies with the host are not among those of siblings: they tell of the slot, and slots differ in one machine.
CARD_FIGURES = {
    "memory_read_gb_per_s": ("memory read", "GB/s"),
    "memory_write_gb_per_s": ("memory written", "GB/s"),
    "memory_copy_gb_per_s": ("memory copied", "GB/s"),
    "fp32_tflop_per_s": ("single precision", "TFLOP/s"),
    "fp16_tensor_tflop_per_s": ("tensor cores with FP16", "TFLOP/s"),
    "bf16_tensor_tflop_per_s": ("tensor cores with BF16", "TFLOP/s"),
    "peer_gb_per_s": ("copies by NVLink", "GB/s"),
}
# What the board gives and not the card: it is compared where this is equal.
BOARDS = {"peer_gb_per_s": "peer_limit_gb_per_s"}
FIGURES = {
    **CARD_FIGURES,
    "host_to_device_gb_per_s": ("host to GPU", "GB/s"),
    "device_to_host_gb_per_s": ("GPU to host", "GB/s"),
}

# By which a median of differences is the standard deviation of what is spread normally.
MAD_TO_SIGMA = 1.4826
# How many times the share that is allowed anyway siblings may allow that differ among themselves: of a few, one or two
# bad ones make a deviation of any size.
SPREAD_MOST = 3


def peer_figure(uuid: str, pairs: Iterable[Mapping[str, Any]]) -> float | None:
    """What a GPU sends by NVLink to the others of its node, in the median, of two the lower one.

    A bad GPU is slow to all, and the others to that one alone. Other ways depend on the slots.
    """
    rates = [pair["gb_per_s"] for pair in pairs if pair["from"] == uuid and pair["nvlink"] and pair["gb_per_s"]]
    return statistics.median_low(rates) if rates else None


def peer_limit(pairs: Iterable[Mapping[str, Any]]) -> float | None:
    """What NVLink gives between two GPUs of a node at most, as its board has it; None where nobody tells.

    Not by a GPU's own pairs: one that lost links would be like none of those beside it.
    """
    return max((pair["limit_gb_per_s"] for pair in pairs if pair["nvlink"] and pair["limit_gb_per_s"]), default=None)


@dataclasses.dataclass(frozen=True)
class Allowed:
    """How much slower than others, and than itself, a GPU may be."""

    siblings_min: int = 3
    """So many other GPUs of the class are needed for a judgement by them."""
    sibling_percent: float = 10.0
    """Share of the others' median by which it may be slower, however alike they are; 0 judges nothing by siblings."""
    sibling_mads: float = 5.0
    """Standard deviations, as the median of their differences tells them, by which it may be slower where that is more,
    up to three times the share."""
    past_percent: float = 10.0
    """Share by which it may be slower than at its last acceptance; 0 judges nothing by it."""


def class_of(gpu: Mapping[str, Any], level: str) -> Hashable:
    """Whose figures can be compared: the same model (of a MIG device with its profile), with the same power limit."""
    return gpu["model"], gpu["sm_count"], gpu["power_limit_w"], level


def _same(gpu: Mapping[str, Any]) -> list[Hashable]:
    """By what a GPU is known again, the surest first. A serial is a whole GPU's; its MIG devices have it as well."""
    whole = not gpu["uuid"].startswith("MIG-")
    return [gpu["uuid"], *(("serial", gpu["serial"]),) * bool(whole and gpu["serial"])]


def shared_serials(gpus: Iterable[Mapping[str, Any]]) -> set[str]:
    """Serial numbers that several whole GPUs have, as those of one board do (K80, M60): none is known by them."""
    whole = [gpu["serial"] for gpu in gpus if gpu["serial"] and not (gpu["uuid"] or "").startswith("MIG-")]
    return {serial for serial, number in Counter(whole).items() if number > 1}


def _value(gpu: Mapping[str, Any], figure: str) -> float | None:
    value: float | None = (gpu["figures"] or {}).get(figure)
    return value


def _board(gpu: Mapping[str, Any], figure: str) -> Hashable:
    """With whose the figure can be compared; a record of old has nothing of it."""
    return gpu.get(BOARDS[figure]) if figure in BOARDS else None


def _comparable(gpus: Iterable[Mapping[str, Any]], figure: str) -> Iterable[dict[str, float]]:
    """The figure by UUID, of those together of which it can be compared."""
    boards: dict[Hashable, dict[str, float]] = {}
    for gpu in gpus:
        if (value := _value(gpu, figure)) is not None:
            boards.setdefault(_board(gpu, figure), {})[gpu["uuid"]] = value
    return boards.values()


def judge_siblings(
    gpus: Sequence[tuple[Mapping[str, Any], str]], allowed: Allowed
) -> dict[str, tuple[int | None, Finding | None]]:
    """Of each GPU (an entry of a record, and its level), by how many siblings it was judged and what they say of it.

    The number is None where it was not judged: it has too few siblings, or no figures.
    """
    classes: dict[Hashable, list[Mapping[str, Any]]] = {}
    for gpu, level in gpus:
        if gpu["model"] is not None and allowed.sibling_percent:
            classes.setdefault(class_of(gpu, level), []).append(gpu)
    told: dict[str, tuple[int | None, Finding | None]] = {gpu["uuid"]: (None, None) for gpu, _level in gpus}
    for alike in classes.values():
        judged: dict[str, int] = {}
        slow: dict[str, list[str]] = {}
        for figure, (what, unit) in CARD_FIGURES.items():
            for values in _comparable(alike, figure):
                others = len(values) - 1
                if others < max(allowed.siblings_min, 1):
                    continue
                alone = _Others(values.values(), allowed)
                for uuid, value in values.items():
                    judged[uuid] = max(others, judged.get(uuid, 0))
                    middle, least = alone.of(value)
                    if value < least:
                        why = f"{what} at {value:g} {unit}, where their median is {middle:g}"
                        slow.setdefault(uuid, []).append(why)
        for uuid, number in judged.items():
            told[uuid] = number, _slow_among(slow[uuid], number, allowed) if uuid in slow else None
    return told


class _Others:
    """What the others of each value do. A class may be thousands of GPUs, so nothing is sorted for each of them."""

    def __init__(self, values: Iterable[float], allowed: Allowed) -> None:
        self._values = sorted(values)
        self._allowed = allowed
        self._differences: dict[float, list[float]] = {}

    def of(self, value: float) -> tuple[float, float]:
        """The median of the others, of two the lower one, and what this one must not fall short of."""
        allowed = self._allowed
        middle = _median_without(self._values, value)
        if middle not in self._differences:
            self._differences[middle] = sorted(abs(each - middle) for each in self._values)
        spread = MAD_TO_SIGMA * _median_without(self._differences[middle], abs(value - middle))
        share = middle * allowed.sibling_percent / 100.0
        return middle, middle - min(max(allowed.sibling_mads * spread, share), SPREAD_MOST * share)


def _median_without(ordered: Sequence[float], value: float) -> float:
    """The median, of two the lower one, of what is left without one of this value."""
    at = (len(ordered) - 2) // 2
    return ordered[at + (at >= bisect.bisect_left(ordered, value))]


def _slow_among(slow: Sequence[str], siblings: int, allowed: Allowed) -> Finding:
    return Finding(
        "slow_among_siblings",
        f"among {siblings} other GPUs of its model and power limit {'; '.join(slow)}",
        f"no more than {allowed.sibling_percent:g} % below the median, or {allowed.sibling_mads:g} standard deviations "
        f"where that is more, up to {SPREAD_MOST * allowed.sibling_percent:g} %",
        "compare its clocks, temperature and VBIOS with theirs (nvidia-smi -q); if it stays so, have the card replaced",
    )


LINKS_STEP = (
    "check the links (nvidia-smi nvlink -s -e), Fabric Manager and bridges, reset the GPU or reboot the node, and run "
    "playbooks/accept.yml again; where it is meant to be so, set {} to 0 for one run"
)


def judge_links(
    gpus: Sequence[Mapping[str, Any]],
    before: Mapping[Hashable, Accepted],
    allowed: Allowed,
    *,
    nodes: Mapping[str, str],
) -> dict[str, Finding]:
    """GPUs that have fewer active NVLinks than before in their node, or than most of their model have.

    Those of C(nodes) are judged, the names of nodes by UUID. Links that nobody can tell any more are fewer than before.
    One without any is not compared with others: a card may have no bridge.
    """
    models: dict[Hashable, list[int]] = {}
    for gpu in gpus:
        if gpu["nvlinks"]:
            models.setdefault(gpu["model"], []).append(gpu["nvlinks"])
    usual = {
        model: statistics.median_low(links)
        for model, links in models.items()
        if allowed.sibling_percent and model is not None and len(links) > max(allowed.siblings_min, 1)
    }
    found = {}
    for gpu in gpus:
        links, node = gpu["nvlinks"], nodes.get(gpu["uuid"])
        if node is None:
            continue
        past = next((before[key, None] for key in _same(gpu) if (key, None) in before), None)
        then = past[1].get("nvlinks") if past and past[0]["node"] == node and allowed.past_percent else None
        if past and then and (links is None or links < then):
            number = "an unknown number of" if links is None else links
            found[gpu["uuid"]] = Finding(
                "nvlink_down",
                f"{number} active NVLinks, where it had {then} when it was accepted on {past[0]['date']}",
                f"{then} active NVLinks, as then",
                LINKS_STEP.format("accept_past_percent"),
            )
        elif links and links < usual.get(gpu["model"], 0):
            found[gpu["uuid"]] = Finding(
                "nvlink_down",
                f"{links} active NVLinks, where most GPUs of its model have {usual[gpu['model']]}",
                f"{usual[gpu['model']]} active NVLinks, as they have",
                LINKS_STEP.format("accept_sibling_percent"),
            )
    return found


def accepted_before(
    records: Iterable[Mapping[str, Any]], now: Iterable[Mapping[str, Any]] = ()
) -> dict[Hashable, Accepted]:
    """The last acceptance of each GPU at each class, and at any (None) the last that knows its NVLinks.

    Its record and the GPU's entry. By a serial number that several GPUs have, then or C(now), none is known again.
    """
    found: dict[Hashable, Accepted] = {}
    shared_now = shared_serials(now)
    for record in records:
        if record["verdict"] == "accepted":
            shared = {("serial", serial) for serial in shared_now | shared_serials(record["gpus"])}
            for gpu in record["gpus"]:
                for key in [key for key in _same(gpu) if key not in shared]:
                    found[key, class_of(gpu, record["level"])] = record, gpu
                    if gpu.get("nvlinks") is not None:
                        found[key, None] = record, gpu
    return found


def judge_past(
    gpu: Mapping[str, Any],
    level: str,
    before: Mapping[Hashable, Accepted],
    allowed: Allowed,
    *,
    node: str | None = None,
) -> tuple[str | None, Finding | None]:
    """By which acceptance of its own a GPU was judged, and what that says; None where it has none, or no figures.

    In its node it is held to what the board gave: a node that lost links has another limit as well.
    """
    past = next(
        (before[key, class_of(gpu, level)] for key in _same(gpu) if (key, class_of(gpu, level)) in before), None
    )
    if past is None or not allowed.past_percent:
        return None, None
    record, then = past
    date = record["date"]
    compared, slow = False, []
    for figure, (what, unit) in FIGURES.items():
        value, first = _value(gpu, figure), _value(then, figure)
        like = record["node"] == node or _board(gpu, figure) == _board(then, figure)
        if value is not None and first and like:
            compared = True
            lost = 100.0 * (first - value) / first
            if lost > allowed.past_percent:
                slow.append(f"{what} at {value:g} {unit}, {lost:.0f} % less than {first:g}")
    if not slow:
        return date if compared else None, None
    return date, Finding(
        "slower_than_before",
        f"{'; '.join(slow)}, as it was accepted on {date}",
        f"no more than {allowed.past_percent:g} % less",
        "compare its clocks, temperature and PCI Express link with a sibling's; where the change is meant (another "
        "slot, another driver), raise accept_past_percent for one run",
    )
