# Copyright (c) 2026, gpufarm contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""How site.yml and upgrade.yml bring back agents whose certificates have ended: by the play itself, on hosts that are
folders of this machine, with agents that speak TLS as Nomad does."""

from __future__ import annotations

import datetime
import functools
import ipaddress
import json
import os
import ssl
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from ansible_collections.gpufarm.core.tests.unit.playbooks import playbook_helper
from ansible_collections.gpufarm.core.tests.unit.playbooks.playbook_helper import ROOT
from ansible_collections.gpufarm.core.tests.unit.plugins.module_utils import nomad_helper
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

pytestmark = [
    pytest.mark.controller,
    pytest.mark.skipif(os.geteuid() != 0, reason="certificates of nodes are root's"),
]

PLAYS = yaml.safe_load((ROOT / "playbooks/site_preflight.yml").read_text(encoding="utf-8"))
(ENDED,) = (play for play in PLAYS if play["name"] == "Certificates that have ended")
DAY = datetime.timedelta(days=1)
PEM = serialization.Encoding.PEM
# As far as the play asks it.
SYSTEMCTL = """#!/bin/sh
echo "$*" >>{folder}/asked
case "$1" in
  is-active) [ -e {folder}/active ] ;;
  is-enabled) true ;;
  reload) [ ! -e {folder}/refuses ] && touch {folder}/reload ;;
  start) touch {folder}/active {folder}/reload ;;
  *) exit 1 ;;
