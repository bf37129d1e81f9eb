# Copyright (c) 2026, gpufarm contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""examples/wsl/setup.sh, up to the playbook that it runs; its venv is that of the tests, so nothing is downloaded."""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import os
import pty
import re
import shutil
import socket
import ssl
import subprocess
import sys
import threading
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
import yaml
from ansible_collections.gpufarm.core.tests.unit.playbooks import playbook_helper
from ansible_collections.gpufarm.core.tests.unit.playbooks.playbook_helper import plays
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from tests.simulator import galaxy
from tests.simulator.galaxy import archive_of
from tests.simulator.windows import modules
from tests.simulator.windows.host import SYSTEM32, Distribution, Machine, Windows

pytestmark = pytest.mark.controller
ROOT = Path(__file__).resolve().parents[3]
SCRIPT = ROOT / "examples/wsl/setup.sh"
SERVERS = "gpufarm/servers.yml"
WINDOWS = "gpufarm/windows.wsl.yml"


@pytest.fixture(scope="module")
def tarball(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The collection and what it depends on, as they are named where Galaxy is out of reach."""
    folder = tmp_path_factory.mktemp("tarball")
    galaxy = Path(sys.executable).with_name("ansible-galaxy")
    subprocess.run([galaxy, "collection", "build", ROOT, "--output-path", folder], check=True, capture_output=True)
    (found,) = folder.iterdir()
    return f"{found} {archive_of('community.crypto', folder)}"


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Path]:
    share = tmp_path / ".local/share/gpufarm"
    share.mkdir(parents=True)
    venv = Path(sys.executable).parents[1]
    # Otherwise the script would make the venv anew.
    assert (venv / "bin/pip").exists()
    (share / "venv").symlink_to(venv)
    me = {"root": os.geteuid()}
    Windows.create(
        tmp_path / "windows",
        Machine("PC1", [Distribution("Debian", default=True, users=me), Distribution("Other", users=me)]),
    )
    yield tmp_path
    shutil.rmtree(share)


def run(
    home: Path,
    *arguments: object,
    typed: str = "",
    distribution: str | None = "Debian",
    collections: object | None = "",
    under: tuple[str, ...] = (),
) -> subprocess.CompletedProcess[str]:
    program = Windows(home / "windows").mounted(SYSTEM32)
    environment = {
        **os.environ, "HOME": str(home), "PATH": f"{program.parent}:{os.environ['PATH']}",
        "ANSIBLE_LOCALHOST_WARNING": "False",
    }  # fmt: skip
    environment |= {"WSL_DISTRO_NAME": distribution} if distribution else {}
    environment |= {} if collections is None else {"GPUFARM_COLLECTIONS": str(collections)}
    command = [*under, "sh", SCRIPT, *map(str, arguments)]
    if not typed:
        return subprocess.run(
            command, env=environment, cwd=home, capture_output=True, text=True, check=False, start_new_session=True
        )
    # Of somebody at a terminal, who has typed already.
    master, slave = pty.openpty()
    os.write(master, typed.encode())
    found = subprocess.run(
        ["setsid", "--ctty", "sh", "-c", 'exec "$@" </dev/null', "sh", *command],
        env=environment, cwd=home, stdin=slave, capture_output=True, text=True, check=False,
    )  # fmt: skip
    os.close(slave)
    os.close(master)
    return found


@contextmanager
def nomad(context: ssl.SSLContext | None = None) -> Iterator[str]:
    """Give the address of what does with a first byte what a server of Nomad does with and without TLS."""

    def serve() -> None:
        while True:
            try:
                connection, _peer = listening.accept()
            except OSError:
                return
            with connection, suppress(OSError):
                if connection.recv(1) == b"\x04" and context:
                    with context.wrap_socket(connection, server_side=True) as inside:
                        inside.recv(1)

    with socket.create_server(("127.0.0.1", 0)) as listening:
        threading.Thread(target=serve, daemon=True).start()
        yield f"127.0.0.1:{listening.getsockname()[1]}"
        listening.shutdown(socket.SHUT_RDWR)


@pytest.fixture
def server() -> Iterator[str]:
    with nomad() as address:
        yield address


class Farm:
    """A CA, and what is made with it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.key = ec.generate_private_key(ec.SECP256R1())
        self.name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "CA of a farm")])
        folder.mkdir()
        self.make("nomad-ca", "CA of a farm", self.key)

    def make(self, file: str, name: str, key: ec.EllipticCurvePrivateKey) -> None:
        now, day = datetime.datetime.now(datetime.UTC), datetime.timedelta(days=1)
        subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])
        own = self.key.public_key()
        made = (
            x509.CertificateBuilder(self.name, subject, key.public_key(), 1, now - day, now + day)
            .add_extension(x509.SubjectAlternativeName([x509.DNSName(name)]), critical=False)
            .add_extension(x509.BasicConstraints(file == "nomad-ca", None), critical=True)
            # Python 3.13 wants both.
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
            .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(own), critical=False)
            .sign(self.key, hashes.SHA256())
        )
        pem = serialization.Encoding.PEM
        (self.folder / f"{file}.pem").write_bytes(made.public_bytes(pem))
        if file != "nomad-ca":
            form = (serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
            (self.folder / f"{file}-key.pem").write_bytes(key.private_bytes(pem, *form))

    @contextmanager
    def server(self) -> Iterator[str]:
        self.make("server", "server.lab.nomad", ec.generate_private_key(ec.SECP256R1()))
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=self.folder / "nomad-ca.pem")
        context.verify_mode = ssl.CERT_REQUIRED
        context.load_cert_chain(self.folder / "server.pem", self.folder / "server-key.pem")
        with nomad(context) as address:
            yield address

    def given(self) -> Path:
        """Return a folder as the farm's owner makes it."""
        self.make("lab-client-nomad", "client.lab.nomad", ec.generate_private_key(ec.SECP256R1()))
        folder = self.folder / "given"
        folder.mkdir()
        for name in ("nomad-ca.pem", "lab-client-nomad.pem", "lab-client-nomad-key.pem"):
            shutil.copy(self.folder / name, folder)
        (folder / "nomad-farm-token.txt").write_text("token")
        return folder


