"""Calls of nvidia-smi and CUDA that were recorded on real GPUs, and how an answer is compared with them.

A recorded call is a line ``## <command>``, what it wrote, ``~~err``, what it wrote to stderr, and ``~~rc <code>``. A
line ``CVD '<CUDA_VISIBLE_DEVICES>' <code of cuInit> <devices> [<first digits of their UUIDs>]`` is one of CUDA. Long
output is cut off in some files: a recording that does not end with a line's end is compared as far as it goes.
"""

from __future__ import annotations

import ast
import re
import shlex
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).parents[2] / "unit/simulator/gpu/fixtures/h200x2"

# GPU 0 and GPU 1 of the machines where the recordings were made.
MACHINES = (
    ("GPU-c0047ab6-7245-e82d-d248-fcfb343180cc", "GPU-5a108570-5564-610a-4c91-0fcc46516b94"),
    ("GPU-32aad18a-b822-42fb-5708-268fd556c823", "GPU-9582871e-6306-9fa1-5cd5-01e6fb25ab54"),
    ("GPU-f7eb4d1e-135a-5ca3-3888-31572097b512", "GPU-ab56f249-ce18-e97f-605d-190604e445bc"),
    ("GPU-4af7a13e-438b-f6b9-1c93-7b5793e3c270", "GPU-5e82fabf-bcf3-9654-ca9a-3c47e727e88c"),
)

# What differs from one moment or one card to the next.
_VARIES = (
    (r"\w{3} \w{3} [ \d]\d \d\d:\d\d:\d\d \d{4}", "DATE"),
    (r" +\d+(?=C +P\d)", " TEMPERATURE"),
    (r" +\d+(?=W / )", " DRAW"),
    (r" +\d+(?=% )", " UTILISATION"),
    (r"((?:Current|GPU T\.Limit) Temp +: )-?\d+", r"\1TEMPERATURE"),
    (r"(Power Draw +: )[\d.]+(?= W)", r"\1DRAW"),
    (r"(?<=, )[\d.]+(?= W\b)", "DRAW"),
    (r"((?:GPU|Memory|Encoder|Decoder|JPEG|OFA) +: )\d+(?= %)", r"\1UTILISATION"),
    (r"((?:Tx|Rx) Throughput +: )\d+", r"\1THROUGHPUT"),
    (r"(Replays Since Reset +: )\d+", r"\1REPLAYS"),
    (r"((?:Graphics|SM|Video) +: )\d+(?= MHz)", r"\1CLOCK"),
    # Bytes, rounded one by one.
    (r"((?:Used|Free) +: )\d+(?= MiB)", r"\1MEMORY"),
    (r"\b165\d{10}\b", "SERIAL"),
    (r"(GPU PDI +: )0x[0-9a-f]+", r"\1PDI"),
    (r"(Module Id +: )\d+", r"\1MODULE"),
)


@dataclass(frozen=True)
class Call:
    """One recorded call of a program."""

    command: str
    stdout: str
    stderr: str
    returncode: int

    @property
    def arguments(self) -> list[str]:
        """The command without `env` and its variables."""
        words = shlex.split(self.command)
        while words[0] == "env" or "=" in words[0]:
            del words[0]
        return words

    @property
    def environment(self) -> dict[str, str]:
        """The variables that `env` sets."""
        words = shlex.split(self.command)
        words = words[1 : len(words) - len(self.arguments)]
        return dict(word.split("=", 1) for word in words)


@dataclass(frozen=True)
class CudaCall:
    """One recorded cuInit: its code, and the devices that it left, by the first digits of their UUIDs."""

    visible_devices: str
    code: int
    devices: tuple[str, ...]


def calls(name: str) -> list[Call]:
    """Return the calls of one recorded file."""
    found = re.findall(
        r"^## (.*)\n((?:.*\n)*?.*?)~~err\n((?:.*\n)*?)~~rc (\d+)$",
        (FOLDER / name).read_text(encoding="utf-8"),
        flags=re.MULTILINE,
    )
    return [Call(command, stdout, stderr, int(code)) for command, stdout, stderr, code in found]


def cuda_calls(name: str) -> list[CudaCall]:
    """Return the lines about CUDA_VISIBLE_DEVICES of one recorded file."""
    found = re.findall(
        r"^CVD '(.*)' (\d+) \d+ (\[.*\])$", (FOLDER / name).read_text(encoding="utf-8"), flags=re.MULTILINE
    )
    return [CudaCall(variable, int(code), tuple(ast.literal_eval(devices))) for variable, code, devices in found]


def renamed(text: str, uuids: tuple[str, str]) -> str:
    """Return the text with the UUIDs of the recordings, also such as are cut off, replaced by these."""

    def rename(match: re.Match[str]) -> str:
        found = match.group()
        for machine in MACHINES:
            for recorded, wanted in zip(machine, uuids, strict=True):
                if recorded.lower().startswith(found.lower()):
                    new = wanted[: len(found)]
                    return new.upper() if found == found.upper() else new
        return found

    return re.sub(r"GPU-[0-9a-fA-F][0-9a-fA-F-]*", rename, text)


def masked(text: str) -> str:
    """Return the text without what differs from one moment or one card to the next."""
    for pattern, word in _VARIES:
        text = re.sub(pattern, word, text)
    return text


def answer_of(recorded: Call, uuids: tuple[str, str], stdout: str) -> tuple[str, str]:
    """Return what is to be the same: the recorded output and the other one, as far as the recording goes."""
    wanted, found = masked(renamed(recorded.stdout, uuids)), masked(stdout)
    if wanted and not wanted.endswith("\n"):
        found = found[: len(wanted)]
    return wanted, found
