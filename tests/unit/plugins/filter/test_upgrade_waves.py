# Copyright (c) 2026, gpufarm contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

from typing import Any

import pytest
from ansible.errors import AnsibleFilterError
from ansible_collections.gpufarm.core.plugins.filter import upgrade_waves as plugin

upgrade_waves = plugin.FilterModule().filters()["upgrade_waves"]


def nodes(count: int, *models: str) -> list[dict[str, Any]]:
    return [{"host": f"n{number}", "models": list(models)} for number in range(count)]


@pytest.mark.parametrize(
    ("count", "sizes", "lengths"),
    [
        (10, ["1", "30%", "100%"], [1, 3, 6]),
        (10, [2], [2, 2, 2, 2, 2]),
        (3, ["1", "1%"], [1, 1, 1]),
        (19, ["10%"], [1] * 19),
        (2, ["5"], [2]),
        (0, ["1"], []),
    ],
)
def test_sizes(count: int, sizes: list[object], lengths: list[int]) -> None:
    waves = upgrade_waves(nodes(count, "T4"), sizes)
    assert [len(wave) for wave in waves] == lengths
    assert [host for wave in waves for host in wave] == [f"n{number}" for number in range(count)]


def test_a_model_that_has_no_room_waits_and_others_go_before_it() -> None:
    farm = [
        {"host": "a1", "models": ["A"]}, {"host": "a2", "models": ["A"]}, {"host": "b1", "models": ["B"]},
        {"host": "ab", "models": ["A", "B", "B"]}, {"host": "none", "models": []}, {"host": "a3", "models": ["A"]},
    ]  # fmt: skip
    assert upgrade_waves(farm, ["100%"], 1) == [["a1", "b1", "none"], ["a2"], ["ab"], ["a3"]]
    # Half of four A are two, half of two B are one.
    assert upgrade_waves(farm, ["100%"], "50%") == [["a1", "a2", "b1", "none"], ["ab", "a3"]]
    assert upgrade_waves(farm, ["1", "100%"], "50%") == [["a1"], ["a2", "b1", "none", "a3"], ["ab"]]


@pytest.mark.parametrize("size", ["0", "0%", "101%", "-1", "many", "", "1.5", None])
def test_a_limit_that_is_none(size: object) -> None:
    for name, given in (("waves", ([size],)), ("per_model", (["1"], size))):
        assert refused(*given) == (
            f"upgrade_waves: found {name}: {size!r}. Expected: a number of nodes from 1 on, or a percentage from 1% to "
            f"100%. Next step: correct upgrade_{name}."
        )


def test_no_sizes() -> None:
    assert refused([]) == ("upgrade_waves: found no size. Expected: one at least. Next step: correct upgrade_waves.")


def refused(*limits: Any) -> str:
    with pytest.raises(AnsibleFilterError) as caught:
        upgrade_waves(nodes(1), *limits)
    return str(caught.value)


def test_servers_that_are_nodes_too_go_one_by_one() -> None:
    """Two of three that restart at once leave the farm without a leader."""
    farm = [{"host": f"n{number}", "models": ["A"], "server": number < 3} for number in range(5)]
    assert upgrade_waves(farm, ["100%"]) == [["n0", "n3", "n4"], ["n1"], ["n2"]]
    assert upgrade_waves(farm, ["1", "2"]) == [["n0"], ["n1", "n3"], ["n2", "n4"]]


@pytest.mark.parametrize(("sizes", "lengths"), [("1,30%, 100%", [1, 3, 6]), ("5", [5, 5]), ("50%", [5, 5])])
def test_sizes_of_the_command_line(sizes: str, lengths: list[int]) -> None:
    assert [len(wave) for wave in upgrade_waves(nodes(10, "T4"), sizes)] == lengths


def test_a_string_without_sizes() -> None:
    assert refused("").startswith("upgrade_waves: found waves: ''. Expected: ")
