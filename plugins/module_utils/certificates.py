# Copyright (c) 2026, gpufarm contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Certificates in files, and when they end. Python's own reader of them is no public function."""

from __future__ import annotations

import base64
import calendar
import re
import time

PEM = re.compile(rb"-----BEGIN CERTIFICATE-----([A-Za-z0-9+/=\s]+)-----END CERTIFICATE-----")
SEQUENCE, VERSION, UTC_TIME, GENERALIZED_TIME = 0x30, 0xA0, 0x17, 0x18


def certificates_of(content: bytes) -> list[bytes]:
    """All certificates of a file in PEM, in DER."""
    return [base64.b64decode(match[1]) for match in PEM.finditer(content)]


def end_of(certificate: bytes) -> int:
    """When a certificate in DER ends, in seconds since 1970; ValueError where it is none."""
    try:
        inner = _into(certificate, _into(certificate, 0))
        if certificate[inner] == VERSION:
            inner = _part(certificate, inner)[2]
        # Serial number, algorithm and issuer go before the time in which it holds; that has its begin first.
        for _skipped in range(3):
            inner = _part(certificate, inner)[2]
        kind, start, end = _part(certificate, _part(certificate, _into(certificate, inner))[2])
        text = certificate[start:end].decode("ascii")
        if kind == UTC_TIME:
            text = ("19" if text >= "5" else "20") + text
        elif kind != GENERALIZED_TIME:
            raise ValueError(f"no time: {text}")
        return calendar.timegm(time.strptime(text, "%Y%m%d%H%M%SZ"))
    except IndexError as error:
        raise ValueError("a certificate that is cut off") from error


def _part(data: bytes, at: int) -> tuple[int, int, int]:
    """The kind of what begins there, and where its content begins and ends."""
    length, start = data[at + 1], at + 2
    if length & 0x80:
        size = length & 0x7F
        length, start = int.from_bytes(data[start : start + size], "big"), start + size
    return data[at], start, start + length


def _into(data: bytes, at: int) -> int:
    kind, start, _end = _part(data, at)
    if kind != SEQUENCE:
        raise ValueError("no certificate")
    return start
