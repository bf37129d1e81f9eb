# Copyright (c) 2026, gpufarm contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

import contextlib
import hashlib
import random
import re
from collections.abc import Iterator

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


@pytest.fixture(scope="module")
def gpg() -> Iterator[helper.Gpg]:
    if not helper.HAS_GPG:
        pytest.skip(helper.GPG_MISSING)
    ring = helper.Gpg()
    yield ring
    ring.close()


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
    assert [(key.fingerprint, key.version) for key in keys] == [(V6_FINGERPRINT, 6)]
    assert keys[0].expires is None and not keys[0].revoked


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
    assert keys[0].expires is None
    assert openpgp.join_keys(keys) == binary


@needs_gpg
def test_armor_of_gpg_and_our_own(gpg: helper.Gpg, key: tuple[str, bytes]) -> None:
    fingerprint, binary = key
    armored = gpg.export(fingerprint)
    assert openpgp.dearmor(armored) == binary
    assert openpgp.dearmor(openpgp.armor(binary)) == binary
    assert openpgp.is_armored(armored) and not openpgp.is_armored(binary)
    assert fingerprint.encode() in gpg.run("--show-keys", "--with-colons", data=openpgp.armor(binary))
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
def test_expiry(gpg: helper.Gpg) -> None:
    fingerprint = gpg.new_key("short", expire="20200301T000000", faked_time="20200101T000000!")
    key = openpgp.read_keys(gpg.export(fingerprint))[0]
    listing = gpg.run("--with-colons", "--show-keys", data=gpg.export(fingerprint)).decode().splitlines()
    assert key.expires == int(listing[0].split(":")[6])
    assert key.created == int(listing[0].split(":")[5])


@needs_gpg
def test_other_peoples_signatures_do_not_prolong(gpg: helper.Gpg) -> None:
    short = gpg.new_key("victim", expire="1d")
    friend = gpg.new_key("friend")
    before = openpgp.read_keys(gpg.export(short))[0].expires
    gpg.run("--local-user", friend, "--quick-sign-key", short)
    assert openpgp.read_keys(gpg.export(short))[0].expires == before is not None


@needs_gpg
def test_revocation(gpg: helper.Gpg) -> None:
    fingerprint = gpg.new_key("withdrawn")
    assert not openpgp.read_keys(gpg.export(fingerprint))[0].revoked
    certificate = (gpg.home / "openpgp-revocs.d" / f"{fingerprint}.rev").read_text()
    gpg.run("--import", data=certificate.replace(":-----BEGIN", "-----BEGIN").encode())
    assert openpgp.read_keys(gpg.export(fingerprint))[0].revoked


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
        (lambda armored: re.sub(rb"\n=.{4}\n", b"\n=AAAA\n", armored), "CRC-24 is"),
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
        (packet(openpgp.TAG_PUBLIC_KEY, b"\x04"), "shorter than its own header"),
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
