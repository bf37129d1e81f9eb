# Copyright (c) 2026, gpufarm contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
name: bundle_refusal
short_description: Say why hosts cannot install from a bundle
version_added: 1.0.0
author:
  - gpufarm contributors (@gpufarm)
description:
  - Files that are missing, cut off or of others are told, by names and sizes. Checksums are compared when a file is
    handed on.
  - Used by the roles before they change anything.
options:
  _input:
    description: Folder of the bundle, as M(gpufarm.core.bundle_collect) has made it.
    type: path
    required: true
  platform:
    description: Name of the hosts in the bundle.
    type: str
    required: true
"""

EXAMPLES = r"""
- name: Require a bundle for hosts like this one
  ansible.builtin.assert:
    that: gpufarm_bundle | gpufarm.core.bundle_refusal('debian-trixie-amd64') == ''
"""

RETURN = r"""
_value:
  description: What was found, what was expected and what to do; empty where the bundle is whole.
  type: str
  sample: ""
"""

from collections.abc import Callable
from typing import Any


def bundle_refusal(folder: str, platform: str) -> str:
    # Not where the filter is loaded: design.md.
    from pathlib import Path

    from ansible_collections.gpufarm.core.plugins.module_utils.apt_bundle import BundleError
    from ansible_collections.gpufarm.core.plugins.plugin_utils import bundle

    try:
        bundle.require(Path(folder).expanduser(), platform)
    except BundleError as error:
        return str(error)
    return ""


class FilterModule:
    def filters(self) -> dict[str, Callable[..., Any]]:
        return {"bundle_refusal": bundle_refusal}
