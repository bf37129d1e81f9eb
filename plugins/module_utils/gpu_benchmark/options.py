# Copyright (c) 2026, gpufarm contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The options of C(nvidia_gpu_benchmark), which are also looked at before a node is closed for it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from ansible_collections.gpufarm.core.plugins.module_utils import gpu_benchmark
from ansible_collections.gpufarm.core.plugins.module_utils.gpu_benchmark import Thresholds

THRESHOLDS = tuple(field.name for field in dataclasses.fields(Thresholds))


def argument_spec() -> dict[str, dict[str, Any]]:
    least: dict[str, dict[str, Any]] = {
        field.name: {"type": "float"} if field.default is None else {"type": "float", "default": field.default}
        for field in dataclasses.fields(Thresholds)
    }
    return {
        "level": {"type": "str", "choices": list(gpu_benchmark.LEVELS), "default": "quick"},
        "devices": {"type": "list", "elements": "str"},
        "busy": {"type": "bool", "default": False},
        "memory_share": {"type": "float"},
        "soak": {"type": "float", "default": 60.0},
        "peers": {"type": "bool", "default": True},
        **least,
        "path": {"type": "path"},
        "timeout": {"type": "float", "default": 60.0},
    }


def wrong_option(params: Mapping[str, Any]) -> str | None:
    """What is wrong with the options, None where nothing is."""
    share = params["memory_share"]
    if share is not None and not 0 < share <= 0.98:
        return f"memory_share is {share:g}. Expected: above 0 and up to 0.98. Next step: correct it."
    for name in ("timeout", "soak", *THRESHOLDS):
        if (params[name] or 0.0) < 0 or (name == "timeout" and not params[name]):
            return f"{name} is {params[name]:g}. Expected: a positive number. Next step: correct it."
    return None
