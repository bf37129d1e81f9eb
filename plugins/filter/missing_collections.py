# Copyright (c) 2026, gpufarm contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
name: missing_collections
short_description: Tell which collections are not installed
version_added: 1.0.0
author:
  - gpufarm contributors (@gpufarm)
description:
  - Returns those collections that the control node does not have.
  - A task file that uses them cannot even be read there, so what includes it asks first.
options:
  _input:
    description: Names of collections.
    type: list
    elements: str
    required: true
"""

EXAMPLES = r"""
- name: Require the collections for Windows
  ansible.builtin.assert:
    that: "['ansible.windows', 'microsoft.wsl'] | gpufarm.core.missing_collections == []"
"""

RETURN = r"""
_value:
  description: Their names, in the same order.
  type: list
  elements: str
  sample: [microsoft.wsl]
"""

import importlib.util
from collections.abc import Callable, Iterable
from typing import Any


def missing_collections(names: Iterable[str]) -> list[str]:
    return [name for name in names if not _is_there(f"ansible_collections.{name}")]


def _is_there(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is not None
    except ModuleNotFoundError:
        # Not even the namespace is.
        return False


class FilterModule:
    def filters(self) -> dict[str, Callable[..., Any]]:
        return {"missing_collections": missing_collections}
