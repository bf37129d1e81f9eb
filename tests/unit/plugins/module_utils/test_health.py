# Copyright (c) 2026, gpufarm contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Judgement of recorded facts with one thing wrong at a time, then the collectors with stand-ins for programs."""

from __future__ import annotations

import copy
import dataclasses
import json
import math
import os
import re
import textwrap
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from ansible_collections.gpufarm.core.plugins.module_utils import command_lines, commands, health, nvidia_smi, xid
from ansible_collections.gpufarm.core.plugins.module_utils.health import (
    HealthOptions,
    infiniband,
    judge,
    kernel_log,
    probing,
)
from ansible_collections.gpufarm.core.plugins.module_utils.health import dcgm as dcgm_source
from ansible_collections.gpufarm.core.plugins.module_utils.health import node as health_node
from ansible_collections.gpufarm.core.plugins.module_utils.health import options as health_options
from ansible_collections.gpufarm.core.plugins.module_utils.problem import Finding
from ansible_collections.gpufarm.core.plugins.module_utils.xid_events import Event
from ansible_collections.gpufarm.core.tests.unit.plugins.module_utils.recorded import assert_recorded

CORPUS = Path(__file__).parent / "nvidia_smi_corpus"
UUIDS = [f"GPU-0000000{number}-1111-2222-3333-444444444444" for number in range(8)]
XID_79 = "NVRM: Xid (PCI:0000:3b:00): 79, pid=123, name=python, GPU has fallen off the bus."


def dcgm_finding(code: str, severity: str, uuid: str | None, found: str) -> Finding:
    return Finding(code, found, "a pass of DCGM", severity=severity, action="contact_support", uuid=uuid)


def facts_of(number: int = 2, **changes: Any) -> dict[str, Any]:
    """Facts of a healthy node, with recorded values; the changes are made to its last GPU."""
    recorded = nvidia_smi.parse_query_xml((CORPUS / "580.159.04-h100-queried.xml").read_text(encoding="utf-8"))
    gpus = []
    for index in range(number):
        gpu = copy.deepcopy(recorded["gpus"][0])
        gpu.update(index=index, uuid=UUIDS[index], pci_bus_id=f"00000000:{0x3B + index:02X}:00.0", nvlinks=[])
        gpus.append(gpu)
    for path, value in changes.items():
        *parents, last = path.split("__")
        section = gpus[-1]
        for parent in parents:
            section = section[parent]
        assert last in section, path
        section[last] = value
    return dict(nvidia_smi.empty_facts("linux"), available=True, driver_version="580.159.04", gpus=gpus)


def verdict_of(facts: Mapping[str, Any], **options: Any) -> dict[str, Any]:
    return judge(facts, [], [], HealthOptions(**options), host="gpu01", checks={"kernel_log": "journal"})


def codes(result: Mapping[str, Any]) -> list[tuple[str, str]]:
    return [(problem["code"], problem["severity"]) for problem in result["problems"]]


def event(number: int, bus: str | None = "0000:3c:00.0", **more: Any) -> Event:
    values: dict[str, Any] = {"kind": "xid", "uuid": None, "count": 1, "first": 0.0, "last": 0.0, "text": ""}
    return Event(**{**values, "number": number, "pci_bus_id": bus, **more})


def links(up: int, down: int, **errors: int) -> list[dict[str, Any]]:
    counted = {name: errors.get(name) for name in ("replay_errors", "recovery_errors", "crc_errors")}
    return [{"link": number, "active": number < up, "speed_gb_per_s": None, **counted} for number in range(up + down)]


def pages(single_bit: int | None, double_bit: int | None) -> dict[str, Any]:
    return {"single_bit": single_bit, "double_bit": double_bit, "pending": False}


# Judgement of the facts


def test_a_healthy_node_has_no_problem() -> None:
    result = verdict_of(facts_of(), gpus=2)
    assert (result["verdict"], result["reason"], result["problems"], result["xids"]) == ("ok", None, [], [])
    assert [(gpu["index"], gpu["uuid"], gpu["verdict"], gpu["problems"]) for gpu in result["gpus"]] == [
        (0, UUIDS[0], "ok", []),
        (1, UUIDS[1], "ok", []),
    ]
    assert (result["gpus"][1]["name"], result["gpus"][1]["pci_bus_id"]) == ("NVIDIA H100 80GB HBM3", "00000000:3C:00.0")


@pytest.mark.parametrize("recording", sorted(path.name for path in CORPUS.glob("*.xml")))
def test_every_recording_can_be_judged(recording: str) -> None:
    parsed = nvidia_smi.parse_query_xml((CORPUS / recording).read_text(encoding="utf-8"))
    result = verdict_of(dict(nvidia_smi.empty_facts("linux"), gpus=parsed["gpus"]))
    expected = {"persistence_off", "pcie_width", "retired_pages_pending", "hw_slowdown", "ecc_uncorrected"}
    assert {code for code, _severity in codes(result)} <= expected
    assert len(result["gpus"]) == len(parsed["gpus"])


def test_what_the_platform_does_not_give_is_no_problem() -> None:
    everything = nvidia_smi.empty_gpu()
    strict: dict[str, Any] = {name: 1 for name in ("ecc_corrected_max", "temperature_gpu_max_c", "pcie_width_min")}
    result = verdict_of(dict(facts_of(), gpus=[everything]), pcie_generation_min=5, ecc_required=True, **strict)
    assert result["problems"] == []


# Temperatures where the recording has margins.
ABSOLUTE = {
    "temperature_limits__slowdown_c": 90,
    "temperature_limits__shutdown_c": 95,
    "temperature_limits__slowdown_margin_c": None,
    "temperature_limits__shutdown_margin_c": None,
}

CASES: list[tuple[dict[str, Any], dict[str, Any], str, str]] = [
    ({"status": "lost", "status_message": "GPU is lost."}, {}, "gpu_lost", "critical"),
    ({"status": "reset_required", "status_message": "GPU requires reset."}, {}, "reset_required", "critical"),
    ({"status": "unreadable", "status_message": "no permission"}, {}, "gpu_unreadable", "critical"),
    ({"compute_mode": "Prohibited"}, {}, "compute_prohibited", "critical"),
    ({"recovery_action": "Reset"}, {}, "recovery_action", "critical"),
    ({"recovery_action": "Drain and Reset"}, {}, "recovery_action", "critical"),
    ({"ecc__uncorrected__volatile": 1}, {}, "ecc_uncorrected", "critical"),
    ({"ecc__uncorrected__volatile": 3}, {"ecc_uncorrected_max": 2}, "ecc_uncorrected", "critical"),
    ({"ecc__corrected__volatile": 6}, {"ecc_corrected_max": 5}, "ecc_corrected", "warning"),
    ({"ecc__mode": "Disabled", "ecc__mode_pending": "Disabled"}, {"ecc_required": True}, "ecc_disabled", "warning"),
    ({"ecc__mode_pending": "Disabled"}, {}, "ecc_mode_pending", "warning"),
    ({"ecc__sram_threshold_exceeded": True}, {}, "sram_threshold_exceeded", "critical"),
    ({"ecc__remapped_rows__pending": True}, {}, "row_remap_pending", "critical"),
    ({"ecc__remapped_rows__failure": True}, {}, "row_remap_failed", "critical"),
    ({"ecc__retired_pages__pending": True}, {}, "retired_pages_pending", "critical"),
    ({"ecc__retired_pages": pages(24, 40)}, {}, "retired_pages", "warning"),
    ({"ecc__retired_pages": pages(60, 0)}, {}, "retired_pages", "warning"),
    ({"ecc__retired_pages": pages(None, 3)}, {"retired_pages_max": 2}, "retired_pages", "warning"),
    ({"clocks_event_reasons": ["gpu_idle", "hw_slowdown"]}, {}, "hw_slowdown", "warning"),
    ({"clocks_event_reasons": ["hw_thermal_slowdown"]}, {}, "hw_slowdown", "warning"),
    ({"clocks_event_reasons": ["hw_power_brake_slowdown"]}, {}, "hw_slowdown", "warning"),
    ({"clocks_event_reasons": ["sw_power_cap"]}, {"throttle_reasons": ("sw_power_cap",)}, "hw_slowdown", "warning"),
    ({"temperature_gpu_c": 91}, {"temperature_gpu_max_c": 90}, "temperature", "warning"),
    ({"temperature_gpu_c": 90, **ABSOLUTE}, {}, "temperature", "warning"),
    ({"temperature_gpu_c": 94, **ABSOLUTE}, {}, "temperature", "warning"),
    ({"temperature_gpu_c": 95, **ABSOLUTE}, {}, "temperature", "critical"),
    ({"temperature_limits__margin_c": -2}, {}, "temperature", "warning"),
    ({"temperature_limits__margin_c": -7}, {}, "temperature", "warning"),
    ({"temperature_limits__margin_c": -8}, {}, "temperature", "critical"),
    ({"temperature_limits__margin_c": -8, "temperature_gpu_c": None}, {}, "temperature", "critical"),
    ({"temperature_memory_c": 85, "temperature_limits__memory_max_c": 85}, {}, "temperature", "warning"),
    ({"sensors_failed": ["temperature_gpu_c"], "temperature_gpu_c": None}, {}, "sensors_failed", "warning"),
    (
        {"status": "unreadable", "status_message": "Its sensors.", "sensors_failed": ["x"]},
        {},
        "gpu_unreadable",
        "critical",
    ),
    ({"inforom_corrupted": True}, {}, "inforom_corrupted", "warning"),
    ({"ecc__unrepairable_memory": True}, {}, "unrepairable_memory", "critical"),
    ({"ecc__channel_repair_pending": True}, {}, "channel_repair_pending", "critical"),
    ({"ecc__tpc_repair_pending": True}, {}, "tpc_repair_pending", "critical"),
    ({"fabric_health__summary": "Unhealthy"}, {}, "fabric_unhealthy", "critical"),
    ({"fabric_health__summary": "Limited Capacity"}, {}, "fabric_unhealthy", "warning"),
    ({"fabric_health__bandwidth": "Degraded"}, {}, "fabric_unhealthy", "warning"),
    ({"fabric_health__route_unhealthy": "True"}, {}, "fabric_unhealthy", "critical"),
    ({"fabric_health__route_unhealthy": "Yes"}, {}, "fabric_unhealthy", "critical"),
    ({"fabric_health__route_recovery_in_progress": "True"}, {}, "fabric_unhealthy", "warning"),
    ({"fabric_health__access_timeout_recovery": "True"}, {}, "fabric_unhealthy", "warning"),
    ({"fabric_health__incorrect_configuration": "Insufficient NVLinks"}, {}, "fabric_unhealthy", "critical"),
    ({"pcie__width_current": 8}, {}, "pcie_width", "warning"),
    ({"pcie__width_current": 4}, {"pcie_width_min": 8}, "pcie_width", "warning"),
    (
        {"pcie__generation_current": 1, "clocks_event_reasons": []},
        {"pcie_generation_min": 5},
        "pcie_generation",
        "warning",
    ),
    (
        {"pcie__generation_max": 3, "pcie__generation_current": 3},
        {"pcie_generation_min": 4},
        "pcie_generation",
        "warning",
    ),
    ({"fabric_state": "In Progress"}, {}, "fabric_not_ready", "critical"),
    ({"fabric_state": "Completed", "fabric_status": "Insufficient Resources"}, {}, "fabric_not_ready", "critical"),
    (
        {
            "virtualization_mode": "VGPU",
            "vgpu_licensed_product": "NVIDIA AI Enterprise",
            "vgpu_license_status": "Unlicensed (Restricted)",
        },
        {},
        "vgpu_unlicensed",
        "warning",
    ),
    ({"persistence_mode": "Disabled"}, {}, "persistence_off", "warning"),
    ({"mig_mode_pending": "Enabled"}, {}, "mig_pending", "warning"),
    ({"mig_mode": "Enabled", "mig_mode_pending": "Enabled", "mig_devices": []}, {}, "mig_empty", "critical"),
]


