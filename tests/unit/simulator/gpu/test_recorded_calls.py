"""The double against calls that were recorded on real GPUs: output, stderr and exit code."""

from __future__ import annotations

import ast
import os
import re
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.simulator.gpu import faults, recorded

from .conftest import Node
from .test_libraries import CUDA, python

MakeNode = Callable[[str], Node]

PROFILE = "h200-x2"
UUIDS = recorded.MACHINES[0]  # the profile has these
FILES = (
    "device-nodes-that-fail.txt",
    "options.txt",
    "selection-and-format.txt",
    "more-options.txt",
    "more-device-nodes.txt",
)

USAGE = "a usage text, recorded in part"
ONE_OPTION = "the double shows one thing of a subcommand, and has no other option"
SAMPLES = "the real one adds the samples of the last seconds"
# What the double does not answer. It has to say so, and to fail.
REFUSED = {
    "nvidia-smi -h": USAGE,
    "nvidia-smi topo": USAGE,
    "nvidia-smi nvlink": USAGE,
    "nvidia-smi topo -p2p r": ONE_OPTION,
    "nvidia-smi topo -m -i 0": ONE_OPTION,
    "nvidia-smi topo -foo": ONE_OPTION,
    "nvidia-smi nvlink -s -l 3": ONE_OPTION,
    "nvidia-smi nvlink -i 0": ONE_OPTION,
    "nvidia-smi nvlink -foo": ONE_OPTION,
    "nvidia-smi dmon -c 1": "samples of a device over time",
    "nvidia-smi pmon -c 1": "samples of processes over time",
    "nvidia-smi -q -d CLOCK -i 0": SAMPLES,
    "nvidia-smi -q -d MEMORY,UTILIZATION,POWER,COMPUTE,PIDS,PERFORMANCE,ROW_REMAPPER -i 0": SAMPLES,
    "nvidia-smi --query-gpu=index --format=csv,noheader -i 1 -i 0": "the real one blames another option",
    "nvidia-smi -B": "excluded GPUs",
    "nvidia-smi -u": "units, which no node has",
    "nvidia-smi -q -u": "units, which no node has",
}
# No calls of the double's programs.
OF_THE_MACHINE = ("ls ", "cat ", "uname ")

# The recorded machine made opening a device node fail; the double opens none and looks with stat().
PRELOADED = r"""
#include <errno.h>
#include <dlfcn.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
int stat(const char *path, struct stat *status)
{
    const char *failing = getenv("XF"), *from = failing ? strstr(path, failing) : NULL;
    if (from && !strcmp(from, failing)) {
        errno = atoi(getenv("XE"));
        return -1;
    }
    return ((int (*)(const char *, struct stat *))dlsym(RTLD_NEXT, "stat"))(path, status);
}
"""


@pytest.fixture(scope="session")
def preloaded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the library that lets a device node fail, XF with the errno XE."""
    library = tmp_path_factory.mktemp("preloaded") / "failing-node.so"
    command = ["gcc", "-D_GNU_SOURCE", "-shared", "-fPIC", "-Wall", "-Werror", "-xc", "-", "-o", str(library), "-ldl"]
    subprocess.run(command, input=PRELOADED, text=True, check=True)
    return library


def all_calls() -> Iterator[recorded.Call]:
    """Return every recorded call once for each answer that it has."""
    known = set()
    for name in FILES:
        for call in recorded.calls(name):
            answer = (call.command, recorded.renamed(call.stdout, UUIDS), call.returncode)
            if answer not in known:
                known.add(answer)
                yield call


def asked(condition: Callable[[recorded.Call], bool]) -> pytest.MarkDecorator:
    chosen = [call for call in all_calls() if condition(call)]
    return pytest.mark.parametrize("call", chosen, ids=[call.command for call in chosen])


def run(machine: Node, call: recorded.Call, preloaded: Path) -> subprocess.CompletedProcess[str]:
    environment = {name: text for name, text in call.environment.items() if name != "LD_PRELOAD"}
    if "XF" in environment:
        environment["LD_PRELOAD"] = str(preloaded)
    words = shlex.split(recorded.renamed(shlex.join(call.arguments), UUIDS))
    if words[0] == "su":
        return as_nobody(machine, words[words.index("-c") + 2 :])
    assert words[0] == "nvidia-smi"
    return machine.run(str(machine.build / "nvidia-smi"), *words[1:], extra=environment)


def as_nobody(machine: Node, arguments: list[str]) -> subprocess.CompletedProcess[str]:
    """Run nvidia-smi as somebody without rights, who cannot look into pytest's folders."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        shutil.copytree(machine.root, Path(folder, "root"))
        for name in ("nvidia-smi", "libnvidia-ml.so.1"):
            shutil.copy(machine.build / name, folder)
        return subprocess.run(
            [f"{folder}/nvidia-smi", *arguments],
            env=machine.environment | {"LD_LIBRARY_PATH": folder, "GPUFARM_SIM_ROOT": f"{folder}/root"},
            user=65534 if os.geteuid() == 0 else None,
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )


