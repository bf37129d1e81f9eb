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


@pytest.mark.parametrize(("facts", "lacks"), [({}, "'available'"), (None, "subscriptable")])
def test_what_are_no_facts(facts: object, lacks: str) -> None:
    with pytest.raises(AnsibleFilterError, match=lacks) as caught:
        expected(facts, "gpu01")
    assert str(caught.value).startswith("gpu01: the facts of its GPUs lack ") and "Next step: " in str(caught.value)
