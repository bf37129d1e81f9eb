# Copyright (c) gpufarm contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

import itertools
import random
from collections import Counter
from pathlib import Path

import pytest
from ansible_collections.gpufarm.core.plugins.module_utils.mig.listings import (
    Instance,
    Profile,
    parse_instances,
    parse_profiles,
)
from ansible_collections.gpufarm.core.plugins.module_utils.mig.planning import LayoutError, Plan, plan

FIXTURES = Path(__file__).resolve().parents[1] / "fixtures/mig"
# As an H100 says it, driver 580.159 (recorded; MIG was off).
LGIP, LGIPP = ((FIXTURES / f"h100-{name}.txt").read_text("ascii") for name in ("lgip", "lgipp"))
H100 = parse_profiles(LGIP, LGIPP)[0]
LGI = """
+---------------------------------------------------------+
| GPU instances:                                          |
| GPU   Name               Profile  Instance   Placement  |
|                            ID       ID       Start:Size |
|=========================================================|
|   0  MIG 1g.10gb+me        20        9          2:1     |
+---------------------------------------------------------+
|   0  MIG 2g.20gb           14        3          0:2     |
+---------------------------------------------------------+
|  10  MIG 3g.40gb            9        2          4:4     |
+---------------------------------------------------------+
"""
LCI = """
+--------------------------------------------------------------------+
| Compute instances:                                                 |
| GPU     GPU       Name             Profile   Instance   Placement  |
|       Instance                       ID        ID       Start:Size |
|         ID                                                         |
|====================================================================|
|   0      9       MIG 1g.10gb+me       0         0          0:1     |
+--------------------------------------------------------------------+
|   0      3       MIG 1c.2g.20gb       0         0          0:1     |
+--------------------------------------------------------------------+
|   0      3       MIG 1c.2g.20gb       0         1          1:1     |
+--------------------------------------------------------------------+
"""


def instances(*found: tuple[int, str, int]) -> list[Instance]:
    sizes = {profile.name: profile.size for profile in H100}
    return [Instance(number, name, start, sizes[name], (name,)) for number, name, start in found]


@pytest.mark.parametrize(
    ("profile", "compute", "whole"),
    [
        ("1g.10gb+me", ("1g.10gb+me",), True),
        ("1g.10gb+me", ("1g.10gb",), True),
        ("2g.20gb", ("1c.2g.20gb", "1c.2g.20gb"), False),
        ("2g.20gb", ("1c.2g.20gb",), False),
        ("2g.20gb", (), False),
    ],
)
def test_what_is_whole(profile: str, compute: tuple[str, ...], whole: bool) -> None:
    assert Instance(3, profile, 0, 2, compute).whole is whole


def steps(layout: dict[str, int], there: list[Instance], busy: tuple[int, ...] = ()) -> tuple[list[int], list[str]]:
    found = plan("GPU 0", layout, H100, there, frozenset(busy))
    return [each.id for each in found.destroy], [f"{profile.name}@{start}" for profile, start in found.create]


def test_profiles_of_a_card() -> None:
    assert [(each.name, each.id, each.total, each.memory_gib, each.starts, each.size) for each in H100] == [
        ("1g.10gb", 19, 7, 9.75, (0, 1, 2, 3, 4, 5, 6), 1),
        ("1g.10gb+me", 20, 1, 9.75, (0, 1, 2, 3, 4, 5, 6), 1),
        ("1g.20gb", 15, 4, 19.62, (0, 2, 4, 6), 2),
        ("2g.20gb", 14, 3, 19.62, (0, 2, 4), 2),
        ("3g.40gb", 9, 2, 39.5, (0, 4), 4),
        ("4g.40gb", 5, 1, 39.5, (0,), 4),
        ("7g.80gb", 0, 1, 79.25, (0,), 8),
    ]
    assert [each.slices for each in H100] == [1, 1, 1, 2, 3, 4, 7]
    assert parse_profiles("No MIG-enabled devices found.\n", "") == {}


def test_instances_of_cards() -> None:
    """One that is divided further, or holds nothing, is none of a layout."""
    assert parse_instances(LGI, LCI) == {
        0: [Instance(9, "1g.10gb+me", 2, 1, ("1g.10gb+me",)), Instance(3, "2g.20gb", 0, 2, ("1c.2g.20gb",) * 2)],
        10: [Instance(2, "3g.40gb", 4, 4, ())],
    }
    assert parse_instances("No GPU instances found: Not Found\n", "") == {}


