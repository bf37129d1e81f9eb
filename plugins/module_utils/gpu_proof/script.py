# Copyright (c) 2026, gpufarm contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What a task or a pod runs, and the programs that come with it."""

from __future__ import annotations

import base64
import functools
import inspect
import json
import shlex
import zlib
from collections.abc import Sequence
from types import ModuleType

from ansible_collections.gpufarm.core.plugins.module_utils import text
from ansible_collections.gpufarm.core.plugins.module_utils.gpu_benchmark import measuring
from ansible_collections.gpufarm.core.plugins.module_utils.gpu_proof import listing, own
from ansible_collections.gpufarm.core.plugins.module_utils.gpu_proof.listing import MARK
from ansible_collections.gpufarm.core.plugins.module_utils.gpu_proof.records import ProofSettings

# Seconds for each step of the payload; a fourth of the proof's own time, where that is less, so that what hangs is
# named before that is over.
STEP_S = 60.0

# By their names, so that one imports another as it does here; the last is what is run.
UNPACK = """\
import base64, json, os, sys, types, zlib
for name, text in json.loads(zlib.decompress(base64.b64decode(os.environ["{variable}"]))):
    module = sys.modules[name] = types.ModuleType(name)
    exec(compile(text, name, "exec"), module.__dict__)
raise SystemExit(module.main())"""


@functools.lru_cache
def payload(*modules: ModuleType) -> str:
    """Programs, packed; the module has them with it, wherever it runs."""
    sources = [(module.__name__, inspect.getsource(module)) for module in modules]
    return base64.b64encode(zlib.compress(json.dumps(sources).encode(), 9)).decode()


def payload_of_task() -> str:
    """For who says which device is meant."""
    return payload(measuring)


def payload_of_pod() -> str:
    """For who learns which device it has by what it sees."""
    return payload(measuring, text, listing, own)


def compute(variable: str, settings: ProofSettings, options: str = "", only_if: str = "") -> tuple[str, ...]:
    """What is run to have a GPU compute, by the payload in this variable of the environment; its answer is one line."""
    if not settings.computes:
        return ()
    step = min(STEP_S, settings.timeout / 4)
    program = f"python3 -c {shlex.quote(UNPACK.format(variable=variable))}"
    arguments = f"--level {settings.level} --format json --timeout {step:g} {options}".rstrip()
    return (
        f"if [ $code = 0 ]{only_if}; then",
        f"""answer=$(printf '%s\\n' "$said" | {program} {arguments})""",
        "computed=$?",
        f"""printf '%s\\n' "{MARK} answer $answer" "{MARK} computed $computed\"""",
        "fi",
    )


def script(linger: int, compute: Sequence[str] = ()) -> str:
    """What is run: its environment, the platform, the GPUs, and how nvidia-smi ended as the last line."""
    return "\n".join(
        (
            # WSL's folder is not on the PATH of services.
            "PATH=$PATH:/usr/bin:/bin:/usr/lib/wsl/lib",
            "export PATH",
            "said=$(",
            "nvidia-smi -L",
            "code=$?",
            # A GPU whose MIG mode is on is listed as any other.
            "[ $code != 0 ] || nvidia-smi --query-gpu=mig.mode.current,uuid --format=csv,noheader 2>/dev/null |",
            f'while read -r mode uuid; do [ "$mode" != Enabled, ] || echo "{MARK} divided $uuid"; done',
            f'case "$(uname -r 2>/dev/null)" in (*[Mm]icrosoft*) echo "{MARK} wsl";; esac',
            f'if [ -e /dev/dxg ]; then echo "{MARK} wsl"; fi',
            # No braces around the variable: Nomad would put its own value there, whatever the task has.
            f'echo "{MARK} visible $NVIDIA_VISIBLE_DEVICES"',
            "exit $code",
            ")",
            "code=$?",
            """printf '%s\\n' "$said\"""",
            *compute,
            f'echo "{MARK} end $code"',
            f"sleep {linger}",
            "exit $code",
        )
    )
