# Copyright (c) 2026, gpufarm contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The catalogue's data, and the kernel's lines in the shapes that drivers from 384 to 600 gave them."""

from __future__ import annotations

import dataclasses
import datetime
import json
import tracemalloc
from pathlib import Path

import pytest
from ansible_collections.gpufarm.core.plugins.module_utils import xid, xid_events
from ansible_collections.gpufarm.core.plugins.module_utils.xid import lookup
from ansible_collections.gpufarm.core.plugins.module_utils.xid_events import Event, read_events
from ansible_collections.gpufarm.core.tests.unit.plugins.module_utils.recorded import assert_recorded

OFF_BUS = "NVRM: fallen off the bus and is not responding to commands."
UUID = "GPU-b850f46d-d5ea-c752-ddf3-c4453e44d3f7"


def read(*messages: str, since: float = 0.0) -> list[Event]:
    """The events of these messages, a second after one another."""
    return read_events(((float(at), message) for at, message in enumerate(messages, 1)), since)


def test_a_device_can_have_a_later_time_of_its_own() -> None:
    lines = [(1.0, "NVRM: Xid (PCI:0000:3b:00): 79, x"), (2.0, "NVRM: Xid (PCI:0000:5e:00): 79, x")]
    addresses = [event.pci_bus_id for event in read_events(lines)]
    assert [event.pci_bus_id for event in read_events(lines, 0.0, {str(addresses[0]): 1.5})] == [addresses[1]]
    assert [event.pci_bus_id for event in read_events(lines, 1.5, {str(addresses[0]): 1.5})] == [addresses[1]]


def one(*messages: str) -> Event:
    (event,) = read(*messages)
    return event


# The catalogue


def test_rows_are_whole() -> None:
    for number, row in xid.CATALOGUE.items():
        assert row.number == number
        assert row.action in xid.ACTIONS
        assert row.severity in ("ignore", "warning", "critical")
        assert row.name and row.name.isascii()
        assert (row.action == "none") <= (row.severity == "ignore"), number
        assert (row.action == "check_app") == (row.severity == "ignore" and row.action != "none"), number


def test_catalogue_and_actions_as_recorded() -> None:
    rows = {str(number): dataclasses.astuple(row) for number, row in xid.CATALOGUE.items()}
    assert_recorded("xid", {"catalogue": rows, "actions": xid.ACTIONS})


# NVIDIA's catalogue as of its date, as tests/xids.py writes one that it reads.
NVIDIA = json.loads((Path(__file__).parents[1] / "fixtures/xid/immediate.json").read_text(encoding="utf-8"))
IMMEDIATE = {action: set(numbers) for action, numbers in NVIDIA["immediate"].items()}
# By these no GPU is reset; the first two are of numbers that are unused, or newer than its actions.
NOT_BY_IT = ("CONTACT_SUPPORT", "")
LESS_THAN_A_RESET = {*NOT_BY_IT, "CHECK_UVM", "IGNORE", "RESTART_APP", "UPDATE_SWFW", "WORKFLOW_XID_45"}


def test_what_is_critical_is_what_the_catalogue_of_nvidia_resets() -> None:
    """So that a change of a row is one of NVIDIA's, or has a reason here."""
    critical = {number for number, row in xid.CATALOGUE.items() if row.severity == "critical"}
    beyond = set().union(*(IMMEDIATE[action] for action in NOT_BY_IT))
    assert critical - beyond == set().union(*(IMMEDIATE[action] for action in IMMEDIATE.keys() - LESS_THAN_A_RESET))
    # Of GPUs older than that catalogue.
    assert {number for number in critical & beyond if number < 100} == {57, 58, 61}
    assert lookup(79).action == lookup(151).action == "reboot"
    named = {lookup(number).action for number in IMMEDIATE["RESET_GPU"] - {136}}
    assert named == {"reset_gpu"} and lookup(136).action == "check_nvlink"


def test_what_has_an_action_in_the_catalogue_of_nvidia_has_a_row() -> None:
    known = set().union(*IMMEDIATE.values())
    assert known - IMMEDIATE["CONTACT_SUPPORT"] <= xid.CATALOGUE.keys() <= known


def test_the_date_of_the_catalogue_is_told() -> None:
    day = datetime.date.fromisoformat(NVIDIA["date"])
    checks = (Path(__file__).parents[4] / "docs/checks.md").read_text(encoding="utf-8")
    for text in (str(xid.__doc__), checks):
        assert f"{day.day} {day:%B %Y}" in text


@pytest.mark.parametrize("number", [13, 31, 43, 45, 68])
def test_faults_of_jobs_say_nothing_of_the_gpu(number: int) -> None:
    assert lookup(number).severity == "ignore"


