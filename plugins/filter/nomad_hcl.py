# Copyright (c) 2026, gpufarm contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
name: nomad_hcl
short_description: Write a configuration of Nomad's agent as HCL
version_added: 1.0.0
author:
  - gpufarm contributors (@gpufarm)
description:
  - Makes the text of a file such as C(client.hcl) of a dictionary, in its order.
  - A dictionary becomes a block, a list of dictionaries one block each. Anything else becomes a value. What is null is
    left out.
  - Of blocks with labels (C(plugin), C(host_volume), C(host_network)) the dictionary's keys are the labels.
options:
  _input:
    description: Blocks and values by their names.
    type: dict
    required: true
notes:
  - Nomad's parser takes C(${) in a value for the begin of an interpolation, up to the next C(}), and leaves that part
    as it is. A quote or a backslash in there is refused here, because it would arrive with another one before it.
"""

EXAMPLES = r"""
- name: A file beside those of the role
  ansible.builtin.copy:
    content: "{{ {'client': {'reserved': {'memory': 2048}}} | gpufarm.core.nomad_hcl }}"
    dest: /etc/nomad.d/mine.hcl
    mode: "0640"
"""

RETURN = r"""
_value:
  description: The text, with an end of line.
  type: str
  sample: |
    client {
      reserved {
        memory = 2048
      }
    }
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from ansible.errors import AnsibleFilterError

LABELLED = ("plugin", "host_volume", "host_network")
RAW = re.compile(r"\$\{[^}]*(?:[\"\\]|\Z)")


def nomad_hcl(config: Mapping[str, Any]) -> str:
    if not isinstance(config, Mapping):
        raise _refused("a configuration", config, "a dictionary of blocks and values")
    return "".join(f"{line}\n" for line in _body(config, ""))


def _body(config: Mapping[str, Any], place: str) -> Iterator[str]:
    values = {_name(key): value for key, value in config.items() if value is not None and not _blocks(value)}
    width = max(map(len, values), default=0)
    for name, value in values.items():
        yield f"{name:<{width}} = {_value(value, f'{place}{name}')}"
    blank = bool(values)
    for head, block in _headed(config, place):
        if blank:
            yield ""
        blank = True
        yield f"{head} {{"
        for line in _body(block, f"{place}{head}."):
            yield f"  {line}" if line else ""
        yield "}"


def _headed(config: Mapping[str, Any], place: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield each block with what stands before its brace."""
    for key, value in config.items():
        for block in _blocks(value):
            if key not in LABELLED:
                yield _name(key), block
                continue
            for label, inner in block.items():
                head = f"{key} {_text(label)}"
                if isinstance(inner, Mapping):
                    yield head, inner
                elif inner is not None:
                    raise _refused(f"{place}{head}", inner, "a dictionary, as this is a block with a label")


def _blocks(value: Any) -> list[Mapping[str, Any]]:
    """Return the blocks that a value stands for; none where it is one itself."""
    if isinstance(value, Mapping):
        return [value]
    if isinstance(value, list) and value and all(isinstance(each, Mapping) for each in value):
        return value
    return []


def _name(key: Any) -> str:
    if not isinstance(key, str):
        raise _refused("a name", key, "a text")
    return key if re.fullmatch(r"[A-Za-z_][A-Za-z0-9_-]*", key) else _text(key)


def _value(value: Any, place: str) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        if RAW.search(value):
            raise _refused(place, value, "no quote and no backslash after ${, and a } that ends it")
        return _text(value)
    if isinstance(value, int | float):
        return json.dumps(value)
    if isinstance(value, list | tuple):
        return f"[{', '.join(_value(each, place) for each in value)}]"
    raise _refused(place, value, "a text, a number, a boolean or a list of them")


def _text(value: str) -> str:
    return json.dumps(value, ensure_ascii=False)


def _refused(place: str, value: Any, expected: str) -> AnsibleFilterError:
    # A value may be a secret.
    return AnsibleFilterError(
        f"{place}: found a value of type {type(value).__name__} that Nomad's configuration cannot hold. "
        f"Expected: {expected}. Next step: correct the variable that gives it."
    )


class FilterModule:
    def filters(self) -> dict[str, Callable[..., Any]]:
        return {"nomad_hcl": nomad_hcl}
