# Copyright (c) 2026, gpufarm contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The verdict on nodes, and the file that keeps it."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml
from ansible_collections.gpufarm.core.plugins.module_utils.gpu_benchmark import judging, measuring, records
from ansible_collections.gpufarm.core.plugins.modules import nvidia_gpu_acceptance
from ansible_collections.gpufarm.core.tests.unit.plugins.modules import release_helper as helper

ROOT = Path(__file__).resolve().parents[4]
FIGURES = {**dict.fromkeys(measuring.FIGURES, None), "memory_read_gb_per_s": 3140.0, "fp32_tflop_per_s": 64.0}


def measured(uuid: str, **figures: float) -> dict[str, Any]:
    name = "NVIDIA H100 80GB HBM3"
    return {"uuid": uuid, "name": name, "sm_count": 132, "verdict": "ok", "figures": {**FIGURES, **figures}}


def node(name: str, *gpus: dict[str, Any], **changes: Any) -> dict[str, Any]:
    facts = [
        {
            "uuid": gpu["uuid"],
            "serial": f"S-{gpu['uuid']}",
            "vbios_version": "96.00.74.00.01",
            "power_limit_w": 700.0,
            "mig_devices": None,
        }
        for gpu in gpus
    ]
    return {
        "node": name,
        "host": f"host-{name}",
        "close_on": "critical",
        "probe": {
            "verdict": "ok",
            "problems": [],
            "nvidia_smi": {"driver_version": "580.159.04", "gpus": facts},
        },
        "benchmark": {"gpus": list(gpus), "problems": []},
        **changes,
    }


def problem(code: str, uuid: str, **changes: Any) -> dict[str, Any]:
    return {
        "node": "gpu01",
        "uuid": uuid,
        "code": code,
        "found": "f",
        "expected": "e",
        "message": f"m {uuid}",
        **changes,
    }


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


class Run:
    def __init__(self, path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.path, self._capsys = path, capsys

    def __call__(self, *nodes: dict[str, Any], check_mode: bool = False, **given: Any) -> helper.Outcome:
        arguments = {"path": str(self.path), "nodes": list(nodes), **given}
        return helper.run_module(nvidia_gpu_acceptance.main, self._capsys, arguments, check_mode=check_mode)


@pytest.fixture
def run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Run:
    return Run(tmp_path / "new" / "accepted.jsonl", capsys)


def test_a_node_that_is_well_has_its_record(run: Run) -> None:
    outcome = run(node("gpu01", measured("GPU-a")))
    (record,) = lines(run.path)
    assert [record] == outcome["nodes"] and outcome["unreadable"] == [] and outcome["changed"]
    date = record.pop("date")
    assert len(date) == 20 and date.endswith("Z") and "T" in date
    assert record == {
        "node": "gpu01",
        "host": "host-gpu01",
        "verdict": "accepted",
        "level": "quick",
        "driver_version": "580.159.04",
        "collection_version": "1.0.0",
        "gpus": [
            {
                "uuid": "GPU-a",
                "serial": "S-GPU-a",
                "vbios_version": "96.00.74.00.01",
                "power_limit_w": 700.0,
                "model": "NVIDIA H100 80GB HBM3",
                "sm_count": 132,
                "verdict": "ok",
                "figures": {**FIGURES, "peer_gb_per_s": None},
                "peer_limit_gb_per_s": None,
                "nvlinks": None,
                "siblings": None,
                "accepted_before": None,
            }
        ],
        "peers": [],
        "problems": [],
    }


def test_the_version_is_that_of_the_collection() -> None:
    galaxy = yaml.safe_load((ROOT / "galaxy.yml").read_text(encoding="utf-8"))
    assert galaxy["version"] == records.COLLECTION_VERSION


def judged(outcome: helper.Outcome) -> list[tuple[str, list[tuple[str, str | None]]]]:
    return [
        (each["verdict"], [(problem["code"], problem["uuid"]) for problem in each["problems"]])
        for each in outcome["nodes"]
    ]


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        (
            {"benchmark": {"gpus": [measured("GPU-a")], "problems": [problem("wrong_results", "GPU-a")]}},
            "wrong_results",
        ),
        # A GPU that was left alone passes the benchmark, and proves nothing.
        ({"benchmark": {"gpus": [measured("GPU-a")], "problems": [problem("gpu_busy", "GPU-a")]}}, "gpu_busy"),
        ({"benchmark": {"failed": True, "msg": "no GPU to measure."}}, "not_measured"),
        ({"benchmark": {"unreachable": True, "msg": "Failed to connect"}}, "not_measured"),
        ({"probe": {"failed": True, "msg": "dcgm_diag_level is 3"}}, "not_probed"),
        *(
            ({"dcgm_diag_level": level, "probe": {"verdict": "ok", "checks": {"dcgm": dcgm}}}, code)
            for level, dcgm, code in (
                (2, "failed: diag -r 2 -j: an answer in which no test was run", "dcgm_not_run"),
                (1, "not_installed", "dcgm_not_run"),
                (2, "ok", None),
                (2, "failed: health -c -j: no watches", None),
                (None, "not_installed", None),
            )
        ),
        (
            {"probe": {"verdict": "critical", "problems": [problem("gpu_lost", "GPU-a", severity="critical")]}},
            "gpu_lost",
        ),
        ({"probe": {"verdict": "warning", "problems": [problem("temperature", "GPU-a", severity="warning")]}}, None),
        (
            {
                "close_on": "warning",
                "probe": {"verdict": "warning", "problems": [problem("temperature", "GPU-a", severity="warning")]},
            },
            "temperature",
        ),
    ],
)
def test_each_reason_to_fail(run: Run, changes: dict[str, Any], expected: str | None) -> None:
    outcome = run(node("gpu01", measured("GPU-a"), **changes), node("gpu02", measured("GPU-b")))
    (first, second) = outcome["nodes"]
    assert [found["code"] for found in first["problems"]] == ([expected] if expected else [])
    assert (first["verdict"], second["verdict"]) == ("failed" if expected else "accepted", "accepted")
    assert lines(run.path) == outcome["nodes"]
    for found in first["problems"]:
        if expected in ("not_measured", "not_probed"):
            assert found["message"].startswith("Node gpu01: found ") and "Next step: " in found["message"]


