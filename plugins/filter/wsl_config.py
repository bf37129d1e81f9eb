# Copyright (c) 2026, gpufarm contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
name: wsl_config
short_description: Change settings of WSL's configuration on Windows
version_added: 1.0.0
author:
  - gpufarm contributors (@gpufarm)
description:
  - Returns the text of C(.wslconfig) with some settings changed or added.
  - Other settings, comments, blank lines and line endings stay as they are.
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
- name: Read the configuration
  ansible.windows.slurp:
    src: C:\Users\alice\.wslconfig
  register: before

- name: Never end a distribution that nobody uses
  ansible.windows.win_copy:
    dest: C:\Users\alice\.wslconfig
    content: "{{ before.content | gpufarm.core.wsl_config({'general': {'instanceIdleTimeout': -1}}) }}"
    backup: true
"""

RETURN = r"""
_value:
  description: The whole text.
  type: str
  sample: "[general]\r\ninstanceIdleTimeout=-1\r\n"
"""

import base64
import codecs
from collections.abc import Callable, Mapping
from typing import Any

from ansible.errors import AnsibleFilterError
from ansible_collections.gpufarm.core.plugins.module_utils import wsl_settings
from ansible_collections.gpufarm.core.plugins.module_utils.problem import FoundError


def wsl_config(content: str, settings: Mapping[str, Mapping[str, Any]]) -> str:
    raw = base64.b64decode(content)
    try:
        # WSL goes by the mark, which Windows PowerShell's own redirection writes.
        text = raw.decode("utf-16" if raw.startswith(codecs.BOM_UTF16_LE) else "utf-8")
        return wsl_settings.changed(text, settings, windows=True)
    except UnicodeDecodeError as error:
        raise AnsibleFilterError(
            f".wslconfig is no UTF-8 (byte {error.start}). Expected: UTF-8, or UTF-16 with a mark, as WSL reads it. "
            "Next step: save it with that encoding."
        ) from None
    except FoundError as error:
        raise AnsibleFilterError(f"wsl_config has {error}") from None


class FilterModule:
    def filters(self) -> dict[str, Callable[..., Any]]:
        return {"wsl_config": wsl_config}
