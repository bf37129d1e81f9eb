# Copyright (c) 2026, gpufarm contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What a task may say instead of what its GPU did."""

from __future__ import annotations

import copy
import json
import math
import random
from collections.abc import Iterator
from typing import Any

import pytest
from ansible_collections.gpufarm.core.plugins.module_utils.gpu_proof import ProofSettings
from ansible_collections.gpufarm.core.plugins.module_utils.gpu_proof.listing import Listing, read_listing
from ansible_collections.gpufarm.core.plugins.module_utils.gpu_proof.work import judge_work
from ansible_collections.gpufarm.core.plugins.module_utils.problem import Finding
from ansible_collections.gpufarm.core.tests.unit.plugins.module_utils.nomad_jobs_helper import (
    RECORDED_UUIDS,
    answer_of,
    log_that_says,
)

UUID, OTHER = RECORDED_UUIDS[:2]


def judged_log(log: str, level: str = "quick") -> tuple[Finding | None, dict[str, Any] | None]:
    return judge_work(UUID, read_listing(log), ProofSettings(level=level), "", image="any")


def judged(answer: Any, computed: int | None = 0, level: str = "quick") -> tuple[Finding | None, dict[str, Any] | None]:
    return judged_log(log_that_says(UUID, answer, computed), level)


def one(**changes: Any) -> dict[str, Any]:
    """An answer that has these instead; C(answer_of) keeps what a change leaves out."""
    answer = answer_of(UUID)
    answer["devices"][0].update(changes)
    return answer


DEVICE = one()["devices"][0]
FIGURES, CHECKED, MEMORY = DEVICE["figures"], DEVICE["wrong_results"], DEVICE["memory"]
CUDA_ERROR = {"code": "cuda", "step": "context", "cuda_error": 999, "message": "unknown"}


@pytest.mark.parametrize("level", ["start", "quick"])
def test_an_answer_of_a_gpu_that_is_well(level: str) -> None:
    finding, benchmark = judged(one(), level=level)
    assert finding is None and benchmark is not None and benchmark["memory"] == MEMORY


def test_what_the_level_start_and_older_cards_leave_out_is_no_flaw() -> None:
    none = dict.fromkeys(FIGURES)
    assert judged(one(figures=none, wrong_results=None, sm_clock_mhz=None), level="start")[0] is None
    without_tensor = {**FIGURES, "fp16_tensor_tflop_per_s": None, "bf16_tensor_tflop_per_s": None}
    checked = {"memory_read": 0, "fp32": 0, "host_copies": 0}
    older = one(figures=without_tensor, wrong_results=checked, compute_capability="6.0", ecc_enabled=None, name=None)
    assert judged(older)[0] is None


def test_whether_a_gpu_is_integrated_is_told() -> None:
    slow = {**FIGURES, "memory_read_gb_per_s": 1.0}
    for integrated, code in ((True, None), (False, "slow_memory")):
        finding, benchmark = judged(one(integrated=integrated, figures=slow))
        assert (finding and finding.code) == code
        assert benchmark is not None and benchmark["integrated"] is integrated


def test_an_error_needs_no_figures() -> None:
    nothing = {"uuid": UUID, "error": CUDA_ERROR}
    finding, benchmark = judged({"devices": [nothing]}, 1)
    assert finding is not None and finding.code == "context_failed" and benchmark is not None


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        ('{"devices": [{"uuid": "x"}', "line 1 column"),
        ('{"devices": []}', "one device"),
        ("{}", "one device"),
        ('{"devices": {}}', "one device"),
        ('{"devices": ["x"]}', "one device"),
        ('{"devices": [{}, {}]}', "one device"),
        ('{"devices": [{}]}', f"no device instead of {UUID}"),
        (f'{{"devices": [{"9" * 5000}]}}', ""),
        (f'{{"devices": {"[" * 100000}{"]" * 100000}}}', "nested too deeply"),
        (answer_of(OTHER), f"it tells of {OTHER} instead of {UUID}"),
        (one(figures=None), "figures"),
        (one(figures={}), "figures"),
        (one(figures={**FIGURES, "fp32_tflop_per_s": "64"}), "figures"),
        (one(figures={**FIGURES, "fp32_tflop_per_s": True}), "figures"),
        (one(figures={**FIGURES, "memory_read_gb_per_s": math.inf}), "figures"),
        (one(figures={**FIGURES, "memory_read_gb_per_s": 10**400}), "figures"),
        (one(figures=dict.fromkeys(FIGURES, math.nan)), "figures"),
        (one(figures={**FIGURES, "more": 1.0}), "figures"),
        (one(memory=[]), "memory"),
        (one(memory={**MEMORY, "errors": None}), "memory"),
        (one(memory={**MEMORY, "errors": 1, "error_samples": [{}]}), "memory"),
        (one(wrong_results={**CHECKED, "fp32": None}), "wrong_results"),
        (one(compute_capability="None.None"), "compute_capability"),
        (one(integrated=1), "integrated"),
        (one(sm_count="132"), "sm_count"),
        (one(sm_count=-132), "sm_count"),
        (one(sm_count=1, sm_clock_max_mhz=1), "a card that could do next to nothing"),
        (one(soak={"errors": 0}), "soak"),
        (one(more=1), "more"),
        (one(error={**CUDA_ERROR, "code": "new"}), "error"),
        (one(error={"code": "new"}), "error"),
        (one(error={**CUDA_ERROR, "cuda_error": []}), "error"),
        (one(memory=None), "not what was measured: memory"),
        (one(memory={**MEMORY, "tested_mib": 0}), "not what was measured: memory"),
        (one(memory={**MEMORY, "patterns": []}), "not what was measured: memory"),
        (one(wrong_results=None), "not what was measured: wrong_results"),
        (one(wrong_results={}), "not what was measured: wrong_results"),
        (one(wrong_results={"memory_read": 0, "fp32": 0, "host_copies": 0}), "measured: wrong_results"),
        (one(figures=dict.fromkeys(FIGURES)), "not what was measured: memory_read_gb_per_s, fp32_tflop_per_s"),
        (one(figures={**FIGURES, "fp32_tflop_per_s": 0}), "not what was measured: fp32_tflop_per_s"),
    ],
    ids=lambda value: value[:50] if isinstance(value, str) else None,
)  # fmt: skip
def test_an_answer_that_is_none(answer: Any, says: str) -> None:
    finding, benchmark = judged(answer)
    assert finding is not None and (finding.code, benchmark) == ("no_answer", None)
    assert "ended with 0 and with an answer that cannot be used (" in finding.found and says in finding.found


