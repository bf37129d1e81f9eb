# Copyright (c) 2026, gpufarm contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The connection to Windows, through the double of powershell.exe, or through one that tells what has reached it."""

from __future__ import annotations

import base64
import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from ansible.errors import AnsibleConnectionFailure, AnsibleError, AnsibleFileNotFound
from ansible.playbook.play_context import PlayContext
from ansible_collections.gpufarm.core.plugins.connection import wsl_windows
from ansible_collections.gpufarm.core.plugins.module_utils import wsl as module_utils

from tests.simulator.windows.host import POWERSHELL, SYSTEM32, Distribution, Machine, Windows

pytestmark = pytest.mark.controller
ROOT = Path(__file__).resolve().parents[4]
OPTIONS = yaml.safe_load(wsl_windows.DOCUMENTATION)["options"]
COMMON = ["-NoProfile", "-NonInteractive", "-ExecutionPolicy", "Unrestricted", "-EncodedCommand"]
NAME = "C:\\it's \u2018here\u2019 $x.bin"
# Tells what it was started with, and answers what it was given to answer.
RECORDER = """\
#!{python} -SE
import json, pathlib, sys
folder = pathlib.Path({folder!r})
given = sys.stdin.buffer.read()
with (folder / "seen").open("a") as seen:
    seen.write(json.dumps([sys.argv[1:], given.decode("latin-1")]) + "\\n")
answer = json.loads((folder / "answer").read_text())
sys.stdout.write(answer["stdout"])
sys.stdout.flush()
sys.stderr.buffer.write(answer["stderr"].encode("latin-1"))
sys.exit(answer["code"])
"""


def connect(windows: Windows, **options: Any) -> wsl_windows.Connection:
    connection = wsl_windows.Connection(PlayContext())
    connection._options = {
        **{name: option.get("default") for name, option in OPTIONS.items()},
        "host": "pc",
        "wsl_exe": str(windows.mounted(SYSTEM32)),
        **options,
    }
    return connection


@pytest.fixture
def windows(tmp_path: Path) -> Windows:
    return Windows.create(tmp_path / "windows", Machine("PC1", [Distribution("Debian", default=True)]))


def record(windows: Windows, stdout: str = "", stderr: str = "", code: int = 0) -> None:
    program = windows.mounted(POWERSHELL)
    program.write_text(RECORDER.format(python=sys.executable, folder=str(windows.folder)), encoding="utf-8")
    answer = {"stdout": stdout, "stderr": stderr, "code": code}
    (windows.folder / "answer").write_text(json.dumps(answer), encoding="utf-8")


def seen(windows: Windows) -> list[tuple[list[str], str]]:
    lines = (windows.folder / "seen").read_text(encoding="utf-8").splitlines()
    return [(words, given) for words, given in map(json.loads, lines)]


def script_of(words: list[str]) -> str:
    assert words[:-1] == COMMON
    return base64.b64decode(words[-1]).decode("utf-16-le")


