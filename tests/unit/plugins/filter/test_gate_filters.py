from __future__ import annotations

from typing import Any

import pytest
from ansible.errors import AnsibleFilterError
from ansible_collections.gpufarm.core.plugins.filter.gate_nodes import gate_nodes
from ansible_collections.gpufarm.core.plugins.filter.nomad_expected import nomad_expected


def facts(*mig: bool) -> dict[str, Any]:
    gpus = [
        {
            "uuid": f"GPU-{number}",
            "name": "NVIDIA A100",
            "mig_mode": "Enabled" if on else "Disabled",
            "mig_devices": [{"uuid": f"MIG-{number}-0"}, {"uuid": f"MIG-{number}-1"}] if on else [],
        }
        for number, on in enumerate(mig)
    ]
    return {"available": True, "driver_version": "580.95.05", "gpus": gpus}


def test_gpus_are_expected_as_they_are() -> None:
    assert nomad_expected(facts(False, False), "a") == {
        "node": "a",
        "uuids": ["GPU-0", "GPU-1"],
        "models": ["NVIDIA A100"],
        "driver_version": "580.95.05",
    }


def test_of_a_divided_gpu_its_devices_are_expected() -> None:
    assert nomad_expected(facts(False, True), "a") == {
        "node": "a",
        "uuids": ["GPU-0", "MIG-1-0", "MIG-1-1"],
        "driver_version": "580.95.05",
    }


def test_hidden_gpus_are_not_expected() -> None:
    assert nomad_expected(facts(False, False, True), "a", ["gpu-0", "MIG-2-1"])["uuids"] == ["GPU-1", "MIG-2-0"]
    assert nomad_expected(facts(False), "a", ["GPU-0"])["uuids"] == []


def test_gpu_without_a_name_counts() -> None:
    sick = facts(False, False)
    sick["gpus"][1].update(uuid=None, name=None)
    assert nomad_expected(sick, "a") == {
        "node": "a",
        "uuids": ["GPU-0"],
        "count": 2,
        "driver_version": "580.95.05",
    }


def test_divided_gpu_without_devices_is_missing() -> None:
    empty = facts(True)
    empty["gpus"][0]["mig_devices"] = []
    assert nomad_expected(empty, "a")["uuids"] == ["GPU-0"]


def test_of_devices_that_nobody_could_list_one_is_expected() -> None:
    unknown = facts(True)
    unknown["gpus"][0]["mig_devices"] = None
    told = {"node": "a", "driver_version": "580.95.05", "uuids": [], "mig_unknown": ["GPU-0"]}
    assert nomad_expected(unknown, "a") == told
    assert nomad_expected({"available": False, "gpus": []}, "a") == {"node": "a"}


def test_facts_that_are_none_are_refused() -> None:
    with pytest.raises(AnsibleFilterError) as caught:
        nomad_expected({"ansible_facts": {}}, "a")
    # Some versions of Ansible add the cause.
    assert str(caught.value).startswith(
        "a: the facts of its GPUs lack 'available'. Expected: ansible_facts.nvidia_smi as the module nvidia_smi_facts "
        "returns it. Next step: gather it with its default subsets and pass it on as it is"
    )


def test_unknown_verdict_is_refused() -> None:
    for where, value, given in (
        ("gate_nodes", "never", ([], [], "never")),
        ("a", "no", ([{"node": "a", "close_on": "no"}], [])),
    ):
        with pytest.raises(AnsibleFilterError) as caught:
            gate_nodes(*given)
        assert str(caught.value) == (
            f"{where}: close_on is '{value}'. Expected: critical or warning. Next step: correct gpu_health_close_on of "
            "this host."
        )
    with pytest.raises(AnsibleFilterError, match="Expected: nomad or kubernetes"):
        gate_nodes([], [], scheduler="slurm")
    assert gate_nodes([], [])["nodes"] == []


def test_wishes_of_a_node_go_before_those_of_the_farm() -> None:
    probe = {"verdict": "warning", "reason": "temperature GPU-1"}
    entries = [
        {"node": "a", "probe": probe, "close_on": "warning", "drain": True, "drain_deadline": 60},
        {"node": "b", "probe": probe},
    ]
    assert gate_nodes(entries, [])["nodes"] == [
        {"node": "a", "healthy": False, "reason": "temperature GPU-1", "drain": True, "drain_deadline": 60},
        {"node": "b", "healthy": True, "reason": None},
    ]
