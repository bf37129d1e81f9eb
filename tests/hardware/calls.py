"""Repeats the recorded calls of nvidia-smi and CUDA, which the GPU double is held to, on a machine with real GPUs.

    python tests/hardware/calls.py

Needs Python, gcc and the driver, and two H200 like those of the recording: other cards and drivers differ in what they
are. Changes nothing; skips what was recorded of a process. Ends with 1 when an answer is another one, and shows it.
"""

from __future__ import annotations

import difflib
import os
import re
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.simulator.gpu import recorded

# Opening the device node XF fails with the errno XE.
FAILING_NODE = r"""
#include <dlfcn.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#define FAILING(name) \
    int name(const char *path, int flags, int mode) \
    { \
        if (getenv("XF") && !strcmp(path, getenv("XF"))) { \
            errno = atoi(getenv("XE")); \
            return -1; \
        } \
        return ((int (*)(const char *, int, int))dlsym(RTLD_NEXT, #name))(path, flags, mode); \
    }
FAILING(open)
FAILING(open64)
"""
CUDA = """
import ctypes
cuda, count = ctypes.CDLL("libcuda.so.1"), ctypes.c_int()
code = cuda.cuInit(0)
cuda.cuDeviceGetCount(ctypes.byref(count))
uuids = [(ctypes.c_ubyte * 16)() for _ in range(count.value)]
for device, uuid in enumerate(uuids):
    cuda.cuDeviceGetUuid_v2(uuid, device)
print(code, *(bytes(uuid).hex()[:4] for uuid in uuids))
"""
# The machine's own: the errors that its memory has met, and which issue of the board it is.
OWN = re.compile(r"^( +[SD]RAM [^:]+: | +Board Part Number +: [0-9A-Z-]+-)[0-9]+$", re.MULTILINE)
# The moment's.
OTHERWISE = ("nvidia-smi dmon", "nvidia-smi pmon", "nvidia-smi -q -d MEMORY,UTILIZATION", "ls ", "cat ", "uname ")


def run(command: list[str], **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, env=os.environ | environment, capture_output=True, text=True, timeout=60, check=False
    )


def differences(library: Path, uuids: tuple[str, str]) -> list[str]:
    """Return what is answered in another way."""
    found = []
    for name in sorted(path.name for path in recorded.FOLDER.iterdir()):
        for call in recorded.calls(name):
            if call.command.startswith(OTHERWISE) or re.search(r"\b634\b", call.stdout):
                continue
            environment = {key: text for key, text in call.environment.items() if key != "LD_PRELOAD"}
            if "XF" in environment:
                environment["LD_PRELOAD"] = str(library)
            words = shlex.split(recorded.renamed(shlex.join(call.arguments), uuids))
            if words[0] == "su":
                at = words.index("-c") + 1
                words[at:] = [" ".join(words[at:])]
            done = run(words, **environment)
            wanted, answer = (OWN.sub(r"\1?", text) for text in recorded.answer_of(call, uuids, done.stdout))
            if (answer, done.stderr, done.returncode) != (wanted, call.stderr, call.returncode):
                lines = difflib.unified_diff(wanted.splitlines(), answer.splitlines(), lineterm="", n=0)
                codes = f"exit code {done.returncode}, recorded {call.returncode}"
                found.append("\n".join([f"{call.command}: {codes}", *lines, done.stderr]))
        heads = {pair[n][4:8]: uuids[n][4:8] for pair in recorded.MACHINES for n in (0, 1)}
        for cuda in recorded.cuda_calls(name):
            visible = recorded.renamed(cuda.visible_devices, uuids)
            words = run([sys.executable, "-c", CUDA], CUDA_VISIBLE_DEVICES=visible).stdout.split()
            wanted_words = [str(cuda.code), *(heads[head] for head in cuda.devices)]
            if words != wanted_words:
                found.append(f"CUDA_VISIBLE_DEVICES={visible!r}: {words}, recorded {wanted_words}")
    return found


def main() -> int:
    """Run the command."""
    try:
        listed = re.findall(r"UUID: (GPU-\S+)\)", run(["nvidia-smi", "-L"]).stdout)
    except FileNotFoundError:
        listed = []
    if len(listed) != 2:
        sys.stderr.write(
            f"{len(listed)} GPUs here. Expected: two, as recorded. Next step: run this on such a machine.\n"
        )
        return 1
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder, "failing-node.so")
        build = ["gcc", "-D_GNU_SOURCE", "-shared", "-fPIC", "-xc", "-", "-o", str(library), "-ldl"]
        subprocess.run(build, input=FAILING_NODE, text=True, check=True)
        found = differences(library, (listed[0], listed[1]))
    sys.stdout.write("\n\n".join([*found, f"{len(found)} answers differ from the recorded ones"]) + "\n")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
