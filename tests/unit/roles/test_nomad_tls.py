# Copyright (c) 2026, gpufarm contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""When a node needs a certificate, and what nomad_tls refuses, with certificates that are real."""

from __future__ import annotations

import datetime
import hashlib
import ipaddress
import os
import shutil
import stat
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml
from ansible_collections.gpufarm.core.tests.unit.patience import PATIENCE_S
from ansible_collections.gpufarm.core.tests.unit.playbooks import playbook_helper
from ansible_collections.gpufarm.core.tests.unit.roles import role_helper
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa

TLS = "/etc/nomad.d/tls"
CONFIGURED = "/etc/nomad.d/nomad.hcl"
FILES = {f"nomad_tls_{name}_file": f"/{name}.pem" for name in ("ca", "cert", "key")}
OPEN, RUN = f"{TLS}/open", "/run/systemd/units/invocation:nomad.service"
NAMES = ["client.global.nomad", "localhost", "t4", "t4.example"]
DAY = datetime.timedelta(days=1)


def test_an_hour_between_two_clocks_ends_no_certificate() -> None:
    """Each that is made begins a day before."""
    made = [
        option
        for name in ("authority", "certificate")
        for task in all_tasks(yaml.safe_load((role_helper.ROLES / f"nomad/tasks/{name}.yml").read_text("utf-8")))
        for module, options in task.items()
        if module.startswith("community.crypto.x509_certificate")
        for option in [options.get("ownca_not_before") or options.get("selfsigned_not_before")]
    ]
    assert made == ["-1d"] * 3


def certificate(
    names: list[str], days: float = 365, signer: ec.EllipticCurvePrivateKey | None = None, address: str = "127.0.0.1"
) -> str:
    """Return one that holds for some days, in PEM; who has signed it is told where that is not its own key."""
    key = ec.generate_private_key(ec.SECP256R1())
    told = [x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.public_key())] if signer else []
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, names[0])])
    now = datetime.datetime.now(datetime.UTC)
    addresses = {ipaddress.ip_address(each) for each in ("127.0.0.1", address)}
    subjects = [*map(x509.DNSName, names), *map(x509.IPAddress, addresses)]
    built = x509.CertificateBuilder(
        name, name, key.public_key(), x509.random_serial_number(), now - DAY, now + days * DAY,
        [x509.Extension(each.oid, False, each) for each in (x509.SubjectAlternativeName(subjects), *told)],
    ).sign(signer or key, hashes.SHA256())  # fmt: skip
    return built.public_bytes(serialization.Encoding.PEM).decode().strip()


# Of the control machine, as it is read from its file.
CA = certificate(["gpufarm"], 3650)


def node(secrets: Path, there: str = "", ca: str = CA, key_mode: str = "0600", **given: Any) -> dict[str, Any]:
    """Return the variables of a node that was looked at."""
    found = role_helper.host(f"{TLS}/ca.pem", f"{TLS}/agent-key.pem", certificates={})
    found["files"][0]["checksum"] = hashlib.sha1(ca.encode()).hexdigest()  # noqa: S324 # as find tells it
    found["files"][1]["mode"] = key_mode
    found["certificates"] = {f"{TLS}/agent.pem": there or None}
    found["agent_tls"] = {CONFIGURED: None}
    return {
        "nomad_tls": "generate", "nomad_secrets_dir": str(secrets), "inventory_hostname": "t4",
        "ansible_host": "t4.example", "groups": {}, "hostvars": {}, "_common_host": found, **given,
    }  # fmt: skip


def configured(given: dict[str, Any], *, tls: bool) -> dict[str, Any]:
    """Return the variables of a node whose agent was configured before."""
    return {**given, "_common_host": {**given["_common_host"], "agent_tls": {CONFIGURED: tls}}}


def ending(folder: Path, seconds: float | None, path: str = f"{TLS}/agent.pem", **given: Any) -> dict[str, Any]:
    """Return the variables of a node whose certificate ends in so many seconds."""
    found = node(folder, certificate(NAMES), **given)
    found["_common_host"]["certificate_ends"] = {path: seconds and int(time.time() + seconds)}
    return found


@pytest.fixture
def secrets(tmp_path: Path) -> Path:
    (tmp_path / "nomad-ca.pem").write_text(CA, encoding="ascii")
    (tmp_path / "nomad-ca-key.pem").touch()
    return tmp_path


def test_a_node_asks_for_a_certificate_where_it_has_none_that_holds(secrets: Path) -> None:
    good = certificate(NAMES)
    cases = {
        "": node(secrets, good),
        "it has none": node(secrets),
        "another CA has signed it": node(secrets, good, ca="older"),
        "it has other names": node(secrets, good, nomad_tls_names=["192.0.2.7"]),
        # It gets a note with it, by which a run that goes on with one that was cut knows how to ask.
        "the agent has gone on without": configured(node(secrets, good), tls=False),
    }
    more = [
        configured(node(secrets, good), tls=True),
        node(secrets, good, key_mode="0644"),
        node(secrets, certificate(NAMES, days=29.5)),
        node(secrets, certificate(NAMES, days=30.5)),
        node(secrets, certificate(NAMES, days=-0.5)),
        # A server answers as one, and a region has names of its own.
        node(secrets, good, groups={"nomad_servers": ["t4"]}),
        node(secrets, good, nomad_region="eu"),
        # Made in this run, after the host was looked at.
        node(secrets, __nomad_certificate_key={}),
        # A certificate has one form of an address.
        node(secrets, certificate(NAMES, address="fd00::10"), nomad_tls_names=["FD00:0::10"]),
        node(secrets, nomad_tls="files", **FILES),
        node(secrets, nomad_tls=False),
    ]
    found = role_helper.values("__nomad_certificate_due", ["nomad", "_common"], [*cases.values(), *more])
    assert found[: len(cases)] == list(cases)
    found = found[len(cases) :]
    short, renewed = [text.partition("it ends on 20")[0] for text in (found[2], found[4])]
    assert found[:2] == ["", "it has none"]
    assert (short, found[3], renewed) == ("", "", "") and found[2] and found[4]
    assert found[5:] == ["it has other names", "it has other names", "", "", "", ""]


