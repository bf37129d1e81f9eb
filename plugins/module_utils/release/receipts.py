# Copyright (c) 2026, gpufarm contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""Receipts of what was installed and verified, and what they are worth for what is wanted now."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

RECEIPT_FORMAT = 1


@dataclasses.dataclass(frozen=True)
class Receipt:
    """What was installed where, and what it was verified with; written after everything else."""

    product: str
    version: str
    architecture: str
    path: str
    zip_sha256: str
    binary_sha256: str
    source: str
    signed_by: str | None

    def to_json(self) -> str:
        return json.dumps({"format": RECEIPT_FORMAT, **dataclasses.asdict(self)}, indent=2, sort_keys=True) + "\n"


def read_receipt(text: str) -> Receipt | None:
    """A receipt; None for one that is damaged or of another format, which then counts as absent."""
    try:
        fields: Any = json.loads(text)
    except ValueError:
        return None
    if not isinstance(fields, dict) or fields.pop("format", None) != RECEIPT_FORMAT:
        return None
    names = {field.name for field in dataclasses.fields(Receipt)}
    if set(fields) != names:
        return None
    if not all(isinstance(value, str) or (key == "signed_by" and value is None) for key, value in fields.items()):
        return None
    return Receipt(**fields)


@dataclasses.dataclass(frozen=True)
class Wanted:
    """What the task asks for, as far as a receipt can answer it."""

    product: str
    version: str
    architecture: str
    path: str
    checksum: str | None
    signers: tuple[str, ...]


def reasons_to_install(wanted: Wanted, receipt: Receipt | None, binary_sha256: str | None) -> list[str]:
    """Why the program must be installed; an empty list means that it is there and was verified."""
    if binary_sha256 is None:
        return ["the program is not there"]
    if receipt is None:
        return ["there is no receipt of a verified installation"]
    reasons = [
        f"{name} is {getattr(receipt, name)}, not {getattr(wanted, name)}"
        for name in ("product", "version", "architecture", "path")
        if getattr(receipt, name) != getattr(wanted, name)
    ]
    if receipt.binary_sha256 != binary_sha256:
        reasons.append("the program is not the one that was installed")
    if wanted.checksum is not None and receipt.zip_sha256 != wanted.checksum:
        reasons.append("the pinned checksum is not the one of the installed archive")
    if wanted.signers and receipt.signed_by not in wanted.signers:
        reasons.append("its signature was not verified with a key that is pinned now")
    return reasons