esac
"""
LEADER: dict[str, Any] = {"/v1/status/leader": "127.0.0.1:4647"}
HEARTBEATS = {"node_id": "a1", "known_servers": "127.0.0.1:4647", "heartbeat_ttl": "15s", "last_heartbeat": "1s"}
SERVER = {**LEADER, "/v1/agent/self": {"stats": {}}}
# It asks its servers for the leader.
CLIENT = {**LEADER, "/v1/agent/self": {"stats": {"client": HEARTBEATS}}}
# It has found no server yet.
LOST = {**LEADER, "/v1/agent/self": {"stats": {"client": {"node_id": "a1"}}}}


class Farm:
    """Hosts with certificates of one CA, which lies in the folder of secrets."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.hosts: dict[str, dict[str, Any]] = {}
        self.agents: list[nomad_helper.Agent] = []
        self.secrets = folder / "secrets"
        self.secrets.mkdir()
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "gpufarm Nomad CA")])
        self.authority(3000)
        self._write(self.secrets / "nomad-ca-key.pem", self._private(self._key))
        # With it the CA is whole.
        self._write(self.secrets / "nomad-cli.pem", b"")

    def authority(self, days: float) -> None:
        """Have a CA that holds for some days more."""
        ca = self._signed(self._name, self._key, days, x509.BasicConstraints(ca=True, path_length=None))
        self._write(self.secrets / "nomad-ca.pem", ca.public_bytes(PEM))

    def _signed(
        self, name: x509.Name, key: ec.EllipticCurvePrivateKey, days: float, extension: x509.ExtensionType
    ) -> x509.Certificate:
        now = datetime.datetime.now(datetime.UTC)
        return x509.CertificateBuilder(
            self._name, name, key.public_key(), x509.random_serial_number(), now - 400 * DAY, now + days * DAY,
            [
                x509.Extension(each.oid, isinstance(each, x509.BasicConstraints), each)
                for each in (extension, x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key()),
                             x509.SubjectKeyIdentifier.from_public_key(key.public_key()))
            ],
        ).sign(self._key, hashes.SHA256())  # fmt: skip

    @staticmethod
    def _private(key: ec.EllipticCurvePrivateKey) -> bytes:
        return key.private_bytes(PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())

    @staticmethod
    def _write(path: Path, content: bytes) -> None:
        path.write_bytes(content)
        path.chmod(0o600 if "key" in path.name else 0o644)

    def has(
        self, name: str, days: float, *, active: bool = True, says: dict[str, Any] | None = None, **given: Any
    ) -> None:
        """Have a host whose certificate holds for some days more."""
        tls = self.folder / name / "tls"
        tls.mkdir(parents=True)
        self.renews(name, days)
        if not name.startswith("server"):
            (tls.parent / "client.hcl").touch()
        if active:
            (tls.parent / "active").touch()
        (tls.parent / "bin").mkdir()
        programs = {
            "systemctl": SYSTEMCTL.format(folder=tls.parent),
            "python": f'#!/bin/sh\nPATH={tls.parent}/bin:$PATH exec {sys.executable} "$@"\n',
        }
        for program, text in programs.items():
            (tls.parent / "bin" / program).write_text(text, encoding="utf-8")
            (tls.parent / "bin" / program).chmod(0o755)
        agent = nomad_helper.Agent(self._as_nomad(tls))
        agent.answer = functools.partial(self.answer, says or (SERVER if name.startswith("server") else CLIENT))
        self.agents.append(agent)
        self.hosts[name] = {
            "ansible_connection": "local", "ansible_become": False, "nomad_config_dir": str(tls.parent),
            "ansible_python_interpreter": str(tls.parent / "bin/python"), "agent_url": agent.url, **given,
        }  # fmt: skip

    def renews(self, name: str, days: float) -> None:
        tls = self.folder / name / "tls"
        key = ec.generate_private_key(ec.SECP256R1())
        subjects = [x509.DNSName("client.global.nomad"), x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]
        made = self._signed(self._name, key, days, x509.SubjectAlternativeName(subjects))
        self._write(tls / "ca.pem", (self.secrets / "nomad-ca.pem").read_bytes())
        self._write(tls / "agent.pem", made.public_bytes(PEM))
        self._write(tls / "agent-key.pem", self._private(key))

    @staticmethod
    def answer(says: dict[str, Any], request: Any) -> bool:
        request.reply(200, json.dumps(says.get(request.path.partition("?")[0], {})).encode(), {})
        return True

    @staticmethod
    def _as_nomad(tls: Path) -> ssl.SSLContext:
        """What an agent goes by that has read its files, and reads them anew a moment after it is told to."""

        def read() -> ssl.SSLContext:
            context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=str(tls / "ca.pem"))
            context.verify_mode = ssl.CERT_REQUIRED
            context.load_cert_chain(tls / "agent.pem", tls / "agent-key.pem")
            return context

        told, reads, has_read = tls.parent / "reload", tls.parent / "reads", tls.parent / "has_read"

        def hello(connection: Any, _name: str | None, _context: ssl.SSLContext) -> None:
            if reads.exists():
                reads.rename(has_read)
            if told.exists():
                told.rename(reads)
            if has_read.exists():
                connection.context = read()

        context = read()
        context.sni_callback = hello
        return context

    def run(self, *options: str, play: dict[str, Any] | None = None) -> tuple[int, str]:
        """Run a play, that of site_preflight.yml as it stands there, after the look that comes before it."""
        role = {"name": "gpufarm.core.nomad", "tasks_from": "variables.yml"}
        parts = ("files", "certificates", "agent_files")
        look = {part: f"{{{{ __nomad_looks_at.{part} }}}}" for part in parts}
        before = {
            "hosts": "all", "gather_facts": False, "tags": ["always"],
            "tasks": [
                {"ansible.builtin.import_role": role},
                {"gpufarm.core.host_info": look, "register": "_common_host"},
            ],
        }  # fmt: skip
        plays = yaml.safe_dump([before, play or ENDED], sort_keys=False)
        (self.folder / "play.yml").write_text(plays, encoding="utf-8")
        groups: dict[str, Any] = {"nomad_servers": {"hosts": {}}, "gpu_nodes": {"hosts": {}}}
        for name, given in self.hosts.items():
            groups["nomad_servers" if name.startswith("server") else "gpu_nodes"]["hosts"][name] = given
        extra = {"__nomad_local_url": "{{ agent_url }}", "nomad_secrets_dir": str(self.secrets)}
        done = playbook_helper.run_playbook(
            self.folder, {"all": {"children": groups}}, str(self.folder / "play.yml"),
            "--extra-vars", json.dumps(extra), *options,
        )  # fmt: skip
        return done.returncode, " ".join((done.stdout + done.stderr).split())

    def asked(self, name: str) -> list[str]:
        """Return what systemd was asked on a host."""
        path = self.folder / name / "asked"
        return path.read_text(encoding="utf-8").splitlines() if path.exists() else []

    def days(self, name: str) -> int:
        """Return for how many days a host's certificate holds, which is one of the farm's CA and its key's."""
        tls = self.folder / name / "tls"
        made = x509.load_pem_x509_certificate((tls / "agent.pem").read_bytes())
        key = serialization.load_pem_private_key((tls / "agent-key.pem").read_bytes(), None)
        assert made.public_key() == key.public_key()
        made.verify_directly_issued_by(x509.load_pem_x509_certificate((self.secrets / "nomad-ca.pem").read_bytes()))
        return (made.not_valid_after_utc - datetime.datetime.now(datetime.UTC)).days