@pytest.mark.parametrize(("changes", "options", "code", "severity"), CASES)
def test_one_problem(changes: dict[str, Any], options: dict[str, Any], code: str, severity: str) -> None:
    result = verdict_of(facts_of(**changes), **options)
    assert codes(result) == [(code, severity)]
    assert (result["verdict"], result["reason"]) == (severity, f"{code} {UUIDS[1][:12]}")
    assert [gpu["verdict"] for gpu in result["gpus"]] == ["ok", severity]
    (problem,) = result["problems"]
    assert result["gpus"][1]["problems"] == [problem]
    assert (problem["uuid"], problem["pci_bus_id"]) == (UUIDS[1], "00000000:3C:00.0")
    assert problem["action"] in xid.ACTIONS
    assert problem["expected"] and "{" not in problem["expected"]
    start = f"Node gpu01 GPU {UUIDS[1]} at 00000000:3C:00.0: found {problem['found']}. Expected: {problem['expected']}."
    assert problem["message"].startswith(f"{start} Next step: ")
    ignored = verdict_of(facts_of(**changes), **options, severities={code: "ignore"})
    assert (ignored["verdict"], ignored["problems"]) == ("ok", [])
    other = {"warning": "critical", "critical": "warning"}[severity]
    assert codes(verdict_of(facts_of(**changes), **options, severities={code: other})) == [(code, other)]


@pytest.mark.parametrize(
    ("changes", "options"),
    [
        ({"ecc__uncorrected__volatile": 2}, {"ecc_uncorrected_max": 2}),
        ({"ecc__uncorrected__aggregate": 9}, {}),
        ({"ecc__corrected__volatile": 99}, {}),
        ({"ecc__mode": "Disabled", "ecc__mode_pending": "Disabled"}, {}),
        ({"mig_mode": None, "mig_mode_pending": "Enabled"}, {}),
        ({"mig_mode": "Enabled", "mig_mode_pending": None, "mig_devices": None}, {}),
        ({"mig_mode": "Enabled", "mig_mode_pending": "Enabled", "mig_devices": [{"uuid": "MIG-1"}]}, {}),
        ({"clocks_event_reasons": ["gpu_idle", "sw_power_cap", "sw_thermal_slowdown"]}, {}),
        ({"clocks_event_reasons": ["hw_slowdown"]}, {"throttle_reasons": ()}),
        ({"temperature_gpu_c": 90}, {"temperature_gpu_max_c": 90}),
        ({"temperature_gpu_c": 89, **ABSOLUTE}, {}),
        ({"temperature_gpu_c": 99, **ABSOLUTE}, {"temperature_gpu_max_c": 99}),
        ({"temperature_gpu_c": None, **ABSOLUTE}, {}),
        ({"temperature_limits__margin_c": -1}, {}),
        ({"temperature_limits__margin_c": -9}, {"temperature_gpu_max_c": 99}),
        ({"temperature_limits__margin_c": None}, {}),
        ({"temperature_memory_c": 84, "temperature_limits__memory_max_c": 85}, {}),
        ({"temperature_memory_c": None, "temperature_limits__memory_max_c": 85}, {}),
        ({"sensors_failed": None, "inforom_corrupted": None}, {}),
        ({"ecc__unrepairable_memory": False, "ecc__tpc_repair_pending": None}, {}),
        ({"ecc__retired_pages": pages(19, 40)}, {}),
        ({"ecc__retired_pages": pages(24, 40)}, {"retired_pages_max": 64}),
        ({"ecc__retired_pages": pages(0, 0)}, {"retired_pages_max": 0}),
        ({"ecc__retired_pages": pages(None, None)}, {"retired_pages_max": 0}),
        (
            {
                "fabric_health__summary": "Healthy",
                "fabric_health__bandwidth": "Full",
                "fabric_health__route_unhealthy": "False",
                "fabric_health__route_recovery_in_progress": "No",
                "fabric_health__access_timeout_recovery": "Not Active",
                "fabric_health__incorrect_configuration": "None",
            },
            {},
        ),
        ({"pcie__width_current": 8}, {"pcie_width_min": 8}),
        ({"pcie__generation_current": 1}, {"pcie_generation_min": 5}),  # idle, as recorded
        ({"pcie__generation_current": 1}, {}),
        ({"fabric_state": "Completed", "fabric_status": "Success"}, {}),
        ({"persistence_mode": "Disabled"}, {"persistence_required": False}),
        ({"recovery_action": "None"}, {}),
        ({"virtualization_mode": "VGPU", "vgpu_license_status": "Licensed (Expiry: 2026-7-7 16:1:44 GMT)"}, {}),
        ({"virtualization_mode": "VGPU"}, {}),
        ({"virtualization_mode": "VGPU", "vgpu_license_status": "Unlicensed (Unrestricted)"}, {}),
        ({"virtualization_mode": "Pass-Through", "vgpu_license_status": "Unlicensed (Restricted)"}, {}),
    ],
)
def test_no_problem(changes: dict[str, Any], options: dict[str, Any]) -> None:
    assert verdict_of(facts_of(**changes), **options)["problems"] == []


def test_a_vgpu_whose_product_is_not_known_is_told_without_it() -> None:
    facts = facts_of(virtualization_mode="VGPU", vgpu_license_status="Unlicensed (Restricted)")
    (problem,) = verdict_of(facts)["problems"]
    assert problem["found"] == "license status Unlicensed (Restricted)"


def test_every_problem_of_a_gpu_as_recorded() -> None:
    told = {}
    for changes, options, code, _severity in CASES:
        (problem,) = verdict_of(facts_of(**changes), **options)["problems"]
        told[f"{code}: {changes}, {options}"] = problem
    assert_recorded("health-gpu", told)


def test_every_problem_of_a_node_as_recorded() -> None:
    checks = [
        {"kernel_log": "unreadable: dmesg says no"},
        {"dcgm": "failed: no host engine"},
        {"fabric_manager": "failed: it is inactive"},
        {"fabric_manager": "failed: it is inactive", "fabric_manager_version": "580.159.04"},
        {"fabric_manager": "failed: it is inactive", "fabric_manager_version": "580.95.05"},
        {"fabric_manager": "not_installed"},
    ]
    told = {str(check): judge(facts_of(), [], [], HealthOptions(), host="n", checks=check) for check in checks}
    for reason in nvidia_smi.REASONS:
        facts = dict(
            nvidia_smi.empty_facts("linux"), reason=reason, message=f"A thing. {nvidia_smi.NEXT_STEPS[reason]}"
        )
        told[reason] = verdict_of(facts)
    told["no words"] = verdict_of(dict(nvidia_smi.empty_facts("linux"), reason="timeout"))
    told["gpu_count"] = verdict_of(facts_of(1), gpus=2)
    told["orphans"] = judge(facts_of(), [], [], HealthOptions(), host="n", orphans={0: [7], 1: [41, 42]})
    assert_recorded("health-node", {key: value["problems"] for key, value in told.items()})


def test_every_event_as_recorded() -> None:
    times = {"first": 1.0, "last": 61.0, "count": 2}
    told = {f"xid {number}": judged(event(number, **times)) for number in (13, 48, 63, 79, 94, 157, 999)}
    told["text"] = judged(event(48, text="DBE."))
    told["by address"] = judged(event(79, "0000:aa:00.0"))
    told["init"] = judged(event(0, "0000:aa:00.0", kind="init", text="(0x62)", **times))
    told["init, once"] = judged(event(0, "0000:aa:00.0", kind="init"))
    told["init, answers"] = judged(event(0, kind="init"))
    for fatal in (None, True, False):
        told[f"sxid, fatal {fatal}"] = judged(event(12028, "0000:05:00.0", kind="sxid", fatal=fatal))
        told[f"xid 149, fatal {fatal}"] = judged(event(149, fatal=fatal))
    told["dcgm"] = judge(
        facts_of(),
        [],
        [dcgm_finding("dcgm_pcie", "warning", UUIDS[0], "a warning"), dcgm_finding("dcgm_x", "critical", None, "y")],
        HealthOptions(),
        host="n",
    )
    assert_recorded("health-events", {key: [value["problems"], value["xids"]] for key, value in told.items()})


@pytest.mark.parametrize(
    ("wanted", "action"),
    [
        ("Reset", "reset_gpu"),
        ("Reboot", "reboot"),
        ("Drain P2P", "drain_and_reset"),
        ("Drain and Reset", "drain_and_reset"),
    ],
)
def test_what_the_driver_wants_is_the_action(wanted: str, action: str) -> None:
    (problem,) = verdict_of(facts_of(recovery_action=wanted))["problems"]
    assert (problem["action"], problem["severity"]) == (action, "critical")


@pytest.mark.parametrize("wanted", ["Recover IMEX Domain", "imex"])
def test_a_broken_imex_domain_closes_no_node(wanted: str) -> None:
    (problem,) = verdict_of(facts_of(recovery_action=wanted))["problems"]
    assert (problem["action"], problem["severity"]) == ("check_configuration", "warning")
    assert problem["found"] == f"the recovery action {wanted} (IMEX serves NVLink between nodes only)"


def test_persistence_is_windows_business_under_wsl() -> None:
    assert verdict_of(dict(facts_of(persistence_mode="Disabled"), platform="wsl"))["problems"] == []


@pytest.mark.parametrize(
    ("changes", "options", "found", "expected"),
    [
        (
            {"temperature_gpu_c": 99, **ABSOLUTE},
            {},
            "99 C",
            "less than 95 C, at which the card turns itself off",
        ),
        ({"temperature_gpu_c": 92, **ABSOLUTE}, {}, "92 C", "less than 90 C, at which the card slows down"),
        (
            {"temperature_limits__margin_c": -3},
            {},
            "31 C, a margin of -3 C",
            "a margin of more than -2 C, at which the card slows down",
        ),
        (
            {"temperature_limits__margin_c": -8, "temperature_gpu_c": None},
            {},
            "an unknown temperature, a margin of -8 C",
            "a margin of more than -8 C, at which the card turns itself off",
        ),
        (
            {"temperature_memory_c": 96, "temperature_limits__memory_max_c": 95},
            {},
            "96 C of the memory",
            "less than 95 C, at which the card slows down",
        ),
        ({"temperature_gpu_c": 81}, {"temperature_gpu_max_c": 80}, "81 C", "at most 80 C"),
        ({"ecc__retired_pages": pages(24, 40)}, {}, "64 retired pages of memory", "at most 59"),
        (
            {"sensors_failed": ["temperature_gpu_c", "power_draw_w"]},
            {},
            "an error in place of temperature_gpu_c, power_draw_w",
            "a value from every sensor",
        ),
        (
            {"fabric_health__bandwidth": "Degraded", "fabric_health__route_recovery_in_progress": "True"},
            {},
            "a fabric with bandwidth Degraded, route recovery in progress True",
            "a healthy fabric with its full bandwidth",
        ),
    ],
)
def test_the_words_of_a_problem(changes: dict[str, Any], options: dict[str, Any], found: str, expected: str) -> None:
    (problem,) = verdict_of(facts_of(**changes), **options)["problems"]
    assert (problem["found"], problem["expected"]) == (found, expected)


def test_a_gpu_whose_sensors_fail_is_to_be_reset() -> None:
    facts = facts_of(status="unreadable", status_message="x", sensors_failed=["x"])
    assert verdict_of(facts)["problems"][0]["action"] == "reset_gpu"
    assert verdict_of(facts_of(status="unreadable"))["problems"][0]["action"] == "check_configuration"


def test_a_gpu_without_any_link_where_neighbours_have_some() -> None:
    facts = facts_of(2, nvlinks=links(4, 0))
    assert codes(verdict_of(facts)) == [("nvlink_down", "warning")]
    facts["gpus"][0]["nvlinks"] = None  # in MIG mode nobody knows them
    assert codes(verdict_of(facts)) == []


def test_links_that_had_to_be_brought_up_again() -> None:
    facts = facts_of(1, nvlinks=links(2, 0, recovery_errors=0, replay_errors=900, crc_errors=7))
    assert codes(verdict_of(facts)) == []
    facts["gpus"][0]["nvlinks"][1]["recovery_errors"] = 3
    result = verdict_of(facts)
    assert codes(result) == [("nvlink_errors", "warning")]
    (problem,) = result["problems"]
    assert (problem["uuid"], problem["action"]) == (UUIDS[0], "check_nvlink")
    assert problem["found"] == "NVLinks brought up again since the driver was loaded: 1 (3 times)"
    assert problem["expected"] == "at most 0 times a link"
    assert codes(verdict_of(facts, nvlink_recoveries_max=3)) == []


