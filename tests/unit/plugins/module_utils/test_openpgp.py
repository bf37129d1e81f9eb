# Copyright (c) 2026, gpufarm contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

import base64
import contextlib
import hashlib
import random

import pytest
from ansible_collections.gpufarm.core.plugins.module_utils import openpgp
from ansible_collections.gpufarm.core.tests.unit.plugins.modules import release_helper as helper

needs_gpg = pytest.mark.skipif(not helper.HAS_GPG, reason=helper.GPG_MISSING)

# The version 6 certificate of RFC 9580, appendix A.3.
V6_KEY = b"""-----BEGIN PGP PUBLIC KEY BLOCK-----

xioGY4d/4xsAAAAg+U2nu0jWCmHlZ3BqZYfQMxmZu52JGggkLq2EVD34laPCsQYf
GwoAAABCBYJjh3/jAwsJBwUVCg4IDAIWAAKbAwIeCSIhBssYbE8GCaaX5NUt+mxy
KwwfHifBilZwj2Ul7Ce62azJBScJAgcCAAAAAK0oIBA+LX0ifsDm185Ecds2v8lw
gyU2kCcUmKfvBXbAf6rhRYWzuQOwEn7E/aLwIwRaLsdry0+VcallHhSu4RN6HWaE
QsiPlR4zxP/TP7mhfVEe7XWPxtnMUMtf15OyA51YBM4qBmOHf+MZAAAAIIaTJINn
+eUBXbki+PSAld2nhJh/LVmFsS+60WyvXkQ1wpsGGBsKAAAALAWCY4d/4wKbDCIh
BssYbE8GCaaX5NUt+mxyKwwfHifBilZwj2Ul7Ce62azJAAAAAAQBIKbpGG2dWTX8
j+VjFM21J0hqWlEg+bdiojWnKfA5AQpWUWtnNwDEM0g12vYxoWM8Y81W+bHBw805
I8kWVkXU6vFOi+HWvv/ira7ofJu16NnoUkhclkUrk0mXubZvyl4GBg==
-----END PGP PUBLIC KEY BLOCK-----
"""
V6_FINGERPRINT = "CB186C4F0609A697E4D52DFA6C722B0C1F1E27C18A56708F6525EC27BAD9ACC9"


gpg = helper.gpg


@pytest.fixture(scope="module")
def key(gpg: helper.Gpg) -> tuple[str, bytes]:
    fingerprint = gpg.new_key("plain", subkey=True)
    return fingerprint, gpg.export(fingerprint, armored=False)


def packet(tag: int, body: bytes) -> bytes:
    return bytes([0xC0 | tag, 0xFF]) + len(body).to_bytes(4, "big") + body


def test_crc24_of_a_known_text() -> None:
    assert openpgp.crc24(b"") == 0xB704CE
    assert openpgp.crc24(b"123456789") == 0x21CF02


def test_version_6_key_of_the_standard() -> None:
    keys = openpgp.read_keys(V6_KEY)
    assert [key.fingerprint for key in keys] == [V6_FINGERPRINT]


def test_version_4_fingerprint() -> None:
    body = b"\x04" + bytes(4) + b"\x16" + b"key material"
    expected = hashlib.sha1(b"\x99" + len(body).to_bytes(2, "big") + body).hexdigest().upper()  # noqa: S324
    assert openpgp.fingerprint(body) == expected


@needs_gpg
def test_gpg_agrees_on_the_fingerprint(key: tuple[str, bytes]) -> None:
    fingerprint, binary = key
    keys = openpgp.read_keys(binary)
    assert [found.fingerprint for found in keys] == [fingerprint]
    assert keys[0].user_ids == ("plain <plain@example.com>",)
    assert openpgp.join_keys(keys) == binary


@needs_gpg
def test_armor_of_gpg_and_our_own(gpg: helper.Gpg, key: tuple[str, bytes]) -> None:
    fingerprint, binary = key
    armored = gpg.export(fingerprint)
    assert openpgp.dearmor(armored) == binary
    assert openpgp.dearmor(openpgp.armor(binary)) == binary
    assert openpgp.is_armored(armored) and not openpgp.is_armored(binary)
    # Of every length that base64 ends differently for; the rest is what gpg has for something private.
    for more in range(3):
        longer = binary + packet(60, b"x" * more)
        assert fingerprint.encode() in gpg.run("--show-keys", "--with-colons", data=openpgp.armor(longer))
    # Web pages and editors leave such traces.
    for variant in (
        armored.replace(b"\n", b"\r\n"),
        b"\xef\xbb\xbf" + armored,
        b"Our key:\n\n" + armored + b"\nThanks\n",
        armored.replace(b"BLOCK-----\n\n", b"BLOCK-----\nVersion: GnuPG v2\nComment: x\n\n"),
        b"\n".join(line for line in armored.splitlines() if not line.startswith(b"=")),
    ):
        assert openpgp.dearmor(variant) == binary


