# Copyright (c) 2026, gpufarm contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The options of a probe, checked."""

from __future__ import annotations

import dataclasses
import datetime
import math
import re
from collections.abc import Mapping
from typing import Any

from ansible_collections.gpufarm.core.plugins.module_utils.commands import GRACE
from ansible_collections.gpufarm.core.plugins.module_utils.health.problems import NUMBERED, PROBLEMS
from ansible_collections.gpufarm.core.plugins.module_utils.problem import sentences
from ansible_collections.gpufarm.core.plugins.module_utils.xid import CRITICAL, IGNORE, WARNING

SEVERITIES = (IGNORE, WARNING, CRITICAL)


@dataclasses.dataclass(frozen=True)
class HealthOptions:
    """The options of the module C(nvidia_gpu_health), by their names; the defaults are here and nowhere else."""

    gpus: int | None = None
    path: str | None = None
    timeout: float = 60.0
    xid_since: str | None = None
    xid_repeats_max: int | None = None
    acknowledged_file: str = "/var/lib/gpufarm/health-acknowledged"
    status_file: str = "/run/gpufarm/health.json"
    ecc_required: bool = False
    ecc_uncorrected_max: int = 0
    ecc_corrected_max: int | None = None
    retired_pages_max: int = 59
    temperature_gpu_max_c: int | None = None
    throttle_reasons: tuple[str, ...] = ("hw_slowdown", "hw_thermal_slowdown", "hw_power_brake_slowdown")
    pcie_width_min: int | None = None
    pcie_generation_min: int | None = None
    nvlink_recoveries_max: int = 0
    nvlink_errors_max: int | None = None
    infiniband_ports: int | None = None
    infiniband_link_downed_max: int | None = None
    roce_ports: int | None = None
    roce_link_downed_max: int | None = None
    persistence_required: bool = True
    dcgm: bool = True
    dcgm_diag_level: int | None = None
    dcgm_diag_timeout: float = 3600.0
    severities: Mapping[str, str] = dataclasses.field(default_factory=dict)
    ignored_gpus: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        _check(self)

    @classmethod
    def from_mapping(cls, mapping: Mapping[str, Any]) -> HealthOptions:
        """The options in a dictionary, as a JSON file holds them; ValueError when it has others or of another type."""
        return cls(**_checked(mapping))


def defaults() -> dict[str, Any]:
    """Every option with its default, as JSON has it."""
    return {
        field.name: list(value) if isinstance(value, tuple) else value
        for field in dataclasses.fields(HealthOptions)
        for value in [getattr(HealthOptions(), field.name)]
    }


def refuse(found: str, expected: str) -> ValueError:
    return ValueError(f"found {sentences(found, expected, 'correct the options of the health check')}")


def _is(value: Any, kind: str) -> bool:
    if kind == "bool":
        return isinstance(value, bool)
    if kind == "int":
        return isinstance(value, int) and not isinstance(value, bool)
    if kind == "float":
        return isinstance(value, (int, float)) and not isinstance(value, bool)
    if kind == "tuple[str, ...]":
        return isinstance(value, (list, tuple)) and all(isinstance(item, str) for item in value)
    if kind == "Mapping[str, str]":
        return isinstance(value, Mapping) and all(isinstance(item, str) for pair in value.items() for item in pair)
    return isinstance(value, str)


_KINDS = {
    "bool": "true or false",
    "int": "a whole number",
    "float": "a number",
    "str": "text",
    "tuple[str, ...]": "a list of texts",
    "Mapping[str, str]": "a dictionary of texts",
}