def test_a_certificate_is_renewed_before_an_agent_is_asked_only_where_it_would_end_in_the_run(secrets: Path) -> None:
    cases = [
        (ending(secrets, -5), True),
        (ending(secrets, 86000), True),
        (ending(secrets, 87000), False),
        (ending(secrets, None), False),
        # One that is to hold for a day is new by then.
        (ending(secrets, 86000, nomad_tls_days=1, nomad_tls_renew_days=0), False),
        (ending(secrets, 43000, nomad_tls_days=1, nomad_tls_renew_days=0), True),
        (node(secrets), False),
        # Renewed by this run.
        (ending(secrets, -5, __nomad_certificate_key={}), False),
        (ending(secrets, -5, nomad_tls=False), False),
        (ending(secrets, -5, "/cert.pem", nomad_tls="files", **FILES), False),
    ]
    found = role_helper.values("__nomad_certificate_ends", ["nomad", "_common"], [case for case, _ends in cases])
    assert found == [ends for _case, ends in cases]


def run_authority(folder: Path, *, refused: bool = False) -> tuple[int, str]:
    """Enter what keeps the farm's CA, and return how many tasks changed something, and what was said."""
    play = {
        "hosts": "localhost", "connection": "local", "gather_facts": False,
        "vars": {"nomad_secrets_dir": str(folder), "ansible_python_interpreter": sys.executable},
        "tasks": [
            {"ansible.builtin.include_role": {"name": "gpufarm.core.nomad", "tasks_from": "authority.yml"}},
        ],
    }  # fmt: skip
    (folder.parent / "play.yml").write_text(yaml.safe_dump([play]), encoding="utf-8")
    ansible, root = Path(sys.executable).with_name("ansible-playbook"), role_helper.ROLES.parent
    told = subprocess.run(
        [ansible, "-i", "localhost,", "play.yml"], cwd=folder.parent, capture_output=True, text=True,
        timeout=PATIENCE_S, check=False, env={**os.environ, "ANSIBLE_CONFIG": str(root / "ansible.cfg"),
        "ANSIBLE_COLLECTIONS_PATH": str(root / ".collections")},
    )  # fmt: skip
    assert (told.returncode != 0) is refused, told.stdout + told.stderr
    return told.stdout.count("\nchanged: "), " ".join((told.stdout + told.stderr).split())


def aged(folder: Path, days: float) -> tuple[x509.Certificate, x509.Certificate]:
    """Have the role's own CA as it is when it holds for some days only; return it and a node's that it has signed."""
    folder.mkdir()
    run_authority(folder)
    key = serialization.load_pem_private_key((folder / "nomad-ca-key.pem").read_bytes(), None)
    assert isinstance(key, ec.EllipticCurvePrivateKey)
    made = x509.load_pem_x509_certificate((folder / "nomad-ca.pem").read_bytes())
    now = datetime.datetime.now(datetime.UTC)
    former = x509.CertificateBuilder(
        made.issuer, made.subject, key.public_key(), 5, now - 3000 * DAY, now + days * DAY, list(made.extensions)
    ).sign(key, hashes.SHA256())
    (folder / "nomad-ca.pem").write_bytes(former.public_bytes(serialization.Encoding.PEM))
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "client.global.nomad")])
    signed = x509.CertificateBuilder(
        made.subject, name, ec.generate_private_key(ec.SECP256R1()).public_key(), 7, now - DAY, now + 90 * DAY
    ).sign(key, hashes.SHA256())
    return former, signed


def test_a_ca_is_renewed_in_time_and_agents_with_the_former_know_it(tmp_path: Path) -> None:
    folder = tmp_path / "secrets"
    former, signed = aged(folder, 394)
    before = (folder / "nomad-cli.pem").read_bytes()
    cases = [node(folder, certificate(NAMES), ca=(folder / "nomad-ca.pem").read_text(encoding="ascii"))]
    assert role_helper.values("__nomad_certificate_due", ["nomad", "_common"], cases)[0].startswith("the CA ends on 20")
    run_authority(folder)
    now = x509.load_pem_x509_certificate((folder / "nomad-ca.pem").read_bytes())
    assert (now.subject, now.public_key()) == (former.subject, former.public_key())
    people = x509.load_pem_x509_certificate((folder / "nomad-cli.pem").read_bytes())
    assert (folder / "nomad-cli.pem").read_bytes() != before
    for each in (now, people):
        assert each.not_valid_after_utc - datetime.datetime.now(datetime.UTC) > 3640 * DAY
    signed.verify_directly_issued_by(now)
    people.verify_directly_issued_by(former)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in folder.glob("*.pem")}
    assert modes == {
        "nomad-ca.pem": 0o644, "nomad-ca-key.pem": 0o600, "nomad-cli.pem": 0o644, "nomad-cli-key.pem": 0o600
    }  # fmt: skip
    changed, said = run_authority(folder)
    assert changed == 0, said


def test_a_renewal_that_was_cut_is_gone_on_with(tmp_path: Path) -> None:
    """The CA is new by then, and the certificate of people still the former one."""
    folder = tmp_path / "secrets"
    folder.mkdir()
    run_authority(folder)
    key = serialization.load_pem_private_key((folder / "nomad-ca-key.pem").read_bytes(), None)
    assert isinstance(key, ec.EllipticCurvePrivateKey)
    (folder / "nomad-cli.pem").write_text(certificate(["cli.global.nomad"], 100, signer=key), encoding="ascii")
    before = bytes_of(folder)
    assert role_helper.values("__nomad_authority_due", ["nomad", "_common"], [node(folder)]) == [True]
    run_authority(folder)
    now = bytes_of(folder)
    assert {name for name in before if now[name] != before[name]} == {"nomad-cli.pem"}
    people = x509.load_pem_x509_certificate(now["nomad-cli.pem"])
    assert people.not_valid_after_utc - datetime.datetime.now(datetime.UTC) > 3640 * DAY
    assert role_helper.values("__nomad_authority_due", ["nomad", "_common"], [node(folder)]) == [False]


