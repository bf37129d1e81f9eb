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
    return {"driver_version": "580.95.05", "gpus": gpus}


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


def test_facts_that_are_none_are_refused() -> None:
    with pytest.raises(AnsibleFilterError, match=r"^a: the facts of its GPUs lack 'gpus'\. Expected: .* Next step: "):
        nomad_expected({"ansible_facts": {}}, "a")


def test_unknown_verdict_is_refused() -> None:
    with pytest.raises(AnsibleFilterError, match=r"close_on is 'never'\. Expected: critical or warning\. Next step: "):
        gate_nodes([], [], "never")
    assert gate_nodes([], [])["nodes"] == []
