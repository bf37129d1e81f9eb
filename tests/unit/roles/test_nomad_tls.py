# Copyright (c) 2026, gpufarm contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""When a node needs a certificate, and what nomad_tls refuses, with certificates that are real."""

from __future__ import annotations

import datetime
import hashlib
import ipaddress
from pathlib import Path
from typing import Any

import pytest
from ansible_collections.gpufarm.core.tests.unit.roles import role_helper
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

TLS = "/etc/nomad.d/tls"
FILES = {f"nomad_tls_{name}_file": f"/{name}.pem" for name in ("ca", "cert", "key")}
NAMES = ["client.global.nomad", "localhost", "t4", "t4.example"]
DAY = datetime.timedelta(days=1)


def certificate(names: list[str], days: float = 365) -> str:
    """Return one that holds for some days, in PEM."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, names[0])])
    now = datetime.datetime.now(datetime.UTC)
    subjects = [*map(x509.DNSName, names), x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]
    built = x509.CertificateBuilder(
        name, name, key.public_key(), x509.random_serial_number(), now - DAY, now + days * DAY,
        [x509.Extension(x509.SubjectAlternativeName.oid, False, x509.SubjectAlternativeName(subjects))],
    ).sign(key, hashes.SHA256())  # fmt: skip
    return built.public_bytes(serialization.Encoding.PEM).decode().strip()


def node(secrets: Path, there: str = "", ca: str = "CA", key_mode: str = "0600", **given: Any) -> dict[str, Any]:
    """Return the variables of a node that was looked at."""
    found = role_helper.host(f"{TLS}/ca.pem", f"{TLS}/agent-key.pem", certificates={})
    found["files"][0]["checksum"] = hashlib.sha1(ca.encode()).hexdigest()  # noqa: S324 # as find tells it
    found["files"][1]["mode"] = key_mode
    found["certificates"] = {f"{TLS}/agent.pem": there} if there else {}
    return {
        "nomad_tls": "generate", "nomad_secrets_dir": str(secrets), "inventory_hostname": "t4",
        "ansible_host": "t4.example", "groups": {}, "hostvars": {}, "_common_host": found, **given,
    }  # fmt: skip


@pytest.fixture
def secrets(tmp_path: Path) -> Path:
    (tmp_path / "nomad-ca.pem").write_text("CA", encoding="ascii")
    (tmp_path / "nomad-ca-key.pem").touch()
    return tmp_path


def test_a_node_asks_for_a_certificate_where_it_has_none_that_holds(secrets: Path) -> None:
    good = certificate(NAMES)
    cases = {
        "": node(secrets, good),
        "it has none": node(secrets),
        "another CA has signed it": node(secrets, good, ca="older"),
        "it has other names": node(secrets, good, nomad_tls_names=["192.0.2.7"]),
    }
    more = [
        node(secrets, good, key_mode="0644"),
        node(secrets, certificate(NAMES, days=29.5)),
        node(secrets, certificate(NAMES, days=30.5)),
        node(secrets, certificate(NAMES, days=-0.5)),
        # A server answers as one, and a region has names of its own.
        node(secrets, good, groups={"nomad_servers": ["t4"]}),
        node(secrets, good, nomad_region="eu"),
        # Made in this run, after the host was looked at.
        node(secrets, __nomad_certificate_key={}),
        node(secrets, nomad_tls="files", **FILES),
        node(secrets, nomad_tls=False),
    ]
    found = role_helper.values("__nomad_certificate_due", ["nomad", "_common"], [*cases.values(), *more])
    assert found[: len(cases)] == list(cases)
    short, renewed = [text.partition("it ends on 20")[0] for text in (found[5], found[7])]
    assert found[4] == "it has none"
    assert (short, found[6], renewed) == ("", "", "") and found[5] and found[7]
    assert found[8:] == ["it has other names", "it has other names", "", "", ""]


def test_certificate_has_the_names_under_which_the_agent_is_asked(secrets: Path) -> None:
    cases = [
        node(secrets),
        node(secrets, groups={"nomad_servers": ["t4"]}, nomad_region="eu", ansible_host="192.0.2.1"),
        node(secrets, nomad_bind_addr="192.0.2.9", nomad_node_name="Größe", nomad_tls_names=["fd00::1", "GPU.example"]),
    ]
    assert role_helper.values("__nomad_certificate_subjects", ["nomad", "_common"], cases) == [
        ["DNS:client.global.nomad", "DNS:localhost", "DNS:t4", "DNS:t4.example", "IP:127.0.0.1"],
        ["DNS:client.eu.nomad", "DNS:localhost", "DNS:server.eu.nomad", "DNS:t4", "IP:127.0.0.1", "IP:192.0.2.1"],
        ["DNS:client.global.nomad", "DNS:GPU.example", "DNS:localhost", "DNS:t4.example", "IP:127.0.0.1",
         "IP:192.0.2.9", "IP:fd00::1"],
    ]  # fmt: skip


def test_what_is_refused_of_tls(secrets: Path, tmp_path: Path) -> None:
    alone = tmp_path / "alone"
    alone.mkdir()
    (alone / "nomad-ca.pem").write_text("CA", encoding="ascii")
    cases = [
        (node(secrets), ""),
        (node(tmp_path / "new"), ""),
        (node(secrets, nomad_tls="files", **FILES), ""),
        (node(secrets, nomad_tls=False), ""),
        (node(secrets, nomad_tls="off"), ""),
        (node(secrets, nomad_tls="files"), "are empty. Expected: all three"),
        (node(secrets, nomad_tls="files", **{**FILES, "nomad_tls_key_file": ""}), "are empty. Expected: all three"),
        (node(secrets, **FILES), "nomad_tls is generate, and nomad_tls_ca_file"),
        (
            node(secrets, nomad_tls="off", nomad_tls_ca_file="/ca.pem"),
            "(/ca.pem). Expected: these of files that you bring",
        ),
        (node(Path("secrets")), 'nomad_secrets_dir is "secrets". Expected: an absolute path'),
        (node(Path("no"), nomad_tls=False, nomad_acl_enabled=True), 'nomad_secrets_dir is "no". Expected'),
        (node(Path("no"), nomad_tls=False, nomad_acl_enabled=True, nomad_token="T"), ""),
        (node(alone), f"found {alone}/nomad-ca.pem without its key. Expected: {alone}/nomad-ca-key.pem"),
        (
            node(tmp_path / "new", certificate(NAMES)),
            f"found a certificate of this farm in {TLS}/agent.pem, and no CA",
        ),
    ]
    found = role_helper.values("__nomad_refusal", ["nomad", "_common"], [case for case, _expected in cases])
    for text, (_case, expected) in zip(found, cases, strict=True):
        assert (expected in text) if expected else text == "", text
        assert not text or text.count("Next step: ") == 1


def test_an_agent_is_asked_without_tls_only_where_it_is_known_to_have_no_certificate(secrets: Path) -> None:
    unseen = node(secrets)
    del unseen["_common_host"]
    cases = [
        (node(secrets), "http"),
        (node(secrets, __nomad_started_anew=True), "https"),
        (node(secrets, __nomad_started_anew=True, ansible_check_mode=True), "http"),
        (node(secrets, __nomad_purpose="verify"), "https"),
        (node(secrets, certificate(NAMES)), "https"),
        # health.yml and upgrade.yml ask before anyone has looked.
        (unseen, "https"),
        ({**unseen, "ansible_check_mode": True}, "https"),
        ({**unseen, "nomad_tls": "off"}, "http"),
    ]
    asked = [{"ansible_check_mode": False, "ansible_play_name": "", **case} for case, _scheme in cases]
    for wanted in ("__nomad_local_url", "__nomad_api"):
        for found, (case, scheme) in zip(role_helper.values(wanted, ["nomad", "_common"], asked), cases, strict=True):
            url, ca = (found, None) if isinstance(found, str) else (found["address"], found["ca_cert"])
            assert url == f"{scheme}://127.0.0.1:4646", case
            assert ca is None or bool(ca) == (scheme == "https"), case