@pytest.mark.parametrize("counter", ["replay_errors", "crc_errors"])
def test_links_with_more_errors_than_allowed(counter: str) -> None:
    facts = facts_of(1, nvlinks=links(1, 0, **{counter: 8}))
    (problem,) = verdict_of(facts, nvlink_errors_max=7)["problems"]
    assert problem["code"] == "nvlink_errors"
    assert problem["found"] == "NVLinks with damaged or repeated data since the driver was loaded: 0 (8 times)"
    assert codes(verdict_of(facts, nvlink_errors_max=8)) == codes(verdict_of(facts)) == []


def test_links_are_compared_with_neighbours_of_the_same_model() -> None:
    facts = facts_of(3, nvlinks=links(16, 2))
    facts["gpus"][0]["nvlinks"] = links(18, 0)
    facts["gpus"][1].update(name="another", nvlinks=links(4, 8))
    result = verdict_of(facts)
    assert codes(result) == [("nvlink_down", "warning")]
    assert result["problems"][0]["uuid"] == UUIDS[2]
    assert "16 active NVLinks where a neighbour of the same model has 18" in result["problems"][0]["found"]


@pytest.mark.parametrize("reason", nvidia_smi.REASONS)
def test_no_answer_is_critical_by_its_reason(reason: str) -> None:
    message = f"Something was found. {nvidia_smi.NEXT_STEPS[reason]}"
    facts = dict(nvidia_smi.empty_facts("linux"), reason=reason, message=message)
    result = verdict_of(facts, gpus=8)
    assert codes(result) == [(reason, "critical")]
    assert result["reason"] == reason
    (problem,) = result["problems"]
    assert (problem["uuid"], problem["pci_bus_id"], problem["found"]) == (None, None, "that something was found")
    assert problem["message"].count("Next step: ") == 1
    assert nvidia_smi.NEXT_STEPS[reason].rstrip(".")[1:] in problem["message"].partition("Next step: ")[2]
    # A node that has none may lack the driver, too; what is there and fails is sick there as well.
    well = reason in ("not_installed", "no_devices", "driver_not_loaded")
    assert codes(verdict_of(facts, gpus=0)) == ([] if well else [(reason, "critical")])


def test_under_wsl_a_gpu_that_is_gone_is_looked_for_in_windows() -> None:
    facts = dict(facts_of(status="lost", status_message=f"x. {nvidia_smi.WSL_STEPS['gpu_lost']}"), platform="wsl")
    for number, code in ((None, "gpu_lost"), (3, "gpu_count")):
        found = verdict_of(dict(facts if code == "gpu_lost" else facts_of(), platform="wsl"), gpus=number)["problems"]
        (problem,) = [each for each in found if each["code"] == code]
        assert problem["message"].count("check in Windows that nvidia-smi.exe lists the GPU") == 1
        assert "Windows" not in problem["found"]


def test_a_lost_gpu_is_told_once() -> None:
    facts = dict(facts_of(status="lost", status_message="x"), reason="gpu_lost", message="GPU: x")
    assert codes(verdict_of(facts, gpus=2)) == [("gpu_lost", "critical")]


def test_a_missing_gpu_is_told_by_number() -> None:
    result = verdict_of(facts_of(7), gpus=8)
    assert (codes(result), result["reason"]) == ([("gpu_count", "critical")], "gpu_count")
    assert (result["problems"][0]["found"], result["problems"][0]["expected"]) == ("7 GPUs", "8 GPUs")
    assert all(gpu["verdict"] == "ok" for gpu in result["gpus"])
    assert verdict_of(facts_of(8), gpus=7)["verdict"] == "ok"


@pytest.mark.parametrize(
    ("checks", "code"),
    [
        ({"kernel_log": "unreadable: dmesg says no"}, "check_failed"),
        ({"dcgm": "failed: no host engine"}, "check_failed"),
        ({"nvlink": "failed: it hangs"}, "check_failed"),
        ({"mig": "failed: it hangs"}, "check_failed"),
        ({"nvlink": "ok", "mig": "skipped: no GPU"}, None),
        ({"fabric_manager": "failed: it is inactive"}, "fabric_manager"),
        ({"fabric_manager": "not_installed"}, "fabric_manager"),
        ({"kernel_log": "skipped: WSL", "dcgm": "not_installed", "fabric_manager": "not_needed"}, None),
    ],
)
def test_a_check_that_failed_is_a_problem(checks: dict[str, str], code: str | None) -> None:
    result = judge(facts_of(), [], [], HealthOptions(), checks=checks)
    assert [problem["code"] for problem in result["problems"]] == ([code] if code else [])
    if code:
        assert next(iter(checks.values())).partition(": ")[2] in result["problems"][0]["message"]


def test_fabric_manager_may_run_elsewhere() -> None:
    checks = {"fabric_manager": "not_installed"}
    assert codes(judge(facts_of(fabric_state="Completed"), [], [], HealthOptions(), checks=checks)) == []
    broken = judge(facts_of(fabric_state="In Progress"), [], [], HealthOptions(), checks=checks)
    assert codes(broken) == [("fabric_not_ready", "critical"), ("fabric_manager", "critical")]


@pytest.mark.parametrize(
    ("first", "changes", "severity"),
    [
        ("Completed", {"fabric_state": "Completed", "fabric_status": "Success"}, "warning"),
        ("Completed", {}, "warning"),
        (None, {"fabric_state": "Completed"}, "warning"),
        (None, {}, "critical"),
        ("Completed", {"fabric_state": "In Progress"}, "critical"),
        ("Completed", {"fabric_state": "Completed", "fabric_status": "Insufficient Resources"}, "critical"),
    ],
)
def test_fabric_manager_that_was_stopped_where_the_fabric_works(
    first: str | None, changes: dict[str, Any], severity: str
) -> None:
    facts = facts_of(**changes)
    facts["gpus"][0]["fabric_state"] = first
    stopped = {"fabric_manager": "failed: nvidia-fabricmanager.service is inactive (result success)"}
    result = judge(facts, [], [], HealthOptions(), checks=stopped)
    assert ("fabric_manager", severity) in codes(result)
    assert (result["verdict"] == "critical") is (severity == "critical")


@pytest.mark.parametrize(
    "state", ["failed (result exit-code)", "failed (result success)", "inactive (result core-dump)"]
)
def test_fabric_manager_that_failed_is_critical_though_gpus_tell_that_they_have_joined(state: str) -> None:
    checks = {"fabric_manager": f"failed: nvidia-fabricmanager.service is {state}"}
    facts = facts_of(fabric_state="Completed", fabric_status="Success")
    assert codes(judge(facts, [], [], HealthOptions(), checks=checks)) == [("fabric_manager", "critical")]


def test_fabric_manager_that_does_not_run_is_told_with_its_version() -> None:
    def told(version: str | None, driver: str | None = "580.159.04") -> tuple[str, str]:
        checks = {"fabric_manager": "failed: it is inactive", "fabric_manager_version": version}
        facts = {**facts_of(), "driver_version": driver}
        (problem,) = judge(facts, [], [], HealthOptions(), checks=checks)["problems"]
        return problem["found"], problem["message"].partition("Next step: ")[2]

    read = "read 'journalctl -u nvidia-fabricmanager'; its version must be exactly that of the driver."
    assert told("580.95.05") == (
        "it is inactive, in version 580.95.05 where the driver has 580.159.04",
        "install Fabric Manager 580.159.04 and start it.",
    )
    assert told("580.159.04") == ("it is inactive, in version 580.159.04", read)
    assert told("580.159.04", None) == ("it is inactive, in version 580.159.04", read)
    assert told(None) == ("it is inactive", read)


def test_memory_of_dead_processes() -> None:
    result = judge(facts_of(), [], [], HealthOptions(), orphans={1: [41, 42]})
    assert codes(result) == [("process_without_owner", "warning")]
    assert result["problems"][0]["uuid"] == UUIDS[1] and "41, 42" in result["problems"][0]["found"]


# Judgement of the kernel's events and of DCGM


def judged(*events: Event, facts: dict[str, Any] | None = None, **options: Any) -> dict[str, Any]:
    return judge(facts or facts_of(), events, [], HealthOptions(**options), host="gpu01")


def test_what_is_wrong_with_a_gpu_that_no_job_gets_is_a_warning() -> None:
    """Hidden from the scheduler because it is broken, it would close the node of the others all the same."""
    for named in (UUIDS[1], UUIDS[1].upper()):
        result = judged(event(79), ignored_gpus=(named,))
        assert codes(result) == [("xid_79", "warning")]
        assert [gpu["verdict"] for gpu in result["gpus"]] == ["ok", "warning"]
    assert codes(judged(event(79), ignored_gpus=(UUIDS[0],))) == [("xid_79", "critical")]
    assert codes(judged(event(79), ignored_gpus=(UUIDS[1],), severities={"xid_79": "ignore"})) == []


def test_an_xid_is_about_the_gpu_at_its_address() -> None:
    result = judged(event(79, count=3, first=1.0, last=61.0, text="GPU has fallen off the bus."))
    assert (result["verdict"], result["reason"]) == ("critical", f"xid_79 {UUIDS[1][:12]}")
    assert [gpu["verdict"] for gpu in result["gpus"]] == ["ok", "critical"]
    (problem,) = result["problems"]
    assert (problem["code"], problem["action"], problem["expected"]) == ("xid_79", "reboot", "no Xid 79")
    assert problem["found"] == (
        "Xid 79 (the GPU fell off the bus) 3 times from 1970-01-01T00:00:01Z to 1970-01-01T00:01:01Z, saying: "
        "GPU has fallen off the bus"
    )
    assert result["xids"] == [
        {
            "code": "xid_79",
            "severity": "critical",
            "uuid": UUIDS[1],
            "pci_bus_id": "00000000:3C:00.0",
            "count": 3,
            "first_at": "1970-01-01T00:00:01Z",
            "last_at": "1970-01-01T00:01:01Z",
            "text": "GPU has fallen off the bus.",
        }
    ]


def test_an_xid_of_a_gpu_that_nobody_lists_any_more() -> None:
    result = judged(event(79, "0000:aa:00.0", uuid=UUIDS[7]), event(48, "0000:ab:00.0"), event(62, None))
    assert result["reason"] == f"xid_79 {UUIDS[7][:12]}; xid_48 00000000:AB:00.0; xid_62"
    assert [problem["pci_bus_id"] for problem in result["problems"]] == ["00000000:AA:00.0", "00000000:AB:00.0", None]
    assert [gpu["verdict"] for gpu in result["gpus"]] == ["ok", "ok"]
    assert "Node gpu01 device 00000000:AB:00.0: found" in result["problems"][1]["message"]


def test_faults_of_jobs_are_listed_and_no_problem() -> None:
    result = judged(*(event(number) for number in (13, 31, 43, 45)))
    assert (result["verdict"], result["problems"]) == ("ok", [])
    assert [entry["severity"] for entry in result["xids"]] == ["ignore"] * 4


@pytest.mark.parametrize("number", [13, 31])
def test_what_is_a_jobs_fault_and_comes_too_often_is_a_warning(number: int) -> None:
    facts = facts_of()
    bus = facts["gpus"][0]["pci_bus_id"]

    def judged(count: int, **options: Any) -> list[tuple[str, str]]:
        happened = event(number, bus, count=10 * count, incidents=count)
        return codes(judge(facts, [happened], [], HealthOptions(**options)))

    assert judged(1000) == []
    assert judged(3, xid_repeats_max=3) == []
    assert judged(4, xid_repeats_max=3) == [(f"xid_{number}", "warning")]
    # What follows each job that was ended, or that is told of no job, says nothing of the GPU.
    for harmless in (45, 63):
        assert codes(judge(facts, [event(harmless, bus, incidents=9)], [], HealthOptions(xid_repeats_max=3))) == []
    # What is critical once stays so.
    assert codes(judge(facts, [event(79, bus, count=4)], [], HealthOptions(xid_repeats_max=3))) == [
        ("xid_79", "critical")
    ]


