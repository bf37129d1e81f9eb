# Copyright (c) 2026, gpufarm contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
name: bundle_entry
short_description: Write what apt reads of a role's repository in a bundle
version_added: 1.0.0
author:
  - gpufarm contributors (@gpufarm)
description:
  - The entry is that of a flat repository whose pinned key is in C(/etc/apt/keyrings), by the same name.
  - Used by the roles. Entries of the distribution come with M(gpufarm.core.bundle_hand_on).
options:
  _input:
    description: Name of the repository in the bundle.
    type: str
    required: true
  platform:
    description: Name of the hosts in the bundle.
    type: str
    required: true
"""

EXAMPLES = r"""
- name: Have the entry of NVIDIA's repository
  ansible.builtin.copy:
    content: "{{ 'nvidia-cuda' | gpufarm.core.bundle_entry('debian-trixie-amd64') }}"
    dest: /var/lib/gpufarm/bundle/sources.list.d/nvidia-cuda.sources
    mode: "0644"
"""

RETURN = r"""
_value:
  description: The entry, as a file in C(sources.list.d) has it.
  type: str
  sample: |
    Types: deb
    URIs: file:/var/lib/gpufarm/bundle/apt/nvidia-cuda/
    Suites: /
"""

from collections.abc import Callable
from typing import Any


def bundle_entry(name: str, platform: str) -> str:
    # Not where the filter is loaded: design.md.
    from ansible_collections.gpufarm.core.plugins.plugin_utils import bundle

    repository: bundle.Repository = {
        "name": name, "suite": "/", "components": [], "signed_by": f"/etc/apt/keyrings/{name}.asc", "of_role": True,
    }  # fmt: skip
    return bundle.entry(repository, platform)


class FilterModule:
    def filters(self) -> dict[str, Callable[..., Any]]:
        return {"bundle_entry": bundle_entry}