@pytest.mark.parametrize(
    ("name", "wanted", "arguments"),
    [
        ("test.windows.ping", "test.windows.ping", "data='a \"b\" %PATH% ü'"),
        # Ansible's own actions ask for modules by names of Linux.
        ("ansible.builtin.wait_for_connection", "ansible.windows.win_ping", "timeout=1"),
    ],
)
def test_a_module_reaches_powershell_as_ansible_itself_sends_it(
    windows: Windows, tmp_path: Path, name: str, wanted: str, arguments: str
) -> None:
    """No PowerShell can run it here; over SSH it gets the same command and the same input."""
    record(windows, stdout='{"changed": false, "ping": "pong"}\r\n')
    namespace, collection, module = wanted.split(".")
    folder = tmp_path / "collections/ansible_collections" / namespace / collection / "plugins/modules"
    folder.mkdir(parents=True)
    script = "#!powershell\n#AnsibleRequires -CSharpUtil Ansible.Basic\n# grüße\n'pong'\n"
    (folder / f"{module}.ps1").write_text(script, encoding="utf-8")
    (tmp_path / "hosts.yml").write_text(
        yaml.safe_dump(
            {"all": {"hosts": {"pc": {
                "ansible_connection": "gpufarm.core.wsl_windows", "wsl_exe": str(windows.mounted(SYSTEM32)),
            }}}}
        )
    )  # fmt: skip
    done = subprocess.run(
        [Path(sys.executable).with_name("ansible"), "-i", tmp_path / "hosts.yml", "pc", "-m", name, "-a", arguments],
        cwd=ROOT, capture_output=True, text=True, check=False,
        env={**os.environ, "ANSIBLE_COLLECTIONS_PATH": f"{tmp_path / 'collections'}:{ROOT / '.collections'}"},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    words, given = seen(windows)[-1]
    assert "Ansible requires PowerShell v5.1" in script_of(words)
    # Only ASCII is the same in every code page of a console.
    assert given.isascii()
    wrapper, payload = (json.loads(part) for part in given.split("\n\0\0\0\0\n"))
    assert wrapper["name"].startswith("exec_wrapper")
    scripts = [base64.b64decode(each["script"]) for each in payload["scripts"].values()]
    assert any("# grüße".encode() in script for script in scripts)
    if name == wanted:
        assert "ping: pong" in done.stdout
        assert 'a \\"b\\" %PATH% ü' in json.dumps(payload["actions"], ensure_ascii=False)


def test_a_command_is_a_script_and_its_code_is_that_of_the_last_program(windows: Windows) -> None:
    record(windows, stdout="out\r\n", stderr="err\r\n", code=3)
    text = "& 'C:\\a b.exe' \"100%\" ü \U0001f5a5"
    assert connect(windows).exec_command(text) == (3, b"out\r\n", b"err\r\n")
    ((words, given),) = seen(windows)
    script = script_of(words)
    assert script.splitlines()[0] == text
    assert "exit $LASTEXITCODE" in script
    assert given == ""


@pytest.mark.parametrize("name", ["PowerShell", "powershell", "powershell.exe"])
@pytest.mark.parametrize("quote", ["", "'"])
def test_what_is_a_command_line_of_powershell_is_not_put_into_another(windows: Windows, name: str, quote: str) -> None:
    """Of ansible-core 2.19, and of 2.21, which puts quotes around base64 with a plus sign."""
    record(windows)
    connect(windows).exec_command(f"{name} {' '.join(COMMON)} {quote}QQ+BAA=={quote}", in_data=b"\0\xff\r\n")
    assert seen(windows) == [([*COMMON, "QQ+BAA=="], "\0\xff\r\n")]


def test_a_pipe_is_a_script(windows: Windows) -> None:
    """ANSIBLE_KEEP_REMOTE_FILES of ansible-core 2.19."""
    record(windows)
    command = f"type 'C:\\x.ps1' | PowerShell {' '.join(COMMON)} QQBCAA=="
    connect(windows).exec_command(command)
    assert script_of(seen(windows)[0][0]).startswith(command)


@pytest.mark.parametrize("code", [0, 1, 3, 255])
def test_return_codes_are_those_of_a_program(windows: Windows, code: int) -> None:
    with windows.changed() as machine:
        machine.distributions[0].users = {"root": os.geteuid()}
    connection = connect(windows)
    found, _stdout, _stderr = connection.exec_command(f"& 'wsl.exe' -d Debian --exec /bin/sh -c 'exit {code}'")
    assert found == code


def test_a_sibling_is_ended_by_a_command(windows: Windows) -> None:
    assert connect(windows).exec_command("& 'wsl.exe' --terminate Debian")[0] == 0
    assert windows.machine.distributions[0].state == "Stopped"
    assert connect(windows).exec_command("& 'wsl.exe' --terminate Nobody")[0] == 255


@pytest.mark.parametrize("size", [0, 1, 196_608, 700_001])
def test_files_arrive_as_they_are(windows: Windows, tmp_path: Path, size: int) -> None:
    raw = random.Random(size).randbytes(size)  # noqa: S311
    (tmp_path / "file").write_bytes(raw)
    connection = connect(windows)
    connection.put_file(str(tmp_path / "file"), NAME)
    assert windows.mounted(NAME).read_bytes() == raw
    connection.fetch_file(NAME, str(tmp_path / "back"))
    assert (tmp_path / "back").read_bytes() == raw
    assert len(windows.calls()) == 2


def test_files_that_cannot_be_had(windows: Windows, tmp_path: Path) -> None:
    connection = connect(windows)
    (tmp_path / "file").write_bytes(bytes(10_000_000))
    refused = (
        r"\. Expected: a path that the user of this connection may use\. Next step: correct it, or what that user may "
        r"do there\.$"
    )
    with pytest.raises(
        AnsibleError, match=rf"^pc: C:\\no\\file cannot be written: .*Could not find a part of the path.*{refused}"
    ):
        connection.put_file(str(tmp_path / "file"), r"C:\no\file")
    with pytest.raises(
        AnsibleError, match=rf"^pc: C:\\file cannot be read: .*Could not find file 'C:\\file'.*{refused}"
    ):
        connection.fetch_file(r"C:\file", str(tmp_path / "back"))
    assert not (tmp_path / "back").exists()
    with pytest.raises(AnsibleFileNotFound) as failure:
        connection.put_file(str(tmp_path / "nothing"), r"C:\file")
    assert str(failure.value).startswith(
        f"pc: {tmp_path}/nothing is not there to be copied. Expected: a file where Ansible runs. Next step: correct "
        "its path."
    )


def test_files_of_which_a_part_arrives(windows: Windows, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"12345")
    record(windows, stdout="4\r\n")
    with pytest.raises(AnsibleError, match=r"pc: of the 5 bytes of .*/file, 4 arrived in C:\\x. Next step: look"):
        connect(windows).put_file(str(tmp_path / "file"), r"C:\x")
    record(windows, stdout="5\r\nMTIz\r\nND")
    with pytest.raises(AnsibleError, match=r"pc: of the 5 bytes of C:\\x, 3 arrived. Next step: look"):
        connect(windows).fetch_file(r"C:\x", str(tmp_path / "back"))
    assert not (tmp_path / "back").exists()


def xml(*entries: str) -> str:
    return '#< CLIXML\r\n<Objs Version="1.1.0.1" xmlns="http://x/2004/04">' + "".join(entries) + "</Objs>"


@pytest.mark.parametrize(
    ("stderr", "text"),
    [
        (b"plain\r\n", b"plain\r\n"),
        (xml('<S S="Error">a &lt;b&gt; &amp;amp;_x000D__x000A_</S>').encode(), b"a <b> &amp;\r\n"),
        (b"before\r\n" + xml('<Obj S="progress"><I64>1</I64></Obj>').encode() + b"after", b"before\r\nafter"),
        (xml('<S S="Error">one</S>', '<S S="Warning">w</S>', '<S S="Error">two</S>').encode(), b"onetwo"),
        (xml('<S S="Error">_xD83D__xDDA5_ ü</S>').encode(), "\U0001f5a5 ü".encode()),
        (xml('<S S="Error">ü</S>').encode("cp437"), "ü".encode()),
        (xml('<S S="Error">a</S>').encode()[:-7], xml('<S S="Error">a</S>').encode()[:-7]),
        (xml('<S S="Error">lone _xD83D_</S>').encode(), "lone \ufffd".encode()),
    ],
)
def test_errors_are_text(windows: Windows, stderr: bytes, text: bytes) -> None:
    record(windows, stderr=stderr.decode("latin-1"), code=1)
    assert connect(windows).exec_command("x") == (1, b"", text)


def test_a_command_that_is_too_long(windows: Windows) -> None:
    assert connect(windows).exec_command(f"'{'x' * 11_000}'")[0] == 0
    with pytest.raises(AnsibleError, match=r"pc: the command has 13002 char.* at most 32766. Next step: put it into"):
        connect(windows).exec_command(f"'{'x' * 13_000}'")


def test_interop_that_is_switched_off(windows: Windows) -> None:
    windows.mounted(POWERSHELL).write_bytes(b"MZ\x90\0" + bytes(4096))
    with pytest.raises(AnsibleConnectionFailure, match=r"pc: this distribution cannot run .*powershell.exe: interop"):
        connect(windows).exec_command("1")


@pytest.mark.parametrize("state", ["lost", "stale"])
def test_an_interop_without_a_session(
    windows: Windows, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, state: str
) -> None:
    monkeypatch.setenv("WSL_INTEROP", "/run/WSL/9_interop")
    with windows.changed() as machine:
        machine.interop = state
    expected = r"pc: nothing came of .*powershell.exe.*; WSL_INTEROP is '/run/WSL/9_interop'. Expected: "
    (tmp_path / "file").write_bytes(b"x")
    for use in (
        lambda: connect(windows).exec_command("1"),
        lambda: connect(windows).put_file(str(tmp_path / "file"), r"C:\x"),
        lambda: connect(windows).fetch_file(r"C:\x", str(tmp_path / "back")),
    ):
        with pytest.raises(AnsibleConnectionFailure, match=expected):
            use()


def test_a_command_that_fails_silently_is_the_commands_own(windows: Windows) -> None:
    assert connect(windows).exec_command("exit 1") == (1, b"", b"")


def test_where_powershell_is(windows: Windows, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drive = "/windows/c/"
    for place in module_utils.PLACES:
        assert module_utils.powershells(place.replace("/mnt/c/", drive)) == [drive + module_utils.POWERSHELL]
    monkeypatch.setenv("PATH", str(tmp_path))
    assert module_utils.powershells("/usr/local/bin/wsl.exe") == [f"/mnt/c/{module_utils.POWERSHELL}"]
    (tmp_path / "powershell.exe").touch(mode=0o755)
    assert module_utils.powershells(None)[0] == str(tmp_path / "powershell.exe")
    windows.mounted(POWERSHELL).unlink()
    with pytest.raises(AnsibleConnectionFailure, match=r"pc: powershell.exe was not found.*set ansible_wsl_powershell"):
        connect(windows).exec_command("1")
    with pytest.raises(AnsibleConnectionFailure, match=r"was not found \(/no/powershell.exe\)"):
        connect(windows, powershell="/no/powershell.exe").exec_command("1")