def test_a_closed_farm_is_joined_with_what_its_owner_gives(home: Path, tarball: str) -> None:
    farm = Farm(home / "farm")
    secrets = home / "gpufarm-secrets"
    with farm.server() as server:
        done = run(home, server, "--", "--list-hosts", collections=tarball)
        assert "127.0.0.1 wants a certificate. Expected: the folder that the farm's owner has made for" in done.stderr
        assert (done.returncode, (home / SERVERS).exists()) == (1, False)
        # What was there of another farm gives way.
        secrets.mkdir()
        (secrets / "global-client-nomad.pem").touch()
        (secrets / "global-client-nomad-key.pem").touch()
        good(run(home, "--secrets", farm.given(), server, "--", "--list-hosts"))
        assert yaml.safe_load((home / SERVERS).read_text())["all"]["vars"] == {
            "nomad_client_servers": [server],
            "nomad_region": "lab",
            "nomad_tls": "files",
            "nomad_tls_ca_file": f"{secrets}/nomad-ca.pem",
            "nomad_tls_cert_file": f"{secrets}/lab-client-nomad.pem",
            "nomad_tls_key_file": f"{secrets}/lab-client-nomad-key.pem",
        }
        assert sorted((path.name, oct(path.stat().st_mode & 0o777)) for path in secrets.iterdir()) == [
            ("lab-client-nomad-key.pem", "0o600"), ("lab-client-nomad.pem", "0o600"),
            ("nomad-ca.pem", "0o600"), ("nomad-farm-token.txt", "0o600"),
        ]  # fmt: skip
        # It is kept, so another run needs not name it.
        shutil.rmtree(farm.folder)
        good(run(home, server, "--", "--list-hosts"))
    shutil.rmtree(home / "gpufarm-secrets")


