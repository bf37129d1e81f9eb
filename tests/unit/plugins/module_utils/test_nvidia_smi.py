# Copyright (c) gpufarm contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The parsers, against recordings of real programs and against damage."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from ansible_collections.gpufarm.core.plugins.module_utils import nvidia_smi, pci
from ansible_collections.gpufarm.core.plugins.module_utils.nvidia_smi import (
    facts,
    failures,
    listings,
    query_csv,
    query_xml,
    values,
)
from ansible_collections.gpufarm.core.tests.unit.plugins.module_utils.recorded import assert_recorded
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

CORPUS = Path(__file__).parent / "nvidia_smi_corpus"
RECORDINGS = sorted(CORPUS.glob("*.xml"))
ONE_GPU = (CORPUS / "580.159.04-h100.xml").read_text(encoding="utf-8")
SMALL = (CORPUS / "510.47.03-tesla-p100.xml").read_text(encoding="utf-8")
NO_VALUE = [
    "N/A",
    "[N/A]",
    "[Not Supported]",
    "Not Supported",
    "[Unknown Error]",
    "Unknown Error",
    "ERR!",
    "",
    "Requested functionality has been deprecated",
    "[Insufficient Permissions]",
    "Not Found",
]

TYPES: dict[str, type] = {
    "index": int,
    "name": str,
    "uuid": str,
    "pci_bus_id": str,
    "status": str,
    "status_message": str,
    "sensors_failed": list,
    "inforom_corrupted": bool,
    "unrepairable_memory": bool,
    "channel_repair_pending": bool,
    "tpc_repair_pending": bool,
    "summary": str,
    "bandwidth": str,
    "route_recovery_in_progress": str,
    "route_unhealthy": str,
    "access_timeout_recovery": str,
    "incorrect_configuration": str,
    "serial": str,
    "architecture": str,
    "minor_number": int,
    "persistence_mode": str,
    "compute_mode": str,
    "mig_mode": str,
    "mig_mode_pending": str,
    "mig_devices": list,
    "numa_node": int,
    "cpu_affinity": str,
    "pci_root": str,
    "nvlinks": list,
    "nvlink_peers": list,
    "brand": str,
    "board_part_number": str,
    "vbios_version": str,
    "gsp_firmware_version": str,
    "virtualization_mode": str,
    "vgpu_licensed_product": str,
    "vgpu_license_status": str,
    "addressing_mode": str,
    "c2c_mode": str,
    "driver_model": str,
    "ecc": dict,
    "mode": str,
    "mode_pending": str,
    "corrected": int,
    "uncorrected": int,
    "volatile": int,
    "aggregate": int,
    "sram_threshold_exceeded": bool,
    "pending": bool,
    "failure": bool,
    "single_bit": int,
    "double_bit": int,
    "recovery_action": str,
    "performance_state": str,
    "clocks_event_reasons": list,
    "replay_count": int,
    "fabric_state": str,
    "fabric_status": str,
    "processes": list,
    "profile": str,
    "gpu_instance_id": int,
    "compute_instance_id": int,
    "pid": int,
    "type": str,
}
UNITS = {"mib": int, "w": float, "c": int, "percent": int, "mhz": int, "us": int}
MIG_KEYS = {"index", "uuid", "profile", "gpu_instance_id", "compute_instance_id", "memory_total_mib"}
PROCESS_KEYS = {"pid", "type", "name", "cpu_affinity", "memory_used_mib", "gpu_instance_id", "compute_instance_id"}


# What nvidia-smi's XML has counted as what.
COUNTERS = "clocks_event_reasons_counters/clocks_event_reasons_counters"
COUNTED = {
    "sw_power_cap_us": "sw_power_cap",
    "sync_boost_us": "sync_boost",
    "sw_thermal_slowdown_us": "sw_therm_slowdown",
    "hw_thermal_slowdown_us": "hw_therm_slowdown",
    "hw_power_brake_slowdown_us": "hw_power_brake",
}


def type_of(key: str) -> type:
    if key.startswith(("generation_", "width_")):
        return int
    return TYPES.get(key) or UNITS[key.rsplit("_", 1)[1]]


def assert_shape(value: dict[str, Any], template: dict[str, Any]) -> None:
    """Every key is there and holds its type or null."""
    assert value.keys() == template.keys()
    for key, inner in value.items():
        if isinstance(template[key], dict):
            assert_shape(inner, template[key])
        elif inner is not None:
            assert type(inner) is type_of(key), (key, inner)


def assert_answer(answer: dict[str, Any]) -> None:
    assert set(answer) == {"driver_version", "cuda_version", "attached_gpus", "gpus"}
    for key in ("driver_version", "cuda_version"):
        assert answer[key] is None or re.fullmatch(r"[0-9.]+", answer[key])
    for gpu in answer["gpus"]:
        assert_shape(gpu, nvidia_smi.empty_gpu())
        assert gpu["status"] in ("ok", "lost", "reset_required", "unreadable")
        for device in gpu["mig_devices"] or []:
            assert_shape(device, dict.fromkeys(MIG_KEYS))
        for process in gpu["processes"] or []:
            assert_shape(process, dict.fromkeys(PROCESS_KEYS))
        assert all(type(reason) is str for reason in gpu["clocks_event_reasons"] or [])


def parses_or_refuses(text: str) -> bool:
    try:
        assert_answer(nvidia_smi.parse_query_xml(text))
    except nvidia_smi.NvidiaSmiError as error:
        assert error.reason == "invalid_output"
        assert error.message
        return False
    return True


def with_value(tag: str, value: str, document: str = ONE_GPU) -> dict[str, Any]:
    """The GPU of a recording in which one element was given another value."""
    changed, count = re.subn(rf"<{tag}>[^<]*</{tag}>", f"<{tag}>{value}</{tag}>", document)
    assert count
    gpu: dict[str, Any] = nvidia_smi.parse_query_xml(changed)["gpus"][0]
    return gpu


# The corpus


@pytest.mark.parametrize("path", RECORDINGS, ids=lambda path: path.stem)
def test_recording_gives_what_was_checked_by_eye(path: Path) -> None:
    expected = json.loads(path.with_suffix(".json").read_text(encoding="utf-8"))
    answer = nvidia_smi.parse_query_xml(path.read_text(encoding="utf-8"))
    assert answer == expected
    assert_answer(answer)


@pytest.mark.parametrize("path", RECORDINGS, ids=lambda path: path.stem)
def test_recording_agrees_with_an_independent_reading(path: Path) -> None:
    """The plain values once more with another XML library, so that the expected files are no mere echo."""
    root = ElementTree.fromstring(path.read_text(encoding="utf-8"))  # noqa: S314  # a file of this repository
    answer = nvidia_smi.parse_query_xml(path.read_text(encoding="utf-8"))
    assert answer["driver_version"] == root.findtext("driver_version") == path.stem.split("-")[0]
    elements = root.findall("gpu")
    assert len(answer["gpus"]) == len(elements)
    assert answer["attached_gpus"] == int(root.findtext("attached_gpus") or 0)
    for index, element in enumerate(elements):
        gpu = answer["gpus"][index]
        assert gpu["index"] == index
        assert gpu["status"] == "ok"
        for key, tag, unit in (
            ("name", "product_name", ""),
            ("uuid", "uuid", ""),
            ("serial", "serial", ""),
            ("pci_bus_id", "pci/pci_bus_id", ""),
            ("minor_number", "minor_number", ""),
            ("memory_total_mib", "fb_memory_usage/total", " MiB"),
            ("memory_used_mib", "fb_memory_usage/used", " MiB"),
            ("bar1_total_mib", "bar1_memory_usage/total", " MiB"),
            ("temperature_gpu_c", "temperature/gpu_temp", " C"),
            ("utilization_gpu_percent", "utilization/gpu_util", " %"),
            ("persistence_mode", "persistence_mode", ""),
            ("performance_state", "performance_state", ""),
            ("temperature_limits.slowdown_c", "temperature/gpu_temp_slow_threshold", " C"),
            ("temperature_limits.shutdown_c", "temperature/gpu_temp_max_threshold", " C"),
            ("temperature_limits.memory_max_c", "temperature/gpu_temp_max_mem_threshold", " C"),
            ("temperature_limits.margin_c", "temperature/gpu_temp_tlimit", " C"),
            ("temperature_limits.slowdown_margin_c", "temperature/gpu_temp_slow_tlimit_threshold", " C"),
            ("temperature_limits.shutdown_margin_c", "temperature/gpu_temp_max_tlimit_threshold", " C"),
            *((f"clocks_event_reasons_counters.{key}", f"{COUNTERS}_{tag}", " us") for key, tag in COUNTED.items()),
        ):
            found = element.findtext(tag)
            section, _dot, name = key.rpartition(".")
            value = gpu[section][name] if section else gpu[name]
            assert (found in (None, "N/A")) if value is None else (f"{value}{unit}" == found), key
        assert len(gpu["processes"]) == len(element.findall("processes/process_info"))
        assert len(gpu["mig_devices"]) == len(element.findall("mig_devices/mig_device"))


