# Copyright (c) gpufarm contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The texts that nvidia-smi writes, as values; None where it gives none."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from ansible_collections.gpufarm.core.plugins.module_utils.text import clean

# What NVML's error strings and nvidia-smi itself put where a value cannot be given.
_NO_VALUE = frozenset(
    (
        "",
        "n/a",
        "err!",
        "unknown",
        "uninitialized",
        "invalid argument",
        "not supported",
        "insufficient permissions",
        "already initialized",
        "not found",
        "insufficient size",
        "insufficient external power",
        "driver not loaded",
        "timeout",
        "interrupt request issue",
        "nvml shared library not found",
        "function not found",
        "corrupted inforom",
        "gpu is lost",
        "gpu requires reset",
        "gpu access blocked by the operating system",
        "driver/library version mismatch",
        "in use by another client",
        "insufficient memory",
        "no data",
        "vgpu ecc not supported",
        "insufficient resources",
        "frequency not supported",
        "invalid frequency",
        "argument version mismatch",
        "requested functionality has been deprecated",
        "system is not ready",
        "system is not in ready state",
        "gpu not found",
        "no supported gpus were found",
        "invalid state",
        "resource not in correct state to perform requested operation",
        "reset type is not supported for given device",
        "unknown error",
    )
)


# Of these, what is no lack of a value but a GPU, or a driver, that fails. A healthy card gives none of its sensors so:
# fan and power limits of some do (enkore/i3pystatus#850), and are no sensors here for that reason.
_ERRORS = frozenset(
    (
        "err!",
        "unknown error",
        "timeout",
        "uninitialized",
        "driver not loaded",
        "interrupt request issue",
        "corrupted inforom",
        "insufficient external power",
    )
)


GPU_STATES = {"gpu is lost": "lost", "gpu requires reset": "reset_required"}


# No more digits than a 64-bit counter has, so that damaged text cannot become a number of absurd size.
_NUMBER = re.compile(r"^(-?[0-9]{1,20}(?:\.[0-9]{1,9})?)\s*([A-Za-z%/]*)$")


def bare(text: str | None) -> str:
    """The text without padding and without the brackets that the CSV format puts around what is not a value."""
    value = clean((text or "").strip())
    if value.startswith("[") and value.endswith("]"):
        value = value[1:-1].strip()
    return value


def text_of(raw: str | None) -> str | None:
    value = bare(raw)
    return None if value.lower() in _NO_VALUE else value


def fails(raw: str | None) -> bool:
    return bare(raw).lower() in _ERRORS


def _number(raw: str | None, units: tuple[str, ...]) -> str | None:
    match = _NUMBER.match(bare(raw))
    return match.group(1) if match and match.group(2) in units else None


def int_of(raw: str | None, *units: str) -> int | None:
    value = _number(raw, units or ("",))
    return None if value is None or "." in value else int(value)


def float_of(raw: str | None, *units: str) -> float | None:
    value = _number(raw, units or ("",))
    return None if value is None else float(value)


def bool_of(raw: str | None) -> bool | None:
    return {"yes": True, "no": False}.get(bare(raw).lower())


def identifier_of(raw: str | None) -> str | None:
    """A UUID or serial number; the driver masks what it never read with question marks."""
    value = text_of(raw)
    return None if value is None or "?" in value else value


_VERSION = re.compile(r"^[0-9]+(?:\.[0-9]+)+")


def version_of(raw: str | None) -> str | None:
    """A version number; driver 610 appends to it, or puts in its place, that the label is deprecated."""
    match = _VERSION.match(bare(raw))
    return match.group(0) if match else None


def sum_of(values: Iterable[int | None]) -> int | None:
    known = [value for value in values if value is not None]
    return sum(known) if known else None


def first_of(*values: Any) -> Any:
    for value in values:
        if value is not None:
            return value
    return None