def test_what_does_not_fit_a_closed_farm_is_refused(home: Path, tarball: str, server: str) -> None:
    farm, other = Farm(home / "farm"), Farm(home / "other")
    given, wrong = farm.given(), other.given()
    done = run(home, "--secrets", given, server, "--", "--list-hosts", collections=tarball)
    assert f"127.0.0.1 knows no TLS, and {given} has certificates. Expected: a server of the farm" in done.stderr
    with farm.server() as closed:
        done = run(home, "--secrets", wrong, closed, "--", "--list-hosts")
        assert f"127.0.0.1 and the certificates of {wrong} do not fit (" in done.stderr
        assert "and of the server's region, which is to be lab. Next step: have the farm's owner" in done.stderr
        # A certificate that the servers' CA has not signed, with the right CA.
        shutil.copy(given / "nomad-ca.pem", wrong)
        done = run(home, "--secrets", wrong, closed, "--", "--list-hosts")
        assert f"127.0.0.1 and the certificates of {wrong} do not fit (" in done.stderr
        assert not (home / SERVERS).exists()
        assert list(home.glob("gpufarm-secrets*")) == []
        # What works is not lost to what does not, nor to itself.
        good(run(home, "--secrets", given, closed, "--", "--list-hosts"))
        kept = {path.name: path.read_bytes() for path in (home / "gpufarm-secrets").iterdir()}
        assert run(home, "--secrets", wrong, closed, "--", "--list-hosts").returncode == 1
        good(run(home, "--secrets", home / "gpufarm-secrets", closed, "--", "--list-hosts"))
        assert {path.name: path.read_bytes() for path in (home / "gpufarm-secrets").iterdir()} == kept
        # A token of a farm without ACLs would be that of another.
        (given / "nomad-farm-token.txt").unlink()
        (home / SERVERS).unlink()
        good(run(home, "--secrets", given, closed, "--", "--list-hosts"))
        assert not (home / "gpufarm-secrets/nomad-farm-token.txt").exists()
        assert yaml.safe_load((home / SERVERS).read_text())["all"]["vars"]["nomad_acl_enabled"] is False
    (given / "lab-client-nomad-key.pem").unlink()
    done = run(home, "--secrets", given, "192.0.2.10")
    assert f"{given} has not one file *-client-nomad-key.pem. Expected: what the farm's owner has" in done.stderr
    shutil.rmtree(home / "gpufarm-secrets")


def test_another_farm_takes_the_place_of_the_first_only_by_a_yes(home: Path, tarball: str) -> None:
    """The agent that runs has the certificates of the first in these files."""
    farm, other = Farm(home / "farm"), Farm(home / "other")
    secrets, given = home / "gpufarm-secrets", other.given()
    with farm.server() as server, other.server() as another:
        good(run(home, "--secrets", farm.given(), server, "--", "--list-hosts", collections=tarball))
        kept = {path.name: path.read_bytes() for path in secrets.iterdir()}
        for typed in ("", "no\n"):
            done = run(home, "--secrets", given, another, "--", "--list-hosts", typed=typed)
            assert f"servers.yml names other servers than {another}, and nobody has said yes" in done.stderr
            assert {path.name: path.read_bytes() for path in secrets.iterdir()} == kept
            assert list(home.glob("gpufarm-secrets?*")) == []
        good(run(home, "--secrets", given, another, "--", "--list-hosts", typed="yes\n"))
        assert {path.name: path.read_bytes() for path in secrets.iterdir()} == {
            path.name: path.read_bytes() for path in given.iterdir()
        }
    shutil.rmtree(secrets)


def test_newer_certificates_of_the_same_farm_come_beside_servers_that_were_edited(home: Path, tarball: str) -> None:
    """They end after a year."""
    farm, secrets = Farm(home / "farm"), home / "gpufarm-secrets"
    with farm.server() as server:
        good(run(home, "--secrets", farm.given(), server, "--", "--list-hosts", collections=tarball))
        edited = (home / SERVERS).read_text() + "    nomad_node_class: gaming\n"
        (home / SERVERS).write_text(edited)
        shutil.rmtree(farm.folder / "given")
        given = farm.given()
        run(home, "--secrets", given, server, "--", "--list-hosts", typed="no\n")
        assert {path.name: path.read_bytes() for path in secrets.iterdir()} == {
            path.name: path.read_bytes() for path in given.iterdir()
        }
        assert (home / SERVERS).read_text() == edited
        good(run(home, "--", "--list-hosts"))
    shutil.rmtree(secrets)


def nobody() -> str:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        return f"127.0.0.1:{listening.getsockname()[1]}"


