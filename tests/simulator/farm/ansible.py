"""Runs a playbook against a farm, shows how far it is, and says why it failed."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.simulator.cache import ROOT
from tests.simulator.farm import INVENTORY

RECAP = re.compile(r"^(\S+)\s+: (ok=\d+ .*)$")


class PlaybookError(RuntimeError):
    """A playbook failed; the message holds Ansible's reason and the log's place."""


def command(playbook: str, extra: dict[str, Any] | None = None, *options: str) -> list[str]:
    """Return the ansible-playbook command line against the farm's inventory."""
    line = [str(Path(sys.executable).with_name("ansible-playbook")), "-i", str(INVENTORY), playbook, *options]
    return line + (["--extra-vars", json.dumps(extra)] if extra else [])


def playbook(
    name: str, environment: dict[str, str], log: Path, say: Callable[[str], None], extra: dict[str, Any] | None = None
) -> dict[str, dict[str, int]]:
    """Run a playbook and return its recap (host → ok, changed, failed, ... → count); PlaybookError if it fails."""
    terminal = sys.stdout.isatty()
    begun = time.monotonic()
    lines: list[str] = []
    tasks = 0
    role = ""
    with (
        log.open("w", encoding="utf-8") as output,
        subprocess.Popen(
            command(name, extra), cwd=ROOT, env=environment, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL,
        ) as process,
    ):  # fmt: skip
        assert process.stdout is not None
        for line in process.stdout:
            output.write(line)
            lines.append(line.rstrip("\n"))
            if line.startswith("PLAY ["):
                _clear(terminal)
                say(f"      {time.monotonic() - begun:4.0f} s  {line[6:].split(']')[0]}")
            elif line.startswith("TASK ["):
                tasks += 1
                title = line[6:].split("]")[0].replace("gpufarm.core.", "")
                named = title.split(" : ")[0] if " : " in title else ""
                if not terminal and named not in ("", "_common", role):
                    role = named
                    say(f"      {time.monotonic() - begun:4.0f} s    {role}")
                if terminal:
                    shown = f"      {time.monotonic() - begun:4.0f} s  task {tasks}: {title}"
                    # A longer line would wrap, and only its end be cleared.
                    sys.stdout.write(f"\r\033[K{shown[: shutil.get_terminal_size().columns - 1]}")
                    sys.stdout.flush()
        code = process.wait()
    _clear(terminal)
    if code:
        raise PlaybookError(f"{name} failed with exit code {code}.\n{reason(lines)}\nLog: {log}")
    return recap(lines)


def _clear(terminal: bool) -> None:
    if terminal:
        sys.stdout.write("\r\033[K")


def recap(lines: list[str]) -> dict[str, dict[str, int]]:
    """Return the counts of Ansible's PLAY RECAP."""
    found: dict[str, dict[str, int]] = {}
    for line in lines:
        match = RECAP.match(line)
        if match:
            found[match[1]] = {key: int(value) for key, value in re.findall(r"(\w+)=(\d+)", match[2])}
    return found


def reason(lines: list[str], most: int = 25) -> str:
    """Return the part of Ansible's output that says what failed."""
    picked: list[str] = []
    for number, line in enumerate(lines):
        if line.startswith(("fatal:", "failed:", "[ERROR]", "ERROR!")):
            for following in lines[number : number + most]:
                if not following.strip() or following.startswith(("TASK [", "PLAY ")):
                    break
                picked.append(f"  {following}")
    return "\n".join(picked[: 2 * most]) or "\n".join(lines[-most:])