def test_a_new_ca_signs_anew_whom_a_former_one_has_signed(tmp_path: Path) -> None:
    """The owner has moved a leaked one away, or has brought another in its place, and left what people ask with."""
    folder = tmp_path / "secrets"
    folder.mkdir()
    run_authority(folder)
    assert role_helper.values("__nomad_authority_due", ["nomad", "_common"], [node(folder)]) == [False]
    for name in ("nomad-ca.pem", "nomad-ca-key.pem"):
        (folder / name).unlink()
    moved = role_helper.values("__nomad_authority_due", ["nomad", "_common"], [node(folder)])
    run_authority(folder)
    people, ours = (x509.load_pem_x509_certificate(bytes_of(folder)[f"nomad-{name}.pem"]) for name in ("cli", "ca"))
    people.verify_directly_issued_by(ours)
    key = ec.generate_private_key(ec.SECP256R1())
    authority(folder, key)
    (folder / "nomad-ca-key.pem").write_bytes(pem(key))
    before = bytes_of(folder)
    brought = role_helper.values("__nomad_authority_due", ["nomad", "_common"], [node(folder)])
    assert (moved, brought) == ([True], [True])
    run_authority(folder)
    now = bytes_of(folder)
    assert {name for name in before if now[name] != before[name]} == {"nomad-cli.pem"}
    people = x509.load_pem_x509_certificate(now["nomad-cli.pem"])
    people.verify_directly_issued_by(x509.load_pem_x509_certificate(now["nomad-ca.pem"]))
    assert role_helper.values("__nomad_authority_due", ["nomad", "_common"], [node(folder)]) == [False]


def test_a_ca_that_holds_longer_than_any_certificate_is_left(tmp_path: Path) -> None:
    folder = tmp_path / "secrets"
    aged(folder, 396)
    before = (folder / "nomad-ca.pem").read_bytes()
    run_authority(folder)
    assert (folder / "nomad-ca.pem").read_bytes() == before


def pem(key: ec.EllipticCurvePrivateKey | rsa.RSAPrivateKey, passphrase: bytes = b"") -> bytes:
    """Return a key as it is in a file."""
    kept = serialization.BestAvailableEncryption(passphrase) if passphrase else serialization.NoEncryption()
    return key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, kept)


def bytes_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.glob("*.pem")}


@pytest.mark.parametrize("alone", [False, True])
def test_a_key_of_the_ca_that_cannot_be_read_stays(tmp_path: Path, *, alone: bool) -> None:
    key = ec.generate_private_key(ec.SECP256R1())
    for index, damaged in enumerate((pem(key)[:100], pem(key, b"secret"), b"")):
        folder = tmp_path / f"secrets{index}"
        authority(folder, key)
        (folder / "nomad-ca-key.pem").write_bytes(damaged)
        if alone:
            (folder / "nomad-ca.pem").unlink()
        before = bytes_of(folder)
        _changed, said = run_authority(folder, refused=True)
        assert bytes_of(folder) == before, said
        assert f"{folder}/nomad-ca-key.pem cannot be read" in said and "Expected: a key of PEM" in said, said


def test_a_key_of_another_ca_replaces_none(tmp_path: Path) -> None:
    for index, other in enumerate((
        ec.generate_private_key(ec.SECP256R1()), ec.generate_private_key(ec.SECP384R1()),
        rsa.generate_private_key(65537, 2048),
    )):  # fmt: skip
        folder = tmp_path / f"secrets{index}"
        authority(folder, ec.generate_private_key(ec.SECP256R1()))
        (folder / "nomad-ca-key.pem").write_bytes(pem(other))
        before = bytes_of(folder)
        _changed, said = run_authority(folder, refused=True)
        assert bytes_of(folder) == before, said
        assert f"{folder}/nomad-ca-key.pem is not the key of the CA in {folder}/nomad-ca.pem" in said, said


def test_a_ca_that_was_brought_is_used_and_stays(tmp_path: Path) -> None:
    folder = tmp_path / "secrets"
    key = ec.generate_private_key(ec.SECP384R1())
    authority(folder, key, name="Company CA")
    (folder / "nomad-ca-key.pem").write_bytes(pem(key))
    before = bytes_of(folder)
    run_authority(folder)
    now = bytes_of(folder)
    assert {name: now[name] for name in before} == before
    people = x509.load_pem_x509_certificate(now["nomad-cli.pem"])
    people.verify_directly_issued_by(x509.load_pem_x509_certificate(now["nomad-ca.pem"]))
    # Another name would be known by no agent.
    authority(folder, key, 300, name="Company CA")
    (folder / "nomad-ca-key.pem").write_bytes(pem(key))
    before = bytes_of(folder)
    _changed, said = run_authority(folder, refused=True)
    assert bytes_of(folder) == before, said
    assert "ends on 20" in said and 'is "Company CA", which was brought' in said, said


def test_certificate_has_the_names_under_which_the_agent_is_asked(secrets: Path) -> None:
    cases = [
        node(secrets),
        node(secrets, groups={"nomad_servers": ["t4"]}, nomad_region="eu", ansible_host="192.0.2.1"),
        node(secrets, nomad_bind_addr="192.0.2.9", nomad_node_name="Größe", nomad_tls_names=["FD00::1", "GPU.example"]),
    ]
    assert role_helper.values("__nomad_certificate_subjects", ["nomad", "_common"], cases) == [
        ["DNS:client.global.nomad", "DNS:localhost", "DNS:t4", "DNS:t4.example", "IP:127.0.0.1"],
        ["DNS:client.eu.nomad", "DNS:localhost", "DNS:server.eu.nomad", "DNS:t4", "IP:127.0.0.1", "IP:192.0.2.1"],
        ["DNS:client.global.nomad", "DNS:GPU.example", "DNS:localhost", "DNS:t4.example", "IP:127.0.0.1",
         "IP:192.0.2.9", "IP:fd00::1"],
    ]  # fmt: skip