def port(root: Path, name: str, state: str = "4: ACTIVE", layer: str = "InfiniBand", downed: str | None = "0") -> None:
    """A port as the kernel shows it; an adapter's folder is a link to its place on the bus."""
    device, number = name.split("/")
    place = root / "sys/devices/pci0000:00" / device
    (place / "ports" / number / "counters").mkdir(parents=True)
    folder = root / "sys/class/infiniband"
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / device).exists():
        (folder / device).symlink_to(place)
    for file, text in (("state", state), ("link_layer", layer), ("counters/link_downed", downed)):
        if text is not None:
            (place / "ports" / number / file).write_text(f"{text}\n")


def test_ports_of_infiniband_that_should_be_active(tmp_path: Path) -> None:
    def asked(**options: Any) -> tuple[str, list[str]]:
        told, findings = infiniband.infiniband_findings(HealthOptions(**options), tmp_path)
        return told, [f"{each.code}: {each.found}" for each in findings]

    assert asked() == ("skipped", [])
    assert asked(infiniband_ports=1) == ("0 of 0 ports active", ["infiniband_ports: 0"])
    port(tmp_path, "mlx5_0/1", downed="3")
    port(tmp_path, "mlx5_0/2", "1: DOWN", downed="7")
    port(tmp_path, "mlx5_1/1", "2: INIT", downed=None)
    port(tmp_path, "mlx5_2/1", layer="Ethernet", downed="99")
    assert asked(infiniband_ports=1) == ("1 of 3 ports active", [])
    assert asked(infiniband_ports=2)[1] == ["infiniband_ports: 1, mlx5_0 port 2 DOWN, mlx5_1 port 1 INIT"]
    # A virtual function that no machine uses is down, and has no cable.
    port(tmp_path, "mlx5_3/1", "1: DOWN", downed="99")
    (tmp_path / "sys/devices/pci0000:00/mlx5_3/device").mkdir()
    (tmp_path / "sys/devices/pci0000:00/mlx5_3/device/physfn").symlink_to("..")
    assert asked(infiniband_ports=1) == ("1 of 3 ports active", [])
    assert infiniband.roce_findings(HealthOptions(roce_ports=2), tmp_path)[1][0].found == "1"
    told, findings = infiniband.roce_findings(HealthOptions(roce_link_downed_max=4), tmp_path)
    # Of its link the counter of InfiniBand, which is 99 here, says nothing.
    assert (told, findings) == ("1 of 1 ports active", [])
    ndevs, net = tmp_path / "sys/devices/pci0000:00/mlx5_2/ports/1/gid_attrs/ndevs", tmp_path / "sys/class/net/eth7"
    for folder in (ndevs, net):
        folder.mkdir(parents=True)
    (ndevs / "0").write_text("eth7\n")
    (net / "carrier_down_count").write_text("5\n")
    (flapped,) = infiniband.roce_findings(HealthOptions(roce_link_downed_max=4), tmp_path)[1]
    assert (flapped.code, flapped.found) == ("roce_link_downed", "that the link of mlx5_2 port 1 went down 5 times")
    assert asked(infiniband_link_downed_max=7)[1] == []
    assert asked(infiniband_link_downed_max=3)[1] == [
        "infiniband_link_downed: that the link of mlx5_0 port 2 went down 7 times"
    ]


def test_a_link_that_goes_down_has_a_step_for_its_own_port(tmp_path: Path) -> None:
    port(tmp_path, "mlx5_0/2", downed="7")
    options = HealthOptions(infiniband_link_downed_max=3)
    _told, findings = infiniband.infiniband_findings(options, tmp_path)
    (problem,) = judge(facts_of(), [], [], options, host="gpu01", others=findings)["problems"]
    assert "reset its counters with 'perfquery -R -C mlx5_0 -P 2'." in problem["message"]


def test_a_missing_port_is_a_problem_of_the_node(tmp_path: Path) -> None:
    options = HealthOptions(infiniband_ports=2)
    _told, findings = infiniband.infiniband_findings(options, tmp_path)
    result = judge(facts_of(), [], [], options, host="gpu01", others=findings)
    assert codes(result) == [("infiniband_ports", "critical")]
    assert result["problems"][0]["message"] == (
        "Node gpu01: found 0. Expected: 2 active ports of InfiniBand. Next step: look at the cables and the subnet "
        "manager with 'ibstat', or correct infiniband_ports."
    )
    assert {gpu["verdict"] for gpu in result["gpus"]} == {"ok"}


def test_severities_of_xids_can_be_set_one_by_one() -> None:
    chosen = {"xid_31": "warning", "xid_94": "critical", "xid_79": "ignore"}
    result = judged(event(31), event(94), event(79), severities=chosen)
    assert codes(result) == [("xid_94", "critical"), ("xid_31", "warning")]
    assert [entry["severity"] for entry in result["xids"]] == ["warning", "critical", "ignore"]


@pytest.mark.parametrize(("fatal", "severity"), [(True, "critical"), (False, "warning"), (None, "warning")])
def test_nvswitch_errors_are_as_bad_as_they_say(fatal: bool | None, severity: str) -> None:
    result = judged(event(12028, "0000:05:00.0", kind="sxid", fatal=fatal))
    assert codes(result) == [("sxid_12028", severity)]
    assert result["reason"] == "sxid_12028 00000000:05:00.0"


def test_sub_codes_and_recovery_actions_are_judged_by_their_text() -> None:
    back = "GPU recovery action changed from 0x1 (GPU Reset Required) to 0x0 (None)"
    result = judged(event(149, fatal=True), event(149, "0000:3b:00.0", fatal=False), event(154, text=back))
    assert codes(result) == [("xid_149", "critical"), ("xid_149", "warning")]


def test_a_start_that_failed_counts_until_the_gpu_answers() -> None:
    failed = event(0, kind="init", text="(0x62:0x55:2477)")
    assert judged(failed)["problems"] == []
    lost = facts_of(status="lost", status_message="x")
    assert ("gpu_init_failed", "critical") in codes(judged(failed, facts=lost))


def test_dcgm_findings() -> None:
    findings = [
        dcgm_finding("dcgm_pcie", "warning", UUIDS[0], "a warning"),
        dcgm_finding("dcgm_x", "critical", None, "y"),
    ]
    result = judge(facts_of(), [], findings, HealthOptions())
    assert codes(result) == [("dcgm_x", "critical"), ("dcgm_pcie", "warning")]
    assert [gpu["verdict"] for gpu in result["gpus"]] == ["warning", "ok"]
    assert result["problems"][1]["pci_bus_id"] == "00000000:3B:00.0"


def test_the_reason_fits_into_nomads_meta() -> None:
    many = [event(number, f"0000:{bus:02x}:00.0", text="ä") for number in (48, 79, 95) for bus in range(64)]
    line = judged(*many, facts=facts_of(persistence_mode="Disabled"))["reason"]
    assert line.startswith("xid_48 00000000:00:00.0 ") and line.endswith(" ...")
    assert len(line) == 500 and line.isascii() and line.isprintable()
    warned = facts_of(persistence_mode="Disabled")
    short = judged(event(94), facts=warned)["reason"]
    assert short == f"persistence_off {UUIDS[1][:12]}; xid_94 {UUIDS[1][:12]}"
    assert judged(event(94), event(79), facts=warned)["reason"] == f"xid_79 {UUIDS[1][:12]}"


# Options


def test_defaults_as_recorded() -> None:
    assert_recorded("health-defaults", health.defaults())


def test_wrong_options_are_refused_as_recorded() -> None:
    wrong: dict[str, list[Any]] = {
        "timeout": [0, -1, None, "5", True, math.inf, math.nan],
        "dcgm_diag_timeout": [0, math.inf],
        "gpus": [-1, 1.5, True, "8"],
        "ecc_uncorrected_max": [-1, None],
        "ecc_corrected_max": [-1],
        "retired_pages_max": [-1, None],
        "pcie_width_min": [-1],
        "pcie_generation_min": [-1],
        "dcgm_diag_level": [0, 5, "1"],
        "dcgm": ["yes", 1, None],
        "path": [5],
        "throttle_reasons": ["x", [1], None],
        "severities": [[], {"xid_79": 1}, {1: "ignore"}, {"xid_79": "bad"}, {"xid_": "ignore"}, {"sxid_0": "ignore"}],
        "xid_since": ["yesterday", "nan", "", "20260101T000000Z", "2026-W01-4", "2026-01-01T00:00:00.5", "2026-01-01Z"],
        "unknown": [1],
    }
    told = {}
    for name, values in wrong.items():
        for value in values:
            with pytest.raises(ValueError, match="found") as error:
                HealthOptions.from_mapping({name: value})
            told[f"{name}: {value!r}"] = str(error.value)
    assert_recorded("health-refused", told)


@pytest.mark.parametrize(
    "mapping",
    [
        {"timeout": 0.001, "dcgm_diag_timeout": 0.001},
        {"gpus": 0, "ecc_uncorrected_max": 0, "ecc_corrected_max": 0, "pcie_width_min": 0, "pcie_generation_min": 0},
        *({"dcgm_diag_level": level} for level in (None, 1, 2, 3, 4)),
        {"severities": {"xid_1": "ignore", "sxid_999999": "warning", "dcgm_pcie": "critical", "gpu_lost": "ignore"}},
        {"temperature_gpu_max_c": -5, "path": None, "gpus": None, "xid_since": "0"},
    ],
)
def test_what_is_just_right_is_taken(mapping: dict[str, Any]) -> None:
    options = HealthOptions.from_mapping(mapping)
    assert {name: getattr(options, name) for name in mapping} == mapping


def test_options_of_a_file_on_the_node() -> None:
    given = {"gpus": 8, "timeout": 5, "throttle_reasons": ["hw_slowdown"], "severities": {"xid_94": "critical"}}
    options = HealthOptions.from_mapping(json.loads(json.dumps(given)))
    assert (options.gpus, options.timeout, options.throttle_reasons) == (8, 5.0, ("hw_slowdown",))
    assert HealthOptions.from_mapping({}) == HealthOptions()
    assert HealthOptions.from_mapping(json.loads(json.dumps(health.defaults()))) == HealthOptions()


@pytest.mark.parametrize(
    ("mapping", "words"),
    [
        ({"gpu": 8}, "found the unknown option gpu. Expected: one of gpus, path, timeout,"),
        ({"gpus": "8"}, "found gpus is '8'. Expected: a whole number."),
        ({"gpus": True}, "gpus is True"),
        ({"gpus": -1}, "gpus is -1. Expected: 0 or more"),
        ({"timeout": 0}, "timeout is 0. Expected: more than 0 seconds"),
        ({"timeout": None}, "timeout is None"),
        ({"timeout": float("inf")}, "timeout is inf. Expected: more than 0 seconds, and an end."),
        ({"timeout": float("nan")}, "timeout is nan"),
        ({"dcgm_diag_timeout": 0}, "dcgm_diag_timeout is 0. Expected: more than 0 seconds"),
        ({"dcgm": "yes"}, "Expected: true or false"),
        ({"throttle_reasons": "hw_slowdown"}, "Expected: a list of texts"),
        ({"throttle_reasons": [1]}, "Expected: a list of texts"),
        ({"severities": {"xid_79": 1}}, "Expected: a dictionary of texts"),
        ({"severities": {"xid_79": "fatal"}}, "Expected: one of ignore, warning, critical"),
        ({"severities": {"xid79": "ignore"}}, "the unknown code 'xid79'"),
        ({"severities": {"xid_*": "ignore"}}, "the unknown code 'xid_*'"),
        ({"dcgm_diag_level": 5}, "dcgm_diag_level is 5"),
        ({"xid_since": "yesterday"}, "xid_since is 'yesterday'. Expected: a time such as"),
        ({"xid_since": "nan"}, "xid_since is 'nan'"),
    ],
)
def test_wrong_options_are_refused(mapping: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match="Next step: ") as error:
        HealthOptions.from_mapping(mapping)
    assert words in str(error.value)


@pytest.mark.parametrize(
    "text",
    [
        *(
            "1767225600",
            "2026-01-01T00:00:00Z",
            "2026-01-01T01:00:00+01:00",
            "1767225600.0",
            "2026-01-01 00:00:00+00:00",
        ),
        *("2026-01-01T00Z", "2026-01-01t00:00z", "2026-01-01T00:00:00.000+00:00", "2026-01-01T00:00:00.000000Z"),
    ],
)
def test_times(text: str) -> None:
    assert health_options.seconds_of(text) == 1767225600.0