@pytest.mark.parametrize("number", [8, 32, 92, 94])
def test_what_a_restart_of_the_job_mends_is_a_warning(number: int) -> None:
    assert lookup(number).severity == "warning"


@pytest.mark.parametrize(
    ("number", "action"),
    [
        (46, "reset_gpu"),
        (48, "drain_and_reset"),
        (54, "check_hardware"),
        (61, "reset_gpu"),
        (62, "reset_gpu"),
        (64, "reset_gpu"),
        (74, "check_nvlink"),
        (79, "reboot"),
        (95, "reset_gpu"),
        (109, "reset_gpu"),
        (110, "reset_gpu"),
        (119, "reset_gpu"),
        (120, "reset_gpu"),
        (136, "check_nvlink"),
        (140, "reset_gpu"),
        (143, "reset_gpu"),
        (155, "reset_gpu"),
        (156, "reset_gpu"),
        (158, "reset_gpu"),
    ],
)
def test_faults_of_the_gpu_are_critical(number: int, action: str) -> None:
    assert (lookup(number).severity, lookup(number).action) == ("critical", action)


def test_an_unknown_number_is_a_warning() -> None:
    assert 999 not in xid.CATALOGUE
    assert (lookup(999).number, lookup(999).severity, lookup(999).action) == (999, "warning", "watch")


RECOVERY = "GPU recovery action changed from"


@pytest.mark.parametrize(
    ("text", "severity", "action"),
    [
        ("GPU recovery action changed from 0x0 (None) to 0x1 (GPU Reset Required)", "critical", "reset_gpu"),
        ("GPU recovery action changed from 0x0 (None) to 0x2 (Node Reboot Required)", "critical", "reboot"),
        ("GPU recovery action changed from 0x0 (None) to 0x3 (Drain P2P)", "critical", "drain_and_reset"),
        ("GPU recovery action changed from 0x0 (None) to 0x4 (Drain and Reset)", "critical", "drain_and_reset"),
        ("GPU recovery action changed from 0x1 (GPU Reset Required) to 0x0 (None)", "ignore", "none"),
        ("GPU recovery action changed from 0x0 (None) to 0x5 (Recover IMEX Domain)", "warning", "check_configuration"),
        ("GPU recovery action changed from 0x0 (None) to 0x5", "warning", "check_configuration"),
        ("GPU recovery action changed from 0x0 (None) to 0x5 (Reset Bus)", "critical", "reset_gpu"),
        ("GPU recovery action changed from 0x5 (Recover IMEX Domain) to 0x1 (Reset)", "critical", "reset_gpu"),
        ("GPU recovery action changed from 0x0 (None) to 0x9 (Something New)", "critical", "reset_gpu"),
        ("said otherwise", "critical", "reset_gpu"),
        # A process has the name that somebody gave it.
        (f"pid=7, name=up to 0x0, {RECOVERY} 0x0 (None) to 0x1 (GPU Reset Required)", "critical", "reset_gpu"),
        (f"pid=7, name=up to 0x5, {RECOVERY} 0x0 (None) to 0x2 (Node Reboot Required)", "critical", "reboot"),
        (f"pid=7, name=up to 0x2, {RECOVERY} 0x1 (GPU Reset Required) to 0x0 (None)", "ignore", "none"),
        ("pid=7, name=up to 0x0, said otherwise", "critical", "reset_gpu"),
    ],
)
def test_xid_154_means_what_its_message_says(text: str, severity: str, action: str) -> None:
    row = lookup(154, text)
    assert (row.severity, row.action) == (severity, action)


@pytest.mark.parametrize("number", range(144, 151))
def test_nvlink_5_errors_are_critical_unless_the_message_says_nonfatal(number: int) -> None:
    assert [lookup(number, "", fatal).severity for fatal in (True, None, False)] == ["critical", "critical", "warning"]


# The kernel's lines


