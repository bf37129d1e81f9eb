# Copyright (c) 2026, gpufarm contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

import pytest
from ansible.errors import AnsibleFilterError
from ansible_collections.gpufarm.core.plugins.filter.kubernetes_expected import FilterModule

expected = FilterModule().filters()["kubernetes_expected"]


def test_an_entry_of_expected() -> None:
    gpu = {"uuid": "GPU-1", "name": "Tesla T4", "mig_mode": None, "mig_devices": None}
    facts = {"available": True, "driver_version": "580.159.04", "gpus": [gpu]}
    assert expected(facts, "gpu01") == {
        "node": "gpu01",
        "uuids": ["GPU-1"],
        "models": ["Tesla T4"],
        "driver_version": "580.159.04",
    }


def test_a_gpu_that_is_to_have_no_mig_device_may_be_there() -> None:
    gpus = [
        {"uuid": f"GPU-{number}", "name": "NVIDIA H200", "mig_mode": mode, "mig_devices": devices}
        for number, (mode, devices) in enumerate(
            (("Disabled", None), ("Enabled", []), ("Enabled", [{"uuid": "MIG-1", "profile": "7g.141gb"}]))
        )
    ]
    facts = {"available": True, "driver_version": "580.159.04", "gpus": gpus}
    told = {"node": "gpu01", "driver_version": "580.159.04", "models": ["NVIDIA H200"], "mig_profiles": {"7g.141gb": 1}}
    assert expected(facts, "gpu01") == {**told, "uuids": ["GPU-0", "GPU-1", "MIG-1"]}
    assert expected(facts, "gpu01", False) == {**told, "uuids": ["GPU-0", "MIG-1"], "mig_unknown": ["GPU-1"]}
    assert expected({"available": False}, "gpu01", False) == {"node": "gpu01"}


@pytest.mark.parametrize(("facts", "lacks"), [({}, "'available'"), (None, "subscriptable")])
def test_what_are_no_facts(facts: object, lacks: str) -> None:
    with pytest.raises(AnsibleFilterError, match=lacks) as caught:
        expected(facts, "gpu01")
    assert str(caught.value).startswith("gpu01: the facts of its GPUs lack ") and "Next step: " in str(caught.value)