@pytest.fixture
def farm(tmp_path: Path) -> Iterator[Farm]:
    running = Farm(tmp_path)
    yield running
    for agent in running.agents:
        agent.close()


RELOADED = ["is-active --quiet nomad", "reload nomad"]


def test_agents_whose_certificates_have_ended_work_again_and_others_are_not_asked(farm: Farm) -> None:
    farm.has("server1", -3)
    farm.has("server2", 60)
    farm.has("ended", -0.01)
    farm.has("soon", 0.2)
    farm.has("later", 1.2)
    farm.has("stopped", -3, active=False)
    farm.has("open", -3, nomad_tls="off")
    code, said = farm.run()
    assert code == 0, said
    assert {name: farm.days(name) for name in farm.hosts} == {
        "server1": 364, "ended": 364, "soon": 364, "stopped": 364, "server2": 59, "later": 1, "open": -3 - 1,
    }  # fmt: skip
    assert {name: farm.asked(name) for name in farm.hosts} == {
        "server1": RELOADED, "ended": RELOADED, "soon": RELOADED, "stopped": RELOADED[:1],
        "server2": [], "later": [], "open": [],
    }  # fmt: skip
    heard = {name for name, agent in zip(farm.hosts, farm.agents, strict=True) if agent.requests}
    assert heard == {"server1", "ended", "soon"}
    assert "ended: the certificate in" in said and "It is renewed before anything else." in said
    # What it has done is no reason to do it again.
    for name in farm.hosts:
        (farm.folder / name / "asked").unlink(missing_ok=True)
    code, said = farm.run()
    assert (code, [name for name in farm.hosts if farm.asked(name)]) == (0, []), said
    assert "changed=0" in said and "changed=1" not in said


def test_a_check_says_what_a_run_would_do_and_changes_nothing(farm: Farm) -> None:
    farm.has("ended", -3)
    before = (farm.folder / "ended/tls/agent.pem").read_bytes()
    code, said = farm.run("--check")
    assert (code, farm.asked("ended"), (farm.folder / "ended/tls/agent.pem").read_bytes()) == (0, [], before), said
    assert "ended: the certificate in" in said and "A run that is no check renews it before anything else;" in said


def test_who_does_not_work_with_it_is_told_and_goes_on(farm: Farm) -> None:
    """A role may mend it, and who needs the agent fails by itself."""
    farm.has("server1", -3, says={**SERVER, "/v1/status/leader": ""})
    farm.has("server2", -3)
    farm.has("lost", -3, says=LOST)
    farm.has("refused", -3)
    (farm.folder / "refused/refuses").touch()
    code, said = farm.run("--extra-vars", json.dumps({"__nomad_certificate_wait": {"timeout": 1, "retries": 3}}))
    assert (code, [farm.days(name) for name in farm.hosts]) == (0, [364] * 4), said
    assert "/v1/status/leader answered ''" in said and "the client knows no servers" in said
    assert "refused: the agent could not be told to read its new certificate" in said
    # One of the servers has a leader, so it was waited for them.
    assert "it is not waited" not in said


