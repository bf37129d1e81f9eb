# Copyright (c) 2026, gpufarm contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A GPU beside its siblings, and beside what it did before."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
from ansible_collections.gpufarm.core.plugins.module_utils.gpu_benchmark import comparing
from ansible_collections.gpufarm.core.plugins.module_utils.gpu_benchmark.comparing import Allowed

READ = "memory_read_gb_per_s"


def gpu(number: int, *, read: float | None = 3140.0, **changes: Any) -> dict[str, Any]:
    return {
        "uuid": f"GPU-{number}",
        "serial": f"165{number}",
        "model": "NVIDIA H100 80GB HBM3",
        "sm_count": 132,
        "power_limit_w": 700.0,
        "figures": {READ: read},
        **changes,
    }


def accused(gpus: Sequence[dict[str, Any]], level: str = "quick", **allowed: Any) -> set[str]:
    told = comparing.judge_siblings([(each, level) for each in gpus], Allowed(**allowed))
    return {uuid for uuid, (_number, finding) in told.items() if finding}


def reads(*values: float | None) -> list[dict[str, Any]]:
    return [gpu(number, read=value) for number, value in enumerate(values)]


def test_one_that_is_slower_is_named_with_what_its_siblings_do() -> None:
    told = comparing.judge_siblings([(each, "quick") for each in reads(3140, 3138, 3145, 2700)], Allowed())
    assert [(uuid, number) for uuid, (number, _finding) in told.items()] == [(f"GPU-{each}", 3) for each in range(4)]
    slow = [finding for _number, finding in told.values() if finding]
    assert [finding.code for finding in slow] == ["slow_among_siblings"] and told["GPU-3"][1] is slow[0]
    assert "among 3 other GPUs" in slow[0].found and "memory read at 2700 GB/s" in slow[0].found
    assert "their median is 3140" in slow[0].found and slow[0].expected and slow[0].next_step