@needs_gpg
def test_several_keys_in_one_file(gpg: helper.Gpg, key: tuple[str, bytes]) -> None:
    second = gpg.new_key("second")
    blocks = gpg.export(key[0]) + gpg.export(second)
    assert [found.fingerprint for found in openpgp.read_keys(blocks)] == [key[0], second]
    assert {found.fingerprint for found in openpgp.read_keys(gpg.export(key[0], second))} == {key[0], second}


@needs_gpg
def test_secret_keys_are_refused(gpg: helper.Gpg, key: tuple[str, bytes]) -> None:
    for armored in ([], ["--armor"]):
        secret = gpg.run(*armored, "--export-secret-keys", key[0])
        with pytest.raises(openpgp.OpenPGPError, match=r"secret key|PRIVATE KEY BLOCK"):
            openpgp.read_keys(secret)


@needs_gpg
@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda armored: armored[: len(armored) // 2], "cut off"),
        (lambda _armored: b"", "empty"),
        (lambda _armored: b"  \n", "empty"),
        (lambda _armored: b"<html>404</html>", "starts with '<html>404</html>'"),
        (lambda armored: armored.replace(b"PUBLIC KEY BLOCK", b"MESSAGE"), "PGP MESSAGE"),
        (lambda armored: armored.replace(b"\n\n", b"\n\n!!!!\n", 1), "base64"),
        (lambda armored: openpgp.dearmor(armored)[:-3], "cut off"),
        (lambda armored: openpgp.dearmor(armored) + b"\x00", "no OpenPGP packet header"),
    ],
)
def test_damage_is_named(key: tuple[str, bytes], change: object, words: str) -> None:
    assert callable(change)
    with pytest.raises(openpgp.OpenPGPError, match=words):
        openpgp.read_keys(change(openpgp.armor(key[1])))


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (packet(openpgp.TAG_USER_ID, b"x"), "starts with packet 13"),
        (packet(openpgp.TAG_MARKER, b"PGP"), "no public key"),
        (packet(openpgp.TAG_PUBLIC_KEY, b"\x03" + bytes(20)), "unsupported version 3"),
        (packet(openpgp.TAG_PUBLIC_KEY, b""), "unsupported version"),
        (bytes([0xC6, 0xE1, 0x04]), "partial length"),
        (bytes([0x9B, 0x04]), "indeterminate length"),
        (bytes([0xC6]), "cut off in a packet header"),
        (bytes([0xC6, 0xFF, 0x00]), "cut off in a packet header"),
        (bytes([0x99, 0x00]), "cut off in a packet header"),
    ],
)
def test_packets_that_are_no_key(data: bytes, words: str) -> None:
    with pytest.raises(openpgp.OpenPGPError, match=words):
        openpgp.read_keys(data)


@needs_gpg
def test_damaged_keys_give_one_exception(key: tuple[str, bytes]) -> None:
    chance = random.Random(20261121)  # noqa: S311
    for data in (key[1], openpgp.armor(key[1]), V6_KEY):
        for _round in range(400):
            damaged = bytearray(data)
            for _change in range(chance.randint(1, 4)):
                damaged[chance.randrange(len(damaged))] = chance.randrange(256)
            with contextlib.suppress(openpgp.OpenPGPError):
                openpgp.read_keys(bytes(damaged[: chance.randint(1, len(damaged))]))


@pytest.mark.parametrize(
    ("text", "plain"),
    [
        ("C874 011F 0AB4 0511 0D02  1055 3436 5D94 72D7 468F", "C874011F0AB405110D02105534365D9472D7468F"),
        ("0xc874011f0ab405110d02105534365d9472d7468f", "C874011F0AB405110D02105534365D9472D7468F"),
        (V6_FINGERPRINT.lower(), V6_FINGERPRINT),
    ],
)
def test_fingerprints_as_people_write_them(text: str, plain: str) -> None:
    assert openpgp.normalize_fingerprint(text) == plain