def test_nodes_are_not_waited_for_whose_servers_are_left_out(farm: Farm) -> None:
    farm.has("server1", -3)
    for name in ("first", "second"):
        farm.has(name, -3, says=LOST)
    code, said = farm.run("--limit", "gpu_nodes")
    assert (code, farm.days("first"), farm.days("server1"), farm.asked("server1")) == (0, 364, -4, []), said
    assert said.count(
        "This run has not reached the servers server1 of region global, or they have no leader yet, so it is not "
        "waited until nodes heartbeat. If their certificates have ended as well what asks them fails: run this again "
        "with them."
    ) == 1  # fmt: skip
    # Their agents show it all the same.
    assert "knows no servers" not in said and all(agent.requests for agent in farm.agents[1:])


def test_a_server_that_is_stopped_is_started_and_a_node_is_not(farm: Farm) -> None:
    """All others need it, and it has no driver to wait for."""
    farm.has("server1", -3, active=False)
    farm.has("node", -3)
    farm.has("stopped", -3, active=False)
    # Whatever part of the run is asked for.
    code, said = farm.run("--tags", "driver")
    assert code == 0, said
    started = ["is-active --quiet nomad", "is-enabled --quiet nomad", "start --no-block nomad"]
    assert {name: farm.asked(name) for name in farm.hosts} == {
        "server1": started, "node": RELOADED, "stopped": RELOADED[:1],
    }  # fmt: skip
    assert "it is not waited" not in said


def test_a_run_that_was_cut_is_gone_on_with(farm: Farm) -> None:
    farm.has("server1", 300)
    for name in ("lost", "unread", "open"):
        farm.has(name, -3)
    for name in ("lost", "open"):
        (farm.folder / name / "tls/agent.pem").unlink()
    (farm.folder / "lost/nomad.hcl").write_text("tls {\n", encoding="utf-8")
    # After the files, before the reload: the agent shows the former one.
    farm.renews("unread", 300)
    (farm.folder / "unread/tls/unread").touch()
    # One that has not been led to TLS yet.
    (farm.folder / "open/nomad.hcl").touch()
    code, said = farm.run()
    assert (code, farm.days("lost"), farm.days("unread")) == (0, 364, 299), said
    assert {name: farm.asked(name) for name in farm.hosts} == {
        "server1": [], "lost": RELOADED, "unread": RELOADED, "open": [],
    }  # fmt: skip
    assert "is not there. It is renewed before anything else." in said
    assert "as after a run that was cut. It is read before anything else." in said and "open: the cert" not in said
    # They answered with it.
    assert said.count("RETRYING") < 8 and "certificate has expired" not in said, said
    assert {path.name for path in farm.folder.glob("*/tls/*")} == {"ca.pem", "agent.pem", "agent-key.pem"}
    for name in farm.hosts:
        (farm.folder / name / "asked").unlink(missing_ok=True)
    code, said = farm.run()
    assert (code, [name for name in farm.hosts if farm.asked(name)]) == (0, []), said


def test_files_that_are_each_others_are_there_until_others_are(farm: Farm) -> None:
    """Wherever a run is cut, the next one sees whether it has to go on."""
    farm.has("ended", -3)
    tls = farm.folder / "ended/tls"
    before = {path.name: path.read_bytes() for path in tls.iterdir()}
    (tls.parent / "bin/mv").write_text("#!/bin/sh\nexit 1\n", encoding="utf-8")
    (tls.parent / "bin/mv").chmod(0o755)
    code, _said = farm.run()
    left = {path.name: path.read_bytes() for path in tls.iterdir()}
    assert (code, "agent.pem" in left, left["agent-key.pem"]) == (2, False, before["agent-key.pem"])
    assert {"agent.pem.new", "agent-key.pem.new", "unread"} <= set(left)
    # As it is where a run ends before they are exchanged.
    (tls / "agent.pem").write_bytes(before["agent.pem"])
    (tls.parent / "bin/mv").unlink()
    (tls.parent / "refuses").touch()
    code, said = farm.run()
    assert (code, farm.days("ended"), (tls / "unread").exists()) == (0, 364, True), said
    (tls.parent / "refuses").unlink()
    assert farm.run()[0] == 0
    assert {path.name for path in tls.iterdir()} == {"ca.pem", "agent.pem", "agent-key.pem"}