def test_what_is_refused_of_tls(secrets: Path, tmp_path: Path) -> None:
    def brought(seconds: float | None) -> dict[str, Any]:
        return ending(secrets, seconds, "/cert.pem", nomad_tls="files", **FILES)

    def of(*names: str, **given: Any) -> dict[str, Any]:
        found = node(secrets, nomad_tls="files", **FILES, **given)
        found["_common_host"]["certificate_names"] = {"/cert.pem": names}
        return found

    alone = tmp_path / "alone"
    alone.mkdir()
    (alone / "nomad-ca.pem").write_text("CA", encoding="ascii")
    cases = [
        (node(secrets), ""),
        (node(tmp_path / "new"), ""),
        (node(secrets, nomad_tls="files", **FILES), ""),
        (node(secrets, nomad_tls=False), ""),
        (node(secrets, nomad_tls="off"), ""),
        (node(secrets, nomad_tls_days=31), ""),
        (
            node(secrets, nomad_tls_days=30),
            "nomad_tls_days is 30, and nomad_tls_renew_days 30. Expected: the first greater",
        ),
        (node(secrets, nomad_tls_days=1826), "nomad_tls_days is 1826, and nomad_tls_renew_days 30. Expected"),
        (node(secrets, nomad_tls="files", nomad_tls_days=30, **FILES), ""),
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
        (brought(100), ""),
        (brought(None), ""),
        (brought(-100), "the certificate in /cert.pem has expired on 20"),
        # What is the farm's own is renewed.
        (ending(secrets, -100), ""),
        (of("client.global.nomad", "localhost"), ""),
        # Who asks by certificates of his own alone has other names, or more.
        (of("farm.example"), ""),
        (of("client.eu.nomad", "client.global.nomad"), ""),
        (
            of("client.eu.nomad", "localhost"),
            "the certificate in /cert.pem is for client.eu.nomad. Expected: one for client.global.nomad, because the "
            "servers of a region let no agent of another in. Next step: bring one, as `nomad tls cert create -client "
            "-region global` makes it, or correct nomad_region.",
        ),
        (
            of("server.global.nomad", nomad_region="eu", groups={"nomad_servers": ["t4"]}),
            "/cert.pem is for server.global.nomad. Expected: one for server.eu.nomad, because",
        ),
    ]
    found = role_helper.values("__nomad_refusal", ["nomad", "_common"], [case for case, _expected in cases])
    for text, (_case, expected) in zip(found, cases, strict=True):
        assert (expected in text) if expected else text == "", text
        assert not text or text.count("Next step: ") == 1


def test_who_joins_the_servers_of_others_makes_no_ca(tmp_path: Path, secrets: Path) -> None:
    """Servers that it has not made know no certificate of its own."""
    joins = {"nomad_client_servers": ["192.0.2.10", "192.0.2.11"]}
    ours = {"groups": {"nomad_servers": ["s1"]}}
    cases = [node(tmp_path / "new", **joins), node(tmp_path / "new", **joins, **ours), node(secrets, **joins)]
    told, *rest = role_helper.values("__nomad_refusal", ["nomad", "_common"], cases)
    assert (
        f"nomad_servers has no host of region global, and {tmp_path}/new on the control machine no CA. Expected: "
        in told
    )
    assert "192.0.2.10, 192.0.2.11, because these" in told and "`nomad_tls: off` and `nomad_acl_enabled: false`" in told
    assert rest == ["", ""]


def test_the_first_run_with_tls_has_all_servers(tmp_path: Path, secrets: Path) -> None:
    """Others would let no node in that has a certificate, or would get another CA."""
    servers = {"groups": {"nomad_servers": ["s1", "s2"]}, "ansible_play_hosts_all": ["s1", "t4"]}
    cases = [
        node(tmp_path / "new", ansible_limit="s1,t4", **servers),
        node(tmp_path / "new", **servers),
        node(tmp_path / "new", ansible_limit="all", **{**servers, "ansible_play_hosts_all": ["s1", "s2"]}),
        node(secrets, ansible_limit="s1,t4", **servers),
        node(tmp_path / "new", ansible_limit="s1,t4", nomad_tls="off", nomad_acl_enabled=False, **servers),
    ]
    told, *rest = role_helper.values("__nomad_refusal", ["nomad", "_common"], cases)
    assert told.startswith(
        f"--limit leaves out s2, and {tmp_path}/new on the control machine has no CA. Expected: every"
    )
    assert rest == [""] * 4


def test_an_agent_changes_how_it_speaks_only_with_every_server_seen(secrets: Path) -> None:
    def seen(*, tls: bool, **given: Any) -> dict[str, Any]:
        hosts = {"s1": {"_common_host": role_helper.host()}, "s2": {}}
        groups = {"nomad_servers": [*hosts]}
        return configured(node(secrets, groups=groups, hostvars=hosts, ansible_play_hosts_all=["t4"], **given), tls=tls)

    there = {name: {"_common_host": role_helper.host()} for name in ("s1", "s2")}
    cut = seen(tls=True)
    cut["_common_host"]["links"] = {OPEN: "a1", RUN: "a1"}
    off = {"nomad_tls": "off", "nomad_acl_enabled": False}
    cases = [
        (seen(tls=False), "without TLS, nomad_tls is generate"),
        (seen(tls=False, nomad_tls="files", **FILES), "without TLS, nomad_tls is files"),
        (seen(tls=True, **off), "with TLS, nomad_tls is off"),
        (cut, "without TLS, nomad_tls is generate"),
        ({**seen(tls=False), "hostvars": there}, ""),
        (seen(tls=True), ""),
        (seen(tls=False, **off), ""),
        # TLS of its own.
        (seen(tls=True, nomad_agent_options={"tls": {"http": True}}, **off), ""),
        (seen(tls=False, __nomad_started_anew=True), ""),
        # One that comes to a farm, and one that joins the servers of others.
        ({**seen(tls=False), "_common_host": node(secrets)["_common_host"]}, ""),
        ({**seen(tls=False), "groups": {}}, ""),
    ]
    found = role_helper.values("__nomad_refusal", ["nomad", "_common"], [case for case, _expected in cases])
    for text, (_case, expected) in zip(found, cases, strict=True):
        assert (f"found an agent {expected}, and this run has not seen s2. Expected: " in text) == bool(expected)
        assert text.count("Next step: ") == bool(expected), text


def test_which_servers_would_not_understand_an_agent_yet(secrets: Path) -> None:
    def seen(tls: bool | None, run: str | None = None, **more: Any) -> dict[str, Any]:
        found = role_helper.host(agent_tls={CONFIGURED: tls}, links={OPEN: run and "a1", RUN: run})
        return {"_common_host": found, **more}

    hosts = {
        "open": seen(False), "tls": seen(True), "new": seen(None), "cut": seen(True, "a1"), "ended": seen(True, "b2"),
        "anew": seen(False, __nomad_started_anew=True), "other": seen(True, __nomad_started_anew=True), "unseen": {},
    }  # fmt: skip
    given = node(secrets, hostvars=hosts, groups={"nomad_servers": [*hosts]})
    cases = [given, {**given, "nomad_tls": "off"}]
    assert role_helper.values("__nomad_servers_behind", ["nomad", "_common"], cases) == [
        ["open", "new", "cut", "unseen"], ["tls", "ended", "unseen"],
    ]  # fmt: skip