def good(done: subprocess.CompletedProcess[str]) -> str:
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_this_distribution_alone_becomes_a_node_and_leaves(home: Path, tarball: str, server: str) -> None:
    # The playbook itself would make this machine a node.
    said = good(run(home, server, "--", "--list-hosts", "-e", "token=secret", collections=tarball))
    name = re.sub("[^a-z0-9]", "-", os.uname().nodename.partition(".")[0].lower()).strip("-")
    assert plays(said)["Windows machines"] == [name]
    assert plays(said)["GPU nodes"] == [f"{name}-Debian"]
    assert "Other" not in said
    assert "secret" not in said
    # With this the role writes what the distribution is to start by.
    assert ("-e wsl_terminate=true" in said) is not Path("/run/systemd/system").exists()
    assert yaml.safe_load((home / SERVERS).read_text())["all"]["vars"] == {
        "nomad_client_servers": [server], "nomad_tls": "off", "nomad_acl_enabled": False
    }  # fmt: skip
    core = home / ".local/share/gpufarm/collections/ansible_collections/gpufarm/core"
    assert (core / "playbooks/wsl.yml").exists()
    assert (core / "examples/wsl/setup.sh").exists()

    before = {path: (home / path).read_bytes() for path in (SERVERS, WINDOWS)}
    again = good(run(home, "--", "--list-hosts"))
    assert "stays as it is" not in again
    assert {path: (home / path).read_bytes() for path in before} == before

    # Whatever else is in the inventory stays in the farm.
    (home / "gpufarm/others.yml").write_text("gpu_nodes: {hosts: {other: {}}}\nwsl_hosts: {hosts: {pc2: {}}}\n")
    left = plays(good(run(home, "--remove", "--", "--list-hosts")))
    assert left["GPU nodes"] == [f"{name}-Debian"]
    assert left["Windows machines"] == [name]
    (home / WINDOWS).unlink()
    assert f"{home / 'gpufarm'} does not have this distribution" in run(home, "--remove", "--", "--list-hosts").stderr


def test_a_file_of_the_user_stays_unless_he_says_otherwise(home: Path, tarball: str, server: str) -> None:
    good(run(home, server, "--", "--list-hosts", collections=tarball))
    (home / SERVERS).write_text("all: {vars: {mine: true}}\n")
    (home / WINDOWS).write_text((home / WINDOWS).read_text() + "details: all\n")
    for typed in ("", "no\n"):
        done = run(home, server, "--", "--list-hosts", typed=typed)
        assert done.returncode == 1
        assert f"servers.yml names other servers than {server}, and nobody has said yes" in done.stderr
        assert "mine" in (home / SERVERS).read_text()
    assert f"{WINDOWS} stays as it is" in good(run(home, "--", "--list-hosts"))
    good(run(home, server, "--", "--list-hosts", typed="y\nno\n"))
    assert server in (home / SERVERS).read_text()
    assert "details: all" in (home / WINDOWS).read_text()
    found = sorted(path.name for path in (home / "gpufarm").iterdir())
    assert found[::2] == ["servers.yml", "windows.wsl.yml"]
    # Ansible's inventory leaves this one out.
    assert found[1].endswith("~")
    assert "mine" in (home / "gpufarm" / found[1]).read_text()


def test_servers_of_which_none_answers_are_refused_before_anything_is_installed(
    home: Path, tarball: str, server: str
) -> None:
    closed = nobody()
    done = run(home, closed, "--", "--list-hosts", collections=tarball)
    assert done.returncode == 1
    assert f"127.0.0.1 does not answer on port {closed[10:]} (" in done.stderr
    assert "none of the servers answers. Expected: a connection to port 4647 of a Nomad server. Next" in done.stderr
    assert not (home / SERVERS).exists()
    # One that is down for now is no mistake.
    done = run(home, closed, server, f"[::1]:{closed[10:]}", "::1", "--", "--list-hosts")
    assert "::1 does not answer on port 4647 (" in done.stderr
    good(done)
    assert f'["{closed}", "{server}", "[::1]:{closed[10:]}", "::1"]' in (home / SERVERS).read_text()


def test_the_printed_address_is_that_of_this_script() -> None:
    (repository,) = re.findall(
        r"^repository: https://github\.com/(\S+)$", (ROOT / "galaxy.yml").read_text("utf-8"), re.M
    )
    printed = re.findall(r"curl\.exe -fsSL (\S+)", (ROOT / "docs/wsl.md").read_text("utf-8"))
    path = SCRIPT.relative_to(ROOT)
    assert printed == [f"https://raw.githubusercontent.com/{repository}/main/{path}"]


