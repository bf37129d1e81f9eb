# Copyright (c) 2026, gpufarm contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

import dataclasses
import datetime
import ipaddress
import ssl
from pathlib import Path

import pytest
from ansible_collections.gpufarm.core.plugins.module_utils import certificates, nomad, nomad_certificates
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa

# Python 3.9 has no datetime.UTC.
UTC = datetime.timezone.utc
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


@pytest.mark.parametrize("names", [[], ["client.eu.nomad"], ["localhost", "a.example", "b" * 63 + ".example"] * 4])
def test_names_are_those_that_another_reader_sees(names: list[str]) -> None:
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "client.global.nomad")])
    address = x509.IPAddress(ipaddress.ip_address("192.0.2.1"))
    begin, end = (datetime.datetime(year, 1, 1, tzinfo=UTC) for year in (2020, 2030))
    builder = x509.CertificateBuilder(subject, subject, key.public_key(), x509.random_serial_number(), begin, end)
    # What is before it, critical or not, is none of it.
    builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
    builder = builder.add_extension(x509.SubjectKeyIdentifier(b"\x55\x1d\x11"), critical=False)
    if names:
        alternatives = x509.SubjectAlternativeName([address, *map(x509.DNSName, names)])
        builder = builder.add_extension(alternatives, critical=len(names) == 1)
    certificate = builder.sign(key, hashes.SHA256()).public_bytes(serialization.Encoding.DER)
    assert certificates.names_of(certificate) == names
    if names:
        with pytest.raises(ValueError, match="cut off"):
            certificates.names_of(certificate[: certificate.index(names[0].encode())])


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


def signed(subject: str, issuer: str, year: int) -> bytes:
    key = ec.generate_private_key(ec.SECP256R1())
    names = [x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)]) for name in (issuer, subject)]
    begin, end = datetime.datetime(1990, 1, 1, tzinfo=UTC), datetime.datetime(year, 1, 1, tzinfo=UTC)
    builder = x509.CertificateBuilder(*names, key.public_key(), x509.random_serial_number(), begin, end)
    return builder.sign(key, hashes.SHA256()).public_bytes(serialization.Encoding.DER)


@pytest.mark.parametrize(
    ("between", "year"),
    [
        ([], None),
        ([("inter", "root", 2030)], 2030),
        # One that follows it stands beside it.
        ([("inter", "root", 2030), ("inter", "root", 2045)], 2045),
        ([("other", "root", 2030)], None),
        ([("inter", "upper", 2045), ("upper", "root", 2035)], 2035),
        # By each other.
        ([("inter", "upper", 2045), ("upper", "inter", 2042)], 2042),
    ],
)
def test_a_chain_ends_with_what_is_between_a_certificate_and_its_ca(
    between: list[tuple[str, str, int]], year: int | None
) -> None:
    own = signed("leaf", "inter", 2040)
    others = [own, *(signed(*each) for each in between), signed("root", "root", 2026)]
    found = certificates.end_above(own, others)
    assert found == (None if year is None else datetime.datetime(year, 1, 1, tzinfo=UTC).timestamp())


def test_the_chain_of_an_agent_is_told_where_it_ends_first(tmp_path: Path) -> None:
    def write(name: str, *held: bytes) -> str:
        text = "".join(ssl.DER_cert_to_PEM_cert(each) for each in held)
        (tmp_path / name).write_text(text, encoding="ascii")
        return str(tmp_path / name)

    leaf, inter, root = signed("leaf", "inter", 2040), signed("inter", "root", 2030), signed("root", "root", 2050)
    now = datetime.datetime(2029, 12, 30, tzinfo=UTC).timestamp()
    # Nobody answers there.
    asked = nomad.Connection(address="https://127.0.0.1:1", client_cert=write("agent.pem", leaf, inter))
    for ca in (write("ca.pem", root), write("both.pem", inter, root)):
        own = asked if ca.endswith("ca.pem") else dataclasses.replace(asked, client_cert=write("leaf.pem", leaf))
        found = nomad_certificates.of_agent(dataclasses.replace(own, ca_cert=ca), 30, now)
        ends = [(each["of"], each["not_after"][:4], each["state"]) for each in found]
        assert ends == [("file", "2040", "ok"), ("ca", "2050", "ok"), ("chain", "2030", "ends_soon")]
        (told,) = nomad_certificates.told(found, "ends_soon", 30)
        start = f"a certificate between the CA's and that in {own.client_cert} expires on 2030-01-01"
        assert told.startswith(start)
    # One that ends with its chain is told once.
    longer = signed("inter", "root", 2045)
    whole = dataclasses.replace(asked, client_cert=write("agent.pem", leaf, longer), ca_cert=write("ca.pem", root))
    assert [each["of"] for each in nomad_certificates.of_agent(whole, 30, now)] == ["file", "ca"]


OLD, NEW, OTHER = ("root", "root", 2030), ("root", "root", 2040), ("other", "other", 2050)


@pytest.mark.parametrize(
    ("chain", "held", "year"),
    [
        ([("leaf", "root", 2029)], [OLD, OTHER], 2030),
        ([("leaf", "root", 2029)], [OTHER, OLD, NEW], 2040),
        ([("leaf", "inter", 2029), ("inter", "root", 2029)], [OTHER, OLD], 2030),
        ([("leaf", "inter", 2029)], [("inter", "root", 2029), OTHER, OLD], 2030),
        # By another one as well, from which it can be told, and by itself alone.
        ([("leaf", "root", 2029), ("root", "other", 2029)], [OLD, OTHER], 2050),
        ([("leaf", "root", 2029), ("root", "other", 2029)], [OLD], 2030),
        ([("leaf", "leaf", 2029)], [("leaf", "leaf", 2029), OTHER], 2029),
        # Of none of them, and of nobody knows whom.
        ([("leaf", "nobody", 2029)], [OLD, OTHER], 2050),
        ([], [OLD, OTHER], 2050),
        # One that lets in whom a company has signed for.
        ([("leaf", "inter", 2029)], [("inter", "company", 2035)], 2035),
    ],
)
def test_the_ca_is_that_of_the_agents_own_chain(
    tmp_path: Path, chain: list[tuple[str, str, int]], held: list[tuple[str, str, int]], year: int
) -> None:
    for name, those in (("agent.pem", chain), ("ca.pem", held)):
        text = "".join(ssl.DER_cert_to_PEM_cert(signed(*each)) for each in those)
        (tmp_path / name).write_text(text, encoding="ascii")
    asked = nomad.Connection(
        address="https://127.0.0.1:1", client_cert=str(tmp_path / "agent.pem"), ca_cert=str(tmp_path / "ca.pem")
    )
    found = nomad_certificates.of_agent(asked, 30)
    assert [each["not_after"][:4] for each in found if each["of"] == "ca"] == [str(year)]


def test_what_is_no_certificate_is_told() -> None:
    key = ec.generate_private_key(ec.SECP256R1())
    der = made(datetime.datetime(2030, 1, 1, tzinfo=UTC), key).public_bytes(serialization.Encoding.DER)
    for wrong in (b"", b"no", b"\x30", b"\x30\x82", der[:60], bytes(40), der[4:]):
        with pytest.raises(ValueError):
            certificates.end_of(wrong)
