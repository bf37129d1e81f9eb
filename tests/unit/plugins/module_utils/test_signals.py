# Copyright (c) 2026, gpufarm contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from ansible_collections.gpufarm.core.tests.unit.patience import wait_for

# It says that it has begun, works until it is ended, or for a hundred looks, and says how it went.
PROGRAM = """
import sys, time
from pathlib import Path
from ansible_collections.gpufarm.core.plugins.module_utils import signals
folder = Path(sys.argv[1])
signals.LOOK_EVERY_S = 0.02
looks, look = [], signals._session
signals._session = lambda: looks.append(1) or look()
try:
    with signals.ended_with_controller():
        (folder / "begun").touch()
        while not (folder / "over").exists() or len(looks) < 100:
            time.sleep(0.005)
    (folder / "done").touch()
    print("answer")
finally:
    (folder / "ended").touch()
"""
SH = 'trap "" HUP; %s "$@" & echo $$ >"$0"; wait'


def begin(folder: Path, command: list[str]) -> subprocess.Popen[bytes]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    started = subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True, env=environment)
    wait_for((folder / "begun").exists)
    return started


def program(folder: Path) -> list[str]:
    (folder / "program.py").write_text(PROGRAM, encoding="utf-8")
    return [sys.executable, str(folder / "program.py"), str(folder)]


def test_a_blank_line_stands_before_the_answer_and_none_within(tmp_path: Path) -> None:
    with begin(tmp_path, program(tmp_path)) as started:
        (tmp_path / "over").touch()
        assert started.stdout
        assert started.stdout.read().strip(b"\n") == b"answer"


def test_it_ends_when_nobody_reads_its_answer(tmp_path: Path) -> None:
    with begin(tmp_path, program(tmp_path)) as started:
        assert started.stdout
        started.stdout.close()
        wait_for((tmp_path / "ended").exists)
    assert not (tmp_path / "done").exists() and started.returncode == 128 + signal.SIGHUP


@pytest.mark.parametrize(
    ("between", "done"),
    [
        # As sshd's is, or that of a worker of Ansible.
        ("setsid sh -c '\"$@\"; true' sh", False),
        # As that of a shell in which somebody has started Ansible and logged out.
        ("", True),
    ],
)
def test_it_ends_with_who_started_its_session(tmp_path: Path, between: str, done: bool) -> None:
    pid = tmp_path / "pid"
    with begin(tmp_path, ["setsid", "--wait", "sh", "-c", SH % between, str(pid), *program(tmp_path)]) as started:
        os.kill(int(wait_for(lambda: pid.exists() and pid.read_text())), signal.SIGKILL)
        if done:
            (tmp_path / "over").touch()
        wait_for((tmp_path / "ended").exists)
        assert (tmp_path / "done").exists() is done
        assert started.stdout