@pytest.mark.parametrize("text", ["", "72D7468F", "34365D9472D7468F", "C874011F0AB405110D02105534365D9472D7468G"])
def test_what_is_no_fingerprint(text: str) -> None:
    with pytest.raises(openpgp.OpenPGPError, match="not a full OpenPGP fingerprint"):
        openpgp.normalize_fingerprint(text)


# --- keys made by hand, for what gpg does not make --------------------------------------------

BODY = b"\x04" + (1000).to_bytes(4, "big") + b"\x16" + b"key material"


def number(value: int) -> bytes:
    return value.to_bytes(4, "big")


@pytest.mark.parametrize("version", [5, 6])
def test_fingerprints_of_later_versions(version: int) -> None:
    body = bytes([version]) + BODY[1:]
    prefix = b"\x9a" if version == 5 else b"\x9b"
    expected = hashlib.sha256(prefix + number(len(body)) + body).hexdigest().upper()
    assert openpgp.fingerprint(body) == expected


def old_style(kind: int, body: bytes) -> bytes:
    return bytes([0x80 | openpgp.TAG_PUBLIC_KEY << 2 | kind]) + len(body).to_bytes(1 << kind, "big") + body


@pytest.mark.parametrize("kind", [0, 1, 2])
def test_old_lengths(kind: int) -> None:
    data = old_style(kind, BODY)
    assert [found.raw for found in openpgp.split_keys(data)] == [data]
    with pytest.raises(openpgp.OpenPGPError, match="cut off in a packet header at octet 0"):
        openpgp.split_keys(data[: 1 << kind])


@pytest.mark.parametrize(
    ("size", "length"),
    [
        (191, "bf"),
        (192, "c000"),
        (193, "c001"),
        (448, "c100"),
        (8383, "dfff"),
        (8384, "ff000020c0"),
        (192, "ff000000c0"),
    ],
)
def test_new_lengths(size: int, length: str) -> None:
    packet_of_key = b"\xc6" + bytes.fromhex(length) + BODY.ljust(size, b"x")
    after = packet(openpgp.TAG_USER_ID, b"who")
    key = openpgp.split_keys(packet_of_key + after)[0]
    assert key.raw == packet_of_key + after and key.user_ids == ("who",)
    header = bytes.fromhex(length)
    for cut in range(1, len(header)):
        with pytest.raises(openpgp.OpenPGPError, match="cut off in a packet header at octet 0"):
            openpgp.split_keys(b"\xc6" + header[:cut])


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (packet(6, BODY) + b"\x40", "octet 24 is no OpenPGP packet header (found 0x40)"),
        (
            packet(6, BODY) + packet(13, b"abc")[:-1],
            "the OpenPGP data is cut off: packet 13 at octet 24 needs 3 octets, 2 are left",
        ),
        (packet(6, BODY) + b"\xcd\xe0", "the packet at octet 24 has a partial length, which keys must not have"),
        (packet(6, BODY) + b"\xcd\xfe", "the packet at octet 24 has a partial length, which keys must not have"),
        (packet(6, BODY) + b"\xb7", "the packet at octet 24 has an indeterminate length, which keys must not have"),
        (packet(6, BODY) + packet(5, b""), "the file holds a secret key, which must never lie on a node"),
        (packet(6, BODY) + packet(7, b""), "the file holds a secret key, which must never lie on a node"),
        (packet(2, b""), "the OpenPGP data starts with packet 2, not with a public key"),
        (packet(21, b"") + packet(10, b""), "the file holds no public key"),
        (b"", "the file holds no public key"),
        (packet(6, b"\x07" + bytes(9)), "a public key has the unsupported version 7 (supported: 4, 5 and 6)"),
        (packet(6, b""), "a public key has the unsupported version -1 (supported: 4, 5 and 6)"),
    ],
)
def test_what_is_wrong_is_told_with_its_place(data: bytes, words: str) -> None:
    with pytest.raises(openpgp.OpenPGPError) as caught:
        openpgp.split_keys(data)
    assert str(caught.value) == words


def test_what_belongs_to_no_key_is_left_out() -> None:
    parts = [packet(6, BODY[:6]), packet(21, b"padding"), packet(13, b"one"), packet(10, b"PGP"), packet(13, b"tw\xff")]
    key = openpgp.split_keys(b"".join(parts))[0]
    assert key.raw == parts[0] + parts[2] + parts[4]
    assert key.user_ids == ("one", "tw\ufffd")
    assert openpgp.describe([key]) == f"{key.fingerprint} (one)"
    nameless = openpgp.split_keys(parts[0])[0]
    assert openpgp.describe([nameless, key]) == f"{key.fingerprint}, {key.fingerprint} (one)"


