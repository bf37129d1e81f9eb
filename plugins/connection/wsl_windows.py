# Copyright (c) 2026, gpufarm contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
name: wsl_windows
short_description: Run tasks in Windows from a WSL distribution of the same machine
version_added: 1.0.0
author:
  - gpufarm contributors (@gpufarm)
description:
  - Runs commands and modules for Windows on the machine below the distribution that Ansible runs in, through WSL's
    interop and C(powershell.exe), without SSH or WinRM.
  - Tasks run as the Windows user of the terminal in which Ansible was started, and have an administrator's rights only
    where that terminal has them.
  - The inventory plugin P(gpufarm.core.wsl#inventory) gives this connection to a machine that it asks locally.
options:
  host:
    description: Name of the machine, for messages.
    type: str
    default: Windows
    vars:
      - name: inventory_hostname
  wsl_exe:
    description: Path of C(wsl.exe) as this distribution sees it, on the drive that has PowerShell, too.
    type: str
    vars:
      - name: wsl_exe
  powershell:
    description:
      - Path of C(powershell.exe) as this distribution sees it.
      - If not set, it is that of Windows on the drive of O(wsl_exe), else the first on E(PATH), else where Windows has
        it below C(/mnt/c).
    type: str
    vars:
      - name: ansible_wsl_powershell
notes:
  - Linux keeps the last byte of an exit code of Windows, so -1 is 255 and 256 is 0.
  - A command of more than about 12,000 characters is refused, because Windows takes no command line of more than
    32,766. Modules do not count, for they come through standard input.
"""

EXAMPLES = r"""
# An inventory
all:
  hosts:
    this-pc:
      ansible_connection: gpufarm.core.wsl_windows
"""

import base64
import binascii
import contextlib
import html
import re
import subprocess
from pathlib import Path
from typing import IO, Any, cast

from ansible.errors import AnsibleError
from ansible.module_utils.common.text.converters import to_text
from ansible.plugins.connection import ConnectionBase
from ansible.utils.display import Display
from ansible_collections.gpufarm.core.plugins.module_utils import wsl
from ansible_collections.gpufarm.core.plugins.plugin_utils import interop
from ansible_collections.gpufarm.core.plugins.plugin_utils.wsl import single_quoted

display = Display()

OPTIONS = ("-NoProfile", "-NonInteractive", "-ExecutionPolicy", "Unrestricted", "-EncodedCommand")
# What the shell plugin has already made a command line of PowerShell; the name of the program counts no more.
READY = re.compile(r"powershell(?:\.exe)?((?: -[a-z]+(?: '?[a-z0-9+/=]+'?)?)+)", re.IGNORECASE)
# PowerShell itself would make 1 of the code of a program.
EXIT = "\nif (-not $?) { if ($LASTEXITCODE) { exit $LASTEXITCODE }\nexit 1 }"
# PowerShell reads standard input line by line in its console's code page, so that bytes have to be letters.
PUT = """\
$ErrorActionPreference = 'Stop'
$file = [IO.File]::Create('{path}')
foreach ($line in $input) {{
  $raw = [Convert]::FromBase64String($line)
  $file.Write($raw, 0, $raw.Length)
}}
$file.Length
$file.Close()
"""
FETCH = """\
$ErrorActionPreference = 'Stop'
$file = [IO.File]::Open('{path}', 'Open', 'Read', 'ReadWrite')
$file.Length
$raw = [byte[]]::new({chunk})
$count = $file.Read($raw, 0, $raw.Length)
while ($count) {{
  [Convert]::ToBase64String($raw, 0, $count)
  $count = $file.Read($raw, 0, $raw.Length)
}}
"""
CHUNK = 196_608
CLIXML = re.compile(rb"#< CLIXML\r?\n(?:<Objs .*?</Objs>)+", re.DOTALL)
ERROR = re.compile(r'<S S="Error">(.*?)</S>', re.DOTALL)


def arguments_of(script: str) -> list[str]:
    """Arguments of powershell.exe for a script, in which nothing is left for its quoting rules."""
    return [*OPTIONS, base64.b64encode(script.encode("utf-16-le", "surrogatepass")).decode("ascii")]


def readable_errors(stderr: bytes) -> bytes:
    """Standard error of PowerShell, with the text of errors in place of the XML in which it sends objects."""

    def text(found: re.Match[bytes]) -> bytes:
        try:
            xml = found.group().decode("utf-8")
        except UnicodeDecodeError:
            # A console's code page; every byte is a character of this one.
            xml = found.group().decode("cp437")
        errors = html.unescape("".join(ERROR.findall(xml)))
        units = re.sub("_x([0-9A-Fa-f]{4})_", lambda unit: chr(int(unit[1], 16)), errors)
        # A character beyond the first 65,536 comes as two.
        return units.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace").encode()

    return CLIXML.sub(text, stderr)


class Connection(ConnectionBase):  # type: ignore[misc] # ansible-core has no types
    """Commands in Windows, through powershell.exe."""

    transport = "gpufarm.core.wsl_windows"
    module_implementation_preferences = (".ps1", ".exe", "")
    has_pipelining = True
    always_pipeline_modules = True
    has_native_async = True
    allow_executable = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._shell_type = "powershell"
        super().__init__(*args, **kwargs)
        self._connected = False

    def _connect(self) -> Connection:
        if not self._connected:
            self._program = interop.Program.found(
                str(self.get_option("host")), "powershell.exe", "ansible_wsl_powershell",
                self.get_option("powershell"), wsl.powershells(self.get_option("wsl_exe")),
            )  # fmt: skip
            display.vvv("ESTABLISH CONNECTION TO WINDOWS THROUGH INTEROP", host=self._program.host)
            self._connected = True
        return self

    def exec_command(self, cmd: str, in_data: bytes | None = None, sudoable: bool = True) -> tuple[int, bytes, bytes]:
        super().exec_command(cmd, in_data=in_data, sudoable=sudoable)
        command = to_text(cmd)
        display.vvv(f"EXEC {command}", host=self._program.host)
        ready = READY.fullmatch(command)
        arguments = ready[1].replace("'", "").split() if ready else arguments_of(command + EXIT)
        self._program.require_short(arguments, command)
        with self._program.running(arguments) as process:
            stdout, stderr = process.communicate(in_data or b"")
        self._refuse_silence(process.returncode, stdout, stderr)
        return process.returncode, stdout, readable_errors(stderr)

    def _refuse_silence(self, code: int, stdout: bytes, stderr: bytes) -> None:
        """Raise why nothing has come, unless PowerShell itself was silent."""
        if not code or stdout or (stderr and not stderr.startswith(interop.SAYS)):
            return
        if not stderr and self._program.answered(arguments_of("1"))[1].strip() == b"1":
            return
        self._program.refuse_silence(stderr)

    def put_file(self, in_path: str, out_path: str) -> None:
        super().put_file(in_path, out_path)
        display.vvv(f"PUT {in_path} TO {out_path}", host=self._program.host)
        size = 0
        with (
            self._program.source(to_text(in_path)) as source,
            self._program.running(arguments_of(PUT.format(path=single_quoted(out_path)))) as process,
        ):
            stdin: IO[bytes] = cast("IO[bytes]", process.stdin)
            # Where it ends early, it says why.
            with contextlib.suppress(BrokenPipeError):
                while chunk := source.read(CHUNK):
                    size += len(chunk)
                    stdin.write(base64.b64encode(chunk) + b"\r\n")
                stdin.flush()
            stdout, stderr = process.communicate()
        self._require(process.returncode, stdout, stderr, f"{out_path} cannot be written")
        if stdout.strip() != str(size).encode():
            self._refuse_part(str(size), in_path, f"{wsl.readable(stdout) or 0} arrived in {out_path}")

    def fetch_file(self, in_path: str, out_path: str) -> None:
        super().fetch_file(in_path, out_path)
        display.vvv(f"FETCH {in_path} TO {out_path}", host=self._program.host)
        target = Path(to_text(out_path))
        script = FETCH.format(path=single_quoted(in_path), chunk=CHUNK)
        arrived = 0
        try:
            with (
                target.open("wb") as file,
                self._program.running(arguments_of(script), stdin=subprocess.DEVNULL) as process,
            ):
                stdout, stderr = (cast("IO[bytes]", each) for each in (process.stdout, process.stderr))
                # The size goes ahead, so that a file that ends too early is told from a short one.
                size = stdout.readline().strip()
                for line in stdout:
                    # Of one that breaks off, what comes first counts.
                    with contextlib.suppress(binascii.Error):
                        arrived += file.write(base64.b64decode(line))
                said = stderr.read()
                process.wait()
            self._require(process.returncode, size, said, f"{in_path} cannot be read")
            # A log may have grown meanwhile.
            if not size.isdigit() or arrived < int(size):
                self._refuse_part(wsl.readable(size) or "?", in_path, f"{arrived} arrived")
        except AnsibleError:
            target.unlink(missing_ok=True)
            raise

    def _require(self, code: int, stdout: bytes, stderr: bytes, failed: str) -> None:
        self._refuse_silence(code, stdout, stderr)
        if code:
            self._program.refuse_file(failed, wsl.readable(readable_errors(stderr)))

    def _refuse_part(self, size: str, path: str, arrived: str) -> None:
        raise AnsibleError(
            f"{self._program.host}: of the {size} bytes of {path}, {arrived}. Next step: look whether PowerShell was "
            "ended meanwhile, and run it again."
        )

    def reset(self) -> None:
        self.close()

    def close(self) -> None:
        self._connected = False
