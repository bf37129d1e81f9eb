# Copyright (c) 2026, gpufarm contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What the program that measures said, which may be cut off, mixed with other output, or made up."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from ansible_collections.gpufarm.core.plugins.module_utils.gpu_benchmark import empty_device
from ansible_collections.gpufarm.core.plugins.module_utils.gpu_benchmark.judging import ERRORS
from ansible_collections.gpufarm.core.plugins.module_utils.gpu_benchmark.measuring import FIGURES, TENSOR_NAMES
from ansible_collections.gpufarm.core.plugins.module_utils.gpu_proof.records import LEVELS
from ansible_collections.gpufarm.core.plugins.module_utils.text import clean_all

# What every GPU and every MIG device has; tensor cores are not among it.
ALWAYS_MEASURED = ("memory_read_gb_per_s", "fp32_tflop_per_s")
ALWAYS_CHECKED = frozenset(("memory_read", "fp32", "host_copies"))


def _number(value: Any) -> bool:
    # JSON has whole numbers that no float holds, and Python's has NaN, which is at least nothing.
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value < 1e15


def _text(value: Any) -> bool:
    return isinstance(value, str)


def _truth(value: Any) -> bool:
    return isinstance(value, bool)


def _counts(value: Any) -> bool:
    return isinstance(value, dict) and all(map(_number, value.values()))


# A dictionary has just these keys, a list any number of these, and a tuple is one of these or null.
_FORMS: Mapping[str, Any] = {
    "uuid": _text,
    "name": (_text,),
    "pci_bus_id": (_text,),
    "compute_capability": (lambda value: _text(value) and re.fullmatch(r"[0-9]{1,3}\.[0-9]{1,3}", value),),
    "ecc_enabled": (_truth,),
    "integrated": (_truth,),
    "memory": (
        {
            "tested_mib": _number,
            "patterns": [_text],
            "errors": _number,
            "error_samples": [{"offset_bytes": _number, "pattern": _text, "expected": _text, "found": _text}],
        },
    ),
    "figures": dict.fromkeys(FIGURES, (_number,)),
    "wrong_results": (_counts,),
    # No level of a job has one.
    "soak": (lambda _value: False,),
    "error": (
        {
            "step": (_text,),
            "code": lambda value: value in ("cuda", *ERRORS),
            "cuda_error": (_number,),
            "message": _text,
        },
    ),
}


def _fits(value: Any, form: Any) -> bool:
    if isinstance(form, tuple):
        return value is None or _fits(value, form[0])
    if isinstance(form, list):
        return isinstance(value, list) and all(_fits(each, form[0]) for each in value)
    if isinstance(form, dict):
        whole = isinstance(value, dict) and value.keys() == form.keys()
        return whole and all(_fits(value[key], form[key]) for key in form)
    return bool(form(value))


def read_answer(text: str, uuid: str, level: str) -> dict[str, Any]:
    """The device that an answer tells of, as C(empty_device) has it. C(ValueError) says why there is none."""
    try:
        said = clean_all(json.loads(text))
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    devices = said.get("devices")
    if not isinstance(devices, list) or len(devices) != 1 or not isinstance(devices[0], dict):
        raise ValueError("it does not tell of one device")
    empty = empty_device("")
    device = {**empty, **devices[0]}
    if device["uuid"] != uuid:
        raise ValueError(f"it tells of {device['uuid'] or 'no device'} instead of {uuid}")
    odd = [key for key, value in device.items() if key not in empty or not _fits(value, _FORMS.get(key, (_number,)))]
    if odd:
        raise ValueError(f"it has not the form of an answer: {', '.join(odd)}")
    missing = [] if device["error"] else _not_measured(device, level)
    if missing:
        raise ValueError(f"it tells no error, and not what was measured: {', '.join(missing)}")
    return device


def _not_measured(device: Mapping[str, Any], level: str) -> list[str]:
    # What is 0 was not measured either.
    memory = device["memory"] or {}
    told: dict[str, Any] = {"memory": memory.get("tested_mib") and memory["patterns"]}
    if level != LEVELS[1]:
        told.update((name, device["figures"][name]) for name in ALWAYS_MEASURED)
        tensor = {name for name in TENSOR_NAMES.values() if device["figures"][f"{name}_tflop_per_s"] is not None}
        told["wrong_results"] = (device["wrong_results"] or {}).keys() >= ALWAYS_CHECKED | tensor
    return [name for name, value in told.items() if not value]