def test_a_module_that_fails_is_told_in_its_own_words(run: Run) -> None:
    said = "rack1-a: found no GPU to measure. Expected: at least one. Next step: check nvidia-smi on the node."
    (record,) = run(node("gpu01", measured("GPU-a"), benchmark={"failed": True, "msg": said}))["nodes"]
    assert record["problems"][0]["message"] == said.replace("rack1-a", "Node gpu01")
    (record,) = run(node("gpu01", measured("GPU-a"), benchmark={"unreachable": True, "msg": said}))["nodes"]
    assert record["problems"][0]["message"].startswith(f"Node gpu01: found no answer ({said[:-1]}). Expected: figures")


def test_a_gpu_that_is_ignored_is_not_judged_by_the_benchmark(run: Run) -> None:
    found = [
        problem("wrong_results", "GPU-a"),
        problem("gpu_busy", "GPU-b"),
        # Of a pair either end is enough.
        problem("slow_peer", "GPU-a", peer="GPU-b"),
        problem("slow_peer", "GPU-b", peer="GPU-a"),
        problem("peer_wrong", "GPU-b", peer="GPU-A"),
    ]
    mine = node("gpu01", measured("GPU-a"), measured("GPU-b"), ignored=["gpu-A"])
    mine["benchmark"]["problems"] = found
    (record,) = run(mine)["nodes"]
    assert [gpu["uuid"] for gpu in record["gpus"]] == ["GPU-b"]
    assert [each["code"] for each in record["problems"]] == ["gpu_busy"]
    (record,) = run({**mine, "ignored": [""]})["nodes"]
    assert [each["code"] for each in record["problems"]] == [each["code"] for each in found]