def test_a_time_without_zone_is_local(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TZ", "Etc/GMT-2")
    time.tzset()
    try:
        assert health_options.seconds_of("2026-01-01T02:00:00") == 1767225600.0
    finally:
        monkeypatch.undo()
        time.tzset()


def test_every_code_has_a_valid_action_and_every_reason_is_a_code() -> None:
    assert {kind.action for kind in health.PROBLEMS.values()} <= set(xid.ACTIONS)
    assert set(nvidia_smi.REASONS) <= set(health.PROBLEMS)


# The kernel log


class Clock:
    """Time that passes only where somebody waits."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now

    time = monotonic
    CLOCK_MONOTONIC_RAW = 4

    def clock_gettime(self, _clock: int) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def programs(tmp_path: Path) -> Path:
    """A folder for programs, to be searched alone; and a root without anything."""
    folder = tmp_path / "bin"
    folder.mkdir()
    return folder


def program(folder: Path, name: str, script: str) -> None:
    path = folder / name
    path.write_text(f"#!/bin/sh\n{script}\n", encoding="utf-8")
    path.chmod(0o755)


def entry(message: Any, at: float = 1000.5, **fields: str) -> str:
    return json.dumps(
        {"MESSAGE": message, "__REALTIME_TIMESTAMP": str(int(at * 1e6)), "SYSLOG_FACILITY": "0", **fields}
    )


def printing(text: str, code: int = 0) -> str:
    return f"cat <<'END'\n{text}\nEND\nexit {code}"


def read(programs: Path, since: float = 0.0, timeout: float = 300.0) -> tuple[str, list[Event]]:
    return kernel_log.kernel_events(since, timeout, programs.parent, str(programs))


def runs_for(programs: Path, monkeypatch: pytest.MonkeyPatch, seconds: float, drift: float = 0.0) -> None:
    """Let the kernel have started so long ago, by NTP; by its own clock, which stamps messages, C(drift) less."""
    (programs.parent / "proc").mkdir(exist_ok=True)
    (programs.parent / "proc/uptime").write_text(f"{seconds:.2f} 5.00\n", encoding="ascii")
    clocks = {time.CLOCK_MONOTONIC_RAW: seconds - drift, time.CLOCK_MONOTONIC: seconds, time.CLOCK_BOOTTIME: seconds}
    monkeypatch.setattr(kernel_log.time, "clock_gettime", lambda clock: clocks[clock])


@pytest.mark.parametrize(
    ("after", "partial"), [(0.0, False), (kernel_log.PARTIAL_S - 60, False), (kernel_log.PARTIAL_S + 60, True)]
)
@pytest.mark.parametrize("source", ["journal", "dmesg"])
def test_a_log_that_has_lost_its_beginning_is_partial(
    programs: Path, monkeypatch: pytest.MonkeyPatch, source: str, after: float, partial: bool
) -> None:
    booted = time.time() - 100_000
    runs_for(programs, monkeypatch, 100_000)
    if source == "journal":
        lines = [entry("booted", booted + after), entry(XID_79, booted + 90_000)]
        program(programs, "journalctl", printing("\n".join(lines)))
    else:
        program(programs, "dmesg", printing(f"<6>[{after:12.6f}] booted\n<3>[90000.000000] {XID_79}"))
    told, events = read(programs)
    assert [each.code for each in events] == ["xid_79"]
    assert told.startswith(f"{source}, partial: its first message is of ") is partial
    assert (told == source) is not partial


@pytest.mark.parametrize(
    ("journal", "dmesg", "source"),
    [
        (5000, 0, "dmesg"),
        (5000, 4000, "dmesg, partial"),
        (4000, 5000, "journal, partial"),
        (5000, None, "journal, partial"),
        (0, 0, "journal"),
    ],
)
def test_of_partial_logs_the_one_that_begins_earlier_counts(
    programs: Path, monkeypatch: pytest.MonkeyPatch, journal: int, dmesg: int | None, source: str
) -> None:
    booted = time.time() - 100_000
    runs_for(programs, monkeypatch, 100_000)
    program(programs, "journalctl", printing(entry("booted", booted + journal)))
    program(programs, "dmesg", "exit 1")
    if dmesg is not None:
        program(programs, "dmesg", printing(f"<6>[{dmesg:12.6f}] booted\n<3>[90000.000000] {XID_79}"))
    (programs.parent / "dev").mkdir()
    (programs.parent / "dev/kmsg").write_text(f"6,1,0,-;booted\n3,2,90000000000,-;{XID_79}\n")
    told, events = read(programs)
    assert told.partition(": ")[0].removesuffix(" its first message is of") == source
    assert [each.code for each in events] == (["xid_79"] if source.startswith("dmesg") else [])


def test_the_journal_is_asked_first(programs: Path) -> None:
    program(
        programs, "journalctl", f'echo "$LC_ALL|$*" >"$0.call"\n{printing(entry("booted") + chr(10) + entry(XID_79))}'
    )
    program(programs, "dmesg", 'echo called >"$0.call"')
    source, events = read(programs)
    assert (source, [(one.code, one.pci_bus_id, one.first) for one in events]) == (
        "journal",
        [("xid_79", "0000:3b:00.0", 1000.5)],
    )
    asked = (programs / "journalctl.call").read_text(encoding="utf-8").strip()
    assert asked == "C|--dmesg --boot --output=json --output-fields=MESSAGE,SYSLOG_FACILITY --no-pager"
    assert not (programs / "dmesg.call").exists()


def test_a_message_that_is_not_utf_8_is_a_list_of_numbers(programs: Path) -> None:
    program(programs, "journalctl", printing(entry(list(XID_79.replace("python", "p\xe4").encode("latin-1")))))
    assert [one.code for one in read(programs)[1]] == ["xid_79"]


def test_who_writes_to_the_log_is_not_the_kernel(programs: Path) -> None:
    program(programs, "journalctl", printing(entry(XID_79, SYSLOG_FACILITY="1")))
    assert read(programs) == ("journal", [])


def test_damaged_entries_are_passed_over(programs: Path) -> None:
    lines = [entry(XID_79)[:-9], "{NVRM: }", entry(None) + "NVRM: ", entry(["NVRM: "]), entry(XID_79)]
    program(programs, "journalctl", printing("\n".join(lines)))
    source, events = read(programs)
    assert (source, [one.count for one in events]) == ("journal", [1])


RAW = f"<6>[    0.000000] Linux version 6.12\n<3>[  100.250000] {XID_79}\n<11>[  101.000000] {XID_79}"


@pytest.mark.parametrize(
    "journal",
    [
        "echo '-- No entries --'",
        "echo 'No journal files were found.'; exit 1",
        f"{printing(entry(XID_79.replace(': 79', ': 48')))}\nexit 1",
        None,
    ],
)
def test_dmesg_is_asked_where_the_journal_knows_nothing(
    programs: Path, monkeypatch: pytest.MonkeyPatch, journal: str | None
) -> None:
    if journal:
        program(programs, "journalctl", journal.replace("exit 0\nexit 1", "exit 1"))
    program(programs, "dmesg", f'echo "$*" >"$0.call"\n{printing(RAW)}')
    runs_for(programs, monkeypatch, 500)
    before = time.time()
    source, (found,) = read(programs)
    assert (source, found.code, found.count) == ("dmesg", "xid_79", 1)
    assert before - 400 <= found.first <= time.time() - 399
    assert (programs / "dmesg.call").read_text(encoding="utf-8") == "-r\n"


def test_kmsg_is_read_last(programs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs_for(programs, monkeypatch, 500)
    before = time.time()
    program(programs, "dmesg", "echo 'dmesg: Operation not permitted' >&2; exit 1")
    (programs.parent / "dev").mkdir()
    escaped = XID_79.replace("python", "p\\x0aq")
    text = f"6,0,0,-;Linux version 6.12\n3,1,100250000,-;{escaped}\n SUBSYSTEM=pci\n11,2,1,-;{XID_79}\n"
    (programs.parent / "dev/kmsg").write_text(text, encoding="utf-8")
    source, (found,) = read(programs)
    assert (source, found.code, found.count) == ("kmsg", "xid_79", 1)
    assert before - 399.75 <= found.first <= time.time() - 399.75


@pytest.mark.parametrize("drift", [259, -400])
@pytest.mark.parametrize("source", ["dmesg", "kmsg"])
def test_stamps_are_by_a_clock_that_nobody_steers(
    programs: Path, monkeypatch: pytest.MonkeyPatch, source: str, drift: int
) -> None:
    uptime = 100 * 86400
    runs_for(programs, monkeypatch, uptime, drift)
    ages = {48: 120, 79: 2}
    lines = [(0.0, "Linux version 6.12")]
    lines += [(uptime - drift - age, XID_79.replace(": 79", f": {number}")) for number, age in ages.items()]
    if source == "dmesg":
        program(programs, "dmesg", printing("\n".join(f"<3>[{after:12.6f}] {message}" for after, message in lines)))
    else:
        (programs.parent / "dev").mkdir()
        text = "".join(f"3,{number},{after * 1e6:.0f},-;{said}\n" for number, (after, said) in enumerate(lines))
        (programs.parent / "dev/kmsg").write_text(text, encoding="utf-8")
    begun = time.time() - 60
    told, (found,) = read(programs, since=begun)
    assert (told, found.code) == (source, "xid_79")
    assert begun + 57 <= found.first <= time.time() - 2


def test_kmsg_of_a_kernel_that_has_no_more_to_say_does_not_block(programs: Path) -> None:
    (programs.parent / "dev").mkdir()
    os.mkfifo(programs.parent / "dev/kmsg")
    descriptor = os.open(programs.parent / "dev/kmsg", os.O_RDWR)
    try:
        os.write(descriptor, f"3,1,100250000,-;{XID_79}\n".encode())
        source, events = read(programs)
    finally:
        os.close(descriptor)
    assert (source, [one.code for one in events]) == ("kmsg", ["xid_79"])


def test_no_source_at_all_is_told_with_every_reason(programs: Path) -> None:
    program(programs, "journalctl", "echo 'Hint: You are currently not seeing messages from the system.' >&2")
    program(programs, "dmesg", "echo 'dmesg: read kernel buffer failed: Operation not permitted' >&2; exit 1")
    source, events = read(programs)
    assert events == []
    assert source.startswith("unreadable: journal has no message of the kernel (Hint: You are")
    assert "exit code 1 (dmesg: read kernel buffer failed: Operation not permitted)" in source
    assert source.endswith("dev/kmsg: No such file or directory")


def test_a_program_that_hangs_is_killed(programs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program(programs, "journalctl", "echo $$; exec sleep 600")
    lines = command_lines.lines_of([str(programs / "journalctl"), "-x"], 300)
    pid = int(next(lines))
    now = time.monotonic
    monkeypatch.setattr(kernel_log.time, "monotonic", lambda: now() + 300)
    with pytest.raises(command_lines.SourceError, match=r"journalctl -x did not end within 300 s"):
        next(lines)
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_a_source_that_hangs_leaves_time_for_the_others(programs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    given = []

    def lines(argv: list[str], timeout: float) -> Iterator[bytes]:
        given.append((Path(argv[0]).name, timeout))
        clock.sleep(timeout + 6)
        raise command_lines.SourceError(f"{timeout:g} s")
        yield b""

    def kmsg(path: Path, timeout: float) -> Iterator[bytes]:
        return lines([str(path)], timeout)

    for name in ("journalctl", "dmesg"):
        program(programs, name, "exit 1")
    monkeypatch.setattr(kernel_log, "time", clock)
    monkeypatch.setattr(kernel_log, "lines_of", lines)
    monkeypatch.setattr(kernel_log, "_kmsg_chunks", kmsg)
    source, _events = read(programs, timeout=40)
    assert given == [("journalctl", 20.0), ("dmesg", 7.0), ("kmsg", 0.5)]
    assert source == "unreadable: 20 s; 7 s; 0.5 s"
    del given[:]
    read(programs, timeout=8)
    # Late already, and each is asked all the same.
    assert given == [("journalctl", 4.0), ("dmesg", 0.1), ("kmsg", 0.1)]


def test_a_program_that_fails_says_how(programs: Path) -> None:
    program(programs, "journalctl", 'echo "$LC_ALL"; echo two >&2; printf three; exit 3')
    lines = command_lines.lines_of([str(programs / "journalctl"), "-x"], 300)
    assert [next(lines), next(lines), next(lines)] == [b"C", b"two", b"three"]
    with pytest.raises(command_lines.SourceError, match=r"/journalctl -x ended with exit code 3$"):
        next(lines)


def test_a_program_that_closes_its_output_and_stays_is_killed(programs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program(programs, "journalctl", "echo $$; exec >&- 2>&-; exec sleep 600")
    lines = command_lines.lines_of([str(programs / "journalctl")], 300)
    pid = int(next(lines))
    monkeypatch.setattr(commands.subprocess.Popen, "wait", wait_no_longer(commands.subprocess.Popen.wait))
    with pytest.raises(command_lines.SourceError, match="did not end within 300 s"):
        next(lines)
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def wait_no_longer(wait: Any) -> Any:
    """Popen.wait with a second in place of minutes."""

    def shortened(process: Any, timeout: float) -> Any:
        assert timeout <= 300
        return wait(process, min(timeout, 1.0))

    return shortened


RAW_LINES = {
    "<0>[    1.500000] kernel": (101.5, "kernel"),
    "<7>[ 2.0]  blanks before it": (102.0, "blanks before it"),
    "<8>[    1.0] user": None,
    "<30>[    1.0] daemon": None,
    "<6>[    3.000000][ T1] caller": (103.0, "caller"),
    "<6>[    3.000000] [ C10] caller": (103.0, "caller"),
    "<6>no time": (100.0, "no time"),
    "6,1,2500000,-;kmsg": (102.5, "kmsg"),
    "8,1,2500000,-;user": None,
    "6,1,2500000,-,caller=T1;more\\x09fields": (102.5, "more\tfields"),
}


@pytest.mark.parametrize("line", RAW_LINES)
def test_lines_of_the_kernel(line: str) -> None:
    seen = kernel_log._Seen()
    expected = RAW_LINES[line]
    assert list(kernel_log.kernel_records([line.encode()], seen, 100.0)) == ([expected] if expected else [])
    assert (seen.records, seen.said) == (1 if expected else 0, "")


def test_what_is_no_line_of_the_kernel_is_remembered() -> None:
    seen = kernel_log._Seen()
    lines = [b" SUBSYSTEM=pci", b"dmesg: \x1b[1mno\xff", b"  "]
    assert list(kernel_log.kernel_records(lines, seen, 0.0)) == []
    assert (seen.records, seen.said) == (0, "dmesg:  [1mno\ufffd")
    assert list(kernel_log.journal_records([b"-- No \xff entries --", b""], seen)) == []
    assert seen.said == "-- No \ufffd entries --"


@pytest.mark.parametrize(
    ("text", "records"),
    [
        (entry(XID_79, 12.5), [(12.5, XID_79)]),
        (entry("booted"), []),
        (entry("SXid (x"), [(1000.5, "SXid (x")]),
        (entry(XID_79).replace(', "SYSLOG_FACILITY": "0"', ""), [(1000.5, XID_79)]),
        (entry(XID_79, SYSLOG_FACILITY="3"), []),
        (entry([78, 86, 255]), [(1000.5, "NV\ufffd")]),
        (entry(XID_79).replace("__REALTIME", "x"), []),
        (entry(XID_79).replace('"__REALTIME_TIMESTAMP": "1000500000"', '"__REALTIME_TIMESTAMP": null'), []),
        (entry(XID_79)[:-1], []),
    ],
)
def test_entries_of_the_journal(text: str, records: list[tuple[float, str]]) -> None:
    seen = kernel_log._Seen()
    # journalctl prints hints for people between entries.
    assert list(kernel_log.journal_records([b"-- Boot 1 --", text.encode()], seen)) == records
    assert (seen.records, seen.said) == (1, "-- Boot 1 --")


def test_kmsg_goes_on_behind_what_the_kernel_overwrote(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answers: list[Any] = [b"1", BrokenPipeError(), b"2", BlockingIOError(), b"3"]

    def read(_descriptor: int, _size: int) -> bytes:
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return bytes(answer)

    (tmp_path / "kmsg").touch()
    with monkeypatch.context() as patch:
        patch.setattr(commands.os, "read", read)
        found = list(kernel_log._kmsg_chunks(tmp_path / "kmsg", 300))
    assert (found, answers) == ([b"1", b"2"], [b"3"])
    clock = Clock()
    monkeypatch.setattr(kernel_log, "time", clock)
    chunks = kernel_log._kmsg_chunks(tmp_path / "kmsg", 300)
    (tmp_path / "kmsg").write_bytes(b"x")
    assert next(chunks) == b"x"
    clock.sleep(300.5)
    with pytest.raises(command_lines.SourceError, match=rf"reading {tmp_path}/kmsg did not end within 300 s"):
        next(chunks)


@pytest.mark.parametrize(("text", "seconds"), [("500.25 1.0\n", 500.25), ("", None), ("x", None), (None, None)])
def test_when_the_kernel_started(tmp_path: Path, text: str | None, seconds: float | None) -> None:
    if text is not None:
        (tmp_path / "proc").mkdir()
        (tmp_path / "proc/uptime").write_text(text, encoding="ascii")
    before = time.time()
    booted = kernel_log.boot_time(tmp_path)
    assert booted == 0.0 if seconds is None else before - seconds <= booted <= time.time() - seconds


def test_programs_are_looked_for_beside_the_path_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Units of systemd and sudo have a path of their own."""
    for folder in ("path", "system"):
        (tmp_path / folder).mkdir()
    program(tmp_path / "system", "dcgmi", "")
    monkeypatch.setenv("PATH", str(tmp_path / "path"))
    monkeypatch.setattr(commands, "SYSTEM_PATH", str(tmp_path / "system"))
    assert commands.program_path("dcgmi", None) == str(tmp_path / "system/dcgmi")
    assert commands.program_path("dcgmi", str(tmp_path / "path")) is None
    program(tmp_path / "path", "dcgmi", "")
    assert commands.program_path("dcgmi", None) == str(tmp_path / "path/dcgmi")


def test_lines_of_any_length_and_of_any_cut() -> None:
    def chunks() -> Iterator[bytes]:
        yield b"one\ntw"
        yield b"o\n"
        for _ in range(100):
            yield b"x" * 10_000
        yield b"\nthree"

    first, second, long, last = command_lines.lines_in(chunks())
    assert (first, second, last) == (b"one", b"two", b"three")
    assert len(long) <= command_lines.MAX_LINE_BYTES + 10_000


# DCGM. The shapes are those of dcgmi's source; no recording of a sick GPU could be had.

DISCOVERY = f"""2 GPUs found.
| GPU ID | Device Information                                         |
| 0      | Name: NVIDIA H100 80GB HBM3                                |
|        | PCI Bus ID: 00000000:3B:00.0                               |
|        | Device UUID: {UUIDS[1]}              |
| 1      | Name: NVIDIA H100 80GB HBM3                                |
|        | Device UUID: {UUIDS[0]}              |
"""


def dcgm_health(overall: str, **groups: Any) -> str:
    return json.dumps({"header": ["Health Monitor Report"], "body": {"Overall Health": {"value": overall}, **groups}})


def sick(**systems: str) -> dict[str, Any]:
    errors = {
        system.replace("_", " "): {"value": value, "overflow": ["Detected", "it."]} for system, value in systems.items()
    }
    return {"value": "Failure", "children": {"Errors": {"children": errors}}}


def test_dcgm_numbers_gpus_on_its_own() -> None:
    assert dcgm_source.parse_dcgm_discovery(DISCOVERY) == {"0": UUIDS[1], "1": UUIDS[0]}


def test_dcgm_health() -> None:
    uuids = {"0": UUIDS[1]}
    assert dcgm_source.parse_dcgm_health(dcgm_health("Healthy"), uuids) == []
    gpu = {"children": {"0": sick(PCIe_system="Warning", Memory_system="Failure", SM_system="Healthy")}}
    switch = {"children": {"4": sick(NVLINK_system="Failure")}}
    assert dcgm_source.parse_dcgm_health(dcgm_health("Failure", GPU=gpu, Switch=switch), uuids) == [
        dcgm_finding("dcgm_pcie", "warning", UUIDS[1], "Warning of DCGM's PCIe system: Detected it."),
        dcgm_finding("dcgm_memory", "critical", UUIDS[1], "Failure of DCGM's Memory system: Detected it."),
        dcgm_finding("dcgm_nvlink", "critical", None, "Failure of DCGM's NVLINK system for Switch 4: Detected it."),
    ]
    assert [found.code for found in dcgm_source.parse_dcgm_health(dcgm_health("Warning"), {})] == ["dcgm_health"]


IMEX = (
    "IMEX daemon status is -3 (not READY)\nCheck IMEX installation, configuration, domain and daemon status, and "
    "network connectivity."
)
DOWN = "GPU 0's NvLink link 3 is currently down"


@pytest.mark.parametrize(
    ("said", "severity"),
    [
        ([IMEX], "warning"),
        (["IMEX domain status is NOT_READY", IMEX], "warning"),
        ([IMEX, DOWN], "critical"),
        (["Link down", "IMEX daemon status is -3"], "critical"),
        ([DOWN], "critical"),
        ([], "critical"),
    ],
)
def test_imex_that_is_not_ready_is_no_reason_to_close_a_node(said: list[str], severity: str) -> None:
    """NVIDIA/NVSentinel#1471: told on nodes where none runs. It matters to NVLink between nodes only."""
    # dcgmi has one text of all, in pieces that fit into its table.
    errors = {"NVLINK system": {"value": "Failure", "overflow": textwrap.wrap(", ".join(said), 54)}}
    gpu = {"children": {"0": {"value": "Failure", "children": {"Errors": {"children": errors}}}}}
    (found,) = dcgm_source.parse_dcgm_health(dcgm_health("Failure", GPU=gpu), {"0": UUIDS[1]})
    assert (found.code, found.severity) == ("dcgm_nvlink", severity)
    assert ", ".join(said).replace("\n", " ") in found.found
    assert ("(IMEX serves NVLink between nodes only)" in found.found) is (severity == "warning")
    (result,) = dcgm_source.parse_dcgm_diag(results({"status": "Fail", "gpu_id": "0", "warnings": said}), {}, 1)
    assert result.severity == severity


@pytest.mark.parametrize("old", [False, True])
def test_dcgm_diag(old: bool) -> None:
    passed: dict[str, Any] = (
        {"gpu_id": "0", "status": "Pass"} if old else {"entity_group": "GPU", "entity_id": 0, "status": "Pass"}
    )
    failed = dict(passed, status="Fail", warnings="broken" if old else [{"warning": "broken", "error_id": 1}])
    tests = [
        {"name": "Memory", "results": [passed, failed]},
        {"name": "PCIe", "results": [dict(passed, status="Skip"), None]},
        None,
    ]
    text = json.dumps({"DCGM Diagnostic": {"test_categories": [{"category": "Hardware", "tests": tests}]}})
    assert list(dcgm_source.parse_dcgm_diag(f"Running ...\n{text}", {"0": UUIDS[0]}, 2)) == [
        dcgm_finding("dcgm_memory", "critical", UUIDS[0], "Fail of DCGM's Memory: broken")
    ]
    with pytest.raises(ValueError, match="in use"):
        list(dcgm_source.parse_dcgm_diag(json.dumps({"DCGM Diagnostic": {"runtime_error": "GPUs are in use"}}), {}, 2))


def results(*found: dict[str, Any]) -> str:
    tests = [{"name": "PCIe", "results": list(found)}, {"name": "none"}]
    return json.dumps({"header": 1, "DCGM Diagnostic": {"test_categories": [{"tests": tests}, {}]}})


@pytest.mark.parametrize(
    ("result", "findings"),
    [
        ({"status": "Pass"}, []),
        ({"status": "Warn"}, [dcgm_finding("dcgm_pcie", "warning", None, "Warn of DCGM's PCIe")]),
        (
            {"status": "FAIL", "gpu_ids": "0, 1", "warnings": None},
            [
                dcgm_finding("dcgm_pcie", "critical", UUIDS[0], "FAIL of DCGM's PCIe"),
                dcgm_finding("dcgm_pcie", "critical", None, "FAIL of DCGM's PCIe for GPU 1"),
            ],
        ),
        (
            {"status": "Fail", "gpu_id": 0, "warnings": ["one", {"warning": "two"}, {"error_id": 3}]},
            [dcgm_finding("dcgm_pcie", "critical", UUIDS[0], "Fail of DCGM's PCIe: one two")],
        ),
        (
            {"status": "Fail", "entity_group": "Switch", "entity_id": 0, "gpu_id": 9, "warnings": "x\n y\x1b"},
            [dcgm_finding("dcgm_pcie", "critical", None, "Fail of DCGM's PCIe for Switch 0: x y")],
        ),
        (
            {"status": "Fail", "entity_group": "CPU", "entity_id": "0", "warnings": "z" * 400},
            [dcgm_finding("dcgm_pcie", "critical", None, f"Fail of DCGM's PCIe for CPU 0: {'z' * 300}")],
        ),
    ],
)
def test_results_of_dcgm_diag(result: dict[str, Any], findings: list[Finding]) -> None:
    assert list(dcgm_source.parse_dcgm_diag(results(result), {"0": UUIDS[0]}, 1)) == findings


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "no output"),
        ("  \n", "no output"),
        ("Error: no host engine\n", "Error: no host engine"),
        ("}{", "}{"),
        ("e" * 300, "e" * 200),
        ('{"a": {}}', "an answer without tests"),
        ('{"a": {"runtime_error": "in use"}, "b": {"runtime_error": 7}}', "in use; 7"),
        ('{"a": {"test_categories": []}}', "an answer in which no test was run"),
        (results(), "an answer in which no test was run"),
        (results({}, {"status": "Skip"}, {"status": "NotRun"}), "an answer in which no test was run"),
    ],
)
def test_dcgm_diag_without_tests_is_told(text: str, words: str) -> None:
    with pytest.raises(ValueError, match="^" + re.escape(words) + "$"):
        list(dcgm_source.parse_dcgm_diag(text, {}, 1))