@pytest.mark.parametrize(
    ("message", "number", "bus", "text"),
    [
        (
            "NVRM: Xid (PCI:0000:3b:00): 79, pid=123, name=python, GPU has fallen off the bus.",
            79,
            "0000:3b:00.0",
            "pid=123, name=python, GPU has fallen off the bus.",
        ),
        (
            "NVRM: Xid (PCI:0000:05:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus.",
            79,
            "0000:05:00.0",
            "pid='<unknown>', name=<unknown>, GPU has fallen off the bus.",
        ),
        (
            "NVRM: Xid (PCI:0000:01:00): 79, GPU has fallen off the bus.",
            79,
            "0000:01:00.0",
            "GPU has fallen off the bus.",
        ),
        ("NVRM: Xid (0000:03:00): 14, Channel 00000001", 14, "0000:03:00.0", "Channel 00000001"),
        ("NVRM: Xid (PCI:0000:3b:00.0): 48, DBE", 48, "0000:3b:00.0", "DBE"),
        ("NVRM: Xid (PCI:3b:00): 31, Ch 00000002", 31, "0000:3b:00.0", "Ch 00000002"),
        ("NVRM: Xid (PCI:0018:01:00): 95, x", 95, "0018:01:00.0", "x"),
        ("NVRM: Xid (PCI:00000000:3B:00): 62, 2190(30cc)", 62, "0000:3b:00.0", "2190(30cc)"),
        (
            "NVRM: Xid (PCI:0000:3b:00 GPU-I:05): 94, pid=9, name=a, Contained",
            94,
            "0000:3b:00.0",
            "pid=9, name=a, Contained",
        ),
        ("NVRM: Xid (PCI:0000:3b:00): 63", 63, "0000:3b:00.0", ""),
        ("NVRM: Xid (PCI:0000:3b:00): 45, pid=1, name=a\tb\x07, Ch\n 8", 45, "0000:3b:00.0", "pid=1, name=a b , Ch 8"),
    ],
)
def test_shapes_of_an_xid(message: str, number: int, bus: str, text: str) -> None:
    event = one(message)
    assert (event.kind, event.number, event.pci_bus_id, event.count) == ("xid", number, bus, 1)
    assert (event.first, event.last, event.code) == (1.0, 1.0, f"xid_{number}")
    assert event.text == " ".join(text.split())


@pytest.mark.parametrize(
    ("unit", "fatal"),
    [("NETIR_LINK_EVT  Fatal   XC0 i0 Link 01", True), ("RLW_REMAP Nonfatal XC0 i0 Link 00", False), ("SAW_MVB", None)],
)
def test_sub_codes_of_nvlink_5_say_whether_they_are_fatal(unit: str, fatal: bool | None) -> None:
    event = one(f"NVRM: Xid (PCI:0009:01:00): 149, {unit} (0x021425c6 0x00000000)")
    assert (event.number, event.pci_bus_id, event.fatal) == (149, "0009:01:00.0", fatal)


def test_the_word_fatal_means_nothing_elsewhere() -> None:
    assert one("NVRM: Xid (PCI:0000:3b:00): 79, Fatal").fatal is None


def test_repeats_are_one_event_for_each_gpu_and_number() -> None:
    first, second, third = read(
        "NVRM: Xid (PCI:0000:3b:00): 48, a",
        "NVRM: Xid (PCI:0000:3c:00): 48, b",
        "NVRM: Xid (PCI:0000:3b:00): 48, c",
        "NVRM: Xid (PCI:0000:3b:00): 63, d",
    )
    assert (first.pci_bus_id, first.count, first.first, first.last, first.text) == ("0000:3b:00.0", 2, 1.0, 3.0, "c")
    assert (second.pci_bus_id, second.count) == ("0000:3c:00.0", 1)
    assert third.number == 63


def test_something_fatal_is_not_forgotten_over_what_is_not() -> None:
    event = one(
        "NVRM: Xid (PCI:0000:3b:00): 149, NETIR_BER_EVENT Nonfatal a",
        "NVRM: Xid (PCI:0000:3b:00): 149, NETIR_LINK_EVT Fatal b",
        "NVRM: Xid (PCI:0000:3b:00): 149, NETIR_BER_EVENT Nonfatal c",
    )
    assert (event.fatal, event.count, event.text) == (True, 3, "NETIR_LINK_EVT Fatal b")
    event = one("NVRM: Xid (PCI:0000:3b:00): 149, Fatal a", "NVRM: Xid (PCI:0000:3b:00): 149, Fatal b")
    assert (event.fatal, event.count, event.text) == (True, 2, "Fatal b")


def test_the_last_recovery_action_counts() -> None:
    event = one(
        "NVRM: Xid (PCI:0000:3b:00): 154, GPU recovery action changed from 0x0 (None) to 0x1 (GPU Reset Required)",
        "NVRM: Xid (PCI:0000:3b:00): 154, GPU recovery action changed from 0x1 (GPU Reset Required) to 0x0 (None)",
    )
    assert lookup(154, event.text).severity == "ignore"


def test_what_came_before_does_not_count() -> None:
    messages = [f"NVRM: Xid (PCI:0000:3b:00): 48, {number}" for number in range(1, 4)]
    assert [(event.count, event.first) for event in read(*messages, since=2.0)] == [(2, 2.0)]
    assert read(*messages, since=3.1) == []
    assert [event.first for event in read_events([(0.5, messages[0])])] == [0.5]


