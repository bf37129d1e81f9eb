# Copyright (c) 2026, gpufarm contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A task's timeout ends what both connections have started, whatever they are about."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from ansible.playbook.play_context import PlayContext
from ansible_collections.gpufarm.core.plugins.connection import wsl, wsl_windows

pytestmark = pytest.mark.controller
ROOT = Path(__file__).resolve().parents[4]
# It tells when it has come to its end. Whoever has started it may be cut off at once, as by the clock of a task.
HANGS = """\
#!{python} -SE
import os, pathlib, signal, time
folder = pathlib.Path({folder!r})
(folder / "begun").write_text(str(os.getpid()))
def waits():
    state = pathlib.Path(f"/proc/{{os.getppid()}}/stat").read_text().rpartition(") ")[2][0]
    time.sleep(0.02)
    return state == "S"
# Who has just started this runs, or is about to; whoever waits for it sleeps.
while {cuts} and not all(waits() for _time in range(10)):
    pass
if {cuts}:
    os.kill(os.getppid(), signal.SIGALRM)
time.sleep({seconds})
(folder / "ended").touch()
"""


class Cut(BaseException):
    """As Ansible's own, which is no Exception."""


@pytest.fixture
def alarm() -> Iterator[None]:
    def cut(_number: int, _frame: object) -> None:
        raise Cut

    before = signal.signal(signal.SIGALRM, cut)
    yield
    signal.signal(signal.SIGALRM, before)


def hanging(folder: Path, *, cuts: bool, seconds: int) -> str:
    program = folder / "program.exe"
    text = HANGS.format(python=sys.executable, folder=str(folder), cuts=cuts, seconds=seconds)
    program.write_text(text, encoding="utf-8")
    program.chmod(0o755)
    return str(program)


def lives(pid: int) -> bool:
    try:
        return ") Z " not in Path(f"/proc/{pid}/stat").read_text(encoding="utf-8")
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.mark.usefixtures("alarm")
@pytest.mark.parametrize("use", ["exec", "put", "fetch"])
@pytest.mark.parametrize(("plugin", "option"), [(wsl, "wsl_exe"), (wsl_windows, "powershell")])
def test_what_is_cut_off_leaves_nothing_running(tmp_path: Path, plugin: object, option: str, use: str) -> None:
    connection = plugin.Connection(PlayContext(), None)
    connection._options = {
        **{name: each.get("default") for name, each in yaml.safe_load(plugin.DOCUMENTATION)["options"].items()},
        "host": "pc",
        "distribution": "Debian",
        option: hanging(tmp_path, cuts=True, seconds=30),
    }
    # More than a pipe holds, of which nothing is read.
    (tmp_path / "file").write_bytes(bytes(1_000_000))
    with pytest.raises(Cut):
        if use == "exec":
            connection.exec_command("true", in_data=bytes(1_000_000))
        elif use == "put":
            connection.put_file(str(tmp_path / "file"), "there")
        else:
            connection.fetch_file("there", str(tmp_path / "back"))
    while lives(int((tmp_path / "begun").read_text())):
        assert not (tmp_path / "ended").exists()
        time.sleep(0.05)
    assert not (tmp_path / "ended").exists()


def test_a_task_with_a_timeout_does_not_wait_for_windows(tmp_path: Path) -> None:
    program = hanging(tmp_path, cuts=False, seconds=90)
    hosts = {"pc": {"ansible_connection": "gpufarm.core.wsl_windows", "ansible_wsl_powershell": program}}
    (tmp_path / "hosts.yml").write_text(yaml.safe_dump({"all": {"hosts": hosts}}), encoding="utf-8")
    done = subprocess.run(
        [Path(sys.executable).with_name("ansible"), "--task-timeout=2", "-i", tmp_path / "hosts.yml", "pc", "-m", "raw",
         "-a", "1"],
        cwd=ROOT, capture_output=True, text=True, check=False,
        env={**os.environ, "ANSIBLE_COLLECTIONS_PATH": str(ROOT / ".collections")},
    )  # fmt: skip
    assert "Timed out after 2 second(s)" in done.stdout, done.stdout + done.stderr
    assert not (tmp_path / "ended").exists()