@pytest.mark.parametrize(
    ("recording", "index", "key", "value"),
    [
        ("430.26-4x-tesla-k80", 0, "minor_number", 1),
        ("430.26-4x-tesla-k80", 3, "minor_number", 0),
        ("430.26-4x-tesla-k80", 3, "pci_bus_id", "0000F8D6:00:00.0"),
        ("430.26-4x-tesla-k80", 0, "clocks_event_reasons", ["applications_clocks_setting"]),
        ("430.26-4x-tesla-k80", 0, "power_draw_w", 135.72),
        ("460.73.01-8x-tesla-v100s", 7, "name", "Tesla V100S-PCIE-32GB"),
        ("516.59-rtx-2080-wddm", 0, "driver_model", "WDDM"),
        ("516.59-rtx-2080-wddm", 0, "minor_number", None),
        ("516.59-rtx-2080-wddm", 0, "persistence_mode", None),
        ("535.86.05-rtx-4090", 0, "power_draw_w", 26.84),
        ("535.86.05-rtx-4090", 0, "power_limit_enforced_w", 450.0),
        ("580.159.04-h100", 0, "power_draw_w", 70.54),
        ("580.159.04-h100", 0, "architecture", "Hopper"),
        ("580.159.04-h100", 0, "recovery_action", "None"),
        ("590.44.01-rtx-pro-6000-blackwell", 0, "architecture", "Blackwell"),
        ("590.44.01-2x-rtx-a5000", 1, "addressing_mode", "HMM"),
        ("590.44.01-2x-rtx-a5000", 1, "c2c_mode", None),
        ("580.159.04-h100", 0, "c2c_mode", "Disabled"),
    ],
)
def test_recording_holds(recording: str, index: int, key: str, value: object) -> None:
    answer = nvidia_smi.parse_query_xml((CORPUS / f"{recording}.xml").read_text(encoding="utf-8"))
    assert answer["gpus"][index][key] == value


@pytest.mark.parametrize(
    ("recording", "corrected", "uncorrected"),
    [
        ("430.26-4x-tesla-k80", {"volatile": 0, "aggregate": 7}, {"volatile": 0, "aggregate": 7}),
        ("510.47.03-tesla-p100", {"volatile": 0, "aggregate": 3}, {"volatile": 0, "aggregate": 0}),
        ("510.47.03-a100-40gb-mig", {"volatile": None, "aggregate": 0}, {"volatile": None, "aggregate": 0}),
        ("580.159.04-h100", {"volatile": 0, "aggregate": 0}, {"volatile": 0, "aggregate": 0}),
        ("384.66-2x-gtx-1070", {"volatile": None, "aggregate": None}, {"volatile": None, "aggregate": None}),
    ],
)
def test_every_layout_of_ecc_counters_is_read(
    recording: str, corrected: dict[str, int | None], uncorrected: dict[str, int | None]
) -> None:
    ecc = nvidia_smi.parse_query_xml((CORPUS / f"{recording}.xml").read_text(encoding="utf-8"))["gpus"][0]["ecc"]
    assert (ecc["corrected"], ecc["uncorrected"]) == (corrected, uncorrected)


def test_ecc_counters_of_all_memories_are_added_and_not_mixed_up() -> None:
    ecc = with_value("sram_correctable", "1")["ecc"]
    assert (ecc["corrected"], ecc["uncorrected"]["volatile"]) == ({"volatile": 1, "aggregate": 1}, 0)
    document = ONE_GPU
    for tag, count in (("dram_correctable", 2), ("sram_uncorrectable_parity", 4), ("sram_uncorrectable_secded", 8)):
        document = re.sub(rf"<{tag}>0</{tag}>", f"<{tag}>{count}</{tag}>", document)
    ecc = with_value("dram_uncorrectable", "16", document)["ecc"]
    assert (ecc["corrected"]["volatile"], ecc["uncorrected"]["volatile"]) == (2, 28)


@pytest.mark.parametrize("tag", ["remapped_row_pending", "pending_retirement", "pending_blacklist"])
def test_memory_that_waits_for_a_reset_is_pending(tag: str) -> None:
    assert with_value(tag, "Yes")["ecc"]["pending"] is True
    assert with_value(tag, "No")["ecc"]["pending"] is False


@pytest.mark.parametrize("tag", ["unrepairable_memory", "channel_repair_pending", "tpc_repair_pending"])
def test_repairs_are_told(tag: str) -> None:
    assert with_value(tag, "Yes")["ecc"][tag] is True
    assert with_value(tag, "No")["ecc"][tag] is False
    assert with_value(tag, "N/A")["ecc"][tag] is None


def test_remapping_failure_is_told() -> None:
    rows = with_value("remapped_row_failure", "Yes")["ecc"]["remapped_rows"]
    assert rows == {"corrected": 0, "uncorrected": 0, "pending": False, "failure": True}


def test_shape_and_subsets_as_recorded() -> None:
    assert_recorded(
        "nvidia-smi-shape",
        {
            "facts": nvidia_smi.empty_facts("linux"),
            "gpu": nvidia_smi.empty_gpu(),
            "subsets": nvidia_smi.SUBSETS,
            "default": nvidia_smi.DEFAULT_SUBSETS,
            "identity": nvidia_smi.IDENTITY_KEYS,
            "query": query_csv.QUERY_FIELDS,
            "required": sorted(query_csv.REQUIRED_FIELDS),
            "no value": sorted(values._NO_VALUE),
            "errors": sorted(values._ERRORS),
            "reasons": nvidia_smi.REASONS,
        },
    )


# Values


@pytest.mark.parametrize("word", NO_VALUE)
@pytest.mark.parametrize(
    ("tag", "key"),
    [
        ("uuid", "uuid"),
        ("serial", "serial"),
        ("product_name", "name"),
        ("product_architecture", "architecture"),
        ("minor_number", "minor_number"),
        ("compute_mode", "compute_mode"),
        ("current_mig", "mig_mode"),
        ("gpu_temp", "temperature_gpu_c"),
        ("gpu_util", "utilization_gpu_percent"),
        ("requested_power_limit", "power_limit_w"),
    ],
)
def test_what_is_not_given_is_null(tag: str, key: str, word: str) -> None:
    assert with_value(tag, word)[key] is None


def test_every_error_of_nvml_is_null() -> None:
    """The words as libnvidia-ml.so of driver 580 has them."""
    recording = Path(__file__).parents[2] / "simulator/gpu/fixtures/h200x2/device-nodes-that-fail.txt"
    words = re.findall(r"\(\d+, '([^']+)'\)", recording.read_text(encoding="utf-8"))
    assert len(words) == 32
    kept = [word for word in words if with_value("product_name", word)["name"] is not None]
    assert kept == ["Success"]


@pytest.mark.parametrize("value", ["34 F", "34", "34.5 C", "3 4 C", "٣٤ C", "0x22 C", "9" * 5000 + " C", "C", "- C"])
def test_a_value_in_another_form_is_not_a_number(value: str) -> None:
    assert with_value("gpu_temp", value)["temperature_gpu_c"] is None


def test_negative_temperature_is_a_number() -> None:
    assert with_value("gpu_temp", "-5 C")["temperature_gpu_c"] == -5


