"""What the facts say of faults that the double has as a real host has them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from ansible_collections.gpufarm.core.plugins.module_utils import nvidia_smi

from tests.simulator.gpu import faults

from .conftest import Node

MakeNode = Callable[[str], Node]


@pytest.fixture
def facts(monkeypatch: pytest.MonkeyPatch) -> Callable[..., dict[str, Any]]:
    """Return a function that gathers the facts of a node."""

    def gather(machine: Node, *subsets: str) -> dict[str, Any]:
        for name, text in machine.environment.items():
            monkeypatch.setenv(name, text)
        return nvidia_smi.collect(
            nvidia_smi.resolve_subsets(subsets or nvidia_smi.DEFAULT_SUBSETS),
            path=str(machine.build / "nvidia-smi"),
            root=str(machine.root),
        )

    return gather


@pytest.mark.parametrize("subsets", [(), ("all",)])
def test_a_gpu_that_requires_a_reset(
    node: MakeNode, facts: Callable[..., dict[str, Any]], subsets: tuple[str, ...]
) -> None:
    machine = node("h200-x2")
    machine.change(lambda profile: faults.require_reset(profile, 1))
    found = facts(machine, *subsets)
    assert [gpu["status"] for gpu in found["gpus"]] == ["ok", "reset_required"]
    assert (found["available"], found["reason"]) == (True, "reset_required")
    machine.change(lambda profile: faults.require_reset(profile, 0))
    assert facts(machine, *subsets)["available"] is False


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (faults.unload_driver, "driver_not_loaded"),
        (faults.block_driver, "access_blocked"),
        (faults.deny_driver, "unknown_error"),
        (lambda profile: faults.mismatch_driver(profile, "1.2.3"), "library_mismatch"),
        (lambda profile: faults.lose_gpu(profile, 1), "gpu_lost"),
    ],
)
def test_other_faults(node: MakeNode, facts: Callable[..., dict[str, Any]], change: faults.Change, reason: str) -> None:
    machine = node("h200-x2")
    machine.change(change)
    assert facts(machine)["reason"] == reason


def test_a_missing_control_node_is_told_with_what_to_look_at(
    node: MakeNode, facts: Callable[..., dict[str, Any]]
) -> None:
    machine = node("h200-x2")
    machine.hide("nvidiactl")
    found = facts(machine)
    assert (found["available"], found["reason"]) == (False, "access_blocked")
    assert "ended with exit code 17" in found["message"]
    assert "/dev/nvidiactl" in found["message"].rpartition("system. ")[2]


def test_how_long_clocks_were_held_down(node: MakeNode, facts: Callable[..., dict[str, Any]]) -> None:
    machine = node("h200-x2")
    section = "clocks_event_reasons_counters"
    machine.change(lambda profile: faults.set_value(profile, 1, f"{section}.{section}_hw_therm_slowdown", "5000000 us"))
    first, second = (gpu[section] for gpu in facts(machine, "clocks")["gpus"])
    assert set(first.values()) == {0}
    assert second == {**first, "hw_thermal_slowdown_us": 5000000}
    assert machine.csv(f"{section}.hw_thermal_slowdown", "-i", "1") == [["5000000"]]


def test_a_guest_tells_the_licence_of_its_vgpu(node: MakeNode, facts: Callable[..., dict[str, Any]]) -> None:
    machine = node("h200-x2")
    section = "vgpu_software_licensed_product"
    for key, text in (
        ("gpu_virtualization_mode.virtualization_mode", "VGPU"),
        (f"{section}.licensed_product_name", "NVIDIA AI Enterprise"),
        (f"{section}.license_status", "Unlicensed (Restricted)"),
    ):
        machine.change(lambda profile, key=key, text=text: faults.set_value(profile, 1, key, text))
    whole, vgpu = facts(machine, "board")["gpus"]
    assert (whole["vgpu_licensed_product"], whole["vgpu_license_status"]) == (None, None)
    assert (vgpu["vgpu_licensed_product"], vgpu["vgpu_license_status"]) == (
        "NVIDIA AI Enterprise",
        "Unlicensed (Restricted)",
    )
    assert len(machine.xml().findall(f"gpu/{section}")) == 1
    assert machine.output("-q").count("        License Status ") == 1
