# Copyright (c) 2026, gpufarm contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
name: wsl_config_check
short_description: Tell what WSL's configuration on Windows would be after a change
version_added: 1.0.0
author:
  - gpufarm contributors (@gpufarm)
description:
  - Tells whether P(gpufarm.core.wsl_config#filter) can change C(.wslconfig), and the networking mode that it has then.
positional: settings
options:
  _input:
    description:
      - The file as M(ansible.windows.slurp) returns it, in base64. Empty where there is none.
    type: str
    required: true
  settings:
    description: Values by key, and these by section.
    type: dict
    required: true
"""

EXAMPLES = r"""
- name: Require a configuration that can be changed
  ansible.builtin.assert:
    that: (before.content | gpufarm.core.wsl_config_check(wsl_config)).error == ''
"""

RETURN = r"""
_value:
  description: What was found.
  type: dict
  contains:
    error:
      description: Why it cannot be changed; empty where it can.
      type: str
      sample: ""
    networking_mode:
      description: C(networkingMode) as WSL finds it, in small letters; empty where it is not set.
      type: str
      sample: mirrored
"""

from collections.abc import Callable, Mapping
from typing import Any

from ansible.errors import AnsibleFilterError
from ansible_collections.gpufarm.core.plugins.filter.wsl_config import wsl_config
from ansible_collections.gpufarm.core.plugins.module_utils import wsl_settings


def wsl_config_check(content: str, settings: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
    try:
        text = wsl_config(content, settings)
    except AnsibleFilterError as error:
        return {"error": str(error), "networking_mode": ""}
    return {"error": "", "networking_mode": wsl_settings.value(text, "wsl2", "networkingMode", windows=True).lower()}


class FilterModule:
    def filters(self) -> dict[str, Callable[..., Any]]:
        return {"wsl_config_check": wsl_config_check}
