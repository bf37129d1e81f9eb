# Copyright (c) gpufarm contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What C(nvidia-smi mig) lists, by the index of the GPU."""

from __future__ import annotations

import dataclasses
import re

_PROFILE = re.compile(r"^\|\s+(\d+)\s+MIG (\S+)\s+(\d+)\s+(\d+)/(\d+)\s+([0-9.]+)\s", re.MULTILINE)
_PLACEMENTS = re.compile(r"^GPU\s+(\d+) Profile ID\s+(\d+) Placements?\s*: \{([0-9,]+)\}:(\d+)", re.MULTILINE)
_INSTANCE = re.compile(r"^\|\s+(\d+)\s+MIG (\S+)\s+(\d+)\s+(\d+)\s+(\d+):(\d+)\s+\|", re.MULTILINE)
_COMPUTE = re.compile(r"^\|\s+(\d+)\s+(\d+)\s+MIG (\S+)\s+(\d+)\s+(\d+)\s+(\d+):(\d+)\s+\|", re.MULTILINE)


@dataclasses.dataclass(frozen=True)
class Profile:
    """A kind of GPU instance; C(starts) are the memory slices at which one may begin, C(size) how many it takes."""

    name: str
    id: int
    total: int
    memory_gib: float
    starts: tuple[int, ...]
    size: int

    @property
    def slices(self) -> int:
        """Compute slices, of which most GPUs have seven."""
        match = re.match(r"(\d+)g", self.name)
        return int(match.group(1)) if match else 0


@dataclasses.dataclass(frozen=True)
class Instance:
    """A GPU instance that is there, with the names of its compute instances."""

    id: int
    profile: str
    start: int
    size: int
    compute: tuple[str, ...]

    @property
    def whole(self) -> bool:
        """Whether one compute instance has all of it; it goes by the name without its extras, or with them."""
        return self.compute in ((self.profile,), (self.profile.split("+")[0],))


def parse_profiles(profiles: str, placements: str) -> dict[int, list[Profile]]:
    """The profiles of C(mig -lgip) with the places of C(mig -lgipp), all of them, whatever is taken."""
    places = {
        (int(gpu), int(number)): (tuple(map(int, starts.split(","))), int(size))
        for gpu, number, starts, size in _PLACEMENTS.findall(placements)
    }
    found: dict[int, list[Profile]] = {}
    for gpu, name, number, _free, total, memory in _PROFILE.findall(profiles):
        starts, size = places.get((int(gpu), int(number)), ((), 0))
        profile = Profile(name, int(number), int(total), float(memory), starts, size)
        found.setdefault(int(gpu), []).append(profile)
    return found


def parse_instances(instances: str, compute: str) -> dict[int, list[Instance]]:
    """The GPU instances of C(mig -lgi), with what C(mig -lci) says is in them."""
    inside: dict[tuple[int, int], list[str]] = {}
    for gpu, instance, name, *_rest in _COMPUTE.findall(compute):
        inside.setdefault((int(gpu), int(instance)), []).append(name)
    found: dict[int, list[Instance]] = {}
    for gpu, name, _profile, number, start, size in _INSTANCE.findall(instances):
        compute_names = tuple(inside.get((int(gpu), int(number)), ()))
        found.setdefault(int(gpu), []).append(Instance(int(number), name, int(start), int(size), compute_names))
    return found