def test_it_asks_for_the_server_and_the_playbook_may_ask_too(home: Path, tarball: str, server: str) -> None:
    # It has the input of the playbook.
    (home / "gpufarm").mkdir()
    (home / "gpufarm/tells").write_text(
        """#!/bin/sh\n[ -t 0 ] && host=asked; echo "{\\"a\\": {\\"hosts\\": [\\"$host\\"]}}"\n"""
    )
    (home / "gpufarm/tells").chmod(0o755)
    done = run(home, "--", "--list-hosts", typed="\n")
    told = "no server was named. Expected: the address of a Nomad server. Next step: run it again, and type one."
    assert (done.returncode, f"setup.sh: {told}" in done.stderr) == (1, True), done.stderr
    said = good(run(home, "--", "--list-hosts", typed=f"{server} {server}\n", collections=tarball))
    assert "asked" in plays(said)["Hosts of this run"]
    assert f'["{server}", "{server}"]' in (home / SERVERS).read_text()


def test_an_ansible_of_a_python_that_is_gone_is_made_anew(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    venv = home / ".local/share/gpufarm/venv"
    venv.unlink()
    (venv / "bin").mkdir(parents=True)
    (venv / "bin/python3").symlink_to("/usr/bin/python3.0")
    (venv / "bin/pip").write_text("#!/usr/bin/python3.0\n")
    (venv / "bin/pip").chmod(0o755)
    # Far enough: the rest would be a download.
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    done = run(home, "192.0.2.10")
    assert "pip cannot install ansible-core. Expected: a way to PyPI. Next step: set http_proxy and" in done.stderr
    assert subprocess.run([venv / "bin/python3", "-m", "pip", "--version"], check=False).returncode == 0


# A new distribution: its user is not root, Debian's package python3-venv is missing, and apt knows no package yet. Each
# takes what it is asked by this script, and no more.
NEW = """\
#!/bin/sh
has={has}
echo "$(basename "$0") $*" >>$has/asked
case $0 in
*/id)
    [ "$*" = -u ] && echo 1000
    ;;
*/sudo)
    case $1 in
    --preserve-env=http_proxy,https_proxy,no_proxy) shift ;;
    *) unset http_proxy https_proxy no_proxy ;;
    esac
    exec env -i PATH="$PATH" root=yes ${{http_proxy+http_proxy="$http_proxy"}} "$@"
    ;;
*/apt-get)
    [ "$root $http_proxy" = "yes http://proxy.example:3128" ] || exit 100
    case "$*" in
    "update -q") touch $has/lists ;;
    "-o DPkg::Lock::Timeout=600 install -qy python3-venv")
        [ -e $has/lists ] && [ "$DEBIAN_FRONTEND" = noninteractive ] && touch $has/python3-venv
        ;;
    *) exit 100 ;;
    esac
    ;;
*/python3)
    case "$*" in
    "-c import ensurepip, venv" | "-m venv "*) [ -e $has/python3-venv ] || exit 1 ;;
    esac
    exec {python} "$@"
    ;;
esac
"""


def have_wheel_of_ansible(folder: Path) -> None:
    """Write one of the installed version, whose programs are the installed ones, for a pip that reaches no index."""
    version = importlib.metadata.version("ansible-core")
    info = f"ansible_core-{version}.dist-info"
    files = {
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: ansible-core\nVersion: {version}\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    for name in ("ansible-galaxy", "ansible-inventory", "ansible-playbook"):
        program = Path(sys.executable).with_name(name)
        files[f"ansible_core-{version}.data/scripts/{name}"] = f'#!/bin/sh\nexec {program} "$@"\n'
    files[f"{info}/RECORD"] = "".join(f"{name},,\n" for name in (*files, f"{info}/RECORD"))
    with zipfile.ZipFile(folder / f"ansible_core-{version}-py3-none-any.whl", "w") as wheel:
        for name, text in files.items():
            member = zipfile.ZipInfo(name)
            member.external_attr = 0o100755 << 16
            wheel.writestr(member, text)


def doubled(folder: Path) -> Iterator[Path]:
    """Build the collections for Windows, of which this machine can run the doubles alone."""
    for name in ("ansible.windows", "community.windows"):
        namespace, collection = name.split(".")
        source = modules.install(folder / "doubles") / "ansible_collections" / namespace / collection
        about = {"namespace": namespace, "name": collection, "version": "9.9.9"}
        about |= {"authors": ["-"], "readme": "README.md"}
        (source / "galaxy.yml").write_text(yaml.safe_dump(about))
        (source / "README.md").touch()
        galaxy_program = Path(sys.executable).with_name("ansible-galaxy")
        subprocess.run(
            [galaxy_program, "collection", "build", source, "--output-path", folder], check=True, capture_output=True
        )
        yield folder / f"{namespace}-{collection}-9.9.9.tar.gz"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root has files of its own in /etc")
def test_a_new_distribution_from_its_first_command_to_the_last(
    home: Path, tarball: str, server: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But for the play that makes a machine a node, which molecule's scenarios run on nodes."""
    (home / ".local/share/gpufarm/venv").unlink()
    for name in ("new", "wheels"):
        (home / name).mkdir()
    for name in ("id", "sudo", "apt-get", "python3"):
        (home / "new" / name).write_text(NEW.format(has=home / "new", python="/usr/bin/python3"))
        (home / "new" / name).chmod(0o755)
    have_wheel_of_ansible(home / "wheels")
    monkeypatch.setenv("PATH", str(home / "new"), prepend=os.pathsep)
    monkeypatch.setenv("http_proxy", "http://proxy.example:3128")
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(home / "wheels"))
    windows = Windows(home / "windows")
    wslconfig = windows.mounted(r"C:\Users\alice\.wslconfig")
    wslconfig.parent.mkdir(parents=True)
    before = windows.machine
    under = playbook_helper.of_its_own(home / "inside")
    pc = re.sub("[^a-z0-9]", "-", os.uname().nodename.partition(".")[0].lower()).strip("-")
    known = {"windows_double": str(windows.folder), "wsl_driver_version_min": "", "wsl_ports": [4646]}
    given = ("-e", json.dumps({**known, "_common_is_wsl": True}))

    with galaxy.galaxy(*map(Path, tarball.split()), *doubled(home)) as address:
        monkeypatch.setenv("ANSIBLE_GALAXY_SERVER", address)
        windows_alone = ("--limit", pc, "--skip-tags", "always")
        said = good(run(home, server, "--", *given, *windows_alone, collections=None, under=under))
    assert f"gpufarm.core.wsl (and {len(given + windows_alone)} more)" in said
    held = windows.machine
    assert [name.rpartition("\\")[2] for name in held.tasks] == ["keep Debian", "ports"]
    assert held.portproxy and "vmIdleTimeout=-1" in wslconfig.read_text()

    # The same command takes it back; Galaxy is not asked any more.
    said = good(run(home, "--remove", "--", *given, "-e", "remove_also=wslconfig", collections=None, under=under))
    assert f"--limit {pc},{pc}-Debian gpufarm.core.remove (and" in said
    assert f"{pc}-Debian leaves the farm" in said
    assert [line for line in (home / "new/asked").read_text().splitlines() if line.startswith("apt-get")] == [
        "apt-get update -q", "apt-get -o DPkg::Lock::Timeout=600 install -qy python3-venv",
    ]  # fmt: skip
    after = windows.machine
    assert (after.tasks, after.portproxy, after.firewall) == ({}, {}, {})
    assert "IdleTimeout" not in wslconfig.read_text()
    assert [each.name for each in after.distributions] == [each.name for each in before.distributions]
    assert {each.name for each in after.distributions if each.state == "Running"} >= {"Debian"}
    # What is to be run again is there, as docs/wsl.md says.
    assert (home / SERVERS).exists() and (home / ".local/share/gpufarm/venv").exists()


# A distribution that is new, or old, and whose packages are out of reach.
BARE = """\
#!/bin/sh
case $0 in
*/sudo) exec "$@" ;;
*/apt-get) case "$*" in *"{fails}"*) exit 100 ;; *) exit 0 ;; esac ;;
esac
case "$*" in
*ensurepip*) exit {venv} ;;
*version_info*) exit 1 ;;
--version) echo Python 3.9.2 ;;
esac
"""


@pytest.mark.parametrize(
    ("fails", "venv", "text"),
    [
        (
            "update",
            1,
            "apt-get update has failed. Expected: the distribution's packages. Next step: set http_proxy and",
        ),
        (
            "install",
            1,
            "apt-get has failed. Expected: the package python3-venv. Next step: set http_proxy and https_pro",
        ),
        ("-", 0, "Python 3.9.2 is too old. Expected: Python 3.11 or newer. Next step: take Debian 12 or Ubuntu 24.04"),
    ],
)
def test_a_distribution_that_cannot_have_ansible(
    home: Path, monkeypatch: pytest.MonkeyPatch, fails: str, venv: int, text: str
) -> None:
    (home / "bare").mkdir()
    for name in ("python3", "apt-get", "sudo"):
        (home / "bare" / name).write_text(BARE.format(fails=fails, venv=venv))
        (home / "bare" / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(home / "bare"), prepend=os.pathsep)
    done = run(home, "192.0.2.10")
    assert done.returncode == 1
    assert f"setup.sh: {text}" in done.stderr
    assert not (home / SERVERS).exists()


def test_galaxy_may_be_out_of_reach_once_the_collections_are_there(
    home: Path, tarball: str, server: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ANSIBLE_GALAXY_SERVER", f"http://{nobody()}/")
    for named in (None, home / "nothing.tar.gz"):
        done = run(home, server, "--", "--list-hosts", collections=named)
        assert done.returncode == 1
        what = named or "gpufarm.core ansible.windows community.windows"
        assert (
            f"ansible-galaxy cannot install {what}. Expected: a way to them. Next step: set http_proxy and https_proxy "
            "if a proxy"
        ) in done.stderr
        assert "or name tarballs in GPUFARM_COLLECTIONS." in done.stderr
    good(run(home, server, "--", "--list-hosts", collections=tarball))
    done = run(home, server, "--", "--list-hosts", collections=None)
    good(done)
    assert "the collections stay as they are, for Galaxy does not answer" in done.stderr
    assert run(home, server, "--", "--list-hosts", collections=home / "nothing.tar.gz").returncode == 1


def test_a_locale_that_was_never_made_is_no_obstacle(
    home: Path, tarball: str, server: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LC_ALL", "xx_XX.UTF-8")
    good(run(home, server, "--", "--list-hosts", collections=tarball))


@pytest.mark.parametrize("word", ["-h", "--help"])
def test_it_tells_how_it_is_called(home: Path, word: str) -> None:
    assert "setup.sh --remove" in good(run(home, "192.0.2.10", word, distribution=None))


@pytest.mark.parametrize(
    ("arguments", "distribution", "text"),
    [
        (
            ["192.0.2.10"],
            None,
            "this is no terminal of a WSL distribution, for WSL_DISTRO_NAME is not set. Exp",
        ),
        (["a", "--remove"], None, "--remove came with a. Expected: nothing with it. Next step: leave out the one or"),
        (["--secrets", "x", "--remove"], None, "--remove came with --secrets. Expected: nothing with it."),
        (["--secrets", "x"], None, "--secrets came without a server. Expected: setup.sh --secrets FOLDER SERVER."),
        (["--secrets", ""], None, "--secrets came without a folder. Expected: setup.sh --secrets FOLDER SERVER."),
        (
            ["--secrets"],
            None,
            "--secrets came without a folder. Expected: setup.sh --secrets FOLDER SERVER. Next step:",
        ),
        (["--rm"], None, "--rm is no address. Expected: a name or an IP address. Next step: correct it."),
        (
            ["192.0.2.10:4646"],
            None,
            "192.0.2.10:4646 has the port of Nomad's HTTP API. Expected: that of a server's RPC",
        ),
        (["[::1]:4646"], None, "[::1]:4646 has the port of Nomad's HTTP API. Expected: that of a server's RPC"),
        ([], "Debian", "no server was named, and nobody can be asked. Expected: the address of a Nomad server. Next"),
        (['a"b'], "Debian", 'a"b is no address. Expected: a name or an IP address. Next step: correct it.'),
        (["--remove"], "Debian", "Expected: a collection that this script has installed. Next step: run it without"),
    ],
)
def test_what_is_refused(home: Path, arguments: list[str], distribution: str | None, text: str) -> None:
    done = run(home, *arguments, distribution=distribution)
    assert done.returncode == 1
    assert text in done.stderr
    assert not (home / SERVERS).exists()