@pytest.mark.parametrize(
    ("layout", "create"),
    [
        ({"1g.10gb": 7}, [f"1g.10gb@{start}" for start in range(7)]),
        ({"3g.40gb": 2}, ["3g.40gb@0", "3g.40gb@4"]),
        # The first place of 3g would leave none to 4g.
        ({"3g.40gb": 1, "4g.40gb": 1}, ["4g.40gb@0", "3g.40gb@4"]),
        ({"1g.10gb": 3, "4g.40gb": 1}, ["4g.40gb@0", "1g.10gb@4", "1g.10gb@5", "1g.10gb@6"]),
        ({"1g.10gb": 1, "2g.20gb": 3}, ["2g.20gb@0", "2g.20gb@2", "2g.20gb@4", "1g.10gb@6"]),
        ({"1g.10gb+me": 1, "1g.20gb": 3}, ["1g.20gb@0", "1g.20gb@2", "1g.20gb@4", "1g.10gb+me@6"]),
        ({"7g.80gb": 1}, ["7g.80gb@0"]),
    ],
)
def test_where_instances_go(layout: dict[str, int], create: list[str]) -> None:
    assert steps(layout, []) == ([], create)


@pytest.mark.parametrize(
    ("layout", "there", "busy", "expected"),
    [
        # What is there stays, and what is missing comes.
        ({"1g.10gb": 2}, [(7, "1g.10gb", 0), (8, "1g.10gb", 1)], (), ([], [])),
        ({"1g.10gb": 3}, [(7, "1g.10gb", 0)], (), ([], ["1g.10gb@1", "1g.10gb@2"])),
        ({"1g.10gb": 1}, [(7, "1g.10gb", 0), (8, "1g.10gb", 1)], (), ([8], [])),
        # What holds work stays before others.
        ({"1g.10gb": 1}, [(7, "1g.10gb", 0), (8, "1g.10gb", 1)], (8,), ([7], [])),
        ({"3g.40gb": 1, "1g.10gb": 1}, [(7, "1g.10gb", 0), (9, "1g.10gb", 2)], (9,), ([7], ["3g.40gb@4"])),
        # It lies where the larger one must be.
        ({"4g.40gb": 1, "1g.10gb": 1}, [(7, "1g.10gb", 0)], (), ([7], ["4g.40gb@0", "1g.10gb@4"])),
        ({"4g.40gb": 1, "1g.10gb": 1}, [(7, "1g.10gb", 0), (13, "1g.10gb", 6)], (), ([7], ["4g.40gb@0"])),
        # Of two ways the one in which more stay.
        (
            {"3g.40gb": 1, "1g.10gb": 2},
            [(7, "1g.10gb", 0), (11, "1g.10gb", 4), (12, "1g.10gb", 5)],
            (),
            ([7], ["3g.40gb@0"]),
        ),
        ({"7g.80gb": 1}, [(7, "1g.10gb", 0)], (7,), ([7], ["7g.80gb@0"])),
    ],
)
def test_the_least_is_done(
    layout: dict[str, int],
    there: list[tuple[int, str, int]],
    busy: tuple[int, ...],
    expected: tuple[list[int], list[str]],
) -> None:
    assert steps(layout, instances(*there), busy) == expected


def test_an_instance_that_is_not_whole_is_made_again() -> None:
    there = [Instance(3, "2g.20gb", 0, 2, ("1c.2g.20gb",))]
    assert steps({"2g.20gb": 1}, there) == ([3], ["2g.20gb@0"])


