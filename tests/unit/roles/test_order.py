"""Ansible's filters of set theory return another order in each run, so no file and no message shows it."""

from __future__ import annotations

import re
from pathlib import Path

from ansible_collections.gpufarm.core.tests.unit.roles.role_helper import ROLES

OF_SETS = r"\| *(?:difference|intersect|symmetric_difference|union)\("
# What makes one text of a list, with no order given in between.
SHOWN = re.compile(rf"{OF_SETS}(?:(?!\| *(?:sort|length)\b)[^{{}}])*\| *(?:join|to_json|to_nice_json|to_nice_yaml)\b")


def test_no_text_has_the_order_of_a_set() -> None:
    assert SHOWN.search("{{ ['# Ansible managed'] | union(modules) | join('\\n') }}")
    assert SHOWN.search("{{ hosts | difference(['a'])\n      | join(', ') }}")
    assert not SHOWN.search("{{ hosts | difference(['a']) | sort | join(', ') }}")
    files = [*ROLES.glob("*/*/**/*.yml"), *(ROLES.parent / "playbooks").glob("*.yml")]
    assert {place for path in files for place in places(SHOWN, path)} == set()
    assert {place for path in ROLES.glob("*/templates/*") for place in places(re.compile(OF_SETS), path)} == set()


def places(wanted: re.Pattern[str], path: Path) -> list[str]:
    """Return where a file has it, each as path and line."""
    text = path.read_text(encoding="utf-8")
    return [
        f"{path.relative_to(ROLES.parent)}:{text.count(chr(10), 0, found.start()) + 1}"
        for found in wanted.finditer(text)
    ]