def test_a_ca_that_is_due_is_renewed_by_one_for_all(farm: Farm) -> None:
    """Thousands of nodes would do it one after the other."""
    farm.authority(300)
    for name in ("server1", "first", "second"):
        farm.has(name, -3)
    code, said = farm.run()
    assert (code, [farm.days(name) for name in farm.hosts]) == (0, [364] * 3), said
    made = x509.load_pem_x509_certificate((farm.secrets / "nomad-ca.pem").read_bytes())
    assert made.not_valid_after_utc - datetime.datetime.now(datetime.UTC) > 3640 * DAY
    assert {(farm.folder / name / "tls/ca.pem").read_bytes() for name in farm.hosts} == {made.public_bytes(PEM)}
    task = said.partition("Have the key of the farm's CA]")[2].partition("TASK [")[0]
    assert [name for name in farm.hosts if f"[{name}" in task] == ["server1"], said
    assert said.count("Have the key of the farm's CA]") == 1


def test_nothing_is_renewed_before_all_is_checked() -> None:
    assert [play["name"] for play in PLAYS] == [
        "Require the hosts of a farm", "What the roles refuse", "Certificates that have ended",
    ]  # fmt: skip


@pytest.mark.parametrize("runs", [True, False])
def test_a_note_is_left_of_an_agent_that_goes_on_without_tls(farm: Farm, *, runs: bool) -> None:
    """A run that is cut before the restart would have the next one ask it by TLS."""
    farm.has("open", -3)
    tls = farm.folder / "open/tls"
    for path in tls.iterdir():
        path.unlink()
    link = farm.folder / "invocation"
    if runs:
        link.symlink_to("a1")
    tasks = [
        {"ansible.builtin.import_role": {"name": "gpufarm.core._common", "tasks_from": "variables.yml"}},
        {"ansible.builtin.include_role": {"name": "gpufarm.core.nomad", "tasks_from": "certificate.yml"}},
    ]
    play = {"hosts": "all", "gather_facts": False, "tasks": tasks}
    code, said = farm.run("--extra-vars", json.dumps({"__nomad_run_link": str(link)}), play=play)
    assert (code, farm.days("open")) == (0, 364), said
    there = {"ca.pem", "agent.pem", "agent-key.pem"} | ({"open"} if runs else set())
    assert {path.name for path in tls.iterdir()} == there
    assert not runs or (tls / "open").readlink() == Path("a1")


def test_an_agent_that_gets_another_certificate_in_its_role_is_restarted(farm: Farm) -> None:
    farm.has("ends", 20)
    tasks = yaml.safe_load((ROOT / "roles/nomad/tasks/main.yml").read_text(encoding="utf-8"))
    (task,) = [each for each in tasks if each["name"] == "Have a certificate of the farm's CA"]
    task["ansible.builtin.include_tasks"]["file"] = str(ROOT / "roles/nomad/tasks/certificate.yml")
    known = [
        {"ansible.builtin.import_role": {"name": f"gpufarm.core.{role}", "tasks_from": "variables.yml"}}
        for role in ("_common", "nomad")
    ]
    # The handler finds no Nomad on this machine.
    _code, said = farm.run(play={"hosts": "all", "gather_facts": False, "tasks": [*known, task]})
    assert (farm.days("ends"), "RUNNING HANDLER [gpufarm.core.nomad : Restart Nomad]" in said) == (364, True), said
