# Copyright (c) 2026, gpufarm contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""OpenPGP public keys as files: armor, packets and fingerprints.

Just enough of RFC 4880 and RFC 9580 to say which primary keys a file holds, so that a node
needs no gpg to turn a downloaded key into an apt keyring. No signature is verified here: the
pinned fingerprint is what makes a key trusted.
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

TAG_SIGNATURE = 2
TAG_SECRET_KEY = 5
TAG_PUBLIC_KEY = 6
TAG_SECRET_SUBKEY = 7
TAG_MARKER = 10
TAG_USER_ID = 13
TAG_PADDING = 21

_SELF_CERTIFICATIONS = (0x10, 0x11, 0x12, 0x13)
_DIRECT_KEY = 0x1F
_KEY_REVOCATION = 0x20
_SUBPACKET_CREATED = 2
_SUBPACKET_KEY_EXPIRES = 9
_SUBPACKET_ISSUER = 16
_SUBPACKET_ISSUER_FINGERPRINT = 33


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
    expires: int | None
    revoked: bool
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
        crc = ((crc << 8) & 0xFFFFFF) ^ _CRC24_TABLE[(crc >> 16) ^ octet]
    return crc


def _crc24_table() -> tuple[int, ...]:
    table = []
    for octet in range(256):
        crc = octet << 16
        for _bit in range(8):
            crc <<= 1
            if crc & 0x1000000:
                crc ^= 0x1864CFB
        table.append(crc & 0xFFFFFF)
    return tuple(table)


_CRC24_TABLE = _crc24_table()


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
    checksum: int | None = None
    if body and re.match(rb"^=[A-Za-z0-9+/]{4}$", body[-1]):
        checksum = int.from_bytes(base64.b64decode(body[-1][1:]), "big")
        body = body[:-1]
    try:
        packets = base64.b64decode(b"".join(body), validate=True)
    except binascii.Error as error:
        raise OpenPGPError(f"the OpenPGP key block is not valid base64 ({error})") from error
    if not packets:
        raise OpenPGPError("the OpenPGP key block is empty")
    if checksum is not None and checksum != crc24(packets):
        raise OpenPGPError(
            f"the OpenPGP key block is damaged, its CRC-24 is {crc24(packets):06X} and it states {checksum:06X}"
        )
    return packets


def armor(data: bytes) -> bytes:
    """Binary packets as one ASCII-armored public key block, with its checksum."""
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
    return [_public_key(group) for group in groups]


def read_keys(data: bytes) -> list[PublicKey]:
    """Every primary key in a key file, armored or binary."""
    return split_keys(dearmor(data))


def join_keys(keys: Iterable[PublicKey]) -> bytes:
    """The keys as one binary keyring."""
    return b"".join(key.raw for key in keys)


@dataclasses.dataclass(frozen=True)
class _Signature:
    kind: int
    created: int
    key_expires_after: int
    issuers: frozenset[str]


def _public_key(group: list[Packet]) -> PublicKey:
    primary = group[0].body
    identity = fingerprint(primary)
    if len(primary) < 6:
        raise OpenPGPError("a public key packet is shorter than its own header")
    created = int.from_bytes(primary[1:5], "big")
    key_id = identity[-16:] if primary[0] == 4 else identity[:16]
    newest: dict[bool, _Signature] = {}
    revoked = False
    for packet in group[1:]:
        signature = _signature(packet.body) if packet.tag == TAG_SIGNATURE else None
        # Other people's signatures on the key say nothing about its expiry.
        if signature is None or not signature.issuers & {identity, key_id}:
            continue
        if signature.kind == _KEY_REVOCATION:
            revoked = True
        elif signature.kind == _DIRECT_KEY or signature.kind in _SELF_CERTIFICATIONS:
            direct = signature.kind == _DIRECT_KEY
            if direct not in newest or signature.created >= newest[direct].created:
                newest[direct] = signature
    # Like gpg: the user ID's newest self-signature decides, and the direct one where that is silent.
    stated = [newest[direct].key_expires_after for direct in (False, True) if direct in newest]
    lifetime = next((seconds for seconds in stated if seconds), 0)
    return PublicKey(
        fingerprint=identity,
        expires=created + lifetime if lifetime else None,
        revoked=revoked,
        user_ids=tuple(packet.body.decode("utf-8", "replace") for packet in group if packet.tag == TAG_USER_ID),
        raw=b"".join(packet.raw for packet in group),
    )


def _signature(body: bytes) -> _Signature | None:
    """What a signature packet says about itself; None for one that cannot be read."""
    if len(body) < 6 or body[0] not in (4, 5, 6):
        return None
    width = 4 if body[0] == 6 else 2
    try:
        hashed, position = _area(body, 4, width)
        unhashed, position = _area(body, position, width)
        created = lifetime = 0
        for kind, value in _subpackets(hashed):
            if kind == _SUBPACKET_CREATED:
                created = int.from_bytes(value, "big")
            elif kind == _SUBPACKET_KEY_EXPIRES:
                lifetime = int.from_bytes(value, "big")
        issuers = set()
        for kind, value in [*_subpackets(hashed), *_subpackets(unhashed)]:
            if kind == _SUBPACKET_ISSUER:
                issuers.add(value.hex().upper())
            elif kind == _SUBPACKET_ISSUER_FINGERPRINT:
                issuers.add(value[1:].hex().upper())
    except IndexError:
        return None
    return _Signature(kind=body[1], created=created, key_expires_after=lifetime, issuers=frozenset(issuers))


def _area(body: bytes, position: int, width: int) -> tuple[bytes, int]:
    size = int.from_bytes(body[position : position + width], "big")
    start = position + width
    if start + size > len(body):
        raise IndexError
    return body[start : start + size], start + size


def _subpackets(area: bytes) -> list[tuple[int, bytes]]:
    found = []
    position = 0
    while position < len(area):
        first = area[position]
        if first < 192:
            size, position = first, position + 1
        elif first < 255:
            size, position = ((first - 192) << 8) + area[position + 1] + 192, position + 2
        else:
            size, position = int.from_bytes(area[position + 1 : position + 5], "big"), position + 5
        if size < 1 or position + size > len(area):
            raise IndexError
        found.append((area[position] & 0x7F, area[position + 1 : position + size]))
        position += size
    return found


def describe(keys: Iterable[PublicKey]) -> str:
    """The fingerprints of keys with their first user IDs, for people."""
    return ", ".join(f"{key.fingerprint} ({key.user_ids[0]})" if key.user_ids else key.fingerprint for key in keys)