def _checked(mapping: Mapping[str, Any]) -> dict[str, Any]:
    fields = {field.name: str(field.type) for field in dataclasses.fields(HealthOptions)}
    unknown = sorted(str(key) for key in mapping if key not in fields)
    if unknown:
        raise refuse(f"the unknown option {', '.join(unknown)}", f"one of {', '.join(fields)}")
    values: dict[str, Any] = {}
    for name, value in mapping.items():
        kind = fields[name].replace(" | None", "")
        if value is None and fields[name] != kind:
            continue
        if not _is(value, kind):
            raise refuse(f"{name} is {value!r}", _KINDS[kind])
        values[name] = tuple(value) if kind.startswith("tuple") else float(value) if kind == "float" else value
    return values


def _check(options: HealthOptions) -> None:
    for name in ("timeout", "dcgm_diag_timeout"):
        if not 0 < getattr(options, name) < math.inf:
            raise refuse(f"{name} is {getattr(options, name):g}", "more than 0 seconds, and an end")
    for name in (
        "gpus", "xid_repeats_max", "ecc_uncorrected_max", "ecc_corrected_max", "retired_pages_max", "pcie_width_min",
        "pcie_generation_min", "nvlink_recoveries_max", "nvlink_errors_max", "infiniband_ports",
        "infiniband_link_downed_max", "roce_ports", "roce_link_downed_max",
    ):  # fmt: skip
        value = getattr(options, name)
        if value is not None and value < 0:
            raise refuse(f"{name} is {value}", "0 or more")
    if options.dcgm_diag_level not in (None, 1, 2, 3, 4):
        raise refuse(f"dcgm_diag_level is {options.dcgm_diag_level}", "1, 2, 3 or 4")
    for code, severity in options.severities.items():
        if severity not in SEVERITIES:
            raise refuse(f"severities has {code}: {severity!r}", f"one of {', '.join(SEVERITIES)}")
        if code not in PROBLEMS and not NUMBERED.match(code):
            raise refuse(f"severities has the unknown code {code!r}", "a code such as temperature, xid_94 or dcgm_pcie")
    if options.xid_since is not None:
        seconds_of(options.xid_since)


_TIME = re.compile(
    r"[0-9]{4}-[0-9]{2}-[0-9]{2}"
    r"([Tt ][0-9]{2}(:[0-9]{2}(:[0-9]{2}(\.[0-9]{3}([0-9]{3})?)?)?)?([zZ]|[+-][0-9]{2}:[0-9]{2})?)?\Z"
)


def seconds_of(text: str) -> float:
    """Seconds since the epoch, from those or from a time in ISO 8601, local where it names no zone."""
    if re.match(r"^[0-9]{1,12}(?:\.[0-9]{1,9})?$", text):
        return float(text)
    try:
        # Newer versions of Python read more than 3.9, which can be the node's, and none before 3.11 takes Z for UTC.
        if not _TIME.match(text.strip()):
            raise ValueError
        return datetime.datetime.fromisoformat(re.sub(r"[zZ]$", "+00:00", text.strip())).timestamp()
    except ValueError:
        expected = "a time such as 2026-01-31T18:00:00Z, or seconds since the epoch"
        raise refuse(f"xid_since is {text!r}", expected) from None


# How long a process that just ended may go on being listed.
PROCESS_WAIT = 1.0


# What a probe asks one after the other: nvidia-smi, the kernel log, DCGM, nvidia-smi again, Fabric Manager.
_SOURCES = 5


def longest_probe(options: HealthOptions) -> float:
    """The seconds after which C(probe) has ended, whatever hangs."""
    asked = _SOURCES * (options.timeout + GRACE) + PROCESS_WAIT
    if not options.dcgm or options.dcgm_diag_level is None:
        return asked
    return asked + options.dcgm_diag_timeout + GRACE


def refuse_longer(options: HealthOptions, limit: float) -> None:
    """ValueError where a probe could be killed before its end: it would never give a verdict."""
    longest = longest_probe(options)
    if longest > limit:
        cause = "timeout" if options.dcgm_diag_level is None else "timeout, dcgm_diag_level and dcgm_diag_timeout"
        raise refuse(f"options ({cause}) with which a probe may take {longest:g} s", f"at most {limit:g} s")