def authority(
    folder: Path, key: ec.EllipticCurvePrivateKey, days: float = 3650, name: str = "gpufarm Nomad CA"
) -> None:
    """Have a CA of this key in a folder of secrets."""
    named = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])
    now, identifier = datetime.datetime.now(datetime.UTC), x509.SubjectKeyIdentifier.from_public_key(key.public_key())
    made = x509.CertificateBuilder(
        named, named, key.public_key(), x509.random_serial_number(), now - DAY, now + days * DAY,
        [x509.Extension(identifier.oid, False, identifier)],
    ).sign(key, hashes.SHA256())  # fmt: skip
    folder.mkdir(exist_ok=True)
    (folder / "nomad-ca.pem").write_bytes(made.public_bytes(serialization.Encoding.PEM))
    (folder / "nomad-ca-key.pem").touch()


def test_no_second_ca_is_made_for_a_farm_or_taken(tmp_path: Path) -> None:
    """Once it is there the next run would move the farm to it."""
    ours, theirs = ec.generate_private_key(ec.SECP256R1()), ec.generate_private_key(ec.SECP256R1())
    authority(tmp_path / "ours", ours, 3000)
    before = (tmp_path / "ours/nomad-ca.pem").read_text(encoding="ascii")
    good = certificate(NAMES, signer=ours)

    def seen(name: str, there: str = "", ca: str = before, **hosts: str) -> dict[str, Any]:
        own = node(tmp_path / name, there, ca=ca)
        known = {
            host: {"_common_host": {"certificates": {f"{TLS}/agent.pem": text or None}}} for host, text in hosts.items()
        }
        return {
            **own, "groups": {"nomad_servers": [*hosts, "unreachable"]},
            "hostvars": {"t4": own, "unreachable": {}, **known}, "ansible_play_hosts_all": ["t4", *hosts],
        }  # fmt: skip

    authority(tmp_path / "theirs", theirs)
    authority(tmp_path / "renewed", ours)
    cases = [
        (seen("ours", good, s1=good), ""),
        (seen("renewed", good, s1=good), ""),
        (seen("renewed", s1=good), ""),
        (seen("new", s1=""), ""),
        (seen("theirs", s1=""), ""),
        # A machine of another farm keeps no new one out.
        (seen("ours", s1=certificate(NAMES, signer=theirs), s2=good), ""),
        (seen("ours", certificate(NAMES, signer=theirs), "CA", s1=good), "ours on the control machine has signed the"),
        (seen("new", s1=good, s2=good), f"found certificates of this farm on s1, s2, and no CA in {tmp_path}/new on"),
        (seen("theirs", good, s1=good), f"another CA than that in {tmp_path}/theirs on the control machine has signed"),
        (seen("theirs", s1=good, s2=""), "has signed the certificates of s1. Expected: the one that has signed them"),
    ]
    found = role_helper.values("__nomad_refusal", ["nomad", "_common"], [case for case, _said in cases])
    for text, (_case, said) in zip(found, cases, strict=True):
        assert (said in text) if said else text == "", text
        assert not text or text.count("Next step: ") == 1
        assert not text or f"run `systemctl stop nomad` and remove {TLS} on these hosts" in text


def control_tasks(found: Any) -> list[dict[str, Any]]:
    """Return the tasks, blocks and attributes of includes that are for the control machine."""
    if isinstance(found, list):
        return [task for each in found for task in control_tasks(each)]
    if not isinstance(found, dict):
        return []
    inner = [task for value in found.values() for task in control_tasks(value)]
    return [found, *inner] if found.get("delegate_to") == "localhost" else inner


def test_nobody_becomes_root_on_the_control_machine() -> None:
    """The README's inventory has ansible_become for all hosts; it goes before the keyword become, for localhost too."""
    paths = [
        path
        for role in ("nomad", "nomad_server", "nomad_device_nvidia")
        for path in (role_helper.ROLES / role / "tasks").glob("*.yml")
    ]
    tasks = [
        (path.name, task) for path in paths for task in control_tasks(yaml.safe_load(path.read_text(encoding="utf-8")))
    ]
    assert {name for name, _ in tasks} == {
        "acl.yml",
        "certificate.yml",
        "configure.yml",
        "ended.yml",
        "hand_on.yml",
        "management.yml",
        "install_own.yml",
    }
    assert [(name, task["vars"]["ansible_become"]) for name, task in tasks] == [(name, False) for name, _ in tasks]


def all_tasks(found: Any) -> list[dict[str, Any]]:
    """Return the tasks of a file and of its blocks."""
    return [
        task for each in found or []
        for task in ([each] if "block" not in each else all_tasks(each["block"] + each.get("rescue", [])))
    ]  # fmt: skip


def test_what_is_written_into_the_folder_of_secrets_is_its_owners_alone() -> None:
    """Whoever writes there; certificates alone are for everybody."""
    held = ("nomad_secrets_dir", "__nomad_management", "__nomad_gossip_key_path", "__nomad_tls_authority",
            "__nomad_tls_people")  # fmt: skip
    found = {}
    for path in sorted(role_helper.ROLES.glob("*/tasks/*.yml")):
        for task in all_tasks(yaml.safe_load(path.read_text(encoding="utf-8"))):
            for module in set(task) & {
                "ansible.builtin.copy", "ansible.builtin.file", "ansible.builtin.template",
                "community.crypto.openssl_privatekey", "community.crypto.x509_certificate",
            }:  # fmt: skip
                options = task[module]
                where = str(options.get("dest") or options.get("path"))
                if any(name in where for name in held) and options.get("state") != "absent":
                    found[where.strip("{} ")] = (
                        options.get("mode"),
                        bool(task.get("no_log") or "content" not in options),
                    )
    private = {name: mode for name, (mode, _hidden) in found.items() if mode not in ("0600", "0700")}
    assert private == {"__nomad_tls_authority_cert": "0644", "__nomad_tls_people_cert": "0644"}
    assert {name for name, (mode, _hidden) in found.items() if mode == "0700"} == {"nomad_secrets_dir"}
    # The key of the CA, that of people, the gossip's, the first token, those of others, and what keeps git away.
    assert len(found) == 9
    assert [name for name, (_mode, hidden) in found.items() if not hidden] == ["nomad_secrets_dir }}/.gitignore"]


