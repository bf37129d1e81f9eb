# Copyright (c) 2026, gpufarm contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What is wrong, in the words that everybody reads: found, expected, next step."""

from __future__ import annotations

import dataclasses


def sentences(found: str, expected: str, next_step: str) -> str:
    return f"{found}. Expected: {expected}. Next step: {next_step}."


class FoundError(Exception):
    """Something is not as it must be; the text says what was found, what was expected and what to do."""

    transient = False
    """Whether the same may go well a moment later."""

    def __init__(self, found: str, expected: str, next_step: str) -> None:
        super().__init__(sentences(found, expected, next_step))
        self.found = found


@dataclasses.dataclass(frozen=True)
class Finding:
    """What is wrong, before it is known where; what is empty is left to who tells it."""

    code: str
    found: str
    expected: str = ""
    next_step: str = ""
    severity: str | None = None
    action: str | None = None
    uuid: str | None = None
    peer: str | None = None
    """The other GPU, where it is between two."""


@dataclasses.dataclass(frozen=True)
class Problem:
    """One thing that is wrong on a node; C(uuid) is None where it is no single GPU's, C(message) is for people."""

    node: str
    code: str
    expected: str
    found: str
    message: str
    uuid: str | None = None


def problem_of(
    node: str, code: str, found: str, expected: str, next_step: str, *, uuid: str | None = None, named: bool = False
) -> Problem:
    """The problem with its message, in which the GPU is only C(named) where C(found) does not name it."""
    where = f"Node {node}, GPU {uuid}" if named else f"Node {node}"
    return Problem(node, code, expected, found, f"{where}: found {sentences(found, expected, next_step)}", uuid)
