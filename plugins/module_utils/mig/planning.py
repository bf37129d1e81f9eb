# Copyright (c) gpufarm contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The least that leads from the GPU instances that are there to those that are wanted."""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from ansible_collections.gpufarm.core.plugins.module_utils.problem import FoundError

if TYPE_CHECKING:
    from ansible_collections.gpufarm.core.plugins.module_utils.mig.listings import Instance, Profile


class LayoutError(FoundError):
    """A layout that a GPU cannot have."""


@dataclasses.dataclass(frozen=True)
class Plan:
    """What goes and what comes; the rest stays as it is, with the work in it."""

    destroy: tuple[Instance, ...]
    create: tuple[tuple[Profile, int], ...]


def described(profiles: Sequence[Profile]) -> str:
    """What the card has, for people."""
    each = (
        f"{profile.name} ({profile.total}, at {', '.join(map(str, profile.starts)) or 'no place'})"
        for profile in profiles
    )
    return "; ".join(each) or "none"


def plan(
    gpu: str, layout: Mapping[str, int], profiles: Sequence[Profile], there: Sequence[Instance], busy: frozenset[int]
) -> Plan:
    """How to come to a layout, a number for each profile name.

    Of the instances that are there as many stay as can, those in C(busy), which hold work, before others. C(gpu) names
    the GPU in the error about a layout that it cannot have.
    """
    by_name = {profile.name: profile for profile in profiles}
    # Those of the whole GPU: seven, and four of an A30.
    slices = max((profile.slices for profile in profiles), default=0)
    unknown = sorted(set(layout) - set(by_name))
    if unknown:
        raise LayoutError(
            found=f"{gpu} has no MIG profile {', '.join(unknown)}",
            expected=f"profiles that it has: {described(profiles)}",
            next_step="correct the layout",
        )
    if _places([by_name[name] for name in Counter(dict(layout)).elements()], [], slices) is None:
        wanted = ", ".join(f"{count} of {name}" for name, count in layout.items())
        raise LayoutError(
            found=f"{gpu} has no room for {wanted}",
            expected=f"GPU instances that do not overlap, of {slices} compute slices in all; it has, how many "
            f"at most and where they begin: {described(profiles)}",
            next_step="correct the layout",
        )
    for kept in _stays(layout, there, busy):
        missing = Counter(dict(layout)) - Counter(instance.profile for instance in kept)
        wanted_profiles = [by_name[name] for name in missing.elements()]
        places = _places(wanted_profiles, [(by_name[each.profile], each.start) for each in kept], slices)
        if places is not None:
            return Plan(tuple(each for each in there if each not in kept), tuple(places))
    raise AssertionError("an empty GPU has room for it")


def _stays(
    layout: Mapping[str, int], there: Sequence[Instance], busy: frozenset[int]
) -> Iterator[tuple[Instance, ...]]:
    """What might stay: with the most work first, then the most of all."""
    fitting = [each for each in there if each.whole and each.profile in layout]
    choices = itertools.chain.from_iterable(
        itertools.combinations(fitting, count) for count in range(len(fitting), -1, -1)
    )
    allowed = [
        kept
        for kept in choices
        if all(count <= layout[name] for name, count in Counter(each.profile for each in kept).items())
    ]
    return iter(sorted(allowed, key=lambda kept: (-sum(each.id in busy for each in kept), -len(kept))))


def _places(
    wanted: Sequence[Profile], taken: Sequence[tuple[Profile, int]], slices: int
) -> list[tuple[Profile, int]] | None:
    """Where all of them go beside what is taken, larger ones first; None where they do not."""
    if sum(profile.slices for profile in [*wanted, *(each for each, _start in taken)]) > slices:
        return None
    counts = Counter(profile.name for profile in [*wanted, *(each for each, _start in taken)])
    if any(counts[profile.name] > profile.total for profile in wanted):
        return None
    occupied = frozenset(slot for profile, start in taken for slot in range(start, start + profile.size))
    return _fill(sorted(wanted, key=lambda profile: (-profile.size, -profile.slices, profile.id)), occupied)


def _fill(wanted: Sequence[Profile], occupied: frozenset[int]) -> list[tuple[Profile, int]] | None:
    if not wanted:
        return []
    first, *rest = wanted
    for start in first.starts:
        slots = frozenset(range(start, start + first.size))
        if slots & occupied:
            continue
        others = _fill(rest, occupied | slots)
        if others is not None:
            return [(first, start), *others]
    return None