@pytest.mark.parametrize(
    ("sources", "folder"),
    [
        (["/farm/my-lab.yml", "/farm/windows.wsl.yml"], "/farm/my-lab-secrets"),
        # Never in a folder that is an inventory, of which Ansible reads every file.
        (["/farm/my-lab"], "/farm/my-lab-secrets"),
        (["/farm/lab.v2/hosts.ini"], "/farm/lab.v2/hosts-secrets"),
        (["/farm/ec2.py"], "/farm/ec2.py-secrets"),
        (["a,b", "/farm/lab.json"], "/farm/lab-secrets"),
        (["a,b"], ""),
        ([], ""),
    ],
)
def test_secrets_lie_beside_the_inventory(sources: list[str], folder: str) -> None:
    given = {"ansible_inventory_sources": sources}
    assert role_helper.values("nomad_secrets_dir", ["nomad"], [given]) == [folder]


def test_no_inventory_takes_a_secret_for_a_host(secrets: Path) -> None:
    """Somebody may name the folder in which an inventory lies that was named alone before."""
    known = role_helper.variables("nomad", "nomad_server")
    given = {**known, "nomad_secrets_dir": str(secrets)}
    for name in ("__nomad_gossip_key_path", "__nomad_management", "__nomad_token_meant"):
        Path(role_helper.value(name, given)).write_text("2b2a6ff8-1f0c-4c3e-9d8a-0f4c1f3f7a55", encoding="ascii")
    found = subprocess.run(
        [Path(sys.executable).with_name("ansible-inventory"), "-i", secrets, "--graph"],
        capture_output=True, text=True, check=True, timeout=PATIENCE_S,
    )  # fmt: skip
    assert "2b2a6ff8" not in found.stdout + found.stderr


def test_gossip_of_a_new_farm_is_encrypted_and_that_of_others_stays_as_it_is(secrets: Path) -> None:
    def server(*paths: str, **given: Any) -> dict[str, Any]:
        hosts = {"t4": {"_common_host": role_helper.host(*paths)}, "s2": {"_common_host": role_helper.host()}}
        own = node(secrets, groups={"nomad_servers": ["t4", "s2"]}, hostvars=hosts, _common_paths=list(paths))
        return {**own, **given}

    theirs = role_helper.host("/etc/nomad.d/nomad.hcl")
    theirs["files"][0]["managed"] = False
    runs, gossip = "/etc/nomad.d/server.hcl", "/etc/nomad.d/gossip.hcl"
    cases = [
        (server(), True, False),
        (server("/etc/nomad.d/nomad.hcl"), True, False),
        (server(nomad_tls="off"), False, False),
        (server(nomad_tls="files"), False, False),
        (server(nomad_server_gossip_key=""), False, False),
        (server(nomad_server_gossip_key="a" * 32), False, False),
        # Servers that run; one of them could not be seen; a key that was given once, and is no more.
        (server(runs), False, False),
        # As of a package, all in one file, whose owner has it replaced.
        (server(hostvars={**server()["hostvars"], "s2": {"_common_host": theirs}}), False, False),
        (
            server(groups={"nomad_servers": ["t4", "s2", "s3"]}, hostvars={**server()["hostvars"], "s3": {}}),
            False,
            False,
        ),
        (server(runs, gossip), False, True),
        (server(runs, gossip, nomad_server_gossip_key=""), False, False),
    ]
    for wanted, number in (("__nomad_server_makes_key", 1), ("__nomad_server_keeps_gossip", 2)):
        found = role_helper.values(wanted, ["nomad", "_common", "nomad_server"], [case[0] for case in cases])
        assert found == [case[number] for case in cases], wanted
    (secrets / "nomad-gossip-key.txt").write_text("made", encoding="ascii")
    more = [server(runs), server(nomad_tls="off"), server(nomad_server_gossip_key="given"), server(runs, gossip)]
    roles = ["nomad", "_common", "nomad_server"]
    assert role_helper.values("__nomad_gossip_key", roles, more) == ["made", "", "given", "made"]
    assert role_helper.values("__nomad_server_makes_key", roles, [server()]) == [False]
    assert role_helper.values("__nomad_server_keeps_gossip", roles, more[3:]) == [False]


def test_the_run_that_makes_the_gossips_key_has_all_servers(secrets: Path) -> None:
    """Servers that have begun without one go on so."""

    def server(*paths: str, **given: Any) -> dict[str, Any]:
        hosts = {"t4": {"_common_host": role_helper.host(*paths)}, "s2": {"_common_host": role_helper.host()}, "s3": {}}
        groups = {"nomad_servers": [*hosts]}
        return {**node(secrets, groups=groups, hostvars=hosts, _common_paths=list(paths)), **given}

    seen = {name: {"_common_host": role_helper.host()} for name in ("t4", "s2", "s3")}
    runs = server("/etc/nomad.d/server.hcl")
    cases = [
        server(),
        server(hostvars=seen),
        runs,
        # A server that comes to others that are seen, and run.
        server(hostvars={**seen, "s2": runs["hostvars"]["t4"]}),
        server(nomad_server_gossip_key=""),
        server(nomad_server_gossip_key="a" * 32),
        server(nomad_tls="off"),
        server(groups={}),
    ]
    told, *rest = role_helper.values("__nomad_server_refusal", ["nomad", "_common", "nomad_server"], cases)
    assert told.startswith(
        f"this run has not seen s3, and there is no {secrets}/nomad-gossip-key.txt on the control machine. Expected: "
    )
    assert told.count("Next step: ") == 1 and rest == [""] * 7
    (secrets / "nomad-gossip-key.txt").write_text("A" * 32, encoding="ascii")
    again = role_helper.values("__nomad_server_refusal", ["nomad", "_common", "nomad_server"], cases[:1])
    assert again == [""]


