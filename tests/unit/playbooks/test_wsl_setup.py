# Copyright (c) 2026, gpufarm contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""examples/wsl/setup.sh, up to the playbook that it runs; its venv is that of the tests, so nothing is downloaded."""

from __future__ import annotations

import os
import pty
import re
import shutil
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
    home: Path, *arguments: object, typed: str = "", distribution: str | None = "Debian", collections: object = ""
) -> subprocess.CompletedProcess[str]:
    program = Windows(home / "windows").mounted(SYSTEM32)
    environment = {
        **os.environ, "HOME": str(home), "PATH": f"{program.parent}:{os.environ['PATH']}",
        "GPUFARM_COLLECTIONS": str(collections), "ANSIBLE_LOCALHOST_WARNING": "False",
    }  # fmt: skip
    environment |= {"WSL_DISTRO_NAME": distribution} if distribution else {}
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


def good(done: subprocess.CompletedProcess[str]) -> str:
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_this_distribution_alone_becomes_a_node(home: Path, tarball: Path) -> None:
    # The playbook itself would make this machine a node.
    said = good(run(home, "192.0.2.10", "nomad.example", "--", "--list-hosts", collections=tarball))
    plays = {name.strip(): body.split() for name, _tags, body in re.findall(r"\): (.*)\tTAGS(.*)((?:\n +.*)+)", said)}
    assert plays["Windows machines"][-1] == "this-pc"
    assert plays["GPU nodes"][-1] == "this-pc-Debian"
    assert "Other" not in said
    assert 'nomad_client_servers: ["192.0.2.10", "nomad.example"]' in (home / SERVERS).read_text()
    core = home / ".local/share/gpufarm/collections/ansible_collections/gpufarm/core"
    assert (core / "playbooks/wsl.yml").exists()
    assert (core / "examples/wsl/setup.sh").exists()

    before = {path: (home / path).read_bytes() for path in (SERVERS, WINDOWS)}
    again = good(run(home, "--", "--list-hosts"))
    assert "stays as it is" not in again
    assert {path: (home / path).read_bytes() for path in before} == before


def test_a_file_of_the_user_stays_unless_he_says_otherwise(home: Path, tarball: Path) -> None:
    good(run(home, "192.0.2.10", "--", "--list-hosts", collections=tarball))
    (home / SERVERS).write_text("all: {vars: {mine: true}}\n")
    assert f"{SERVERS} stays as it is" in good(run(home, "192.0.2.11", "--", "--list-hosts"))
    assert "mine" in (home / SERVERS).read_text()
    good(run(home, "192.0.2.11", "--", "--list-hosts", typed="no\n"))
    assert "mine" in (home / SERVERS).read_text()
    good(run(home, "192.0.2.11", "--", "--list-hosts", typed="yes\n"))
    assert "192.0.2.11" in (home / SERVERS).read_text()
    assert sorted(path.name for path in (home / "gpufarm").iterdir()) == ["servers.yml", "windows.wsl.yml"]


def test_the_printed_address_is_that_of_this_script() -> None:
    (repository,) = re.findall(
        r"^repository: https://github\.com/(\S+)$", (ROOT / "galaxy.yml").read_text("utf-8"), re.M
    )
    printed = re.findall(r"curl\.exe -fsSL (\S+)", (ROOT / "docs/wsl.md").read_text("utf-8"))
    path = SCRIPT.relative_to(ROOT)
    assert printed == [f"https://raw.githubusercontent.com/{repository}/main/{path}"]


def test_it_asks_for_the_server(home: Path, tarball: Path) -> None:
    good(run(home, "--", "--list-hosts", typed="192.0.2.12 192.0.2.13\n", collections=tarball))
    assert '["192.0.2.12", "192.0.2.13"]' in (home / SERVERS).read_text()


@pytest.mark.parametrize(
    ("arguments", "distribution", "text"),
    [
        (
            ["192.0.2.10"],
            None,
            "this is no terminal of a WSL distribution, for WSL_DISTRO_NAME is not set. Exp",
        ),
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
