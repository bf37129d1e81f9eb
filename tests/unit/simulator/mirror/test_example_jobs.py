# Copyright (c) 2026, gpufarm contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Each job of the examples is one to the real Nomad, the oldest and the newest that are built."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.simulator import cache
from tests.simulator.cache import ROOT
from tests.simulator.mirror import build
from tests.unit.patience import PATIENCE_S, wait_for

JOBS = sorted((ROOT / "examples/jobs").glob("*.nomad.hcl"))
# What has no default, as the heads of the files say.
NEEDED = {"gpu-burn": {"gpus": "4"}, "triton": {"models": "https://example.com/models.tar.gz"}}

# So says Nomad 1.10 of each job of the type sysbatch; later ones refuse the policy.
REFUSED = "should have a reschedule policy"

CONFIG = """
data_dir  = "{folder}"
bind_addr = "127.0.0.1"
advertise {{
  http = "127.0.0.1"
  rpc  = "127.0.0.1"
  serf = "127.0.0.1"
}}
ports {{
  http = {http}
  rpc  = {rpc}
  serf = {serf}
}}
server {{
  enabled          = true
  bootstrap_expect = 1
}}
client {{
  enabled           = true
  network_interface = "lo"
  options {{
    # They ask addresses that nobody has here.
    "fingerprint.denylist" = "env_aws,env_azure,env_digitalocean,env_gce"
  }}
}}
plugin "raw_exec" {{
  config {{
    enabled = true
  }}
}}
"""


@pytest.fixture(scope="module", params=build.NOMADS, ids=lambda product: product.version)
def nomad(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[..., subprocess.CompletedProcess[str]]]:
    """Ask an agent of the oldest and the newest Nomad that are built, server and node; a client alone knows less."""
    product = request.param
    # What takes minutes to build is not built for a unit test.
    if not (cache.cache_dir() / f"mirror-{product.name}" / cache.key_of(product.inputs())).is_dir():
        pytest.skip("Nomad is not built: python -m tests.simulator.farm build")
    program = build.nomads()[product.version] / "nomad"
    folder = tmp_path_factory.mktemp("nomad")
    with contextlib.ExitStack() as held:
        sockets = [held.enter_context(socket.create_server(("127.0.0.1", 0))) for _port in range(3)]
        http, rpc, serf = (each.getsockname()[1] for each in sockets)
    (folder / "nomad.hcl").write_text(CONFIG.format(folder=folder / "data", http=http, rpc=rpc, serf=serf), "ascii")
    address = f"http://127.0.0.1:{http}"
    environment = {name: value for name, value in os.environ.items() if not name.startswith("NOMAD_")}

    def ask(*arguments: str | Path, text: str | None = None) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [program, *arguments], cwd=ROOT, env={**environment, "NOMAD_ADDR": address}, input=text,
            capture_output=True, text=True, timeout=PATIENCE_S, check=False,
        )  # fmt: skip

    with (
        (folder / "log").open("wb") as log,
        subprocess.Popen(
            [program, "agent", "-config", folder / "nomad.hcl"], env=environment, stdout=log, stderr=log
        ) as agent,
    ):
        try:
            deadline = time.monotonic() + PATIENCE_S
            while not leads(address):
                assert agent.poll() is None and time.monotonic() < deadline, (folder / "log").read_text("utf-8")
                time.sleep(0.1)
            yield ask
            # Else what it has mounted for its tasks stays.
            assert ask("system", "gc").returncode == 0
            wait_for(lambda: not list(folder.glob("data/alloc/*")))
        finally:
            agent.kill()


def leads(address: str) -> bool:
    try:
        with urllib.request.urlopen(f"{address}/v1/status/leader", timeout=10) as answer:  # noqa: S310
            return len(answer.read()) > 2
    except OSError:
        return False


def options(values: dict[str, str]) -> list[str]:
    return [option for name, value in values.items() for option in ("-var", f"{name}={value}")]


@pytest.mark.parametrize("path", JOBS, ids=lambda path: path.name)
def test_every_job_of_the_examples_is_one(path: Path, nomad: Callable[..., Any]) -> None:
    text = path.read_text(encoding="utf-8")
    blocks = re.findall(r'^variable "(\w+)" \{\n(.*?)^\}', text, re.MULTILINE | re.DOTALL)
    needed = NEEDED.get(path.name.removesuffix(".nomad.hcl"), {})
    assert {name for name, block in blocks if not re.search(r"^\s+default\s+=", block, re.MULTILINE)} == set(needed)
    head = text.partition("\nvariable ")[0]
    assert [name for name in needed if f"-var={name}=" not in head and f"-var {name}=" not in head] == []
    told = nomad("job", "validate", *options(needed), path)
    if REFUSED in told.stderr:
        assert re.search(r'^  type += "sysbatch"$', text, re.MULTILINE) and told.stderr.count("error occurred") == 2
        return
    assert (told.returncode, told.stdout.strip()) == (0, "Job validation successful"), told.stdout + told.stderr
    # Nobody has to guess what is missing.
    assert not needed or "Unset variable" in nomad("job", "validate", path).stderr


