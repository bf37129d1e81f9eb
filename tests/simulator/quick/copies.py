"""Ansible copies all that it has read from a file before it uses it: half the work of reading a large playbook.

Here only what can change is copied: what ``copy.deepcopy`` would give, with texts, numbers and their tags shared.
"""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

from ansible.parsing import dataloader

TAGS = "_ansible_tags_mapping"


def copied(value: Any) -> Any:
    """Return a copy of data that was read from YAML."""
    kind: Any = type(value)
    new: Any
    if value is None or issubclass(kind, (str, int, float)):
        return value
    if issubclass(kind, dict):
        new = kind({key: copied(item) for key, item in value.items()})
    elif issubclass(kind, list):
        new = kind([copied(item) for item in value])
    else:
        return copy.deepcopy(value)
    if hasattr(value, TAGS):
        setattr(new, TAGS, getattr(value, TAGS))
    return new


def share() -> None:
    """Have this process's Ansible copy so."""
    dataloader.copy = SimpleNamespace(deepcopy=copied)