BINARY = packet(6, BODY)
ARMORED = openpgp.armor(BINARY)


def test_armor_as_it_is_written() -> None:
    long = bytes(range(96)) + b"x"
    lines = openpgp.armor(long).decode().splitlines()
    assert lines[0] == "-----BEGIN PGP PUBLIC KEY BLOCK-----" and lines[1] == ""
    assert [len(line) for line in lines[2:5]] == [64, 64, 4]
    # gpg takes the END line for content where neither this nor padding comes before it.
    assert lines[5] == "=" + base64.b64encode(openpgp.crc24(long).to_bytes(3, "big")).decode()
    assert lines[6] == "-----END PGP PUBLIC KEY BLOCK-----" and openpgp.armor(long).endswith(b"-----\n")
    assert openpgp.is_armored(ARMORED) and openpgp.is_armored(b"Our key:\n" + ARMORED)
    for data in (b"", b"text", BINARY, BINARY + b"\n" + ARMORED, b"\x98\x10\n" + ARMORED, b"x" + ARMORED):
        assert not openpgp.is_armored(data)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"\n \t", "the file is empty"),
        (b"\xef\xbb\xbf", "the file is empty"),
        (b" <html>\n<p>" + b"x" * 50, "the file holds no OpenPGP key block, it starts with '<html>'"),
        (b"x" * 41, f"the file holds no OpenPGP key block, it starts with '{'x' * 40}'"),
        (b"ab\xff", "the file holds no OpenPGP key block, it starts with 'ab\ufffd'"),
        (
            ARMORED.replace(b"PUBLIC KEY BLOCK", b"PRIVATE KEY BLOCK"),
            "the file holds a PGP PRIVATE KEY BLOCK, not a PGP PUBLIC KEY BLOCK",
        ),
        (
            ARMORED + ARMORED.replace(b"PUBLIC KEY BLOCK", b"SIGNATURE"),
            "the file holds a PGP SIGNATURE, not a PGP PUBLIC KEY BLOCK",
        ),
        (
            ARMORED.replace(b"-----END", b"-----BEGIN"),
            "an OpenPGP key block begins inside another one",
        ),
        (ARMORED[ARMORED.index(b"-----END") :] + ARMORED, "an OpenPGP key block ends that never began"),
        (
            ARMORED[: ARMORED.index(b"-----END")],
            "the OpenPGP key block is cut off, its END line is missing",
        ),
        (
            b"-----BEGIN PGP PUBLIC KEY BLOCK-----\n\n-----END PGP PUBLIC KEY BLOCK-----\n",
            "the OpenPGP key block is empty",
        ),
        (
            openpgp.armor(b"abc").replace(b"\n=", b"\n=AAAA\n#"),
            "the OpenPGP key block is not valid base64 (",
        ),
    ],
)
def test_what_is_wrong_with_armor(data: bytes, words: str) -> None:
    with pytest.raises(openpgp.OpenPGPError) as caught:
        openpgp.dearmor(data)
    assert str(caught.value).startswith(words) and (words.endswith("(") or str(caught.value) == words)


def test_armor_as_others_write_it() -> None:
    text = base64.b64encode(BINARY)
    begin, end = ARMORED.splitlines()[0], ARMORED.splitlines()[-1]
    for lines in (
        [begin, b"Version: x", b"Comment:", b"", text, end],
        [begin, b"", b"", text[:4], b"", text[4:], b"", end],
        [begin, text, end],
        # Without headers the first lines are content, also where a blank line follows.
        [begin, text[:8], b"", text[8:], end],
        # A checksum is not looked at, right or wrong; it stands at the end alone.
        [begin, b"", text, b"=AAAA", end],
        [b"before", b"", begin + b" \t", b" ", b" " + text + b" ", end, b"after"],
    ):
        assert openpgp.dearmor(b"\n".join(lines)) == BINARY
    assert openpgp.dearmor(ARMORED + b"\nand\n" + ARMORED) == BINARY * 2


def test_fingerprints_in_words() -> None:
    with pytest.raises(openpgp.OpenPGPError) as caught:
        openpgp.normalize_fingerprint("72D7 468F")
    assert str(caught.value) == "'72D7 468F' is not a full OpenPGP fingerprint (40 or 64 hexadecimal digits)"
    assert openpgp.normalize_fingerprint(":".join(["ab"] * 20)) == "AB" * 20
    for length in (39, 41, 63, 65):
        with pytest.raises(openpgp.OpenPGPError):
            openpgp.normalize_fingerprint("A" * length)