@pytest.mark.parametrize(
    ("layout", "found"),
    [
        ({"1g.5gb": 7}, "GPU 0 has no MIG profile 1g.5gb. Expected: profiles that it has: 1g.10gb (7, at 0, 1, 2, 3"),
        ({"1g.10gb": 8}, "GPU 0 has no room for 8 of 1g.10gb. Expected: GPU instances that do not overlap, of 7"),
        ({"1g.10gb+me": 2}, "GPU 0 has no room for 2 of 1g.10gb+me"),
        # As memory goes there is room, as compute slices go there is none.
        ({"4g.40gb": 2}, "GPU 0 has no room for 2 of 4g.40gb"),
        ({"3g.40gb": 2, "1g.10gb": 1}, "GPU 0 has no room for 2 of 3g.40gb, 1 of 1g.10gb"),
    ],
)
def test_a_layout_that_the_card_cannot_have(layout: dict[str, int], found: str) -> None:
    with pytest.raises(LayoutError) as caught:
        steps(layout, instances((7, "1g.10gb", 0)))
    assert str(caught.value).startswith(found)
    assert "3g.40gb (2, at 0, 4); 4g.40gb (1, at 0)" in str(caught.value)
    assert str(caught.value).endswith("Next step: correct the layout.")


A30 = [
    Profile("1g.6gb", 14, 4, 5.81, (0, 1, 2, 3), 1),
    Profile("2g.12gb", 5, 2, 11.69, (0, 2), 2),
    Profile("4g.24gb", 0, 1, 23.44, (0,), 4),
]


def test_a_card_has_the_slices_of_its_largest_profile() -> None:
    assert plan("GPU 0", {"2g.12gb": 1, "1g.6gb": 2}, A30, [], frozenset()).create == (
        (A30[1], 0), (A30[0], 2), (A30[0], 3),
    )  # fmt: skip
    with pytest.raises(
        LayoutError, match=r"GPU 0 has no room for 5 of 1g\.6gb\. Expected: .*, of 4 compute slices in all"
    ):
        plan("GPU 0", {"1g.6gb": 5}, A30, [], frozenset())


def valid(placed: list[tuple[Profile, int]]) -> bool:
    slots = [slot for profile, start in placed for slot in range(start, start + profile.size)]
    counts = Counter(profile.name for profile, _start in placed)
    return (
        len(slots) == len(set(slots))
        and sum(profile.slices for profile, _start in placed) <= 7
        and all(counts[profile.name] <= profile.total and start in profile.starts for profile, start in placed)
    )


def every_arrangement() -> set[tuple[tuple[str, int], ...]]:
    """All that a card can hold, by trying everything."""
    found: set[tuple[tuple[str, int], ...]] = {()}
    waiting: list[list[tuple[Profile, int]]] = [[]]
    while waiting:
        placed = waiting.pop()
        for profile in H100:
            for start in profile.starts:
                more = [*placed, (profile, start)]
                key = tuple(sorted((each.name, at) for each, at in more))
                if key not in found and valid(more):
                    found.add(key)
                    waiting.append(more)
    return found


def test_every_layout_of_a_card_is_found_from_everything_that_may_be_there() -> None:
    """What is to be made fits beside what stays, what stays is a part of the layout, and no more goes than must."""
    arrangements = sorted(every_arrangement())
    by_name = {profile.name: profile for profile in H100}
    layouts = sorted({tuple(sorted(Counter(name for name, _ in each).items())) for each in arrangements} - {()})
    assert len(layouts) > 100
    chosen = random.Random(7)  # noqa: S311
    for layout in layouts:
        for arrangement in [(), *chosen.sample(arrangements, 4)]:
            there = [
                Instance(number, name, start, by_name[name].size, (name,))
                for number, (name, start) in enumerate(arrangement)
            ]
            found = plan("GPU 0", dict(layout), H100, there, frozenset())
            stays = [(by_name[each.profile], each.start) for each in there if each not in found.destroy]
            after = [*stays, *found.create]
            assert valid(after) and Counter(profile.name for profile, _ in after) == Counter(dict(layout))
            assert len(stays) == most_that_can_stay(dict(layout), there, arrangements)


def most_that_can_stay(
    layout: dict[str, int], there: list[Instance], arrangements: list[tuple[tuple[str, int], ...]]
) -> int:
    """Of all arrangements of the layout, the most that one has in common with what is there."""
    goals = [each for each in arrangements if Counter(name for name, _ in each) == Counter(layout)]
    had = {(each.profile, each.start) for each in there}
    return max(len(had.intersection(goal)) for goal in goals)


def test_a_plan_that_does_nothing_is_empty() -> None:
    everything = itertools.count(7)
    there = [Instance(next(everything), "1g.10gb", start, 1, ("1g.10gb",)) for start in range(7)]
    assert plan("GPU 0", {"1g.10gb": 7}, H100, there, frozenset({8})) == Plan((), ())