def categories(software: str, pcie: str, memory: str) -> str:
    """An answer of DCGM 4 at level 2, on a card that its tests may not know."""
    parts = {"Deployment": {"software": software}, "Integration": {"pcie": pcie}, "Hardware": {"memory": memory}}
    return json.dumps({"DCGM Diagnostic": {"test_categories": [
        {"category": category, "tests": [
            {"name": name, "results": [{"entity_group": "GPU", "entity_id": 0, "status": status}]}
            for name, status in tests.items()
        ]}
        for category, tests in parts.items()
    ]}})  # fmt: skip


def test_what_any_card_passes_is_no_diagnosis_above_level_1(programs: Path) -> None:
    passed = categories("Pass", "Skip", "Skip")
    assert list(dcgm_source.parse_dcgm_diag(passed, {}, 1)) == []
    with pytest.raises(ValueError, match=r"^an answer in which no test of a GPU was run$"):
        list(dcgm_source.parse_dcgm_diag(passed, {}, 2))
    assert list(dcgm_source.parse_dcgm_diag(categories("Pass", "Skip", "Pass"), {}, 2)) == []
    # Where the software is wrong, DCGM skips the others, and both are told.
    program(programs, "dcgmi", 'if [ "$1" = diag ]; then\n' + printing(categories("Fail", "Skip", "Skip"), 226)
            + "\nfi\n" + printing(dcgm_health("Healthy")))  # fmt: skip
    state, (found,) = dcgm(programs, dcgm_diag_level=2)
    assert (state, found.code) == ("failed: diag -r 2 -j: an answer in which no test of a GPU was run", "dcgm_software")


