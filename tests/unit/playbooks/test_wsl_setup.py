# Copyright (c) 2026, gpufarm contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""examples/wsl/setup.sh, up to the playbook that it runs; its venv is that of the tests, so nothing is downloaded."""

from __future__ import annotations

import os
import pty
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.simulator.windows.host import SYSTEM32, Distribution, Machine, Windows

pytestmark = pytest.mark.controller
ROOT = Path(__file__).resolve().parents[3]
SCRIPT = ROOT / "examples/wsl/setup.sh"
SERVERS = "gpufarm/servers.yml"
WINDOWS = "gpufarm/windows.wsl.yml"


@pytest.fixture(scope="module")
def tarball(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tarball")
    galaxy = Path(sys.executable).with_name("ansible-galaxy")
    subprocess.run([galaxy, "collection", "build", ROOT, "--output-path", folder], check=True, capture_output=True)
    (found,) = folder.iterdir()
    return found


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
) -> subprocess.CompletedProcess[str]:
    program = Windows(home / "windows").mounted(SYSTEM32)
    environment = {
        **os.environ, "HOME": str(home), "PATH": f"{program.parent}:{os.environ['PATH']}",
        "ANSIBLE_LOCALHOST_WARNING": "False",
    }  # fmt: skip
    environment |= {"WSL_DISTRO_NAME": distribution} if distribution else {}
    environment |= {} if collections is None else {"GPUFARM_COLLECTIONS": str(collections)}
    command = ["sh", SCRIPT, *map(str, arguments)]
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


@pytest.fixture
def server() -> Iterator[str]:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        yield f"127.0.0.1:{listening.getsockname()[1]}"


def nobody() -> str:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        return f"127.0.0.1:{listening.getsockname()[1]}"


def plays(said: str) -> dict[str, list[str]]:
    return {
        name.strip(): re.sub(r"(?s).*hosts \(\d+\):", "", body).split()
        for name, body in re.findall(r"\): (.*)\tTAGS.*((?:\n +.*)+)", said)
    }


def good(done: subprocess.CompletedProcess[str]) -> str:
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_this_distribution_alone_becomes_a_node_and_leaves(home: Path, tarball: Path, server: str) -> None:
    # The playbook itself would make this machine a node.
    said = good(run(home, server, "--", "--list-hosts", "-e", "token=secret", collections=tarball))
    name = re.sub("[^a-z0-9]", "-", os.uname().nodename.partition(".")[0].lower()).strip("-")
    assert plays(said)["Windows machines"] == [name]
    assert plays(said)["GPU nodes"] == [f"{name}-Debian"]
    assert "Other" not in said
    assert "secret" not in said
    # With this the role writes what the distribution is to start by.
    assert ("-e wsl_terminate=true" in said) is not Path("/run/systemd/system").exists()
    assert f'nomad_client_servers: ["{server}"]' in (home / SERVERS).read_text()
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


def test_a_file_of_the_user_stays_unless_he_says_otherwise(home: Path, tarball: Path, server: str) -> None:
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
    home: Path, tarball: Path, server: str
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


def test_it_asks_for_the_server_and_the_playbook_may_ask_too(home: Path, tarball: Path, server: str) -> None:
    # It has the input of the playbook.
    (home / "gpufarm").mkdir()
    (home / "gpufarm/tells").write_text(
        """#!/bin/sh\n[ -t 0 ] && host=asked; echo "{\\"a\\": {\\"hosts\\": [\\"$host\\"]}}"\n"""
    )
    (home / "gpufarm/tells").chmod(0o755)
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


def test_galaxy_may_be_out_of_reach_once_the_collections_are_there(
    home: Path, tarball: Path, server: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ANSIBLE_GALAXY_SERVER", f"http://{nobody()}/")
    for named in (None, home / "nothing.tar.gz"):
        done = run(home, server, "--", "--list-hosts", collections=named)
        assert done.returncode == 1
        assert "Expected: a way to them. Next step: set http_proxy and https_proxy if a proxy" in done.stderr
        assert "or name tarballs in GPUFARM_COLLECTIONS." in done.stderr
    good(run(home, server, "--", "--list-hosts", collections=tarball))
    done = run(home, server, "--", "--list-hosts", collections=None)
    good(done)
    assert "the collections stay as they are, for Galaxy does not answer" in done.stderr
    assert run(home, server, "--", "--list-hosts", collections=home / "nothing.tar.gz").returncode == 1


def test_a_locale_that_was_never_made_is_no_obstacle(
    home: Path, tarball: Path, server: str, monkeypatch: pytest.MonkeyPatch
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
        (["a", "--remove"], None, "--remove came with a. Expected: no server with it. Next step: leave out the one or"),
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