@pytest.mark.parametrize(
    ("message", "number", "fatal"),
    [
        (
            "nvidia-nvswitch3: SXid (PCI:0000:05:00.0): 12028, Non-fatal, Link 32 egress non-posted PRIV error",
            12028,
            False,
        ),
        ("nvidia-nvswitch0: SXid (PCI:0000:05:00.0): 20034, Fatal, Link 30 LTSSM Fault Up", 20034, True),
        ("nvidia-nvswitch0: SXid (PCI:0000:05:00.0): 24007 , told otherwise", 24007, None),
    ],
)
def test_errors_of_nvswitches(message: str, number: int, fatal: bool | None) -> None:
    event = one(message, f"nvidia-nvswitch0: SXid (PCI:0000:05:00.0): {number}, Data {{0x50610002, 0x10100030}}")
    assert (event.code, event.pci_bus_id) == (f"sxid_{number}", "0000:05:00.0")
    assert (event.fatal, event.count) == (fatal, 1)
    assert "Data" not in event.text


def test_the_uuid_comes_from_the_kernel_too() -> None:
    assert one(f"NVRM: GPU at PCI:0000:3b:00: {UUID}", "NVRM: Xid (PCI:0000:3b:00): 79, x").uuid == UUID
    assert one(f"NVRM: GPU at 0000:3b:00: {UUID}", "NVRM: Xid (PCI:0000:3c:00): 79, x").uuid is None


@pytest.mark.parametrize(
    "messages",
    [
        ["NVRM: GPU 0000:18:00.0: GPU has fallen off the bus."],
        ["NVRM: GPU at 0000:18:00.0 has fallen off the bus."],
        [f"NVRM: The NVIDIA GPU 0000:18:00.0\nNVRM: (PCI ID: 10de:2330) has\n{OFF_BUS}"],
        ["NVRM: The NVIDIA GPU 0000:18:00.0", OFF_BUS],
    ],
)
def test_falling_off_the_bus_without_a_number_is_xid_79(messages: list[str]) -> None:
    event = one(*messages)
    assert (event.code, event.pci_bus_id, event.count) == ("xid_79", "0000:18:00.0", 1)
    beside = one(*messages, "NVRM: Xid (PCI:0000:18:00): 79, pid=1, GPU has fallen off the bus.")
    assert (beside.count, beside.text) == (1, "pid=1, GPU has fallen off the bus.")


def test_a_gpu_that_cannot_be_started() -> None:
    event = one("NVRM: GPU 0000:18:00.0: RmInitAdapter failed! (0x62:0x55:2477)")
    assert (event.code, event.pci_bus_id, event.text) == ("gpu_init_failed", "0000:18:00.0", "(0x62:0x55:2477)")
    assert event.number == 0
    assert one("NVRM: RmInitAdapter failed! (0x26:0xffff:1227)").pci_bus_id is None


@pytest.mark.parametrize(
    "message",
    [
        "",
        "NVRM: loading NVIDIA UNIX Open Kernel Module for x86_64  580.159.04",
        "NVRM: Xid (PCI:0000:3b:00): none",
        "NVRM: Xid",
        "oom-kill: task=NVRM: Xid (PCI:0000:3b:00): 79, GPU has fallen off the bus.",
        "audit: comm=nvidia-nvswitch0: SXid (PCI:0000:05:00.0): 20034, Fatal",
    ],
)
def test_what_is_no_event(message: str) -> None:
    assert read(message) == []


def test_an_address_that_cannot_be_read_is_null() -> None:
    assert one("NVRM: Xid (PCI:0): 79, x").pci_bus_id is None


def test_a_huge_log_takes_little_memory() -> None:
    def flood() -> object:
        for number in range(20_000):
            yield float(number), f"NVRM: Xid (PCI:{number % 65536:04x}:00:00): {number % 99999}, {'x' * 200}"

    tracemalloc.start()
    events = read_events(flood())  # type: ignore[arg-type]
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(events) == xid_events.MAX_EVENTS
    assert peak < 4 * 1024 * 1024


@pytest.mark.parametrize(
    ("lines", "incidents"),
    [
        # One process that fails writes a line for each of its threads, or of its channels.
        ([(0, "pid=7, name=a"), (0.1, "pid=7, name=a"), (500, "pid=7, name=a")], 1),
        ([(0, "pid=7, name=a"), (0.1, "pid=8, name=a, pid=9"), (0.2, "pid=7, name=a")], 2),
        # Older drivers, and some Xids, name no process.
        ([(0, "Graphics Exception"), (30, "Graphics Exception"), (89, "Graphics Exception")], 1),
        ([(0, "Graphics Exception"), (61, "Graphics Exception"), (62, "pid='<unknown>', name=pid=3")], 2),
    ],
)
def test_incidents_are_told_from_lines(lines: list[tuple[float, str]], incidents: int) -> None:
    records = [(at, f"NVRM: Xid (PCI:0000:3c:00): 31, {text}") for at, text in lines]
    (found,) = read_events(records)
    assert (found.count, found.incidents) == (len(lines), incidents)