def test_a_gpu_that_is_gone_since_the_last_acceptance_is_missed(run: Run) -> None:
    run(node("gpu01", measured("GPU-a"), measured("GPU-b")))
    one = node("gpu01", measured("GPU-a"))
    for _again in range(2):
        outcome = run(one)
        assert judged(outcome) == [("failed", [("gpu_missing", "GPU-b")])]
    assert outcome["nodes"][0]["problems"][0]["message"] == (
        "Node gpu01, GPU GPU-b: found 1 GPU(s), and not this one (serial number S-GPU-b). Expected: the 2 with which "
        f"the node was accepted on {lines(run.path)[0]['date']}. Next step: look for it (lspci -d 10de:, dmesg), and "
        "run playbooks/accept.yml again; where it was taken out on purpose, set gpu_node_gpus of this host to 1."
    )
    # Another node's, one that was replaced, one that Nomad has no use for, and one that is meant to be gone.
    assert judged(run(node("gpu02", measured("GPU-c")), check_mode=True)) == [("accepted", [])]
    assert judged(run(node("gpu01", measured("GPU-a"), measured("GPU-c")), check_mode=True)) == [("accepted", [])]
    assert judged(run({**one, "ignored": ["GPU-b"]}, check_mode=True)) == [("accepted", [])]
    assert judged(run({**one, "gpus_expected": 1})) == [("accepted", [])]
    assert judged(run(one)) == [("accepted", [])]


def test_gpus_of_one_board_are_missed_each(run: Run) -> None:
    """The four GPUs of an A16 have the serial number of their board."""

    def board(*names: str) -> dict[str, Any]:
        whole = node("gpu01", *(measured(f"GPU-{name}") for name in names))
        for gpu in whole["probe"]["nvidia_smi"]["gpus"]:
            gpu["serial"] = "S-board"
        return whole

    assert judged(run(board(*"abcd"))) == [("accepted", [])]
    assert judged(run(board(*"abd"))) == [("failed", [("gpu_missing", "GPU-c")])]
    assert judged(run(board(*"abcd"))) == [("accepted", [])]


def test_of_a_divided_gpu_its_serial_number_is_missed(run: Run) -> None:
    def divided(name: str, *numbers: int) -> dict[str, Any]:
        whole = node("gpu01", *(measured(f"GPU-{number}") for number in numbers))
        for gpu in whole["probe"]["nvidia_smi"]["gpus"]:
            gpu["mig_devices"] = [{"uuid": f"MIG-{name}{gpu['uuid'][4:]}{part}"} for part in "ab"]
        parts = [part["uuid"] for gpu in whole["probe"]["nvidia_smi"]["gpus"] for part in gpu["mig_devices"]]
        whole["benchmark"]["gpus"] = [measured(uuid) for uuid in parts]
        return whole

    assert judged(run(divided("old", 1, 2))) == [("accepted", [])]
    assert judged(run(divided("new", 1, 2))) == [("accepted", [])]
    assert judged(run(divided("new", 1))) == [("failed", [("gpu_missing", "MIG-new2b")])]


def test_siblings_are_those_of_the_node_of_the_batch_and_of_earlier_ones(run: Run) -> None:
    first = run(node("gpu01", measured("GPU-a"), measured("GPU-b", memory_read_gb_per_s=2500.0)))
    assert judged(first) == [("accepted", [])]
    assert [gpu["siblings"] for gpu in first["nodes"][0]["gpus"]] == [None, None]
    second = run(
        node("gpu02", measured("GPU-c"), measured("GPU-d", memory_read_gb_per_s=2500.0)),
        node("gpu03", measured("GPU-e")),
        siblings=[node("gpu00", measured("GPU-f"), measured("GPU-g"))],
    )
    assert judged(second) == [("failed", [("slow_among_siblings", "GPU-d")]), ("accepted", [])]
    slow, well = second["nodes"][0]["gpus"][1], second["nodes"][1]["gpus"][0]
    assert (slow["verdict"], slow["siblings"], well["verdict"], well["siblings"]) == ("failed", 4, "ok", 4)
    assert [each["node"] for each in lines(run.path)] == ["gpu01", "gpu02", "gpu03"]
    (found,) = second["nodes"][0]["problems"]
    for part in ("Node gpu02, GPU GPU-d: found among 4 other GPUs", "Expected: no more than 10 %", "Next step: "):
        assert part in found["message"]


