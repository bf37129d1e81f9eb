# Copyright (c) gpufarm contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What running engines answer when they are asked for their runtimes."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

from ansible_collections.gpufarm.core.plugins.module_utils.commands import Command, run_commands
from ansible_collections.gpufarm.core.plugins.module_utils.container_engines import cri

SOCKET = "/run/containerd/containerd.sock"
DOCKER = ("docker", "info", "--format", '{"runtimes": {{json .Runtimes}}, "default": {{json .DefaultRuntime}}}')
PODMAN = ("podman", "info", "--format", "{{.Host.OCIRuntime.Name}} {{.Version.Version}}")
# The second is that of CRI-O before 1.30.
CRIO = (("crio", "status", "config"), ("crio-status", "config"))
DEVICES = ("nvidia-ctk", "cdi", "list")
# Of nvidia-cdi-refresh.service: where it has its settings, and where it writes to without any.
REFRESH = Path("/etc/nvidia-container-toolkit/nvidia-cdi-refresh.env")
OUTPUT = "NVIDIA_CTK_CDI_OUTPUT_FILE_PATH"
STRATEGIES = "NVIDIA_CTK_CDI_GENERATE_DEVICE_NAME_STRATEGIES"
SPECIFICATION = "/var/run/cdi/nvidia.yaml"
# As systemd's services have it. nvidia-ctk names programs by the folder that PATH has first: under RHEL's sudo by /bin.
SERVICE_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
DROP_INS = ("systemctl", "show", "--property=DropInPaths", "--value", "nvidia-cdi-refresh.service")
# By which somebody has that service make another specification than its own settings do.
OWN_WAY = re.compile(r"^\s*(?:Environment|EnvironmentFile|ExecStart)\s*=", re.MULTILINE)
# What nvidia-ctk mounts while it is there, which for a socket begins after the service has run at boot.
PASSING = re.compile(
    r"^( *)- hostPath: \S*/(?:run/nvidia-(?:persistenced|fabricmanager)/socket|tmp/nvidia-mps)\n(?:\1 .*\n)*",
    re.MULTILINE,
)


@dataclasses.dataclass(frozen=True)
class Engine:
    """A running engine; C(reason) says why it does not answer, C(default) is None where it names none.

    Podman alone tells its version.
    """

    runtimes: dict[str, str]
    default: str | None = None
    reason: str | None = None
    version: str | None = None

    @property
    def told(self) -> dict[str, Any]:
        return {"answers": self.reason is None, **dataclasses.asdict(self)}


def why(answer: Command) -> str:
    """Why a program gave no answer: the first line of its errors."""
    if answer.timed_out:
        return f"{answer.argv[0]} did not end within {answer.limit:.0f} s"
    lines = answer.stderr.strip().splitlines()
    return lines[0] if lines else answer.error or "no reason given"


def docker(answer: Command) -> Engine:
    """Every daemon has runc. Docker's client of Debian 13 has no error of its own where no daemon answers."""
    try:
        said = json.loads(answer.stdout) if answer.returncode == 0 else {}
    except ValueError:
        said = {}
    if not said.get("runtimes"):
        return Engine({}, reason=why(answer))
    return Engine({name: one.get("path") or "" for name, one in said["runtimes"].items()}, said["default"])


def podman(answer: Command) -> Engine:
    """Podman has no daemon and needs no runtime of NVIDIA's: it reads the CDI specification itself."""
    if answer.returncode != 0:
        return Engine({}, reason=why(answer))
    runtime, _space, version = answer.stdout.strip().partition(" ")
    return Engine({runtime: ""}, runtime, version=version or None)


def crio(answers: list[Command]) -> Engine:
    """CRI-O prints the settings that it goes by as TOML: [crio.runtime.runtimes.NAME] with runtime_path in it."""
    text = next((answer.stdout for answer in answers if answer.returncode == 0), None)
    if text is None:
        # Who is not installed has less to say.
        return Engine({}, reason=why(next((one for one in answers if one.returncode is not None), answers[0])))
    found: dict[str, str] = {}
    default = None
    section = ""
    for line in text.splitlines():
        heading = re.match(r'\s*\[crio\.runtime(?:\.runtimes\."?([^]"]+)"?)?\]\s*$', line)
        value = re.match(r'\s*(default_runtime|runtime_path)\s*=\s*"(.*)"\s*$', line)
        if re.match(r"\s*\[", line):
            section = ("runtime " + (heading[1] or "")).strip() if heading else ""
            if heading and heading[1]:
                found[heading[1]] = ""
        elif value and section == "runtime" and value[1] == "default_runtime":
            default = value[2]
        elif value and section.startswith("runtime ") and value[1] == "runtime_path":
            found[section.split(" ", 1)[1]] = value[2]
    return Engine(found, default)


def containerd(path: str, timeout: float) -> Engine:
    try:
        found, default = cri.runtimes(path, timeout)
    except cri.CriError as error:
        return Engine({}, reason=f"{path}: {error}")
    return Engine(found, default)


def text_of(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return None


def refresh_settings() -> dict[str, str]:
    """The settings by which the specification is made again: of systemd's files, as many as such a one needs."""
    lines = (text_of(REFRESH) or "").splitlines()
    return dict(re.findall(r"""^\s*([A-Z_]+)=["']?(.*?)["']?\s*$""", "\n".join(lines), re.MULTILINE))


def by_index() -> bool:
    """Whether that service names devices by index, as it does without a setting of its own."""
    return "index" in map(str.strip, refresh_settings().get(STRATEGIES, "index").split(","))


def version_of(specification: str | None) -> str | None:
    """The version of the Container Device Interface that a specification asks an engine to know."""
    found = re.search(r"""^cdiVersion:\s*["']?([0-9.]+)""", specification or "", re.MULTILINE)
    return found[1] if found else None


def is_current(made: Command, there: str | None) -> bool | None:
    """Whether the specification is what would be made now, passing mounts left out; None where none can be made."""
    if made.returncode != 0 or not made.stdout:
        return None
    return there is not None and PASSING.sub("", made.stdout) == PASSING.sub("", there)


def ask(names: list[str], path: str, timeout: float) -> tuple[dict[str, Engine], Command, bool | None, str | None]:
    """Ask the engines at the same time, and nvidia-ctk for the CDI devices, and for their specification."""
    settings = refresh_settings()
    there = text_of(Path(settings.pop(OUTPUT, SPECIFICATION)))
    settings = {"PATH": SERVICE_PATH, **settings}
    generate = ["env", "-u", OUTPUT, *map("=".join, settings.items()), "nvidia-ctk", "cdi", "generate"]
    calls: dict[str, list[tuple[str, ...]]] = {"docker": [DOCKER], "podman": [PODMAN], "crio": list(CRIO)}
    asked = [(name, argv) for name in names for argv in calls.get(name, [])]
    calls_of_all = [*[argv for _name, argv in asked], DEVICES, DROP_INS, generate]
    *answers, devices, drop_ins, made = run_commands(calls_of_all, timeout)
    by_name: dict[str, list[Command]] = {}
    for (name, _argv), answer in zip(asked, answers):
        by_name.setdefault(name, []).append(answer)
    found = {}
    for name in names:
        if name == "containerd":
            found[name] = containerd(path, timeout)
        elif name == "crio":
            found[name] = crio(by_name[name])
        elif name == "podman":
            found[name] = podman(by_name[name][0])
        else:
            found[name] = docker(by_name[name][0])
    own_way = any(OWN_WAY.search(text_of(Path(path)) or "") for path in drop_ins.stdout.split())
    return found, devices, None if own_way else is_current(made, there), version_of(there)