def test_a_server_without_the_key_comes_to_none_that_encrypt(secrets: Path) -> None:
    """It would start in clear, and they would not hear it."""
    gossip, keyring = "/etc/nomad.d/gossip.hcl", "/opt/nomad/data/server/serf.keyring"

    def server(*paths: str, gossip_text: str = "# Ansible managed\n", **given: Any) -> dict[str, Any]:
        runs = role_helper.host("/etc/nomad.d/server.hcl", keyring)
        own = role_helper.host(*paths)
        for file in own["files"]:
            text = gossip_text.encode()
            file |= {"mode": "0640", "checksum": hashlib.sha1(text).hexdigest()}  # noqa: S324 # as find tells it
        hosts = {"s1": {"_common_host": runs}, "s2": {"_common_host": runs}, "t4": {"_common_host": own}}
        known = node(secrets, groups={"nomad_servers": [*hosts]}, hostvars=hosts, _common_host=own)
        return {**known, "_common_paths": list(paths), "nomad_acl_enabled": False, **given}

    clear = role_helper.host("/etc/nomad.d/server.hcl")
    in_clear = {name: {"_common_host": clear} for name in ("s1", "s2")}
    cases = [
        server(),
        # An earlier run has left it so.
        server("/etc/nomad.d/server.hcl", gossip),
        server(nomad_tls="off"),
        # One of theirs, that runs, or has its key, which is not known here.
        server("/etc/nomad.d/server.hcl", keyring),
        server("/etc/nomad.d/server.hcl", gossip, gossip_text="server { encrypt }"),
        server(hostvars={**server()["hostvars"], **in_clear}),
        server(nomad_server_gossip_key="A" * 32),
        server(nomad_server_gossip_key=""),
        server(nomad_server_options={"server": {"encrypt": "A" * 32}}),
    ]
    roles = ["nomad", "_common", "nomad_server"]
    *told, off = role_helper.values("__nomad_server_refusal", roles, cases)[:3]
    path = f"{secrets}/nomad-gossip-key.txt"
    assert told == 2 * [
        "found the gossip of s1, s2 encrypted, and no key of it on the control machine. Expected: their key, without "
        f"which this server cannot join them. Next step: bring {path} from the control machine that has made the farm, "
        f"or set nomad_server_gossip_key to the key that is in {keyring} of s1."
    ]
    assert off.endswith(f"Next step: set nomad_server_gossip_key to the key that is in {keyring} of s1.")
    assert role_helper.values("__nomad_server_refusal", roles, cases[3:]) == [""] * 6
    (secrets / "nomad-gossip-key.txt").write_text("A" * 32, encoding="ascii")
    assert role_helper.values("__nomad_server_refusal", roles, cases[:1]) == [""]


def test_a_gossip_key_goes_only_with_every_server_seen(secrets: Path) -> None:
    """Who is away then knows no other, and its messages are understood by nobody."""

    def server(text: str | None, *unseen: str, **given: Any) -> dict[str, Any]:
        looked = role_helper.host("/etc/nomad.d/server.hcl", *["/etc/nomad.d/gossip.hcl"] * (text is not None))
        looked["files"][-1]["checksum"] = hashlib.sha1((text or "").encode()).hexdigest()  # noqa: S324 # as find tells it
        hosts = {"t4": {"_common_host": looked}, "s2": {"_common_host": looked}, **{name: {} for name in unseen}}
        own = node(secrets, groups={"nomad_servers": [*hosts]}, hostvars=hosts, _common_host=looked)
        return {**own, "nomad_server_gossip_key": "A" * 32, "nomad_acl_enabled": False, **given}

    held = f'# Ansible managed\nserver {{\n  encrypt = "{"A" * 32}"\n}}\n'
    cases = [
        server(held.replace("A" * 32, "B" * 32), "s3"),
        server(held.replace("A" * 32, "B" * 32)),
        server(held, "s3"),
        server(None, "s3"),
        # A key that is not known here is kept.
        server(held.replace("A" * 32, "B" * 32), "s3", nomad_server_gossip_key="generate"),
    ]
    told, *rest = role_helper.values("__nomad_server_refusal", ["nomad", "_common", "nomad_server"], cases)
    assert told.startswith("the key of the gossip changes, and this run has not seen s3. Expected: every server"), told
    assert told.count("Next step: ") == 1 and "AAA" not in told and rest == [""] * 4


def test_a_gossip_key_that_was_kept_is_a_key(tmp_path: Path) -> None:
    """Servers that run take no notice of another text, and none starts with it."""
    texts = {"A" * 43 + "=\n": "", "A" * 43: "43", "not a key, but as long as a!": "28", "generate": "8", "\n": "0"}
    cases = []
    for number, text in enumerate(texts):
        folder = tmp_path / f"farm{number}"
        folder.mkdir()
        (folder / "nomad-gossip-key.txt").write_text(text, encoding="ascii")
        cases.append(node(folder))
    cases += [{**cases[1], "nomad_tls": "off"}, {**cases[1], "nomad_server_gossip_key": "A" * 32}]
    found = role_helper.values("__nomad_server_refusal", ["nomad", "_common", "nomad_server"], cases)
    for told, length, case in zip(found, texts.values(), cases, strict=False):
        path = f"{case['nomad_secrets_dir']}/nomad-gossip-key.txt"
        assert told.startswith(f"{path} on the control machine has {length} characters") if length else told == ""
        assert told.count("Next step: ") == bool(length) and "as long as" not in told and "AAA" not in told
    assert found[len(texts) :] == ["", ""]