@asked(lambda call: call.command not in REFUSED and not call.command.startswith(OF_THE_MACHINE))
def test_the_double_answers_as_the_recording(node: MakeNode, preloaded: Path, call: recorded.Call) -> None:
    machine = node(PROFILE)
    if re.search(r"\b634\b", call.stdout):
        # The process of the recording, with the memory that each card needs for itself.
        machine.change(lambda profile: faults.add_process(profile, 0, 634, "python3", 1542))
        for number, used in enumerate(("9 MiB", "4 MiB")):
            machine.change(lambda profile, n=number, u=used: faults.set_value(profile, n, "fb_memory_usage.used", u))  # type: ignore[misc]
    done = run(machine, call, preloaded)
    wanted, found = recorded.answer_of(call, UUIDS, done.stdout)
    assert (found, done.stderr, done.returncode) == (wanted, call.stderr, call.returncode)


@asked(lambda call: call.command in REFUSED)
def test_the_double_refuses_what_it_does_not_do(node: MakeNode, preloaded: Path, call: recorded.Call) -> None:
    done = run(node(PROFILE), call, preloaded)
    assert (done.returncode, done.stdout) == (3, "")
    assert "is not simulated" in done.stderr


def test_the_list_of_refused_calls_is_about_recorded_ones() -> None:
    commands = {call.command for call in all_calls()}
    assert set(REFUSED) <= commands
    assert sum(len(recorded.calls(name)) for name in FILES) == 230
    assert len(commands - set(REFUSED)) > 150


@pytest.mark.parametrize(
    "call",
    [call for name in FILES for call in recorded.cuda_calls(name)],
    ids=lambda call: f"{call.visible_devices!r} {call.code}",
)
def test_cuda_reads_its_variable_as_the_recording(node: MakeNode, call: recorded.CudaCall) -> None:
    heads = {pair[n][4:8]: UUIDS[n][4:8] for pair in recorded.MACHINES for n in (0, 1)}
    answer = python(node(PROFILE), CUDA, CUDA_VISIBLE_DEVICES=recorded.renamed(call.visible_devices, UUIDS))
    assert answer["init"] == call.code
    assert [device[0][:4] for device in answer["devices"]] == [heads[head] for head in call.devices]


CUDA_NODES = re.findall(
    r"^cuInit XF=(\S+) XE=(\d+) (\d+) (\d+) \[", (recorded.FOLDER / "more-device-nodes.txt").read_text(), re.MULTILINE
)


@pytest.mark.parametrize("recording", CUDA_NODES, ids=" ".join)
def test_cuda_meets_device_nodes_that_fail(
    node: MakeNode, preloaded: Path, recording: tuple[str, str, str, str]
) -> None:
    device, errno, code, count = recording
    answer = python(node(PROFILE), CUDA, XF=device, XE=errno, LD_PRELOAD=str(preloaded))
    assert (answer["init"], len(answer["devices"])) == (int(code), int(count))


def test_nvml_words_its_errors_as_the_recording(node: MakeNode) -> None:
    line = next(
        line
        for line in (recorded.FOLDER / "device-nodes-that-fail.txt").read_text().splitlines()
        if line.startswith("[(0, 'Success')")
    )
    words = dict(ast.literal_eval(line))
    found = python(
        node(PROFILE),
        f"""
        import ctypes
        library = ctypes.CDLL("libnvidia-ml.so.1")
        library.nvmlErrorString.restype = ctypes.c_char_p
        answer = [[code, library.nvmlErrorString(code)] for code in {list(words)}]
        """,
    )
    assert dict(found) == words
    assert len(words) == 32


def test_a_process_is_shown_as_in_the_recording(node: MakeNode) -> None:
    """Two pieces of -q -x and -q, which the recording has without their calls."""
    text = (recorded.FOLDER / "selection-and-format.txt").read_text()
    machine = node(PROFILE)
    machine.change(lambda profile: faults.add_process(profile, 0, 634, "python3", 1542))
    xml = re.sub(r"^\d+[:-]", "", text[text.index("541:") : text.index("    Processes\n")], flags=re.MULTILINE)
    assert xml in machine.output("-q", "-x", "-i", "0")
    start = text.index("    Processes\n")
    plain = text[start : text.index("\n\n", start)]
    assert plain in machine.output("-q", "-i", "0")