@pytest.mark.parametrize(
    ("reset", "drain", "action"),
    [
        ("No", "No", "None"),
        ("No", "N/A", "None"),
        ("Yes", "No", "Reset"),
        ("Yes", "Yes", "Reset"),
        ("No", "Yes", "Drain and Reset"),
        ("N/A", "N/A", None),
    ],
)
def test_reset_flags_of_driver_535_become_the_later_words(reset: str, drain: str, action: str | None) -> None:
    document = (CORPUS / "535.54.03-a100-80gb-mig.xml").read_text(encoding="utf-8")
    document = document.replace("<reset_required>No<", f"<reset_required>{reset}<")
    assert with_value("drain_and_reset_recommended", drain, document)["recovery_action"] == action


def test_mig_devices_that_are_not_told_are_null() -> None:
    document = ONE_GPU.replace("<current_mig>Disabled<", "<current_mig>Enabled<")
    without = re.sub(r"<mig_devices>.*?</mig_devices>", "", document, flags=re.DOTALL)
    assert nvidia_smi.parse_query_xml(without)["gpus"][0]["mig_devices"] is None
    assert nvidia_smi.parse_query_xml(ONE_GPU)["gpus"][0]["mig_devices"] == []


@pytest.mark.parametrize(
    ("raw", "address"),
    [
        ("00000000:3B:00.0", "0000:3b:00.0"),
        ("0000:3b:1f.7", "0000:3b:1f.7"),
        ("3B:00.0", "0000:3b:00.0"),
        ("0001F8D6:00:00.0", "1f8d6:00:00.0"),
        ("GPU at 0018:01:00.0 is lost", "0018:01:00.0"),
        ("3b:00", None),
        ("3b:00.8", None),
        ("", None),
        (None, None),
    ],
)
def test_pci_addresses_are_those_of_the_kernel(raw: str | None, address: str | None) -> None:
    assert pci.normal_bus_id(raw) == address


def test_masked_uuid_is_null() -> None:
    assert with_value("uuid", "GPU-????????-????-????-????-????????????")["uuid"] is None


def test_instant_power_stands_in_where_there_is_no_average() -> None:
    document = ONE_GPU.replace("<average_power_draw>70.54 W<", "<average_power_draw>N/A<")
    assert nvidia_smi.parse_query_xml(document)["gpus"][0]["power_draw_w"] == 71.01


def test_clocks_event_reasons_are_null_where_unsupported_and_empty_where_none_is_active() -> None:
    document = re.sub(r">(Not )?Active</clocks", ">N/A</clocks", ONE_GPU)
    assert nvidia_smi.parse_query_xml(document)["gpus"][0]["clocks_event_reasons"] is None
    document = ONE_GPU.replace(">Active</clocks", ">Not Active</clocks")
    assert nvidia_smi.parse_query_xml(document)["gpus"][0]["clocks_event_reasons"] == []


def test_each_counter_of_clocks_held_down_is_read_in_microseconds() -> None:
    document = ONE_GPU
    for number, tag in enumerate(COUNTED.values(), 1):
        name = f"clocks_event_reasons_counters_{tag}"
        document = document.replace(f"<{name}>0 us</{name}>", f"<{name}>{number} us</{name}>")
    counters = nvidia_smi.parse_query_xml(document)["gpus"][0]["clocks_event_reasons_counters"]
    assert counters == {key: number for number, key in enumerate(COUNTED, 1)}
    for text in ("N/A", "3 ms"):
        gpu = nvidia_smi.parse_query_xml(document.replace("2 us</", f"{text}</"))["gpus"][0]
        assert gpu["clocks_event_reasons_counters"] == {**counters, "sync_boost_us": None}


@pytest.mark.parametrize(
    ("status", "told"),
    [
        ("Licensed (Expiry: 2026-7-7 16:1:44 GMT)", "Licensed (Expiry: 2026-7-7 16:1:44 GMT)"),
        ("Unlicensed (Restricted)", "Unlicensed (Restricted)"),
        ("N/A", None),
    ],
)
def test_licence_of_a_vgpu_is_read(status: str, told: str | None) -> None:
    """Built from a recording and what was published of guests, of which there is no recording."""
    product = "<licensed_product_name>NVIDIA AI Enterprise</licensed_product_name>"
    section = f"{product}<license_status>{status}</license_status>"
    document = ONE_GPU.replace(
        "</gpu_virtualization_mode>",
        f"</gpu_virtualization_mode><vgpu_software_licensed_product>{section}</vgpu_software_licensed_product>",
    )
    gpu = nvidia_smi.parse_query_xml(document)["gpus"][0]
    assert (gpu["vgpu_licensed_product"], gpu["vgpu_license_status"]) == ("NVIDIA AI Enterprise", told)


def test_processes_are_null_where_they_cannot_be_seen() -> None:
    document = re.sub(r"<processes>\s*</processes>", "<processes>N/A</processes>", ONE_GPU)
    assert nvidia_smi.parse_query_xml(document)["gpus"][0]["processes"] is None


def test_fabric_is_read() -> None:
    document = ONE_GPU.replace("<state>N/A<", "<state>Completed<").replace("<status>N/A<", "<status>Success<")
    gpu = nvidia_smi.parse_query_xml(document)["gpus"][0]
    assert (gpu["fabric_state"], gpu["fabric_status"]) == ("Completed", "Success")


@pytest.mark.parametrize("key", list(nvidia_smi.empty_gpu()["fabric_health"]))
def test_health_of_the_fabric_is_read(key: str) -> None:
    nothing = nvidia_smi.empty_gpu()["fabric_health"]
    assert with_value(key, "N/A")["fabric_health"] == nothing
    assert with_value(key, "Degraded")["fabric_health"] == dict(nothing, **{key: "Degraded"})


# What stands where a value was due

SENSORS = {
    "temperature_gpu_c": ["gpu_temp"],
    "power_draw_w": ["average_power_draw", "instant_power_draw"],
    "utilization_gpu_percent": ["gpu_util"],
    "performance_state": ["performance_state"],
    "clocks.sm_mhz": ["sm_clock"],
    "memory_used_mib": ["used"],
}
ERRORS = ["ERR!", "Unknown Error", "[Unknown Error]", "Timeout", "Uninitialized", "Driver Not Loaded"]
ERRORS += ["Interrupt Request Issue", "Corrupted infoROM", "Insufficient External Power"]


def with_sensors(word: str, *keys: str, document: str = ONE_GPU) -> dict[str, Any]:
    """A recording in which these sensors, or all, say this instead."""
    for key in keys or SENSORS:
        for tag in SENSORS[key]:
            document, count = re.subn(rf"<{tag}>[^<]*</{tag}>", f"<{tag}>{word}</{tag}>", document)
            assert count
    gpu: dict[str, Any] = nvidia_smi.parse_query_xml(document)["gpus"][0]
    return gpu


@pytest.mark.parametrize("word", ERRORS)
@pytest.mark.parametrize("spared", [None, "memory_used_mib"])
def test_a_gpu_whose_sensors_all_fail_is_not_ok(word: str, spared: str | None) -> None:
    failed = [key for key in SENSORS if key != spared]
    gpu = with_sensors(word, *failed)
    assert (gpu["status"], gpu["sensors_failed"]) == ("unreadable", failed)
    assert gpu["status_message"] == f"Its sensors answer with errors only: {', '.join(failed)}."


def test_a_sensor_that_says_nothing_is_no_answer_either() -> None:
    """One error among sensors that the card does not have is as much as it can say."""
    document = ONE_GPU
    for key in ("power_draw_w", "utilization_gpu_percent", "performance_state", "clocks.sm_mhz"):
        for tag in SENSORS[key]:
            document = re.sub(rf"<{tag}>[^<]*</{tag}>", f"<{tag}>N/A</{tag}>", document)
    assert with_sensors("ERR!", "temperature_gpu_c", document=document)["status"] == "unreadable"
    gpu = with_sensors("N/A", "temperature_gpu_c", document=document)
    assert (gpu["status"], gpu["sensors_failed"]) == ("ok", [])
    assert with_sensors("ERR!", "memory_used_mib", document=document)["status"] == "ok"


@pytest.mark.parametrize("key", SENSORS)
def test_a_single_sensor_that_fails_is_named(key: str) -> None:
    gpu = with_sensors("ERR!", key)
    assert (gpu["status"], gpu["status_message"], gpu["sensors_failed"]) == ("ok", None, [key])
    assert with_sensors("N/A", key)["sensors_failed"] == []


