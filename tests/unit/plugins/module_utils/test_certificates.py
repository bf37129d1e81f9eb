# Copyright (c) 2026, gpufarm contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

import datetime

import pytest
from ansible_collections.gpufarm.core.plugins.module_utils import certificates
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa

# Python 3.9 has no datetime.UTC.
UTC = datetime.timezone.utc  # noqa: UP017
# RFC 5280: until 2049 with two digits of the year, later with four.
ENDS = [
    "1999-06-01T00:00:00",
    "2026-11-21T15:11:02",
    "2049-12-31T23:59:59",
    "2050-01-01T00:00:00",
    "9999-12-31T23:59:59",
]


def made(end: datetime.datetime, key: ec.EllipticCurvePrivateKey | rsa.RSAPrivateKey) -> x509.Certificate:
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "client.global.nomad" * 3)])
    begin = datetime.datetime(1990, 1, 1, tzinfo=UTC)
    return x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number(), begin, end).sign(
        key, hashes.SHA256()
    )


@pytest.mark.parametrize("text", ENDS)
def test_ends_are_those_that_another_reader_sees(text: str) -> None:
    end = datetime.datetime.fromisoformat(text).replace(tzinfo=UTC)
    for key in (ec.generate_private_key(ec.SECP256R1()), rsa.generate_private_key(65537, 2048)):
        certificate = made(end, key)
        assert certificate.not_valid_after_utc == end
        assert certificates.end_of(certificate.public_bytes(serialization.Encoding.DER)) == end.timestamp()


def test_a_file_may_hold_several_and_other_things() -> None:
    key = ec.generate_private_key(ec.SECP256R1())
    ends = [datetime.datetime(year, 1, 1, tzinfo=UTC) for year in (2030, 2040)]
    pems = [made(end, key).public_bytes(serialization.Encoding.PEM) for end in ends]
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    found = certificates.certificates_of(b"subject=CN = x\n" + pems[0] + private + pems[1].replace(b"\n", b"\r\n"))
    assert [certificates.end_of(each) for each in found] == [end.timestamp() for end in ends]
    assert certificates.certificates_of(private) == []


def test_what_is_no_certificate_is_told() -> None:
    key = ec.generate_private_key(ec.SECP256R1())
    der = made(datetime.datetime(2030, 1, 1, tzinfo=UTC), key).public_bytes(serialization.Encoding.DER)
    for wrong in (b"", b"no", b"\x30", b"\x30\x82", der[:60], bytes(40), der[4:]):
        with pytest.raises(ValueError):
            certificates.end_of(wrong)