def test_a_node_is_judged_at_the_level_that_it_was_measured_at(run: Run) -> None:
    """A variable of the inventory, which groups may have each their own."""

    def at(level: str, name: str, rate: float) -> dict[str, Any]:
        gpus = [measured(f"GPU-{name}", memory_read_gb_per_s=rate)]
        return node(name, *gpus, benchmark={"level": level, "gpus": gpus, "problems": []})

    mixed = [at("full", "a", 3140.0), at("quick", "b", 3140.0), at("quick", "c", 2000.0)]
    outcome = run(*mixed, level="full", siblings_min=1, siblings=[at("full", "d", 3139.0)])
    assert [(each["level"], each["gpus"][0]["siblings"]) for each in outcome["nodes"]] == [
        ("full", 1), ("quick", 1), ("quick", 1),
    ]  # fmt: skip
    assert [each["verdict"] for each in outcome["nodes"]] == ["accepted", "accepted", "failed"]
    # What it was to be measured at tells where no result does.
    failed = {**node("e"), "benchmark": {"failed": True, "msg": "no"}, "level": "quick"}
    (record,) = run(failed, level="full")["nodes"]
    assert (record["level"], record["verdict"]) == ("quick", "failed")
    # Nor is it what the same GPU did at another level that counts.
    assert judged(run(at("full", "b", 2000.0), level="quick")) == [("accepted", [])]
    assert judged(run(at("quick", "b", 2000.0), level="full")) == [("failed", [("slower_than_before", "GPU-b")])]


def test_the_last_acceptance_counts_and_a_failed_run_does_not(run: Run) -> None:
    run(node("gpu01", measured("GPU-a", fp32_tflop_per_s=64.0)))
    slow = node("gpu01", measured("GPU-a", fp32_tflop_per_s=50.0))
    for _again in range(2):
        outcome = run(slow)
        assert judged(outcome) == [("failed", [("slower_than_before", "GPU-a")])]
        assert outcome["nodes"][0]["gpus"][0]["accepted_before"] == lines(run.path)[0]["date"]
    assert "single precision at 50 TFLOP/s, 22 % less than 64" in outcome["nodes"][0]["problems"][0]["found"]
    assert judged(run(slow, past_percent=30)) == [("accepted", [])]
    assert judged(run(slow)) == [("accepted", [])]


def test_a_gpu_that_is_slow_to_all_others_is_named_and_not_the_others(run: Run) -> None:
    def linked(name: str, slow: str, rate: float = 300.0) -> dict[str, Any]:
        uuids = [f"GPU-{letter}" for letter in "abcd"]
        made = node(name, *map(measured, uuids))
        made["benchmark"]["peers"] = [
            {"from": one, "to": other, "nvlink": True, "errors": 0, "by_host_gb_per_s": 30.0, "limit_gb_per_s": 478.1,
             "gb_per_s": rate if slow in (one, other) else 392.0}
            for one, other in itertools.permutations(uuids, 2)
        ]  # fmt: skip
        return made

    outcome = run(linked("gpu01", "GPU-c"))
    assert judged(outcome) == [("failed", [("slow_among_siblings", "GPU-c")])]
    assert "copies by NVLink at 300 GB/s, where their median is 392" in outcome["nodes"][0]["problems"][0]["found"]
    kept = outcome["nodes"][0]["peers"]
    pair = {"from": "GPU-a", "to": "GPU-b", "nvlink": True, "gb_per_s": 392.0, "limit_gb_per_s": 478.1}
    assert kept[0] == pair and len(kept) == 12
    # Its own past, what Nomad has no use for, and what goes by PCI Express.
    assert judged(run(linked("gpu01", "none"))) == [("accepted", [])]
    later = run(linked("gpu01", "GPU-c"), siblings_min=9, check_mode=True)
    assert judged(later) == [("failed", [("slower_than_before", "GPU-c")])]
    ignored = run({**linked("gpu01", "GPU-c"), "ignored": ["GPU-C"]}, check_mode=True)
    assert judged(ignored) == [("accepted", [])] and len(ignored["nodes"][0]["peers"]) == 6
    # The same where the benchmark itself tells of it.
    told = linked("gpu01", "GPU-c")
    found = judging.judge_peers(told["benchmark"]["peers"], None, judging.Thresholds(peer_min_gb_per_s=350))
    told["benchmark"]["problems"] = [problem(each.code, str(each.uuid), peer=each.peer) for each in found]
    assert judged(run(told, siblings_min=9, past_percent=0, check_mode=True)) == [
        ("failed", [("slow_peer", "GPU-c")] * 6)
    ]
    assert judged(run({**told, "ignored": ["GPU-C"]}, check_mode=True)) == [("accepted", [])]
    slots = linked("gpu02", "GPU-c")
    for each in slots["benchmark"]["peers"]:
        each["nvlink"] = False
    assert judged(run(slots, check_mode=True)) == [("accepted", [])]


