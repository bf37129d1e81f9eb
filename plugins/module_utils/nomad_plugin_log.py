# Copyright (c) 2026, gpufarm contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What a node's agent and its device plugin say of the GPUs in the journal, and what that most likely means.

Nomad itself tells no server why a node has no devices: the plugin logs it, once, and is asked no more.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Iterator

from ansible_collections.gpufarm.core.plugins.module_utils import command_lines
from ansible_collections.gpufarm.core.plugins.module_utils.text import clean

UNIT = "nomad"
READ_S = 30.0
# The newest of them, each cut off.
LINES = 5
LINE_CHARS = 300

# Of these parts of an agent alone, so that nothing else of its log is told. A text of several lines follows its line,
# each behind a bar, and so do fields.
SAID = re.compile(r"\[(?:WARN|ERROR)\] +(client\.device_mgr|agent\.plugin_loader)\S*?: (.*)")
FOLLOWS = re.compile(r"\s*(?:\|(.*)|\S+=.*)")
# What tells nothing of the cause.
FIELDS = re.compile(r" (?:plugin|plugin_dir|timestamp|@module|@caller|id)=\S+")
SECRETS = re.compile(r"(?<![-\w])[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}|(?<=//)[^/@\s]+@")

RESTART = "then restart Nomad there, because it asks the plugin no more"


@dataclasses.dataclass(frozen=True)
class Cause:
    """What a word of the plugin means; its errors are those of NVML, in words or by their names there."""

    pattern: str
    cause: str
    next_step: str


CAUSES = (
    Cause(
        r"version.mismatch",
        "a driver mismatch: the kernel module that is loaded and the libraries are of two versions",
        "reboot the node, by playbooks/site.yml with nvidia_driver_reboot",
    ),
    Cause(
        r"driver.not.loaded",
        "the driver was not loaded when the agent started",
        f"see that nvidia-smi lists the GPUs on the node, {RESTART}",
    ),
    Cause(
        r"library.not.found|could not load NVML|libnvidia-ml",
        "no NVML: the plugin did not find libnvidia-ml.so.1 when the agent started",
        f"see that `ldconfig -p` lists it on the node, {RESTART}",
    ),
    Cause(
        r"access.blocked|operating.system",
        "the operating system keeps the GPU, as Windows does one in TCC mode",
        f"set the GPU to another driver model on Windows, {RESTART}",
    ),
    Cause(
        r"permission",
        "the agent may not use the GPU's devices",
        f"see that the agent runs as root, and what keeps it from /dev/nvidiactl, {RESTART}",
    ),
    # As of unified memory (nomad-device-nvidia#86).
    Cause(
        r"failed to get .*not.supported",
        "a plugin that asks what this GPU does not tell, which hides all of the node",
        "give a build of the plugin that does without it in nomad_device_nvidia_program; those after release 1.1.0 do "
        "without BAR1, memory info and memory clock",
    ),
    Cause(
        r"DeviceInfo(?:AndStatus)?By(?:Index|UUID)|failed to get (?:mig )?device|is.lost|reset.required",
        "one GPU that the plugin cannot read, which hides all of the node",
        "find it with nvidia-smi and `dmesg | grep -i -e nvrm -e xid` on the node, repair it or take it out, "
        f"{RESTART}",
    ),
    Cause(
        r"not referenced in the agent configuration|plugin is not enabled",
        "an agent that is not told of the plugin",
        "run playbooks/site.yml, which configures it",
    ),
    Cause(
        r"unable to initialize|NVML loading",
        "an NVML that does not start, for this node as a whole",
        f"see what nvidia-smi says on the node, and whether its root may use /dev/nvidiactl, {RESTART}",
    ),
    Cause(
        r"skipping plugin|failed to (?:start|fingerprint|dispense) plugin|dispens|exited|remote plugin message",
        "a plugin that does not start",
        "read `journalctl -u nomad` on the node, and set another nomad_device_nvidia_version or give a plugin in "
        "nomad_device_nvidia_program",
    ),
)
SILENT = Cause(
    "",
    "no NVML: a plugin that finds no libnvidia-ml.so.1 when the agent starts says nothing",
    f"see that `ldconfig -p` lists it on the node and nvidia-smi the GPUs, {RESTART}",
)
OTHER = Cause("", "not known", f"mend what the plugin names, {RESTART}")


@dataclasses.dataclass(frozen=True)
class PluginLog:
    """What was said, the newest last, and what it means."""

    lines: list[str]
    cause: str
    next_step: str

    @property
    def message(self) -> str:
        told = "; ".join(self.lines) or "nothing since the agent started"
        return (
            f"The device plugin has said: {told.rstrip('.')}. Likely cause: {self.cause}. Next step: {self.next_step}."
        )


def said(log: Iterable[bytes]) -> list[str]:
    """The newest errors and warnings of the plugin in a log of the agent, none of them twice."""
    found: dict[str, None] = {}
    for words in entries(log):
        text = SECRETS.sub("(hidden)", FIELDS.sub("", clean(words)))[:LINE_CHARS].rstrip(" :")
        found.pop(text, None)
        found[text] = None
        if len(found) > LINES:
            del found[next(iter(found))]
    return list(found)


def entries(log: Iterable[bytes]) -> Iterator[str]:
    words = ""
    for line in log:
        text = line.decode("utf-8", "replace").rstrip()
        head = SAID.search(text)
        follows = None if head else FOLLOWS.match(text)
        if words and follows:
            words = f"{words} {(follows[1] or '').strip()}".rstrip()[: 4 * LINE_CHARS]
            continue
        if words:
            yield words
        # Other plugins are loaded, too.
        words = head[2] if head and (head[1] == "client.device_mgr" or "nvidia" in text) else ""
    if words:
        yield words


def judged(lines: list[str]) -> PluginLog:
    """The newest line that means something counts."""
    means = SILENT if not lines else OTHER
    for line in reversed(lines):
        known = next((cause for cause in CAUSES if re.search(cause.pattern, line, re.IGNORECASE)), None)
        if known:
            means = known
            break
    return PluginLog(lines, means.cause, means.next_step)


def read(timeout: float = READ_S) -> PluginLog:
    """What this host's journal has of the agent that runs now, or ran last."""
    try:
        ran = b"".join(command_lines.lines_of(["systemctl", "show", UNIT, "--property=InvocationID"], timeout)).decode()
        invocation = ran.partition("=")[2].strip()
        asked = [f"_SYSTEMD_INVOCATION_ID={invocation}"] if invocation else [f"--unit={UNIT}"]
        return judged(said(command_lines.lines_of(["journalctl", "--no-pager", "--output=cat", *asked], timeout)))
    except (OSError, command_lines.SourceError) as error:
        return PluginLog(
            [], f"not known, as the journal cannot be read ({error})", "read `journalctl -u nomad` on the node"
        )