@pytest.mark.parametrize("body", ["[]", '{"body": []}', '{"body": {}}', '{"body": {"Overall Health": "Healthy"}}'])
def test_dcgm_health_without_a_verdict_is_told(body: str) -> None:
    with pytest.raises(ValueError, match=r"an answer without Overall Health|no output|\[\]"):
        dcgm_source.parse_dcgm_health(body, {})


def test_odd_answers_of_dcgm_health() -> None:
    empty = {"GPU": {"children": {"0": {}, "1": {"children": {}}, "2": {"children": {"Errors": {}}}}}}
    assert dcgm_source.parse_dcgm_health(dcgm_health("Healthy", **empty), {}) == []
    bare = {"children": {"0": {"children": {"Errors": {"children": {"SM system": {"value": "Fail"}}}}}}}
    assert dcgm_source.parse_dcgm_health(dcgm_health("Fail", GPU=bare), {"0": UUIDS[0]}) == [
        dcgm_finding("dcgm_sm", "critical", UUIDS[0], "Fail of DCGM's SM system")
    ]
    assert dcgm_source.parse_dcgm_health(dcgm_health("Failure"), {}) == [
        dcgm_finding("dcgm_health", "critical", None, "Failure of DCGM's health")
    ]


@pytest.mark.parametrize(
    ("name", "code"),
    [
        ("PCIe system", "dcgm_pcie"),
        ("NVLINK", "dcgm_nvlink"),
        ("Power & more!", "dcgm_power_more"),
        ("a_b", "dcgm_a_b"),
    ],
)
def test_codes_of_dcgm(name: str, code: str) -> None:
    assert dcgm_source.dcgm_code(name) == code
    assert HealthOptions(severities={code: "ignore"})


def dcgm(programs: Path, **options: Any) -> tuple[str, list[Finding]]:
    return dcgm_source.dcgm_findings(HealthOptions(timeout=300, **options), str(programs))


def test_dcgm_is_asked_where_it_is_installed(programs: Path) -> None:
    assert dcgm(programs) == ("not_installed", [])
    answer = dcgm_health("Failure", GPU={"children": {"1": sick(Power_system="Failure")}})
    program(programs, "dcgmi", (
        'echo "$*" >>"$0.calls"\nif [ "$1" = discovery ]; then\n' + printing(DISCOVERY) + "\nfi\n" + printing(answer)
    ))  # fmt: skip
    state, (found,) = dcgm(programs)
    assert (state, found.code, found.uuid) == ("ok", "dcgm_power", UUIDS[0])
    calls = (programs / "dcgmi.calls").read_text(encoding="utf-8").splitlines()
    assert sorted(calls) == ["discovery -l", "health -c -j"]
    assert dcgm(programs, dcgm=False) == ("skipped", [])


def test_dcgm_diag_runs_only_when_asked_for(programs: Path) -> None:
    report = {"DCGM Diagnostic": {"test_categories": [{"tests": [{"name": "PCIe", "results": [{"status": "Fail"}]}]}]}}
    program(programs, "dcgmi", (
        'echo "$*" >>"$0.calls"\nif [ "$1" = diag ]; then\n' + printing(json.dumps(report), 226) + "\nfi\n"
        + printing(dcgm_health("Healthy"))
    ))  # fmt: skip
    assert dcgm(programs) == ("ok", [])
    state, (found,) = dcgm(programs, dcgm_diag_level=2)
    assert (state, found.code, found.uuid) == ("ok", "dcgm_pcie", None)
    assert "diag -r 2 -j" in (programs / "dcgmi.calls").read_text(encoding="utf-8").splitlines()


@pytest.mark.parametrize(
    ("script", "words"),
    [
        (
            "echo 'Error: Health watches not enabled. Please enable watches.'; exit 1",
            "health -c -j: Error: Health watches not",
        ),
        ("echo '{\"body\": {}}'", "an answer without Overall Health"),
        ("echo '{\"body\": {'", "health -c -j: "),
        ("sleep 60", "health -c -j: no answer within 0.5 s"),
    ],
)
def test_dcgm_that_cannot_answer_is_told(programs: Path, script: str, words: str) -> None:
    program(programs, "dcgmi", script)
    limit = 0.5 if script == "sleep 60" else 300
    state, findings = dcgm_source.dcgm_findings(HealthOptions(timeout=limit), str(programs))
    assert findings == []
    assert state.startswith("failed: ") and words in state


# How long it may take


@pytest.mark.parametrize(
    ("options", "seconds"),
    [
        ({}, 5 * 70 + 1),
        ({"timeout": 8, "dcgm_diag_timeout": 100}, 5 * 18 + 1),
        ({"timeout": 8, "dcgm_diag_timeout": 100, "dcgm_diag_level": 1}, 5 * 18 + 1 + 110),
        ({"timeout": 8, "dcgm_diag_timeout": 100, "dcgm_diag_level": 1, "dcgm": False}, 5 * 18 + 1),
    ],
)
def test_the_longest_probe_is_known(options: dict[str, Any], seconds: float) -> None:
    chosen = HealthOptions(**options)
    assert health.longest_probe(chosen) == seconds
    health.refuse_longer(chosen, seconds)
    with pytest.raises(ValueError, match=f"a probe may take {seconds:g} s. Expected: at most {seconds - 1:g} s"):
        health.refuse_longer(chosen, seconds - 1)


@pytest.mark.parametrize(
    ("level", "cause"), [(None, r"\(timeout\)"), (4, r"\(timeout, dcgm_diag_level and dcgm_diag_timeout\)")]
)
def test_what_makes_a_probe_long_is_told(level: int | None, cause: str) -> None:
    with pytest.raises(ValueError, match=f"found options {cause} with which"):
        health.refuse_longer(HealthOptions(dcgm_diag_level=level), 300)


@pytest.mark.parametrize("level", [None, 3])
def test_no_probe_takes_longer_though_everything_hangs(
    programs: Path, monkeypatch: pytest.MonkeyPatch, level: int | None
) -> None:
    clock = Clock()

    def hang(argvs: list[list[str]], timeout: float) -> list[commands.Command]:
        clock.sleep(timeout + commands.GRACE)
        return [commands.Command(tuple(argv), None, timed_out=True, limit=timeout) for argv in argvs]

    def collect(_subsets: Any, *, timeout: float, **_more: Any) -> dict[str, Any]:
        clock.sleep(timeout + commands.GRACE)
        return facts

    def lines(_argv: Any, timeout: float) -> Iterator[bytes]:
        clock.sleep(timeout + commands.KILL_WAIT)
        raise command_lines.SourceError("hangs")
        yield b""

    def kmsg(_path: Path, timeout: float) -> Iterator[bytes]:
        return lines([], timeout)

    for name in ("dcgmi", "journalctl", "dmesg", "systemctl"):
        program(programs, name, "exit 1")
    facts = with_processes(programs.parent, 11)
    (programs.parent / "dev").mkdir()
    (programs.parent / "dev/nvidia-nvswitch0").touch()
    for source in (kernel_log, health_node, probing):
        monkeypatch.setattr(source, "time", clock)
    monkeypatch.setattr(probing, "collect", collect)
    for source in (dcgm_source, health_node):
        monkeypatch.setattr(source, "run_commands", hang)
    monkeypatch.setattr(kernel_log, "lines_of", lines)
    monkeypatch.setattr(kernel_log, "_kmsg_chunks", kmsg)
    options = HealthOptions(
        timeout=8, dcgm_diag_timeout=900, dcgm_diag_level=level, acknowledged_file=str(programs / "none")
    )
    health.probe(options, root=str(programs.parent), search=str(programs))
    # All was asked, and nothing takes longer than it is known to.
    assert health.longest_probe(options) - commands.GRACE <= clock.now - 1000.0 <= health.longest_probe(options)


# Fabric Manager, processes, acknowledgement


def fabric_manager(programs: Path, output: str) -> str:
    program(programs, "systemctl", f'echo "$*" >"$0.call"\n{printing(output)}')
    state, version = health_node.fabric_manager_state(programs.parent, str(programs), 300)
    assert version is None
    return state