def test_a_job_that_is_run_again_runs_again(nomad: Callable[..., Any]) -> None:
    """Nomad takes a job that has ended and is the same to the letter for done, says so to nobody and ends with 0."""
    wait_for(lambda: '"Status": "ready"' in nomad("node", "status", "-json").stdout)
    for times in (1, 2):
        ran = set()
        for path in JOBS:
            needed = NEEDED.get(path.name.removesuffix(".nomad.hcl"), {})
            job = json.loads(nomad("job", "run", "-output", *options(needed), path).stdout)["Job"]
            if job["Type"] != "service":
                run = nomad("job", "run", "-detach", "-json", "-", text=json.dumps(placeable(job)))
                if REFUSED in run.stderr:
                    continue
                assert run.returncode == 0, run.stdout + run.stderr
                ran.add(job["ID"])
        assert len(ran) > 1
        wait_for(lambda: '"Status": "pending"' not in nomad("eval", "list", "-json").stdout)
        assert {name: len(statuses(nomad, name)) for name in ran} == dict.fromkeys(ran, times)
        for name in ran:
            wait_for(lambda name=name: set(statuses(nomad, name)) == {"complete"})


def statuses(nomad: Callable[..., Any], job: str) -> list[str]:
    return [each["ClientStatus"] for each in json.loads(nomad("job", "allocs", "-json", job).stdout)]


def placeable(job: dict[str, Any]) -> dict[str, Any]:
    """The job without what this node has not: GPUs, images, volumes and networks."""
    task = {"Name": "ends", "Driver": "raw_exec", "Config": {"command": "/bin/true"}}
    groups = [{**group, "Volumes": None, "Tasks": [task]} for group in job["TaskGroups"]]
    return {**job, "Constraints": None, "TaskGroups": groups}


SMI = """\
#!/bin/sh
case $* in
-L)
    echo 'GPU 0: NVIDIA H100 (UUID: GPU-a)'
    echo 'GPU 1: NVIDIA H100 (UUID: GPU-b)'
    echo '  MIG 1g.10gb Device 0: (UUID: MIG-b0)'
    ;;
*GPU-a*) echo 00000000:1B:00.0 ;;
*GPU-b*) echo 00000000:9D:00.0 ;;
*) exit 6 ;;
esac
"""
TELLS = ["sh", "-c", 'echo "$CUDA_VISIBLE_DEVICES"']


@pytest.mark.parametrize(
    ("devices", "numactl", "bound"),
    [
        ("GPU-a", True, "numactl --physcpubind=0-31,64-95 --membind=0 "),
        ("GPU-a", False, "taskset --cpu-list 0-31,64-95 "),
        ("GPU-a,GPU-b", True, "numactl --physcpubind=0-31,64-95,32-63 --membind=0,1 "),
        ("MIG-b0", True, "numactl --physcpubind=32-63 --membind=1 "),
    ],
)
def test_a_job_binds_itself_to_the_numa_node_of_its_gpu(
    tmp_path: Path, devices: str, numactl: bool, bound: str
) -> None:
    run = near(tmp_path, devices, numactl)
    assert (run.returncode, run.stdout) == (0, f"{bound}{' '.join(TELLS)}\n{devices}\n"), run.stderr


def test_a_job_without_a_numa_node_runs_and_one_without_its_gpu_does_not(tmp_path: Path) -> None:
    run = near(tmp_path, "GPU-a", True, node="-1")
    assert (run.returncode, run.stdout) == (0, "GPU-a\n")
    assert "nothing tells at which NUMA node GPU-a is" in run.stderr
    run = near(tmp_path, "GPU-c", True)
    assert (run.returncode, run.stdout) == (6, "")


def near(folder: Path, devices: str, numactl: bool, node: str = "0") -> subprocess.CompletedProcess[str]:
    """Run the job's script where two GPUs are at two NUMA nodes and what would bind it tells how it was called."""
    programs = {"nvidia-smi": SMI, "taskset": "", **({"numactl": ""} if numactl else {})}
    (folder / "bin").mkdir(exist_ok=True)
    for name, text in programs.items():
        (folder / "bin" / name).write_text(text or f'#!/bin/sh\necho {name} "$@"\nshift 2\nexec "$@"\n', "ascii")
        (folder / "bin" / name).chmod(0o755)
    for bus, at, cpus in (("0000:1b:00.0", node, "0-31,64-95"), ("0000:9d:00.0", "1", "32-63")):
        device = folder / "sys/bus/pci/devices" / bus
        device.mkdir(parents=True, exist_ok=True)
        (device / "numa_node").write_text(f"{at}\n", "ascii")
        (device / "local_cpulist").write_text(f"{cpus}\n", "ascii")
    for name in ("sh", "cat", "tr", "sed", "awk"):
        (folder / "bin" / name).unlink(missing_ok=True)
        (folder / "bin" / name).symlink_to(str(shutil.which(name)))
    environment = {
        "PATH": str(folder / "bin"), "SYSFS": str(folder / "sys"), "NVIDIA_VISIBLE_DEVICES": devices,
    }  # fmt: skip
    return subprocess.run(
        ["/bin/sh", ROOT / "examples/jobs/gpu-numa/near.sh", *TELLS], env=environment, capture_output=True, text=True,
        check=False,
    )  # fmt: skip


