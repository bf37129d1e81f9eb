# Copyright (c) 2026, gpufarm contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The form of the text. That Nomad reads in it what was meant is seen in the scenario nomad_client."""

from __future__ import annotations

from typing import Any

import pytest
from ansible.errors import AnsibleFilterError
from ansible_collections.gpufarm.core.plugins.filter import nomad_hcl as plugin

nomad_hcl = plugin.FilterModule().filters()["nomad_hcl"]


def test_values_come_first_and_blocks_keep_their_order() -> None:
    config = {
        "plugin": {"b c": {"config": {}}, "a": {"args": ["-x", 1]}, "gone": None},
        "name": "n1",
        "gone": None,
        "odd.key": 1.5,
        "sink": [{"path": "/a"}, {"path": "/b"}],
        "none": [],
    }
    assert nomad_hcl(config) == (
        'name      = "n1"\n"odd.key" = 1.5\nnone      = []\n\n'
        'plugin "b c" {\n  config {\n  }\n}\n\nplugin "a" {\n  args = ["-x", 1]\n}\n\n'
        'sink {\n  path = "/a"\n}\n\nsink {\n  path = "/b"\n}\n'
    )
    assert nomad_hcl({}) == ""


SIMPLE = "a text, a number, a boolean or a list of them"
OPEN = "no quote and no backslash after ${, and a } that ends it"


@pytest.mark.parametrize(
    ("config", "place", "kind", "expected"),
    [
        ([], "a configuration", "list", "a dictionary of blocks and values"),
        ({"a": {"b": object()}}, "a.b", "object", SIMPLE),
        ({"a": [{"b": 1}, 2]}, "a", "dict", SIMPLE),
        ({1: "a"}, "a name", "int", "a text"),
        ({"plugin": {"docker": True}}, 'plugin "docker"', "bool", "a dictionary, as this is a block with a label"),
        ({"client": {"meta": {"x": 's3cret ${a "b"}'}}}, "client.meta.x", "str", OPEN),
        ({"x": "${a"}, "x", "str", OPEN),
    ],
)  # fmt: skip
def test_what_the_configuration_cannot_hold(config: Any, place: str, kind: str, expected: str) -> None:
    with pytest.raises(AnsibleFilterError) as caught:
        nomad_hcl(config)
    assert str(caught.value) == (
        f"{place}: found a value of type {kind} that Nomad's configuration cannot hold. Expected: {expected}. "
        "Next step: correct the variable that gives it."
    )
    assert "s3cret" not in str(caught.value)