@pytest.mark.parametrize("computed", [None, 1, 2, 139])
def test_an_answer_with_another_end_than_it_has(computed: int | None) -> None:
    finding, _benchmark = judged(one(), computed)
    assert finding is not None and finding.code == "no_answer"
    assert f"ended with {computed} and with an answer that cannot be used (after an answer" in finding.found


def test_an_error_that_the_end_does_not_bear_out() -> None:
    finding, _benchmark = judged({"devices": [{"uuid": UUID, "error": CUDA_ERROR}]}, 139)
    assert finding is not None and finding.code == "no_answer"


def test_an_end_that_is_no_number_of_an_end() -> None:
    read = read_listing(f"gpufarm-verify: computed {'1' * 5000}\ngpufarm-verify: end {'0' * 5000}\n")
    assert (read.computed, read.exit_code) == (None, None)


def test_what_steers_a_terminal_is_not_in_an_answer() -> None:
    _finding, benchmark = judged(one(name="H100\x1b[2J\ud800"))
    assert benchmark is not None and benchmark["name"] == "H100 [2J"


# --- answers that nobody has thought of ------------------------------------------------------

ODD: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 0.5, 1e-320, 1e308, math.nan, math.inf, 10**400, "", "x", "9.0", "None.None",
    [], [1], ["x"], [[]], [{}], {}, {"errors": 1}, {"code": "new"}, {"code": "cuda"}, UUID, OTHER, "\ud800\x1b[2J",
)  # fmt: skip


def places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Each dictionary or list within, with each of its keys."""
    keys = list(value) if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    for key in keys:
        yield value, key
        yield from places(value[key])


def mutated(chance: random.Random, level: str) -> str:
    """The log of a task: with an answer in which values were exchanged, or cut or spliced."""
    start = {"figures": dict.fromkeys(FIGURES), "wrong_results": None}
    answer = copy.deepcopy(one(**(start if level == "start" else {})))
    if chance.random() < 0.2:
        answer["devices"][0]["error"] = dict(CUDA_ERROR)
    for _time in range(chance.choice((0, 1, 1, 1, 2, 5))):
        holder, key = chance.choice(list(places(answer)) or [([None], 0)])
        if chance.random() < 0.2:
            del holder[key]
        else:
            holder[key] = copy.deepcopy(chance.choice((*ODD, answer_of(OTHER)["devices"][0], FIGURES, MEMORY)))
    text = log_that_says(UUID, answer, chance.choice((0, 0, 0, 0, 1, 2, 127, 139, None)))
    for _time in range(chance.choice((0, 0, 0, 1, 2))):
        begin, end = sorted(chance.choices(range(len(text) + 1), k=2))
        first, last = text[:begin], text[end:]
        text = chance.choice((first + "}", first + last, text[:end] + text[begin:], "{" + last))
    return text


def is_measured(read: Listing, level: str) -> bool:
    """Whether an answer tells, of this GPU and without an error, all that its level takes."""
    try:
        (device,) = json.loads(read.answer or "")["devices"]
        memory = device["memory"]
        wrong, rates = [memory["errors"]], []
        if level == "quick":
            figures = device["figures"]
            tensor = {name for name in ("fp16_tensor", "bf16_tensor") if figures[f"{name}_tflop_per_s"] is not None}
            wrong += [device["wrong_results"][name] for name in {"memory_read", "fp32", "host_copies"} | tensor]
            rates = [figures["memory_read_gb_per_s"], figures["fp32_tflop_per_s"]]
        counts = [type(each) in (int, float) and each == 0 for each in wrong]
        known = [type(rate) in (int, float) and 0 < rate < math.inf for rate in rates]
        return bool(
            read.computed == 0
            and device["uuid"] == UUID
            and device.get("error") is None
            and memory["tested_mib"] > 0
            and all((*counts, *known))
        )
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return False


def test_no_answer_breaks_the_judgement_or_passes_for_what_it_is_not() -> None:
    chance = random.Random(20261125)  # noqa: S311
    well = 0
    for number in range(1000):
        level = ("start", "quick")[number % 2]
        log = mutated(chance, level)
        finding, benchmark = judged_log(log, level)
        if finding is None:
            well += 1
            assert is_measured(read_listing(log), level), log
        assert finding is None or finding.code != "no_answer" or benchmark is None
        assert json.dumps(benchmark, allow_nan=False).isascii()
    # Those of which nothing was changed that counts.
    assert well > 50