@pytest.mark.parametrize("tag", ["fan_speed", "default_power_limit", "enc_util"])
def test_what_healthy_cards_answer_with_errors_is_no_sensor(tag: str) -> None:
    document = re.sub(rf"<{tag}>[^<]*</{tag}>", f"<{tag}>Unknown Error</{tag}>", ONE_GPU)
    gpu = nvidia_smi.parse_query_xml(document)["gpus"][0]
    assert (gpu["status"], gpu["sensors_failed"]) == ("ok", [])


def test_one_of_two_ways_to_measure_power_is_enough() -> None:
    document = ONE_GPU.replace("<average_power_draw>70.54 W<", "<average_power_draw>ERR!<")
    gpu = nvidia_smi.parse_query_xml(document)["gpus"][0]
    assert (gpu["power_draw_w"], gpu["sensors_failed"]) == (71.01, [])


def test_a_lost_gpu_stays_lost_whatever_its_sensors_say() -> None:
    document = ONE_GPU.replace("<fan_speed>N/A<", "<fan_speed>GPU is lost<")
    gpu = with_sensors("ERR!", document=document)
    assert (gpu["status"], gpu["status_message"]) == ("lost", "nvidia-smi says 'GPU is lost' in <fan_speed>.")


@pytest.mark.parametrize(
    ("total", "used", "status"),
    [
        ("[Unknown Error]", "[Unknown Error]", "unreadable"),
        ("[Unknown Error]", "1", "ok"),
        ("1", "[Unknown Error]", "ok"),
        ("[N/A]", "[N/A]", "ok"),
        ("[Unknown Error]", "[GPU requires reset]", "reset_required"),
    ],
)
def test_listing_call_of_a_gpu_that_fails(total: str, used: str, status: str) -> None:
    line = f"0, NVIDIA X, GPU-1, 00000000:01:00.0, 580.1, {total}, {used}, 1, Enabled, Default, [N/A], [N/A], 8.0, P0"
    gpu = nvidia_smi.parse_query_csv(line)["gpus"][0]
    told = None if status == "ok" else f"nvidia-smi --query-gpu says that the GPU is {status}."
    assert (gpu["status"], gpu["status_message"]) == (status, told)


def test_text_is_clean() -> None:
    gpu = with_value("product_name", "NVIDIA\u202e X\u0085")
    assert gpu["name"] == "NVIDIA  X"
    line = "0, NVIDIA X\0\0, GPU-1\x1b[2J, 00000000:01:00.0\0, 580.1, 1, 1, 1, Enabled, Default, [N/A], [N/A], 8.0, P0"
    gpu = nvidia_smi.parse_query_csv(line)["gpus"][0]
    assert (gpu["name"], gpu["uuid"], gpu["pci_bus_id"]) == ("NVIDIA X", "GPU-1 [2J", "00000000:01:00.0")


def test_versions_of_driver_610_are_read_under_their_old_and_new_labels() -> None:
    marked = "610.57.04 [Deprecated; will be removed in CUDA 14.0. Use KMD Version instead]"
    document = ONE_GPU.replace("<driver_version>580.159.04<", f"<driver_version>{marked}<")
    assert nvidia_smi.parse_query_xml(document)["driver_version"] == "610.57.04"
    document = document.replace("driver_version>", "kmd_version>").replace("cuda_version>", "cuda_umd_version>")
    answer = nvidia_smi.parse_query_xml(document.replace(marked, "610.57.04"))
    assert (answer["driver_version"], answer["cuda_version"]) == ("610.57.04", "13.0")


@pytest.mark.parametrize(("words", "status"), [("GPU is lost", "lost"), ("GPU requires reset", "reset_required")])
def test_a_gpu_that_does_not_answer_is_marked(words: str, status: str) -> None:
    gpu = with_value("gpu_temp", words)
    assert gpu["status"] == status
    assert words in gpu["status_message"]
    assert gpu["temperature_gpu_c"] is None


def with_process_named(name: str) -> str:
    document = (CORPUS / "515.105.01-tesla-t4.xml").read_text(encoding="utf-8")
    return document.replace("<process_name>python</process_name>", f"<process_name>{name}</process_name>")


def test_a_process_named_like_a_failure_marks_no_gpu() -> None:
    gpu = nvidia_smi.parse_query_xml(with_process_named("GPU is lost"))["gpus"][0]
    assert gpu["status"] == "ok"
    assert gpu["processes"][1]["pid"] == 5762


INJECTED = (
    "x</process_name><used_memory>1 MiB</used_memory></process_info></processes></gpu>"
    '<gpu id="0"><uuid>GPU-1</uuid><processes><process_info><process_name>y'
)


@pytest.mark.parametrize(
    "name",
    [
        "a & b", "a < b", "a > b", "\x01\x02", "a &amp; b", "&undefined;", "&#0;", "&#xffff;", "a\ufffdb", "", "a\nb",
        "a]]>b", "a</process_name>", "<process_name>", "</process_name></process_info>", INJECTED, "<![CDATA[", "<!--",
    ],
)  # fmt: skip
def test_process_names_are_not_escaped_by_older_drivers(name: str) -> None:
    answer = nvidia_smi.parse_query_xml(with_process_named(name))
    (gpu,) = answer["gpus"]
    assert (answer["attached_gpus"], gpu["name"], gpu["memory_total_mib"]) == (1, "Tesla T4", 15360)
    told = re.sub("[\x01\x02]", "\ufffd", name).replace("&amp;", "&").replace("\n", " ")
    assert [(each["pid"], each["name"], each["memory_used_mib"]) for each in gpu["processes"]] == [
        (675, "/usr/lib/xorg/Xorg", 22),
        (5762, told or None, 1005),
    ]


LOST = INJECTED.replace("<uuid>GPU-1</uuid>", "<uuid>GPU is lost</uuid>")
SPACED = LOST.replace("><used", "> <used")


@pytest.mark.parametrize(
    "name",
    [
        *(LOST.replace("><used", f">{blank}<used") for blank in (" ", "\n", "\n\t\t\t\t")),
        "x</process_name> <used_memory>",
        # Another one that looks like the driver's own, and one that is half there.
        SPACED.replace("<gpu", "\n    <gpu"),
        "x</process_name> <used_memory></processes></gpu>\n    <gpu id=",
        # Without another GPU.
        SPACED.replace('</gpu><gpu id="0">', ""),
        SPACED.replace("</processes></gpu>", "</processes><gpu_recovery_action>Reset</gpu_recovery_action></gpu>"),
        "x</process_name> <used_memory><!--",
    ],
)
def test_a_process_name_says_nothing_of_a_gpu(name: str) -> None:
    """What such a name hides is unknown: the processes, and no more."""
    honest = nvidia_smi.parse_query_xml(with_process_named("python"))
    honest["gpus"][0]["processes"] = None
    assert nvidia_smi.parse_query_xml(with_process_named(name)) == honest


def with_names(*names: str) -> str:
    """A document of two GPUs, each with one process."""
    document = (CORPUS / "590.44.01-2x-rtx-a5000.xml").read_text(encoding="utf-8")
    start, *ends = re.split(r"(?<=<processes>).*?(?=</processes>)", document, flags=re.DOTALL)
    assert len(ends) == len(names) == 2
    return start + "".join(
        f"<process_info><process_name>{name}</process_name>\n<used_memory>1 MiB</used_memory></process_info>{end}"
        for name, end in zip(names, ends)  # Python 3.9 has no strict; their numbers are held above
    )


@pytest.mark.parametrize(
    "names",
    [
        (SPACED, "b"),
        ("a", SPACED),
        # One takes the place of another GPU, of which a comment makes nothing.
        (f"{SPACED}</process_name> <used_memory><!--", "x</process_name> <used_memory>--><used_memory>"),
    ],
)
def test_a_process_name_says_nothing_of_a_neighbour(names: tuple[str, str]) -> None:
    honest = nvidia_smi.parse_query_xml(with_names("a", "b"))
    for gpu in honest["gpus"]:
        assert len(gpu["processes"]) == 1
        gpu["processes"] = None
    assert nvidia_smi.parse_query_xml(with_names(*names)) == honest