def linked(name: str, *active: int | None) -> dict[str, Any]:
    """A node whose GPUs have so many links of 18 up; None where nobody knows."""
    made = node(name, *(measured(f"GPU-{name}-{number}") for number in range(len(active))))
    for gpu, up in zip(made["probe"]["nvidia_smi"]["gpus"], active):
        gpu["nvlinks"] = None if up is None else [{"link": link, "active": link < up} for link in range(18)]
    return made


@pytest.mark.parametrize(
    ("nodes", "expected"),
    [
        ([[18, 18]], []),
        # Fewer than before in the same node, by one link.
        ([[18, 17]], ["GPU-0-1"]),
        ([[18, 0]], ["GPU-0-1"]),
        # All of a board: by the past, and by nodes that are new.
        ([[17, 17]], ["GPU-0-0", "GPU-0-1"]),
        ([[18, 18], [18, 18], [17, 17]], ["GPU-2-0", "GPU-2-1"]),
        # Those that were known in this node.
        ([[18, None], [18, None]], ["GPU-0-1"]),
        # Those without a bridge, of which nobody knows, and too few to tell.
        ([[18, 18], [18, 18], [0, 0]], []),
        ([[18, 18], [18, 18], [18, None]], []),
        ([[18, 18], [17, 17]], []),
    ],
)
def test_a_gpu_that_lost_nvlinks_is_not_accepted(run: Run, nodes: list[list[int]], expected: list[str]) -> None:
    run(linked("0", 18, 18))
    farm = [linked(str(number), *active) for number, active in enumerate(nodes)]
    outcome = run(*farm, level="start")
    found = [problem for each in outcome["nodes"] for problem in each["problems"]]
    assert [(problem["code"], problem["uuid"]) for problem in found] == [("nvlink_down", uuid) for uuid in expected]
    assert [gpu["uuid"] for each in outcome["nodes"] for gpu in each["gpus"] if gpu["verdict"] == "failed"] == expected
    assert outcome["nodes"][0]["gpus"][0]["nvlinks"] == nodes[0][0]
    every = run(*farm, past_percent=0, sibling_percent=0)
    assert [each["verdict"] for each in every["nodes"]] == ["accepted"] * len(nodes)


def test_where_a_gpu_lost_nvlinks_both_numbers_are_told(run: Run) -> None:
    date = run(linked("gpu01", 18, 18))["nodes"][0]["date"]
    (found,) = run(linked("gpu01", 18, 16))["nodes"][0]["problems"]
    assert found["found"] == f"16 active NVLinks, where it had 18 when it was accepted on {date}"
    assert found["expected"] == "18 active NVLinks, as then"
    # In another node it has another board. What the probe tells of neighbours is no warning here.
    moved = {**linked("gpu01", 18, 16), "node": "gpu02"}
    assert judged(run(moved, check_mode=True)) == [("accepted", [])]
    moved["probe"]["problems"] = [problem("nvlink_down", "GPU-gpu01-1", severity="warning")]
    assert judged(run(moved, check_mode=True)) == [("failed", [("nvlink_down", "GPU-gpu01-1")])]
    assert judged(run({**moved, "ignored": ["GPU-gpu01-1"]}, check_mode=True)) == [("accepted", [])]


def test_links_that_are_not_known_hide_no_loss(run: Run) -> None:
    date = run(linked("gpu01", 18, 18))["nodes"][0]["date"]
    (found,) = run(linked("gpu01", 18, None))["nodes"][0]["problems"]
    assert found["code"] == "nvlink_down" and "GPU GPU-gpu01-1: " in found["message"]
    assert found["found"] == f"an unknown number of active NVLinks, where it had 18 when it was accepted on {date}"
    assert "nvidia-smi nvlink -s" in found["message"]
    # Accepted all the same, as it was meant; what is known next is compared with what was known last.
    assert judged(run(linked("gpu01", 18, None), past_percent=0)) == [("accepted", [])]
    assert judged(run(linked("gpu01", 18, 17))) == [("failed", [("nvlink_down", "GPU-gpu01-1")])]
    assert judged(run(linked("gpu01", 18, 18))) == [("accepted", [])]
    # Where nothing at all is known, that alone is told.
    silent = {**linked("gpu01", 18, 18), "probe": {"failed": True, "msg": "x"}}
    assert judged(run(silent)) == [("failed", [("not_probed", None)])]