def test_fabric_manager_matters_where_there_are_nvswitches(programs: Path) -> None:
    broken = "LoadState=loaded\nActiveState=failed\nResult=exit-code"
    assert fabric_manager(programs, broken) == "not_needed"
    assert not (programs / "systemctl.call").exists()
    (programs.parent / "dev").mkdir()
    (programs.parent / "dev/nvidia-nvswitchctl").touch()
    assert fabric_manager(programs, broken) == "not_needed"
    (programs.parent / "dev/nvidia-nvswitch0").touch()
    assert fabric_manager(programs, broken) == "failed: nvidia-fabricmanager.service is failed (result exit-code)"
    assert fabric_manager(programs, "LoadState=loaded\nActiveState=active\nResult=success") == "ok"
    assert fabric_manager(programs, "LoadState=not-found\nActiveState=inactive") == "not_installed"
    words = "System has not been booted with systemd " + "x" * 200
    assert fabric_manager(programs, words) == f"skipped: systemctl says {words[:120]!r}"
    assert fabric_manager(programs, "") == "skipped: systemctl says 'nothing'"
    assert fabric_manager(programs, "ActiveState=inactive\x07") == (
        "failed: nvidia-fabricmanager.service is inactive  (result unknown)"
    )
    call = "show nvidia-fabricmanager.service --property=LoadState,ActiveState,Result\n"
    assert (programs / "systemctl.call").read_text(encoding="utf-8") == call
    (programs / "systemctl").unlink()
    state = health_node.fabric_manager_state(programs.parent, str(programs), 300)
    assert state == ("skipped: there is no systemctl", None)
    (programs.parent / "dev/nvidia-nvswitch0").unlink()
    (programs.parent / "proc/driver/nvidia-nvswitch/devices").mkdir(parents=True)
    assert health_node.fabric_manager_state(programs.parent, str(programs), 300) == ("not_needed", None)
    (programs.parent / "proc/driver/nvidia-nvswitch/devices/0000:05:00.0").touch()
    assert health_node.fabric_manager_state(programs.parent, str(programs), 300) == state


@pytest.mark.parametrize(
    ("process", "state"),
    [
        (b"/usr/bin/nv-fabricmanager\0-c\0/usr/share/nvidia/nvswitch/fabricmanager.cfg\0", "ok"),
        (b"nv-fabricmanager\0", "ok"),
        (b"tail\0-f\0/var/log/nv-fabricmanager\0", None),
        (b"/usr/bin/nv-fabricmanager-exporter\0", None),
        # One that has ended, and waits for who started it.
        (b"", None),
    ],
)
def test_fabric_manager_may_run_in_a_container(programs: Path, process: bytes, state: str | None) -> None:
    root = programs.parent
    (root / "proc/driver/nvidia-nvswitch/devices/0000:05:00.0").mkdir(parents=True)
    for pid, name, command in (("1", "systemd", b"/sbin/init\0"), ("4711", "nv-fabricmanage", process)):
        (root / "proc" / pid).mkdir()
        (root / "proc" / pid / "comm").write_text(f"{name}\n", encoding="utf-8")
        (root / "proc" / pid / "cmdline").write_bytes(command)
    (root / "proc/4712").mkdir()
    # Nobody could read that of one that hangs in the driver.
    (root / "proc/4713").mkdir()
    (root / "proc/4713/comm").write_text("python3\n", encoding="utf-8")
    os.mkfifo(root / "proc/4713/cmdline")
    assert fabric_manager(programs, "LoadState=not-found\nActiveState=inactive") == (state or "not_installed")
    inactive = "failed: nvidia-fabricmanager.service is inactive (result success)"
    assert fabric_manager(programs, "LoadState=loaded\nActiveState=inactive\nResult=success") == (state or inactive)
    # Its unit's own, which starts, ends or has failed.
    for active, result in (("activating", "success"), ("failed", "exit-code"), ("inactive", "core-dump")):
        told = fabric_manager(programs, f"LoadState=loaded\nActiveState={active}\nResult={result}")
        assert told == f"failed: nvidia-fabricmanager.service is {active} (result {result})"


@pytest.mark.parametrize(
    ("said", "version"),
    [
        ("Fabric Manager version is : 580.95.05", "580.95.05"),
        ("Fabric Manager version is : ", None),
        ("580.95.05", None),
        ("", None),
    ],
)
def test_version_of_fabric_manager(programs: Path, said: str, version: str | None) -> None:
    (programs.parent / "dev").mkdir()
    (programs.parent / "dev/nvidia-nvswitch0").touch()
    program(programs, "systemctl", printing("LoadState=loaded\nActiveState=active"))
    program(programs, "nv-fabricmanager", f'[ "$*" = --version ] || exit 1\n{printing(said)}')
    assert health_node.fabric_manager_state(programs.parent, str(programs), 300) == ("ok", version)
    program(programs, "nv-fabricmanager", printing(said, 1))
    assert health_node.fabric_manager_state(programs.parent, str(programs), 300) == ("ok", None)


def with_processes(root: Path, *pids: int, namespace: str = health_node.HOST_PID_NAMESPACE) -> dict[str, Any]:
    """Facts of two GPUs, the second with these processes, on a node whose /proc has the processes 1 and 10."""
    for pid in ("1", "10", "self/ns"):
        (root / "proc" / pid).mkdir(parents=True)
    (root / "proc/self/ns/pid").symlink_to(namespace)
    return facts_of(processes=[{"pid": pid, "name": "x"} for pid in pids])


def owners(root: Path, facts: dict[str, Any], later: dict[str, Any] | None = None) -> tuple[str, dict[int, list[int]]]:
    return health_node.processes_without_owner(facts, root, lambda: later or facts, wait=0.0)


def test_processes_that_ended_and_hold_memory(tmp_path: Path) -> None:
    assert owners(tmp_path, with_processes(tmp_path, 10, 11, 12)) == ("ok", {1: [11, 12]})


def test_a_process_that_just_ended_is_gone_at_the_second_look(tmp_path: Path) -> None:
    facts = with_processes(tmp_path, 10, 11, 12)
    assert owners(tmp_path, facts, facts_of(processes=[{"pid": 12}])) == ("ok", {1: [12]})
    assert owners(tmp_path, facts, facts_of(processes=None)) == ("ok", {})
    assert owners(tmp_path, facts, facts_of(0)) == ("ok", {})


def test_pids_mean_nothing_in_a_container(tmp_path: Path) -> None:
    facts = with_processes(tmp_path, 11, namespace="pid:[4026532571]")
    assert owners(tmp_path, facts) == ("skipped: not in the pid namespace of the host", {})


def test_pids_mean_nothing_where_proc_hides_others_or_under_wsl(tmp_path: Path) -> None:
    facts = with_processes(tmp_path, 11)
    assert owners(tmp_path, dict(facts, platform="wsl"))[1] == {}
    (tmp_path / "proc/1").rmdir()
    assert owners(tmp_path, facts) == ("skipped: /proc hides the processes of others", {})
    (tmp_path / "proc/self/ns/pid").unlink()
    assert owners(tmp_path, facts)[0].startswith("skipped: the pid namespace is unknown")


def test_acknowledgement(tmp_path: Path) -> None:
    path = tmp_path / "acknowledged"
    assert health_node.acknowledged_at(str(path), 2000.0) == ("none", 0.0)
    path.touch()
    os.utime(path, (1000, 1000))
    assert health_node.acknowledged_at(str(path), 2000.0) == ("1970-01-01T00:16:40Z", 1000.0)
    assert health_node.acknowledged_at(str(path), 940.0) == ("1970-01-01T00:16:40Z", 1000.0)
    told = f"ignored: {path} is of 1970-01-01T00:16:40Z, which is in the future"
    assert health_node.acknowledged_at(str(path), 939.5) == (told, 0.0)


# The whole


@pytest.fixture
def node(programs: Path) -> Path:
    """A root with a kernel log of its own and an nvidia-smi, both in the folder of programs."""
    program(programs, "nvidia-smi", f'[ "$1" = -q ] && exec cat {CORPUS}/580.159.04-h100-queried.xml\nexit 0')
    lines = [entry(XID_79.replace("3b:00", "00:06"), at) for at in (1000, 2000, 3000)]
    program(programs, "journalctl", printing("\n".join(lines)))
    return programs


def probe(node: Path, **options: Any) -> dict[str, Any]:
    chosen = HealthOptions(**{"acknowledged_file": str(node.parent / "acknowledged"), "timeout": 300, **options})
    return health.probe(chosen, root=str(node.parent), search=str(node))


def counts(result: Mapping[str, Any]) -> list[int]:
    return [entry["count"] for entry in result["xids"]]


def test_probe_puts_everything_together(node: Path) -> None:
    result = probe(node)
    assert set(result) == {"verdict", "reason", "gpus", "problems", "xids", "checks", "nvidia_smi"}
    assert (result["verdict"], counts(result)) == ("critical", [3])
    assert result["gpus"][0]["problems"][0]["code"] == "xid_79"
    assert result["checks"]["kernel_log"] == "journal"
    assert result["nvidia_smi"]["gpus"][0]["power_draw_w"] == 70.53
    assert set(result["nvidia_smi"]) == set(nvidia_smi.empty_facts())
    json.dumps(result)


def test_probe_leaves_out_what_was_acknowledged_or_is_too_old(node: Path) -> None:
    assert counts(probe(node, xid_since="1500")) == [2]
    acknowledged = node.parent / "acknowledged"
    acknowledged.touch()
    os.utime(acknowledged, (2500, 2500))
    assert counts(probe(node)) == [1]
    assert counts(probe(node, xid_since="1500")) == [1]
    os.utime(acknowledged, (3500, 3500))
    result = probe(node)
    assert (counts(result), result["verdict"], result["checks"]["acknowledged"]) == ([], "ok", "1970-01-01T00:58:20Z")


def test_one_gpu_is_acknowledged_and_no_other(node: Path) -> None:
    uuid = probe(node)["gpus"][0]["uuid"]
    for name, counted in (("GPU-other", [3]), (uuid, [1])):
        own = node.parent / f"acknowledged-{name}"
        own.touch()
        os.utime(own, (2500, 2500))
        assert counts(probe(node)) == counted
    assert probe(node)["checks"]["acknowledged_gpus"] == {uuid: "1970-01-01T00:41:40Z"}
    # The later of both counts.
    (node.parent / "acknowledged").touch()
    os.utime(node.parent / "acknowledged", (3500, 3500))
    assert counts(probe(node)) == []
    os.utime(node.parent / "acknowledged", (1500, 1500))
    assert counts(probe(node)) == [1] and counts(probe(node, xid_since="3200")) == []


def test_probe_tells_of_links_that_cannot_be_asked(node: Path) -> None:
    assert {probe(node)["checks"][source] for source in ("nvlink", "mig")} == {"ok"}
    script = (node / "nvidia-smi").read_text(encoding="utf-8").partition("\n")[2]
    program(node, "nvidia-smi", f'[ "$1" = nvlink ] && echo Error && exit 255\n{script}')
    result = probe(node)
    assert result["checks"]["nvlink"].startswith("failed: ") and result["checks"]["mig"] == "ok"
    (problem,) = [problem for problem in result["problems"] if problem["code"] == "check_failed"]
    said = "found that NVLinks cannot be asked: "
    end = (
        "nvlink -s ended with exit code 255 and said: Error. Expected: an answer. Next step: run 'nvidia-smi nvlink -s'"
    )
    assert said in problem["message"] and end in problem["message"]


def test_probe_tells_of_a_fabric_manager_of_another_version(node: Path) -> None:
    assert probe(node)["checks"]["fabric_manager_version"] is None
    (node.parent / "dev").mkdir()
    (node.parent / "dev/nvidia-nvswitch0").touch()
    program(node, "systemctl", printing("LoadState=loaded\nActiveState=failed\nResult=exit-code"))
    program(node, "nv-fabricmanager", printing("Fabric Manager version is : 580.95.05"))
    result = probe(node)
    assert result["checks"]["fabric_manager_version"] == "580.95.05"
    (problem,) = [problem for problem in result["problems"] if problem["code"] == "fabric_manager"]
    assert "in version 580.95.05 where the driver has 580.159.04" in problem["message"]


def test_probe_reads_no_kernel_log_under_wsl(node: Path) -> None:
    (node.parent / "proc/sys/kernel").mkdir(parents=True)
    (node.parent / "proc/sys/kernel/osrelease").write_text("6.6.87.2-microsoft-standard-WSL2\n", encoding="ascii")
    result = probe(node)
    assert (result["xids"], result["verdict"]) == ([], "ok")
    assert result["checks"]["kernel_log"].startswith("skipped: ")


def test_probe_without_anything_is_an_answer(programs: Path) -> None:
    result = probe(programs)
    assert [code for code, _severity in codes(result)] == ["not_installed", "check_failed"]
    assert result["checks"]["nvidia_smi"] == "not_installed"


def test_the_records_are_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        HealthOptions().gpus = 1  # type: ignore[misc]