def test_no_gpu_is_taken_from_a_name_that_looks_like_the_drivers_own() -> None:
    told = refused(nvidia_smi.parse_query_xml, with_names(SPACED.replace("<gpu", "\n\t<gpu"), "b"))
    assert told.startswith("The XML has 3 GPUs where 2 are attached")


def test_one_gpu_alone_keeps_its_processes() -> None:
    """Asked for with -i: what is attached is told of all."""
    document = with_process_named("python").replace("attached_gpus>1<", "attached_gpus>8<")
    assert [each["pid"] for each in nvidia_smi.parse_query_xml(document)["gpus"][0]["processes"]] == [675, 5762]


@pytest.mark.parametrize(
    ("written", "name"),
    [
        ("a]]&gt;b &amp;amp; c &amp; &lt;d&gt;", "a]]>b &amp; c & <d>"),
        ("x&lt;/process_name&gt;\n\t\t\t\t&lt;used_memory&gt;1 MiB", "x</process_name>     <used_memory>1 MiB"),
        ("c\x01\x02\ufffd\ufffdd &amp;#0; &amp;lt;e", "c\ufffd\ufffd\ufffd\ufffdd &#0; &lt;e"),
    ],
)
def test_process_names_as_a_newer_driver_writes_them(written: str, name: str) -> None:
    """580.159.04, of processes that were given such names."""
    (gpu,) = nvidia_smi.parse_query_xml(with_process_named(written))["gpus"]
    assert gpu["processes"][1]["name"] == name


def test_names_that_end_otherwise_are_taken_as_they_are() -> None:
    """What follows them may be another element one day, and a document that breaks off costs no time."""
    document = with_process_named("a &gt; b").replace("used_memory>", "something_new>")
    assert [each["name"] for each in nvidia_smi.parse_query_xml(document)["gpus"][0]["processes"]] == [
        "/usr/lib/xorg/Xorg",
        "a > b",
    ]
    # By looking for an end from each beginning it would take hours.
    begun = "<nvidia_smi_log>" + "<process_name>" * 500_000
    assert query_xml._mend_process_names(begun) == begun


# Damage


def test_every_prefix_is_refused() -> None:
    """A document that breaks off anywhere is damaged; only blank space after it may be missing."""
    whole = SMALL.rstrip()
    assert parses_or_refuses(whole)
    for length in [*range(0, len(whole), 7), *range(len(whole) - 100, len(whole))]:
        assert not parses_or_refuses(whole[:length])