def board(name: str, uuids: Sequence[str], rate: float, limit: float, lost: str = "") -> dict[str, Any]:
    """A node whose GPUs are all linked; one may have C(lost) half of its links."""
    made = node(name, *map(measured, uuids))
    made["benchmark"]["peers"] = [
        {"from": one, "to": other, "nvlink": True, "errors": 0,
         "gb_per_s": rate / 2 if lost in (one, other) else rate,
         "limit_gb_per_s": limit / 2 if lost in (one, other) else limit}
        for one, other in itertools.permutations(uuids, 2)
    ]  # fmt: skip
    return made


def test_copies_by_nvlink_are_compared_on_boards_that_are_alike(run: Run) -> None:
    uuids = {letter: [f"GPU-{letter}{number}" for number in range(8 if letter in "ab" else 4)] for letter in "abcdef"}
    eights = [board(f"gpu-{letter}", uuids[letter], 265.0, 300.0) for letter in "ab"]
    fours = [board(f"gpu-{letter}", uuids[letter], 93.0, 100.0) for letter in "cd"]
    outcome = run(*eights, *fours)
    assert judged(outcome) == [("accepted", [])] * 4
    assert [each["gpus"][0]["peer_limit_gb_per_s"] for each in outcome["nodes"]] == [300.0, 300.0, 100.0, 100.0]
    assert [each["gpus"][0]["siblings"] for each in outcome["nodes"]] == [23] * 4
    # Cards that were moved to the other kind of board have a past there from then on.
    moved = uuids["a"][:4]
    assert judged(run(board("gpu-x", moved, 93.0, 100.0), *fours)) == [("accepted", [])] * 3
    assert judged(run(board("gpu-y", moved, 93.0, 100.0), check_mode=True)) == [("accepted", [])]
    assert judged(run(board("gpu-y", moved, 60.0, 100.0), check_mode=True)) == [
        ("failed", [("slower_than_before", uuid) for uuid in moved])
    ]
    # Some that are slow among their own kind, and one that lost links, so that its own pairs could not give more.
    slow = board("gpu-e", uuids["e"], 70.0, 100.0)
    first = judged(run(slow, *fours, check_mode=True))[0]
    assert first == ("failed", [("slow_among_siblings", uuid) for uuid in uuids["e"]])
    lost = board("gpu-f", uuids["f"], 265.0, 300.0, lost="GPU-f2")
    assert judged(run(lost, check_mode=True)) == [("failed", [("slow_among_siblings", "GPU-f2")])]
    # A board that gives less than before in its node is no other one.
    less = board("gpu-b", uuids["b"], 132.0, 150.0)
    assert judged(run(less, check_mode=True)) == [("failed", [("slower_than_before", uuid) for uuid in uuids["b"]])]


def test_a_mig_device_has_what_its_gpu_is(run: Run) -> None:
    part = {**measured("MIG-1"), "name": "NVIDIA A100-SXM4-80GB MIG 1g.10gb"}
    whole = node("gpu01", measured("GPU-a"))
    whole["probe"]["nvidia_smi"]["gpus"][0]["mig_devices"] = [{"uuid": "MIG-1"}]
    whole["benchmark"]["gpus"] = [part]
    (gpu,) = run(whole)["nodes"][0]["gpus"]
    assert (gpu["uuid"], gpu["serial"], gpu["model"]) == ("MIG-1", "S-GPU-a", part["name"])


def test_check_mode_and_a_look_write_nothing(run: Run) -> None:
    assert judged(run(node("gpu01", measured("GPU-a")), check_mode=True)) == [("accepted", [])]
    assert run()["nodes"] == []
    assert not run.path.parent.exists()


