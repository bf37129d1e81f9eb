# Copyright (c) 2026, gpufarm contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""OpenPGP public keys as files: armor, packets and fingerprints.

Just enough of RFC 4880 and RFC 9580 to say which primary keys a file holds, so that a node
needs no gpg to turn a downloaded key into an apt keyring. No signature is verified here and none is
read: the pinned fingerprint is what makes a key trusted, and whether a key has expired or is revoked,
apt and gpgv judge themselves by signatures that they verify.
"""

from __future__ import annotations

import base64
import binascii
import codecs
import dataclasses
import hashlib
import re
from collections.abc import Iterable, Iterator

_BEGIN = b"-----BEGIN PGP PUBLIC KEY BLOCK-----"
_END = b"-----END PGP PUBLIC KEY BLOCK-----"
_ANY_BEGIN = re.compile(rb"^-----BEGIN PGP ([A-Z0-9 ,/]+)-----[ \t\r]*$", re.MULTILINE)

TAG_SECRET_KEY = 5
TAG_PUBLIC_KEY = 6
TAG_SECRET_SUBKEY = 7
TAG_MARKER = 10
TAG_USER_ID = 13
TAG_PADDING = 21


class OpenPGPError(ValueError):
    """The data is not a set of OpenPGP public keys; the text is one sentence that says why."""


@dataclasses.dataclass(frozen=True)
class Packet:
    """One packet; C(raw) is the packet with its header, exactly as it was found."""

    tag: int
    body: bytes
    raw: bytes


@dataclasses.dataclass(frozen=True)
class PublicKey:
    """A primary key with everything that belongs to it (user IDs, signatures, subkeys)."""

    fingerprint: str
    user_ids: tuple[str, ...]
    raw: bytes


def normalize_fingerprint(text: str) -> str:
    """A fingerprint as people write it, as 40 (v4) or 64 (v5, v6) upper-case hexadecimal digits."""
    plain = re.sub(r"[\s:]", "", text).upper()
    if plain.startswith("0X"):
        plain = plain[2:]
    if not re.match(r"^(?:[0-9A-F]{40}|[0-9A-F]{64})$", plain):
        raise OpenPGPError(f"'{text}' is not a full OpenPGP fingerprint (40 or 64 hexadecimal digits)")
    return plain


def crc24(data: bytes) -> int:
    """The checksum of RFC 4880, section 6.1."""
    crc = 0xB704CE
    for octet in data:
        crc ^= octet << 16
        for _bit in range(8):
            crc = crc << 1 ^ (0x1864CFB if crc & 0x800000 else 0)
    return crc


def is_armored(data: bytes) -> bool:
    """Whether the data is ASCII armor; binary packets always start with bit 7 set."""
    return bool(_ANY_BEGIN.search(data)) and not data[0] & 0x80


def dearmor(data: bytes) -> bytes:
    """The binary packets of every public key block in the data; binary data is returned as it is."""
    if data.startswith(codecs.BOM_UTF8):
        data = data[len(codecs.BOM_UTF8) :]
    if not data.strip():
        raise OpenPGPError("the file is empty")
    if data[0] & 0x80:
        return data
    kinds = [match.group(1).decode("ascii") for match in _ANY_BEGIN.finditer(data)]
    if not kinds:
        start = data.lstrip()[:40].decode("utf-8", "replace").splitlines()[0]
        raise OpenPGPError(f"the file holds no OpenPGP key block, it starts with '{start}'")
    for kind in kinds:
        if kind != "PUBLIC KEY BLOCK":
            raise OpenPGPError(f"the file holds a PGP {kind}, not a PGP PUBLIC KEY BLOCK")
    return b"".join(_dearmor_block(lines) for lines in _armor_blocks(data))


def _armor_blocks(data: bytes) -> Iterator[list[bytes]]:
    block: list[bytes] | None = None
    for line in data.splitlines():
        stripped = line.strip()
        if stripped == _BEGIN:
            if block is not None:
                raise OpenPGPError("an OpenPGP key block begins inside another one")
            block = []
        elif stripped == _END:
            if block is None:
                raise OpenPGPError("an OpenPGP key block ends that never began")
            yield block
            block = None
        elif block is not None:
            block.append(stripped)
    if block is not None:
        raise OpenPGPError("the OpenPGP key block is cut off, its END line is missing")


def _dearmor_block(lines: list[bytes]) -> bytes:
    body = lines
    if b"" in lines:
        blank = lines.index(b"")
        if all(b": " in line or line.endswith(b":") for line in lines[:blank]):
            body = lines[blank + 1 :]
    body = [line for line in body if line]
    if body and re.match(rb"^=[A-Za-z0-9+/]{4}$", body[-1]):
        # The checksum says nothing that a fingerprint does not, and RFC 9580 asks nobody to look at it.
        body.pop()
    try:
        packets = base64.b64decode(b"".join(body), validate=True)
    except binascii.Error as error:
        raise OpenPGPError(f"the OpenPGP key block is not valid base64 ({error})") from error
    if not packets:
        raise OpenPGPError("the OpenPGP key block is empty")
    return packets


def armor(data: bytes) -> bytes:
    """Binary packets as one ASCII-armored public key block.

    Without the checksum gpg takes the last line for content, where no sign of padding ends that.
    """
    text = base64.b64encode(data)
    lines = [text[start : start + 64] for start in range(0, len(text), 64)]
    checksum = base64.b64encode(crc24(data).to_bytes(3, "big"))
    return b"\n".join([_BEGIN, b"", *lines, b"=" + checksum, _END, b""])


def packets(data: bytes) -> Iterator[Packet]:
    """The packets of binary OpenPGP data, in order."""
    position = 0
    while position < len(data):
        start = position
        header = data[position]
        if not header & 0x80:
            raise OpenPGPError(f"octet {position} is no OpenPGP packet header (found 0x{header:02X})")
        try:
            if header & 0x40:
                tag = header & 0x3F
                length, position = _new_length(data, position + 1)
            else:
                tag = (header >> 2) & 0x0F
                length, position = _old_length(data, position + 1, header & 0x03)
        except IndexError:
            raise OpenPGPError(f"the OpenPGP data is cut off in a packet header at octet {start}") from None
        if position + length > len(data):
            raise OpenPGPError(
                f"the OpenPGP data is cut off: packet {tag} at octet {start} needs {length} octets, "
                f"{len(data) - position} are left"
            )
        yield Packet(tag=tag, body=data[position : position + length], raw=data[start : position + length])
        position += length


def _new_length(data: bytes, position: int) -> tuple[int, int]:
    first = data[position]
    if first < 192:
        return first, position + 1
    if first < 224:
        return ((first - 192) << 8) + data[position + 1] + 192, position + 2
    if first == 255:
        data[position + 4]
        return int.from_bytes(data[position + 1 : position + 5], "big"), position + 5
    raise OpenPGPError(f"the packet at octet {position - 1} has a partial length, which keys must not have")


def _old_length(data: bytes, position: int, kind: int) -> tuple[int, int]:
    if kind == 3:
        raise OpenPGPError(f"the packet at octet {position - 1} has an indeterminate length, which keys must not have")
    size = 1 << kind
    data[position + size - 1]
    return int.from_bytes(data[position : position + size], "big"), position + size


def fingerprint(body: bytes) -> str:
    """The fingerprint of the body of a public key packet."""
    version = body[0] if body else -1
    if version == 4:
        # SHA-1 is what identifies a version 4 key; nothing is signed with it here.
        digest = hashlib.sha1(b"\x99" + len(body).to_bytes(2, "big") + body)  # noqa: S324
        return digest.hexdigest().upper()
    if version in (5, 6):
        prefix = b"\x9a" if version == 5 else b"\x9b"
        return hashlib.sha256(prefix + len(body).to_bytes(4, "big") + body).hexdigest().upper()
    raise OpenPGPError(f"a public key has the unsupported version {version} (supported: 4, 5 and 6)")


def split_keys(data: bytes) -> list[PublicKey]:
    """Every primary key in binary OpenPGP data, each with the packets that follow it."""
    groups: list[list[Packet]] = []
    for packet in packets(data):
        if packet.tag in (TAG_SECRET_KEY, TAG_SECRET_SUBKEY):
            raise OpenPGPError("the file holds a secret key, which must never lie on a node")
        if packet.tag in (TAG_MARKER, TAG_PADDING):
            continue
        if packet.tag == TAG_PUBLIC_KEY:
            groups.append([packet])
        elif groups:
            groups[-1].append(packet)
        else:
            raise OpenPGPError(f"the OpenPGP data starts with packet {packet.tag}, not with a public key")
    if not groups:
        raise OpenPGPError("the file holds no public key")
    return [
        PublicKey(
            fingerprint=fingerprint(group[0].body),
            user_ids=tuple(packet.body.decode("utf-8", "replace") for packet in group if packet.tag == TAG_USER_ID),
            raw=b"".join(packet.raw for packet in group),
        )
        for group in groups
    ]


def read_keys(data: bytes) -> list[PublicKey]:
    """Every primary key in a key file, armored or binary."""
    return split_keys(dearmor(data))


def join_keys(keys: Iterable[PublicKey]) -> bytes:
    """The keys as one binary keyring."""
    return b"".join(key.raw for key in keys)


def describe(keys: Iterable[PublicKey]) -> str:
    """The fingerprints of keys with their first user IDs, for people."""
    return ", ".join(f"{key.fingerprint} ({key.user_ids[0]})" if key.user_ids else key.fingerprint for key in keys)