def test_an_agent_is_asked_without_tls_only_where_it_is_known_to_have_no_certificate(secrets: Path) -> None:
    unseen = node(secrets)
    del unseen["_common_host"]
    seen = node(secrets)
    seen["_common_host"]["certificates"] = {}
    cases = [
        (node(secrets), "http"),
        (node(secrets, __nomad_started_anew=True), "https"),
        (node(secrets, __nomad_started_anew=True, ansible_check_mode=True), "http"),
        (node(secrets, __nomad_purpose="verify"), "https"),
        (node(secrets, certificate(NAMES)), "https"),
        # health.yml and upgrade.yml ask before anyone has looked.
        (unseen, "https"),
        # node_tuning and nvidia_mig have looked, and for no certificate.
        (seen, "https"),
        ({**seen, "__nomad_agent_asked": {"agent_tls": {CONFIGURED: True}}}, "https"),
        ({**seen, "__nomad_agent_asked": {"agent_tls": {CONFIGURED: False}}}, "http"),
        ({**seen, "__nomad_agent_asked": {"agent_tls": {CONFIGURED: None}}}, "http"),
        # What was looked at later counts.
        ({**node(secrets, certificate(NAMES)), "__nomad_agent_asked": {"agent_tls": {CONFIGURED: False}}}, "https"),
        # The farm has been open, and its certificates lie there from before.
        (configured(node(secrets, certificate(NAMES)), tls=False), "http"),
        (configured(node(secrets, certificate(NAMES)), tls=True), "https"),
        (configured(node(secrets, certificate(NAMES), __nomad_started_anew=True), tls=False), "https"),
        (configured(node(secrets, certificate(NAMES), nomad_tls="files", **FILES), tls=False), "https"),
        ({**unseen, "ansible_check_mode": True}, "https"),
        ({**unseen, "nomad_tls": "off"}, "http"),
    ]
    # A run was cut between the certificate and the restart, from which on it is another run of the agent.
    for note, agent, scheme in (
        ("a1", "a1", "http"),
        ("a1", "b2", "https"),
        ("a1", None, "https"),
        (None, None, "https"),
    ):
        cut = node(secrets, certificate(NAMES))
        cut["_common_host"]["links"] = {OPEN: note, RUN: agent}
        cases.append((cut, scheme))
        cases.append(({**cut, "__nomad_started_anew": True}, "https"))
    asked = [{"ansible_check_mode": False, "ansible_play_name": "", **case} for case, _scheme in cases]
    for wanted in ("__nomad_local_url", "__nomad_api"):
        for found, (case, scheme) in zip(role_helper.values(wanted, ["nomad", "_common"], asked), cases, strict=True):
            url, ca = (found, None) if isinstance(found, str) else (found["address"], found["ca_cert"])
            assert url == f"{scheme}://127.0.0.1:4646", case
            assert ca is None or bool(ca) == (scheme == "https"), case


def test_servers_understand_both_until_all_agents_run_with_a_certificate(secrets: Path) -> None:
    def seen(there: str | None, run: str | None = None, **more: Any) -> dict[str, Any]:
        links = {OPEN: run and "a1", RUN: run}
        return {"_common_host": {"certificates": {f"{TLS}/agent.pem": there}, "links": links}, **more}

    hosts = {
        "open": seen(None), "cut": seen("PEM", "a1"), "ended": seen("PEM", "b2"), "whole": seen("PEM"),
        "anew": seen("PEM", "a1", __nomad_started_anew=True), "unreachable": {}, "before": seen("PEM"),
    }  # fmt: skip
    hosts["before"]["_common_host"]["agent_tls"] = {CONFIGURED: False}
    hosts["whole"]["_common_host"]["agent_tls"] = {CONFIGURED: True}
    given = node(secrets, hostvars=hosts, groups={"nomad_servers": ["open"], "gpu_nodes": [*hosts]})
    assert role_helper.values("__nomad_open_hosts", ["nomad", "_common"], [given]) == [
        ["open", "cut", "unreachable", "before"]
    ]


def test_servers_that_were_open_are_led_where_certificates_lie_from_before(secrets: Path) -> None:
    def server(*, tls: bool, paths: tuple[str, ...] = (CONFIGURED,)) -> dict[str, Any]:
        return configured(node(secrets, certificate(NAMES), _common_paths=list(paths)), tls=tls)

    both = "/etc/nomad.d/tls-upgrade.hcl"
    cases = [server(tls=False), server(tls=True), server(tls=False, paths=(CONFIGURED, both))]
    asked = [{**case, "ansible_check_mode": False} for case in cases]
    begins = role_helper.values("__nomad_server_begins_tls", ["nomad", "_common", "nomad_server"], asked)
    assert begins == [True, False, False]


@pytest.mark.skipif(os.geteuid() != 0, reason="a folder becomes a small disk by mount")
def test_a_disk_that_is_full_leaves_secrets_that_the_next_run_completes(tmp_path: Path) -> None:
    """Each time at another file. A CA without its key, or a torn one, would be refused for ever."""
    folder = tmp_path / "secrets"
    folder.mkdir()
    play = {
        "hosts": "localhost",
        "gather_facts": False,
        "tasks": [
            {
                "ansible.builtin.include_role": {
                    "name": "gpufarm.core.nomad",
                    "tasks_from": "authority.yml",
                    "rolespec_validate": False,
                }
            }
        ],
    }
    (tmp_path / "play.yml").write_text(yaml.safe_dump([play]), encoding="utf-8")
    inventory = {"all": {"hosts": {"localhost": playbook_helper.LOCAL}, "vars": {"nomad_secrets_dir": str(folder)}}}

    def made() -> subprocess.CompletedProcess[str]:
        return playbook_helper.run_playbook(tmp_path, inventory, str(tmp_path / "play.yml"))

    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=40k,mode=0700", "full", folder], check=True)
    filler, failed = folder / ".filler", []
    try:
        for _turn in range(3):
            # Room for one file more.
            left = os.statvfs(folder).f_bfree + (filler.stat().st_size // 4096 if filler.exists() else 0)
            filler.write_bytes(b"x" * 4096 * (left - 1))
            ran = made()
            told = f"localhost: the farm's CA could not be had in {folder} on the control machine"
            assert ran.returncode != 0 and told in " ".join(ran.stdout.split()), ran.stdout
            failed.append(
                ran.stdout.partition("[ERROR]")[0].rpartition("TASK [gpufarm.core.nomad : ")[2].partition("]")[0]
            )
        filler.unlink()
        assert made().returncode == 0
        again = made()
        assert again.returncode == 0 and "changed=0" in again.stdout, again.stdout
        assert len(set(failed)) == 3, failed
    finally:
        shutil.copytree(folder, tmp_path / "there")
        subprocess.run(["umount", folder], check=True)
    for name in ("ca", "cli"):
        signed = x509.load_pem_x509_certificate((tmp_path / f"there/nomad-{name}.pem").read_bytes())
        key = serialization.load_pem_private_key((tmp_path / f"there/nomad-{name}-key.pem").read_bytes(), None)
        assert signed.public_key() == key.public_key()