@pytest.mark.parametrize("left", ['{"date":"2026-11-25T14', '{"da', '{"date":"x"}\n'])
def test_what_is_left_of_a_line_is_told_and_skipped(run: Run, left: str) -> None:
    run.path.parent.mkdir()
    run.path.write_text(left, encoding="utf-8")
    assert run(node("gpu01", measured("GPU-a")))["unreadable"] == [1]
    outcome = run(node("gpu01", measured("GPU-a")))
    assert outcome["unreadable"] == [1]
    assert outcome["nodes"][0]["gpus"][0]["accepted_before"] is not None
    assert run.path.read_text(encoding="utf-8").startswith(left.rstrip("\n") + "\n{")
    # As a killed run leaves it, also behind records.
    with run.path.open("a") as file:
        file.write(left.rstrip("\n"))
    assert run(node("gpu01", measured("GPU-a")))["unreadable"] == [1, 4]


@pytest.mark.parametrize(
    "content", ["# Farm\n", "notes", '{"made_at": "2026-11-25T14:00:00Z", "gpus": 4}\n', "{}\n[]\n"]
)
def test_a_file_of_somebody_else_stays_as_it_is(run: Run, content: str) -> None:
    run.path.parent.mkdir()
    run.path.write_text(content, encoding="utf-8")
    outcome = run(node("gpu01", measured("GPU-a")))
    assert "none is a record of an acceptance. Expected: " in outcome["msg"] and "accept_records" in outcome["msg"]
    assert run.path.read_text(encoding="utf-8") == content


def test_a_place_that_cannot_be_written_to_is_told_by_a_look(run: Run, tmp_path: Path) -> None:
    (tmp_path / "new").write_text("a file", encoding="utf-8")
    outcome = run()
    assert f"found {tmp_path / 'new'}, which is of another kind. Expected: " in outcome["msg"]
    run.path = tmp_path
    assert "which is of another kind" in run()["msg"]
    run.path = Path("/proc/accepted.jsonl")
    assert "Expected: " in run(node("gpu01", measured("GPU-a")))["msg"]


def test_no_room_leaves_the_file_as_it_was(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    run(node("gpu01", measured("GPU-a")))
    before = run.path.read_bytes()
    write, written = os.write, []

    def full(descriptor: int, data: bytes) -> int:
        if written:
            raise OSError(28, "No space left on device")
        written.append(data)
        return write(descriptor, data[:40])

    monkeypatch.setattr(records.os, "write", full)
    outcome = run(node("gpu02", measured("GPU-b")))
    assert "No space left on device" in outcome["msg"] and "Next step: " in outcome["msg"]
    assert written and run.path.read_bytes() == before


WRITER = """
import sys
from pathlib import Path
from ansible_collections.gpufarm.core.plugins.module_utils.gpu_benchmark import records
for number in range(150):
    with records.opened(Path(sys.argv[1])) as descriptor:
        before = records.content_of(descriptor)
        records.append(descriptor, before, [{"seen": before.count(b"\\n"), "text": "x" * 2000}])
"""


def test_two_runs_at_a_time_lose_nothing(run: Run) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT / ".collections")}
    writers = [subprocess.Popen([sys.executable, "-c", WRITER, str(run.path)], env=environment) for _each in range(2)]
    assert [writer.wait(timeout=300) for writer in writers] == [0, 0]
    # Each has read what the other one wrote before it adds its own.
    assert [each["seen"] for each in lines(run.path)] == list(range(300))


@pytest.mark.parametrize("given", [{"past_percent": -1}, {"siblings_min": -1}])
def test_wrong_options_are_refused(run: Run, given: dict[str, Any]) -> None:
    assert "Expected: 0 or more. Next step: " in run(node("gpu01", measured("GPU-a")), **given)["msg"]
    assert not run.path.exists()


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (
            {"benchmark_options": {"a": {"memory_share": 0.5, "path": "/nvidia-smi"}, "b": {"memory_share": 95}}},
            "b: accept_options: memory_share is 95. Expected: above 0 and up to 0.98. Next step: ",
        ),
        ({"benchmark_options": {"a": {"soak": "long"}}}, "a: accept_options: argument 'soak' is of type str"),
        ({"benchmark_options": {"a": {"sook": 1}}}, "a: accept_options: sook. Supported parameters include"),
        (
            {"health_options": {"a": {"dcgm": False}, "b": {"timeout": -1}}},
            "b: gpu_health_options: found timeout is -1. Expected: more than 0 seconds",
        ),
    ],
)
def test_options_are_looked_at_before_a_node_is_closed(run: Run, given: dict[str, Any], told: str) -> None:
    message = run(**given)["msg"]
    assert message.startswith(told) and message.count("Next step: ") == 1