def test_what_is_no_job_is_refused(tmp_path: Path, nomad: Callable[..., Any]) -> None:
    text = (ROOT / "examples/jobs/gpu-docker.nomad.hcl").read_text(encoding="utf-8")
    for wrong in (text.replace("driver", "diver", 1), re.sub(r"constraint \{", "constrain {", text, count=1)):
        assert wrong != text
        (tmp_path / "wrong.nomad.hcl").write_text(wrong, encoding="utf-8")
        assert nomad("job", "validate", tmp_path / "wrong.nomad.hcl").returncode != 0


def test_torchrun_without_a_network_is_told_where_its_processes_meet() -> None:
    """Its store asks for the container's own name otherwise, to which Docker gives no address: they wait for ever."""
    text = (ROOT / "examples/jobs/torchrun.nomad.hcl").read_text(encoding="utf-8")
    assert 'network_mode = "none"' in text
    assert re.search(r'^ +default = \["torchrun", "--standalone", "--local-addr=127.0.0.1"\]$', text, re.MULTILINE)


TORCH = """
import os, sys, time, types

class Matrix:
    def __init__(self, device):
        self.device = int(device.removeprefix("cuda:"))

    def __matmul__(self, other):
        with open(os.environ["SPANS"], "a") as file:
            file.write(f"{self.device} {time.time()}\\n")
        if os.environ.get("SICK") == str(self.device):
            os._exit(9)
        time.sleep(0.01)
        return self

def randn(number, *size, dtype, device):
    return [Matrix(device)] * number

# Not before all have begun, as far as they begin at once: how long that takes is for the machine to say.
def synchronize(device):
    until = time.monotonic() + 30
    while len({line[0] for line in open(os.environ["SPANS"])}) < 4 and time.monotonic() < until:
        time.sleep(0.01)

def equal(one, other):
    return os.environ.get("WRONG") != str(one.device)

bfloat16, manual_seed = None, lambda device: None
cuda = types.SimpleNamespace(
    device_count=lambda: 4, synchronize=synchronize, get_device_name=lambda device: "NVIDIA H100"
)
"""


@pytest.mark.parametrize(
    ("sick", "told"),
    [
        ({}, ""),
        ({"WRONG": "2"}, "RuntimeError: GPU 2: a product of round 1 differs from the first of the same matrices"),
        ({"SICK": "0"}, ""),
    ],
)
def test_all_gpus_burn_at_once_and_one_that_fails_is_named(tmp_path: Path, sick: dict[str, str], told: str) -> None:
    (tmp_path / "torch.py").write_text(TORCH, "ascii")
    environment = {**os.environ, "PYTHONPATH": str(tmp_path), "SPANS": str(tmp_path / "spans"), "BURN_SECONDS": "1"}
    run = subprocess.run(
        [sys.executable, ROOT / "examples/jobs/gpu-burn/burn.py"], env={**environment, **sick}, capture_output=True,
        text=True, timeout=PATIENCE_S, check=False,
    )  # fmt: skip
    failed = "".join(sick.values())
    well = [device for device in "0123" if device != failed]
    assert run.returncode == (1 if sick else 0), run.stderr
    assert sorted(re.findall(r"^GPU (\d) NVIDIA H100: \d+\.\d TFLOP/s$", run.stdout, re.MULTILINE)) == well
    assert told in run.stderr and run.stderr.splitlines()[-1:] == [f"GPU {failed} failed" for _each in sick]
    spans = [line.split() for line in (tmp_path / "spans").read_text("ascii").splitlines()]
    times = {device: [float(at) for which, at in spans if which == device] for device in well}
    assert max(min(each) for each in times.values()) < min(max(each) for each in times.values())


@pytest.mark.parametrize("job", ["gpu-python", "mlflow"])
def test_a_node_without_venv_is_told_what_is_missing(tmp_path: Path, job: str) -> None:
    """Debian and Ubuntu have it in a package of its own."""
    text = (ROOT / f"examples/jobs/{job}.nomad.hcl").read_text(encoding="utf-8")
    (script,) = re.findall(r'^ +"(\$\{var\.python\} .*)",$', text, re.MULTILINE)
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\n[ "$1" = -c ] && exit 1\ntouch "$0.venv"\n', "ascii")
    python.chmod(0o755)
    script = re.sub(r"\$\{join.*?\}$", "torch", script).replace("${var.python}", str(python)).replace('\\"', '"')
    run = subprocess.run(["/bin/sh", "-euc", script], capture_output=True, text=True, check=False)
    assert (run.returncode, list(tmp_path.iterdir())) == (1, [python]), run.stderr
    assert run.stderr == f"found no venv of {python}. Expected: one. Next step: install python3-venv on the node\n"