@pytest.mark.parametrize("seed", range(40))
@pytest.mark.parametrize("count", [2, 3, 4, 5, 9, 200])
def test_what_holds_for_any_siblings(seed: int, count: int) -> None:
    chance = random.Random(seed)  # noqa: S311
    noise = chance.choice([0.0, 1e-6, 0.003, 0.02])
    values = [3140.0 * (1 + chance.uniform(-noise, noise)) for _ in range(count)]
    # Equal cards whose figures differ by next to nothing are not accused, though one is many deviations away.
    assert accused(reads(*values, values[0] * 0.97), siblings_min=1) == set()
    # No card is accused for being fast, and never one that reaches the median.
    wild = [chance.uniform(100, 4000) for _ in range(count)]
    middle = sorted(wild)[count // 2]
    named = accused(reads(*wild), siblings_min=1, sibling_mads=0)
    assert all(wild[int(uuid[4:])] < middle for uuid in named) and len(named) <= count // 2
    # What counts is the share, not the unit; and not the order.
    assert named == accused(reads(*(value * 7.5 for value in wild)), siblings_min=1, sibling_mads=0)
    turned = list(reversed(reads(*wild)))
    assert named == accused(turned, siblings_min=1, sibling_mads=0)
    # Half as fast is named among any that are alike, as soon as there are enough of them, and nobody else is.
    slow = [*values, values[0] / 2]
    assert accused(reads(*slow)) == ({f"GPU-{count}"} if count >= 3 else set())
    # Nor does it hide that a second one is slow, where most are well.
    if count >= 4:
        assert accused(reads(*values, 1500, 1600)) == {f"GPU-{count}", f"GPU-{count + 1}"}


def test_cards_that_differ_among_themselves_are_given_more_room() -> None:
    spread = [3000, 2900, 3200, 3400, 2700, 3100, 3300]
    assert accused(reads(*spread, 2650)) == set()
    assert accused(reads(*spread, 2650), sibling_mads=1) == {"GPU-4", "GPU-7"}


@pytest.mark.parametrize(
    ("values", "slow"),
    [
        # A few that differ do not hide one of them, which is none of its own measure.
        ((64, 66, 60, 40), {"GPU-3"}),
        ((3000, 3400, 3200, 2000), {"GPU-3"}),
        ((3140, 3100, 2000, 2050), {"GPU-2", "GPU-3"}),
        # Where most are slow nobody can tell which, and a fast one is not accused for it.
        ((3140, 2000, 2050, 1990), set()),
        ((3140, 3100, 2000, 2050, 1990), set()),
    ],
)
def test_one_of_four(values: tuple[float, ...], slow: set[str]) -> None:
    assert accused(reads(*values)) == slow


def test_a_farm_is_judged_in_a_moment() -> None:
    chance = random.Random(1)  # noqa: S311
    values = [chance.uniform(3000, 3200) for _each in range(20_000)]
    assert accused(reads(*values, 2000)) == {"GPU-20000"}


@pytest.mark.parametrize(
    "change",
    [
        {"model": "NVIDIA H100 PCIe"},
        {"model": "NVIDIA H100 80GB HBM3 MIG 3g.40gb", "uuid": "MIG-1"},
        {"power_limit_w": 350.0},
        {"power_limit_w": None},
        {"sm_count": 114},
    ],
)
def test_another_kind_is_no_sibling(change: dict[str, Any]) -> None:
    others = reads(3140, 3138, 3145, 3141)
    told = comparing.judge_siblings([(each, "quick") for each in [*others, gpu(9, read=1500, **change)]], Allowed())
    number, finding = told[change.get("uuid", "GPU-9")]
    assert (number, finding, told["GPU-0"][0]) == (None, None, 3)


def test_what_has_no_figures_is_not_judged_and_no_sibling() -> None:
    told = comparing.judge_siblings(
        [(each, "start") for each in [*reads(3140, 3141, 3139, None), gpu(8, figures=None), gpu(9, model=None)]],
        Allowed(),
    )
    assert set(told.values()) == {(None, None)}
    assert accused(reads(3140, 3140, 3140, 1000), sibling_percent=0) == set()


def test_copies_with_the_host_are_the_slots_and_not_the_cards() -> None:
    slots = [gpu(each, figures={"host_to_device_gb_per_s": 55.0 if each else 12.0}) for each in range(8)]
    assert accused(slots) == set()


def record(date: str, *gpus: dict[str, Any], verdict: str = "accepted", level: str = "quick") -> dict[str, Any]:
    return {"date": date, "node": "gpu01", "verdict": verdict, "level": level, "gpus": list(gpus)}


def past(now: dict[str, Any], *records: dict[str, Any], level: str = "quick", **allowed: Any) -> tuple[str | None, str]:
    date, finding = comparing.judge_past(now, level, comparing.accepted_before(records), Allowed(**allowed))
    return date, finding.found if finding else ""


def test_slower_than_at_its_last_acceptance() -> None:
    records = [record("2026-01-01", gpu(1, read=2000)), record("2026-02-01", gpu(1)), record("2026-03-01", gpu(2))]
    date, found = past(gpu(1, read=2700), *records)
    assert (date, found) == (
        "2026-02-01",
        "memory read at 2700 GB/s, 14 % less than 3140, as it was accepted on 2026-02-01",
    )
    assert past(gpu(1, read=2900), *records) == ("2026-02-01", "")
    assert past(gpu(1, read=2900), *records, past_percent=5)[1]
    assert past(gpu(1, read=2000), *records, past_percent=0) == (None, "")
    assert past(gpu(3, read=1000), *records) == (None, "")


@pytest.mark.parametrize(
    ("then", "now", "level", "judged"),
    [
        (gpu(1), gpu(1, uuid="GPU-new"), "quick", True),  # by its serial number
        (gpu(1), gpu(1, serial=None), "quick", True),
        (gpu(1, serial=None), gpu(2, serial=None), "quick", False),
        (gpu(1), gpu(1), "full", False),
        (gpu(1), gpu(1, power_limit_w=350.0), "quick", False),
        (gpu(1, uuid="MIG-1"), gpu(1, uuid="MIG-2"), "quick", False),  # siblings of one card
        (gpu(1, uuid="MIG-1"), gpu(1, uuid="MIG-1"), "quick", True),
        (gpu(1, read=None), gpu(1), "quick", False),
        (gpu(1), gpu(1, read=None), "quick", False),
    ],
)
def test_which_acceptance_is_its_own(then: dict[str, Any], now: dict[str, Any], level: str, judged: bool) -> None:
    assert past(now, record("2026-02-01", then), level=level)[0] == ("2026-02-01" if judged else None)


def test_the_serial_number_of_a_board_with_several_gpus_is_nobodys() -> None:
    """A K80 has one for both of its GPUs, of which one may not have been there at one of the two times."""
    one, other = gpu(1, serial="b"), gpu(2, serial="b")
    both, alone = record("2026-02-01", one, other), record("2026-02-01", one)
    key = ("serial", "b")

    def known(now: list[dict[str, Any]], then: dict[str, Any]) -> bool:
        return key in {name for name, _class in comparing.accepted_before([then], now)}

    assert known([one], alone) and known([gpu(1, uuid="GPU-new", serial="b")], alone)
    assert not known([one, other], alone) and not known([one], both)


def test_a_run_that_failed_is_no_measure() -> None:
    assert past(gpu(1, read=2700), record("2026-02-01", gpu(1), verdict="failed")) == (None, "")