@pytest.mark.parametrize("path", RECORDINGS, ids=lambda path: path.stem)
def test_prefixes_of_every_recording_are_refused(path: Path) -> None:
    whole = path.read_text(encoding="utf-8").rstrip()
    for length in range(0, len(whole), max(len(whole) // 60, 1)):
        assert not parses_or_refuses(whole[:length])


@settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_damaged_bytes_give_a_valid_shape_or_the_exception(data: st.DataObject) -> None:
    raw = bytearray(SMALL.encode())
    for _ in range(data.draw(st.integers(1, 8))):
        start = data.draw(st.integers(0, len(raw) - 1))
        raw[start : start + data.draw(st.integers(0, 40))] = data.draw(st.binary(max_size=12))
    parses_or_refuses(bytes(raw).decode("utf-8", "replace"))
    parses_or_refuses(bytes(raw).decode("latin-1"))


@settings(max_examples=300, deadline=None)
@given(st.text(max_size=200))
def test_any_text_is_parsed_or_refused(text: str) -> None:
    assert not parses_or_refuses(text)
    parses_or_refuses(f"<nvidia_smi_log><gpu>{text}</gpu></nvidia_smi_log>")
    for parse in (nvidia_smi.parse_list, nvidia_smi.parse_query_csv, nvidia_smi.parse_nvlink_status):
        try:
            parse(text)
        except nvidia_smi.NvidiaSmiError as error:
            assert error.reason == "invalid_output"
    nvidia_smi.parse_version(text)
    listings.parse_proc_information(text)
    query_xml.split_xml(text)


@settings(max_examples=200, deadline=None)
@given(st.sampled_from(["gpu_temp", "total", "uuid", "pid", "current_mig", "minor_number"]), st.text(max_size=30))
def test_any_value_is_parsed_or_refused(tag: str, text: str) -> None:
    document = re.sub(rf"<{tag}>[^<]*</{tag}>", lambda _: f"<{tag}>{text}</{tag}>", ONE_GPU)
    parses_or_refuses(document)


ENTITY = "The XML declares or uses an entity, which nvidia-smi never does; it was not read."
# What follows is the parser's.
NOT_WHOLE = "The output of nvidia-smi is not the whole XML document it should be: "


@pytest.mark.parametrize(
    ("document", "told"),
    [
        ('<!DOCTYPE a [<!ENTITY b "x"><!ENTITY c "&b;&b;&b;">]><nvidia_smi_log>&c;</nvidia_smi_log>', ENTITY),
        ('<!DOCTYPE a [<!ENTITY b SYSTEM "file:///etc/passwd">]><nvidia_smi_log>&b;</nvidia_smi_log>', ENTITY),
        ('<!DOCTYPE a [<!ENTITY % b SYSTEM "x">%b;]><nvidia_smi_log/>', ENTITY),
        ('<!DOCTYPE a SYSTEM "x"><nvidia_smi_log>&b;</nvidia_smi_log>', ENTITY),
        ("<!DOCTYPE a [<!ELEMENT nvidia_smi_log ANY>]><nvidia_smi_log/>", ENTITY),
        (
            "<nvidia_smi_log>" + "<a>" * 100 + "</a>" * 100 + "</nvidia_smi_log>",
            "The XML is nested more than 32 deep, which nvidia-smi's never is.",
        ),
        ("<other/>", "The output is XML, but its root is <other> where nvidia-smi writes <nvidia_smi_log>."),
        ("<nvidia_smi_log/><nvidia_smi_log/>", NOT_WHOLE),
        ("", NOT_WHOLE),
        ("\ud800", NOT_WHOLE),
        ("\x00", NOT_WHOLE),
    ],
)
def test_entities_depth_and_other_documents_are_refused(document: str, told: str) -> None:
    assert refused(nvidia_smi.parse_query_xml, document).startswith(told)


def refused(parse: Callable[[str], Any], text: str) -> str:
    with pytest.raises(nvidia_smi.NvidiaSmiError) as caught:
        parse(text)
    assert caught.value.reason == "invalid_output"
    return str(caught.value)


def test_depth_is_bounded() -> None:
    def nested(depth: int) -> str:
        return "<nvidia_smi_log>" + "<a>" * (depth - 1) + "</a>" * (depth - 1) + "</nvidia_smi_log>"

    assert parses_or_refuses(nested(32))
    assert not parses_or_refuses(nested(33))


def test_too_much_output_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(query_xml, "MAX_OUTPUT_BYTES", 1000)
    told = "nvidia-smi printed more than 1000 bytes of XML; it was not read."
    assert refused(nvidia_smi.parse_query_xml, ONE_GPU) == told


def test_the_long_list_of_supported_clocks_is_not_kept() -> None:
    names, waiting = set(), [query_xml._read_tree(ONE_GPU)]
    while waiting:
        node = waiting.pop()
        names.add(node.name)
        waiting.extend(node.children)
    assert "max_clocks" in names
    assert not {name for name in names if name.startswith("supported_") and "clock" in name}


def test_a_log_without_gpus_is_an_answer() -> None:
    answer = nvidia_smi.parse_query_xml("<nvidia_smi_log><driver_version>580.1</driver_version></nvidia_smi_log>")
    assert answer == {"driver_version": "580.1", "cuda_version": None, "attached_gpus": None, "gpus": []}


def test_words_around_the_document_are_told_apart() -> None:
    warning = "WARNING: infoROM is corrupted at gpu 0000:0B:00.0"
    assert query_xml.split_xml(f"{ONE_GPU}\n{warning}\n") == (ONE_GPU.rstrip(), warning)
    assert query_xml.split_xml("No devices were found\n") == ("", "No devices were found")


def test_words_in_a_document_that_breaks_off_are_found() -> None:
    words = "Unable to determine the device handle for GPU 0000:0B:00.0: Unknown Error"
    cut = ONE_GPU[: ONE_GPU.index("<product_brand>")]
    assert query_xml.split_xml(f"{cut}{words}\n")[1] == words
    assert query_xml.split_xml(f"before\n{cut}\n a > b\n a < b\n word\n{words}\n")[1] == f"before\n{words}"


# The other calls


def test_fields_agree_with_query_gpu_of_the_same_moment() -> None:
    """What -q -x and --query-gpu said on one real H100; power and temperature moved a little between the two."""
    asked = json.loads((CORPUS / "580.159.04-h100-queried.query.json").read_text(encoding="utf-8"))
    gpu = nvidia_smi.parse_query_xml((CORPUS / "580.159.04-h100-queried.xml").read_text(encoding="utf-8"))["gpus"][0]
    same = {
        "name": gpu["name"],
        "serial": gpu["serial"],
        "uuid": gpu["uuid"],
        "index": gpu["index"],
        "pci.bus_id": gpu["pci_bus_id"],
        "persistence_mode": gpu["persistence_mode"],
        "addressing_mode": gpu["addressing_mode"],
        "c2c.mode": gpu["c2c_mode"],
        "vbios_version": gpu["vbios_version"],
        "gpu_recovery_action": gpu["recovery_action"],
        "pstate": gpu["performance_state"],
        "memory.total": gpu["memory_total_mib"],
        "memory.reserved": gpu["memory_reserved_mib"],
        "memory.used": gpu["memory_used_mib"],
        "memory.free": gpu["memory_free_mib"],
        "compute_mode": gpu["compute_mode"],
        "mig.mode.current": gpu["mig_mode"],
        "mig.mode.pending": gpu["mig_mode_pending"],
        "utilization.gpu": gpu["utilization_gpu_percent"],
        "utilization.memory": gpu["utilization_memory_percent"],
        "temperature.gpu": gpu["temperature_gpu_c"],
        "power.limit": f"{gpu['power_limit_w']:.2f}",
        "enforced.power.limit": f"{gpu['power_limit_enforced_w']:.2f}",
        "power.default_limit": f"{gpu['power_limit_default_w']:.2f}",
        "ecc.mode.current": gpu["ecc"]["mode"],
        "ecc.mode.pending": gpu["ecc"]["mode_pending"],
        "ecc.errors.corrected.volatile.total": gpu["ecc"]["corrected"]["volatile"],
        "ecc.errors.corrected.aggregate.total": gpu["ecc"]["corrected"]["aggregate"],
        "ecc.errors.uncorrected.volatile.total": gpu["ecc"]["uncorrected"]["volatile"],
        "ecc.errors.uncorrected.aggregate.total": gpu["ecc"]["uncorrected"]["aggregate"],
        "remapped_rows.correctable": gpu["ecc"]["remapped_rows"]["corrected"],
        "remapped_rows.uncorrectable": gpu["ecc"]["remapped_rows"]["uncorrected"],
        "pcie.link.gen.current": gpu["pcie"]["generation_current"],
        "pcie.link.gen.max": gpu["pcie"]["generation_max"],
        "pcie.link.gen.gpumax": gpu["pcie"]["generation_device_max"],
        "pcie.link.width.current": gpu["pcie"]["width_current"],
        "pcie.link.width.max": gpu["pcie"]["width_max"],
        "clocks.current.graphics": gpu["clocks"]["graphics_mhz"],
        "clocks.current.sm": gpu["clocks"]["sm_mhz"],
        "clocks.current.memory": gpu["clocks"]["memory_mhz"],
        "clocks.max.graphics": gpu["clocks"]["graphics_max_mhz"],
        "clocks.max.sm": gpu["clocks"]["sm_max_mhz"],
        "clocks.max.memory": gpu["clocks"]["memory_max_mhz"],
        **{
            f"clocks_event_reasons_counters.{key[:-3]}": count
            for key, count in gpu["clocks_event_reasons_counters"].items()
        },
    }
    assert {field: str(value) for field, value in same.items()} == {field: asked[field] for field in same}
    assert float(asked["temperature.memory"]) == pytest.approx(gpu["temperature_memory_c"], abs=2)
    assert float(asked["power.draw"]) == pytest.approx(gpu["power_draw_w"], abs=0.5)
    assert query_csv.architecture_of(asked["compute_cap"]) == gpu["architecture"]
    active = [name.split(".")[1] for name, value in asked.items() if re.match(r"clocks_event.*\.[a-z_]+", name)]
    assert gpu["clocks_event_reasons"] == [
        name for name in active if asked.get(f"clocks_event_reasons.{name}") == "Active"
    ]
    for field, value in (("fabric.state", gpu["fabric_state"]), ("fabric.status", gpu["fabric_status"])):
        assert (asked[field], value) == ("N/A", None)


def test_listing_call_gives_the_same_gpu_as_the_full_query() -> None:
    listed = nvidia_smi.parse_query_csv(
        (CORPUS / "580.159.04-h100-queried.csv").read_text(encoding="utf-8").strip() + ", P0"
    )
    full = nvidia_smi.parse_query_xml((CORPUS / "580.159.04-h100-queried.xml").read_text(encoding="utf-8"))
    assert listed["driver_version"] == full["driver_version"]
    assert_answer(listed)
    given_there = set(nvidia_smi.SUBSETS["min"] + nvidia_smi.SUBSETS["mig"] + nvidia_smi.IDENTITY_KEYS)
    for key in given_there - {"minor_number", "sensors_failed"}:
        assert listed["gpus"][0][key] == full["gpus"][0][key], key


def test_listing_call_without_values() -> None:
    line = (
        "0, NVIDIA X, GPU-1, 00000000:01:00.0, 552.1, [N/A], [Unknown Error], [N/A], [N/A], Default, [N/A], [N/A], "
        "8.9, [N/A]"
    )
    gpu = nvidia_smi.parse_query_csv(line)["gpus"][0]
    assert_shape(gpu, nvidia_smi.empty_gpu())
    assert gpu["architecture"] == "Ada Lovelace"
    for key in ("memory_total_mib", "memory_used_mib", "serial", "persistence_mode", "mig_mode"):
        assert gpu[key] is None
    assert gpu["mig_devices"] == []


@pytest.mark.parametrize("line", ["0, a", "x" + ", a" * 13, "0" + ", a" * 14])
def test_listing_call_that_is_damaged_is_refused(line: str) -> None:
    assert refused(nvidia_smi.parse_query_csv, line) == (
        f"A line of nvidia-smi --query-gpu should have 14 values with an index first; found '{line}'."
    )


@pytest.mark.parametrize("word", ["[GPU is lost]", "GPU is lost"])
def test_listing_call_marks_a_lost_gpu(word: str) -> None:
    line = f"1, NVIDIA X, GPU-1, 00000000:01:00.0, 580.1, {word}, {word}, 1, Enabled, Default, [N/A], [N/A], 8.0, P0"
    gpu = nvidia_smi.parse_query_csv(line)["gpus"][0]
    assert (gpu["status"], gpu["memory_total_mib"], gpu["uuid"]) == ("lost", None, "GPU-1")


@pytest.mark.parametrize(
    ("capability", "name"),
    [
        ("3.7", "Kepler"),
        ("5.2", "Maxwell"),
        ("6.0", "Pascal"),
        ("7.0", "Volta"),
        ("7.2", "Volta"),
        ("7.1", None),
        ("11.0", "Blackwell"),
        ("8", None),
        ("x8.9", None),
        ("7.5", "Turing"),
        ("8.0", "Ampere"),
        ("8.6", "Ampere"),
        ("8.9", "Ada Lovelace"),
        ("9.0", "Hopper"),
        ("10.0", "Blackwell"),
        ("12.0", "Blackwell"),
        ("99.0", None),
        ("[N/A]", None),
        (None, None),
    ],
)
def test_architecture_of_compute_capability(capability: str | None, name: str | None) -> None:
    assert query_csv.architecture_of(capability) == name


@pytest.mark.parametrize(
    ("recording", "profiles"),
    [
        ("590.48.01-h100-mig", ["3g.40gb", "2g.20gb", "1g.10gb", "1g.10gb"]),
        ("590.48.01-h200-mig", ["1c.3g.71gb", "2c.3g.71gb", "2g.35gb", "1g.18gb", "1g.18gb"]),
        ("580.159.04-h100-queried", []),
    ],
)
def test_recorded_list_is_read(recording: str, profiles: list[str]) -> None:
    (gpu,) = nvidia_smi.parse_list((CORPUS / f"{recording}.list.txt").read_text(encoding="utf-8"))
    assert gpu["index"] == 0
    assert [device["profile"] for device in gpu["mig_devices"]] == profiles
    assert [device["index"] for device in gpu["mig_devices"]] == list(range(len(profiles)))
    assert all(device["uuid"].startswith("MIG-") for device in gpu["mig_devices"])
    for device in gpu["mig_devices"]:
        assert_shape(device, dict.fromkeys(MIG_KEYS))


def test_old_mig_uuid_holds_the_instances() -> None:
    text = "GPU 0: A100 (UUID: GPU-5d)\n  MIG 3g.20gb Device 0: (UUID: MIG-GPU-5d/1/0)\n"
    device = nvidia_smi.parse_list(text)[0]["mig_devices"][0]
    assert (device["gpu_instance_id"], device["compute_instance_id"]) == (1, 0)


@pytest.mark.parametrize("text", ["GPU 0: NVIDIA H1", "GPU 0: X (UUID: GPU-1)\n  MIG 1g.10gb Dev", "MIG 1g"])
def test_a_list_that_breaks_off_is_refused(text: str) -> None:
    assert refused(nvidia_smi.parse_list, text) == (
        f"nvidia-smi -L printed a line that names no GPU or MIG device: {text.splitlines()[-1].strip()!r}."
    )


def test_messages_in_a_list_are_passed_over() -> None:
    text = "Unable to determine the device handle for gpu 0000:0B:00.0: Unknown Error\nGPU 1: X (UUID: GPU-1)\n"
    assert [gpu["index"] for gpu in nvidia_smi.parse_list(text)] == [1]


def mig_listing(uuid: str, count: int) -> str:
    lines = [f"  MIG 3g.20gb     Device  {number}: (UUID: MIG-{number})\n" for number in range(count)]
    return f"GPU 0: NVIDIA A100 (UUID: {uuid})\n" + "".join(lines)


def test_mig_devices_of_the_xml_get_uuid_and_profile_from_the_list() -> None:
    gpus = nvidia_smi.parse_query_xml((CORPUS / "510.47.03-a100-40gb-mig.xml").read_text(encoding="utf-8"))["gpus"]
    listing = nvidia_smi.parse_list(mig_listing(gpus[0]["uuid"], 2))
    before = json.dumps(gpus)
    (gpu,) = nvidia_smi.merge_list(gpus, listing)
    assert json.dumps(gpus) == before
    assert gpu["mig_devices"][1] == {
        "index": 1,
        "uuid": "MIG-1",
        "profile": "3g.20gb",
        "gpu_instance_id": 2,
        "compute_instance_id": 0,
        "memory_total_mib": 19968,
    }


def test_mig_devices_of_the_listing_call_come_from_the_list_alone() -> None:
    gpu = dict(nvidia_smi.empty_gpu(), uuid="GPU-1", mig_mode="Enabled")
    (merged,) = nvidia_smi.merge_list([gpu], nvidia_smi.parse_list(mig_listing("GPU-1", 2)))
    assert [device["uuid"] for device in merged["mig_devices"]] == ["MIG-0", "MIG-1"]
    (other,) = nvidia_smi.merge_list([gpu], nvidia_smi.parse_list(mig_listing("GPU-2", 2)))
    assert other["mig_devices"] is None


NVLINK_ERRORS = ("replay_errors", "recovery_errors", "crc_errors")


def test_nvlinks_are_read() -> None:
    links = nvidia_smi.parse_nvlink_status((CORPUS / "590.48.01-h200.nvlink.txt").read_text(encoding="utf-8"))
    (found,) = links.values()
    assert found is not None
    assert len(found) == 18
    assert found[17] == {"link": 17, "active": True, "speed_gb_per_s": 26.562} | dict.fromkeys(NVLINK_ERRORS)


def test_errors_of_nvlinks_are_read() -> None:
    text = (CORPUS / "580.159.04-2x-h100.nvlink.txt").read_text(encoding="utf-8")
    first, second = nvidia_smi.parse_nvlink_status(text).values()
    assert first == second
    assert first is not None
    assert len(first) == 18
    assert first[17] == {"link": 17, "active": True, "speed_gb_per_s": 26.562} | dict.fromkeys(NVLINK_ERRORS, 0)
    text = text.replace("Link 3: Recovery Errors: 0", "Link 3: Recovery Errors: 18446744073709551615", 1)
    text = text.replace("Link 4: CRC Errors: 0", "Link 4: CRC Errors: N/A", 1)
    changed = nvidia_smi.parse_nvlink_status(text)
    first, second = changed.values()
    assert first is not None
    assert (first[3]["recovery_errors"], first[3]["replay_errors"]) == (18446744073709551615, 0)
    assert (first[4]["crc_errors"], first[4]["recovery_errors"]) == (None, 0)
    assert second == first[:3] + second[3:5] + first[5:]  # type: ignore[index]


@pytest.mark.parametrize(("recording", "links"), [("595.80-l40s", []), ("590.48.01-h200-mig", None)])
def test_no_nvlinks_and_unknown_nvlinks_differ(recording: str, links: list[object] | None) -> None:
    text = (CORPUS / f"{recording}.nvlink.txt").read_text(encoding="utf-8")
    assert list(nvidia_smi.parse_nvlink_status(text).values()) == [links]


def test_cards_that_count_other_errors_have_their_links() -> None:
    """Words of a B300's nvidia-smi, as a public note tells them."""
    other = ("Malformed packet Errors: 0", "Rx Errors: 0", "Total link recovery events: 0", "FEC Errors - 0: 9")
    text = "GPU 0: X (UUID: GPU-1)\n\t Link 0: 50 GB/s\n" + "".join(f"\t Link 0: {each}\n" for each in other)
    (links,) = nvidia_smi.parse_nvlink_status(text).values()
    assert links == [{"link": 0, "active": True, "speed_gb_per_s": 50.0} | dict.fromkeys(NVLINK_ERRORS)]


def test_the_links_of_a_gpu_with_one_in_another_state_are_unknown() -> None:
    """As one that sleeps, which is neither up nor down; how many are up decides whether some are missing."""
    text = "GPU 0: X (UUID: GPU-1)\n\t Link 0: {}\n\t Link 1: 25 GB/s\nGPU 1: X (UUID: GPU-2)\n\t Link 0: 25 GB/s\n"
    for state in ("<sleep>", "<Low Power>"):
        links = nvidia_smi.parse_nvlink_status(text.format(state))
        assert links["GPU-1"] is None
        assert [link["active"] for link in links["GPU-2"] or []] == [True]
    for damage in ("<>", "<1>", "sleep", "<sleep"):
        assert refused(nvidia_smi.parse_nvlink_status, text.format(damage))


def test_inactive_nvlink() -> None:
    text = "GPU 0: X (UUID: GPU-1)\n\t Link 0: <inactive>\n"
    assert nvidia_smi.parse_nvlink_status(text) == {
        "GPU-1": [{"link": 0, "active": False, "speed_gb_per_s": None} | dict.fromkeys(NVLINK_ERRORS)],
    }


def test_damaged_nvlink_is_refused() -> None:
    assert refused(nvidia_smi.parse_nvlink_status, "GPU 0: X (UUID: GPU-1)\n\t Link 0: 26.5") == (
        "nvidia-smi nvlink -s -e printed a line that is no link's state: 'Link 0: 26.5'."
    )


@pytest.mark.parametrize(
    ("recording", "driver", "cuda"),
    [
        ("580.159.04-h100-queried", "580.159.04", "13.0"),
        ("590.48.01-h200", "590.48.01", "13.1"),
        ("595.80-l40s", "595.80", "13.2"),
        ("610.57.04-rtx-2080-super", "610.57.04", "13.3"),
    ],
)
def test_recorded_version_is_read(recording: str, driver: str, cuda: str) -> None:
    text = (CORPUS / f"{recording}.version.txt").read_text(encoding="utf-8")
    assert nvidia_smi.parse_version(text) == {"driver_version": driver, "cuda_version": cuda}


def test_kernel_information_is_read() -> None:
    text = (CORPUS / "580.159.04-h100-queried.information.txt").read_text(encoding="utf-8")
    information = listings.parse_proc_information(text)
    assert information["gpu uuid"] == "GPU-c380f658-bd4a-b014-68f9-4074e00168ab"
    assert information["device minor"] == "0"
    assert information["gpu excluded"] == "No"


# Failures


@pytest.mark.parametrize(
    ("recording", "reason"),
    [
        ("535.261.03-driver-not-loaded", "driver_not_loaded"),
        ("535.261.03-library-not-found", "library_not_found"),
        ("550.163.01-driver-not-loaded", "driver_not_loaded"),
        ("550.163.01-library-not-found", "library_not_found"),
        ("580.159.04-no-devices", "no_devices"),
        ("580.159.04-unknown-field", "unsupported"),
        ("580.159.04-unknown-option", "unsupported"),
    ],
)
def test_recorded_failure_is_classified_by_its_words_and_by_its_code(recording: str, reason: str) -> None:
    words, code = (CORPUS / f"{recording}.failure.txt").read_text(encoding="utf-8").rsplit("exit code ", 1)
    assert failures.classify(0, words) == reason
    if recording != "580.159.04-unknown-option":
        assert failures.classify(int(code), "") == reason


@pytest.mark.parametrize(
    ("code", "words", "reason"),
    [
        (0, "", None),
        (14, "WARNING: infoROM is corrupted at gpu 0000:0B:00.0", None),
        (
            18,
            "Failed to initialize NVML: Driver/library version mismatch\nNVML library version: 535.161",
            "library_mismatch",
        ),
        (255, "Failed to initialize NVML: GPU access blocked by the operating system", "access_blocked"),
        (17, "", "access_blocked"),
        (18, "", "library_mismatch"),
        (255, "Failed to initialize NVML: Driver/library version mismatch", "library_mismatch"),
        (4, "Failed to initialize NVML: Insufficient Permissions", "permission_denied"),
        (255, "Failed to initialize NVML: Unknown Error", "unknown_error"),
        (255, "Failed to initialize NVML: N/A", "unknown_error"),
        (255, "Unable to determine the device handle for GPU0000:07:00.0: Unknown Error", "gpu_lost"),
        (15, "Unable to determine the device handle for GPU 0000:02:00.0: GPU is lost.  Reboot the system", "gpu_lost"),
        (15, "", "gpu_lost"),
        (16, "", "reset_required"),
        (0, "No devices were found", "no_devices"),
        (6, "No devices were found", "no_devices"),
        (11, "", "interrupt_issue"),
        (13, "", "library_mismatch"),
        (127, "nvidia-smi: error while loading shared libraries: libnvidia-ml.so.1: cannot open", "library_not_found"),
        (-11, "", "crashed"),
        (77, "", "unknown_error"),
    ],
)
def test_exit_codes_and_words_become_reasons(code: int, words: str, reason: str | None) -> None:
    assert failures.classify(code, words) == reason


def test_every_reason_has_a_next_step() -> None:
    assert set(nvidia_smi.NEXT_STEPS) == set(nvidia_smi.REASONS) >= set(nvidia_smi.WSL_STEPS)


# Subsets


@pytest.mark.parametrize(
    ("requested", "chosen"),
    [
        (["min"], {"min"}),
        ([], set(nvidia_smi.SUBSETS)),
        (["all"], set(nvidia_smi.SUBSETS)),
        (["!all"], {"min"}),
        (["!all", "!min"], set()),
        (["ecc"], {"min", "ecc"}),
        (["!all", "ecc"], {"min", "ecc"}),
        (["!all", "!min", "ecc"], {"ecc"}),
        (["!ecc"], set(nvidia_smi.SUBSETS) - {"ecc"}),
        (["all", "!ecc", "!power"], set(nvidia_smi.SUBSETS) - {"ecc", "power"}),
        (["all", "!min"], set(nvidia_smi.SUBSETS) - {"min"}),
        (["ecc", "!ecc"], {"min"}),
        (list(nvidia_smi.DEFAULT_SUBSETS), {"min", "mig", "topology"}),
    ],
)
def test_subsets_are_resolved_as_setup_does(requested: list[str], chosen: set[str]) -> None:
    assert nvidia_smi.resolve_subsets(requested) == chosen


@pytest.mark.parametrize("name", ["gpu", "!gpu", "", "!", "!!ecc"])
def test_unknown_subset_is_refused_with_the_known_ones(name: str) -> None:
    with pytest.raises(ValueError, match=r"expected one of all, min, mig"):
        nvidia_smi.resolve_subsets([name])


def test_every_key_belongs_to_exactly_one_subset() -> None:
    keys = [*nvidia_smi.IDENTITY_KEYS, *(key for keys in nvidia_smi.SUBSETS.values() for key in keys)]
    assert sorted(keys) == sorted(nvidia_smi.empty_gpu())


def test_keys_outside_of_the_subsets_are_null_and_there() -> None:
    gpu = nvidia_smi.parse_query_xml(ONE_GPU)["gpus"][0]
    kept = facts.keep_subsets(gpu, frozenset(("power",)))
    assert_shape(kept, nvidia_smi.empty_gpu())
    assert kept["power_draw_w"] == 70.54
    assert kept["uuid"] == gpu["uuid"]
    assert (kept["memory_total_mib"], kept["ecc"]["mode"]) == (None, None)


@pytest.mark.parametrize(
    ("raw", "normal"),
    [
        ("00000000:0B:00.0", "0000:0b:00.0"),
        ("0000:0B:00.0", "0000:0b:00.0"),
        ("0000F8D6:00:00.0", "f8d6:00:00.0"),
        ("00010000:01:00.0", "10000:01:00.0"),
        ("GPU0000:07:00.0: Unknown Error", "0000:07:00.0"),
        ("nothing", None),
        (None, None),
    ],
)
def test_pci_addresses_have_one_normal_form(raw: str | None, normal: str | None) -> None:
    assert pci.normal_bus_id(raw) == normal


def test_xml_library_is_loaded_only_when_needed() -> None:
    """A module run that needs no XML pays for no XML library."""
    program = (
        "import sys; import ansible_collections.gpufarm.core.plugins.module_utils.nvidia_smi as n; "
        "print(sorted(m for m in sys.modules if 'expat' in m or m.startswith('xml')))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, env=python_path()
    )
    assert done.stdout.strip() == "[]"


def python_path() -> dict[str, str]:
    return {"PYTHONPATH": ":".join(sys.path)}


@pytest.mark.parametrize(
    ("said", "status"),
    [
        ("N/A", None),
        ("Not Supported", None),
        ("Success", "Success"),
        ("In use by another client",) * 2,
        ("Timeout",) * 2,
    ],
)
def test_why_a_gpu_cannot_join_its_fabric_is_a_value(said: str, status: str | None) -> None:
    """Elsewhere the words of an error say that there is no value."""
    document = (CORPUS / "580.159.04-h100.xml").read_text(encoding="utf-8")
    changed = re.sub(r"(<fabric>.*?<status>)[^<]*", rf"\g<1>{said}", document, count=1, flags=re.DOTALL)
    assert nvidia_smi.parse_query_xml(changed)["gpus"][0]["fabric_status"] == status


# As a real machine with two H200 prints it (driver 580.159.04); the network card is of the manual.
TOPOLOGY = (
    "\t\x1b[4mGPU0\tGPU1\tNIC0\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\x1b[0m\n"
    "GPU0\t X \tNV18\tPIX\t0-31\t0\t\tN/A\n"
    "GPU1\tNV18\t X \tSYS\t0-31\t0\t\tN/A\n"
    "NIC0\tPIX\tSYS\t X \t\t\t\t\n"
    "\nLegend:\n\n  NV#  = Connection traversing a bonded set of # NVLinks\n"
)


def test_how_gpus_are_connected() -> None:
    assert nvidia_smi.parse_topology(TOPOLOGY) == {(0, 1): "NV18", (1, 0): "NV18"}
    assert nvidia_smi.parse_topology(TOPOLOGY.replace("NV18", "PXB", 1)) == {(0, 1): "PXB", (1, 0): "NV18"}
    for text in ("", "GPU0\tNV18\n", "No devices were found\n", TOPOLOGY.replace("NV18", "???")):
        assert nvidia_smi.parse_topology(text) == {}
