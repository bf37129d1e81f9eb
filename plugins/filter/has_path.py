# Copyright (c) 2026, gpufarm contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
name: has_path
short_description: Tell whether a host has a file or a folder as it is wanted
version_added: 1.0.0
author:
  - gpufarm contributors (@gpufarm)
description:
  - Looks into the answer of M(gpufarm.core.host_info), which knows the files of all roles by one task, where
    M(ansible.builtin.template) and M(ansible.builtin.copy) ask the host twice for each of them.
positional: path, mode, content
options:
  _input:
    description: RV(gpufarm.core.host_info#module:files), or RV(ansible.builtin.find#module:files) with checksums.
    type: list
    elements: dict
    required: true
  path:
    description: Path of the file or folder, which has to belong to root.
    type: str
    required: true
  mode:
    description: Its permissions in four octal digits.
    type: str
    required: true
  content:
    description: The whole text of the file. Without it a folder is wanted.
    type: str
"""

EXAMPLES = r"""
- name: Look at the files of the agent
  gpufarm.core.host_info:
    files: [/etc/nomad.d/*.hcl]
  register: found

- name: Have the agent's configuration
  ansible.builtin.template:
    src: nomad.hcl.j2
    dest: /etc/nomad.d/nomad.hcl
    mode: "0640"
  when: >-
    not found.files | gpufarm.core.has_path('/etc/nomad.d/nomad.hcl', '0640', lookup('template', 'nomad.hcl.j2'))
"""

RETURN = r"""
_value:
  description: Whether nothing is to be done.
  type: bool
  sample: true
"""

import hashlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any


def has_path(files: Iterable[Mapping[str, Any]], path: str, mode: str, content: str | None = None) -> bool:
    there: Mapping[str, Any] = next((file for file in files if file["path"] == path), {})
    if (there.get("mode"), there.get("uid"), there.get("gid")) != (mode, 0, 0):
        return False
    if content is None:
        return bool(there["isdir"])
    # As find tells it; no protection against an attacker, who would need root.
    return bool(there["isreg"]) and there.get("checksum") == hashlib.sha1(content.encode()).hexdigest()  # noqa: S324


class FilterModule:
    def filters(self) -> dict[str, Callable[..., Any]]:
        return {"has_path": has_path}
