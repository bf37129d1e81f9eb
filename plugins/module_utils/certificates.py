# Copyright (c) 2026, gpufarm contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Certificates in files, and when they end. Python's own reader of them is no public function."""

from __future__ import annotations

import base64
import calendar
import re
import time
from collections.abc import Iterator, Sequence

PEM = re.compile(rb"-----BEGIN CERTIFICATE-----([A-Za-z0-9+/=\s]+)-----END CERTIFICATE-----")
SEQUENCE, VERSION, UTC_TIME, GENERALIZED_TIME = 0x30, 0xA0, 0x17, 0x18
EXTENSIONS, DNS_NAME = 0xA3, 0x82
ALTERNATIVE_NAMES = bytes((0x55, 0x1D, 0x11))


def certificates_of(content: bytes) -> list[bytes]:
    """All certificates of a file in PEM, in DER."""
    return [base64.b64decode(match[1]) for match in PEM.finditer(content)]


def end_of(certificate: bytes) -> int:
    """When a certificate in DER ends, in seconds since 1970; ValueError where it is none."""
    return _read(certificate)[1]


def names_of(certificate: bytes) -> list[str]:
    """The DNS names that a certificate in DER is for; ValueError where it is none."""
    try:
        for kind, start, _end in _parts(certificate, *_part(certificate, _into(certificate, 0))[1:]):
            if kind != EXTENSIONS:
                continue
            for _kind, *extension in _parts(certificate, *_part(certificate, start)[1:]):
                # The last part is the content; one that says how critical it is may be before that.
                name, *_more, content = _parts(certificate, *extension)
                if certificate[name[1] : name[2]] == ALTERNATIVE_NAMES:
                    names = _parts(certificate, *_part(certificate, content[1])[1:])
                    return [certificate[begin:end].decode("ascii") for of, begin, end in names if of == DNS_NAME]
    except IndexError as error:
        raise ValueError("a certificate that is cut off") from error
    return []


def end_above(certificate: bytes, others: Sequence[bytes], depth: int = 4) -> int | None:
    """When the chain above a certificate ends, as far as it is among others; null where none has signed it.

    Of several of its issuer's name the one counts that holds longest. What has signed itself is no part of it: that is
    the CA, which ends by itself.
    """
    issuer, _end, subject = _read(certificate)
    if issuer == subject or not depth:
        return None
    ends = []
    for each in others:
        signer, end, name = _read(each)
        if name == issuer and signer != name:
            higher = end_above(each, others, depth - 1)
            ends.append(end if higher is None else min(end, higher))
    return max(ends, default=None)


def authorities(chain: Sequence[bytes], held: Sequence[bytes]) -> list[bytes]:
    """Those of the held certificates that have the name at the top of a chain; all of them where none has it."""
    tops = _tops(chain[0], [*chain, *held]) if chain else set()
    return [each for each in held if _read(each)[2] in tops] or list(held)


def _tops(certificate: bytes, others: Sequence[bytes], depth: int = 4) -> set[bytes]:
    """The names from which nobody leads further up, as far as that is among others."""
    issuer = _read(certificate)[0]
    signers = [each for each in others if _read(each)[2] == issuer]
    above = [each for each in signers if _read(each)[0] != issuer] if depth else []
    # Who has signed itself, or is not there, is a top.
    found = {issuer} if not above or len(above) < len(signers) else set()
    return found.union(*(_tops(each, others, depth - 1) for each in above))


def _read(certificate: bytes) -> tuple[bytes, int, bytes]:
    """The issuer as it stands there, the end, and the subject."""
    try:
        inner = _into(certificate, _into(certificate, 0))
        if certificate[inner] == VERSION:
            inner = _part(certificate, inner)[2]
        # Serial number, algorithm and issuer go before the time in which it holds, and the subject comes after that.
        before = inner
        for _skipped in range(3):
            before, inner = inner, _part(certificate, inner)[2]
        issuer, after = certificate[before:inner], _part(certificate, inner)[2]
        subject = certificate[after : _part(certificate, after)[2]]
        # It has its begin first.
        kind, start, end = _part(certificate, _part(certificate, _into(certificate, inner))[2])
        text = certificate[start:end].decode("ascii")
        if kind == UTC_TIME:
            text = ("19" if text >= "5" else "20") + text
        elif kind != GENERALIZED_TIME:
            raise ValueError(f"no time: {text}")
        return issuer, calendar.timegm(time.strptime(text, "%Y%m%d%H%M%SZ")), subject
    except IndexError as error:
        raise ValueError("a certificate that is cut off") from error


def _part(data: bytes, at: int) -> tuple[int, int, int]:
    """The kind of what begins there, and where its content begins and ends."""
    length, start = data[at + 1], at + 2
    if length & 0x80:
        size = length & 0x7F
        length, start = int.from_bytes(data[start : start + size], "big"), start + size
    return data[at], start, start + length


def _parts(data: bytes, start: int, end: int) -> Iterator[tuple[int, int, int]]:
    """All parts that are between two places, as _part has each."""
    while start < end:
        found = _part(data, start)
        if found[2] > len(data):
            raise IndexError(start)
        yield found
        start = found[2]


def _into(data: bytes, at: int) -> int:
    kind, start, _end = _part(data, at)
    if kind != SEQUENCE:
        raise ValueError("no certificate")
    return start
