"""Runs the example jobs on a farm of containers and compares what they saw with what Nomad assigned."""

from __future__ import annotations

import json
import re
import subprocess
import time
import urllib.request
from dataclasses import dataclass
from functools import cache
from typing import Any

from tests.simulator.cache import ROOT, key_of
from tests.simulator.docker import PATIENCE, docker, docker_binary, exists
from tests.simulator.node.build import base

UUID = re.compile(r"(?:GPU|MIG)-[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}")
WORK = "/srv/farm"


class JobError(RuntimeError):
    """A job did not do what it should; the message says what was expected and found."""


@dataclass(frozen=True)
class Seen:
    """What a job on GPUs saw."""

    node: str
    assigned: list[str]
    """UUIDs that Nomad assigned, from the allocation."""
    listed: list[str]
    """UUIDs that ``nvidia-smi -L`` listed inside the container."""
    output: str

    def describe(self) -> list[str]:
        """Return what was assigned and seen, a line each."""
        told = [line for line in self.output.splitlines() if line.startswith("GPU ")]
        return [f"on {self.node} Nomad assigned {', '.join(self.assigned)}; the container lists", *told]


TRAINER = """
job "trainer" {
  datacenters = ["*"]
  PREFERENCE
  group "gpu" {
    task "train" {
      driver       = "docker"
      kill_timeout = "1s"
      config {
        image        = "IMAGE"
        network_mode = "none"
        command      = "sleep"
        args         = ["86400"]
      }
      resources {
        cpu    = 50
        memory = 64
        device "DEVICE" {}
      }
    }
  }
}
"""


def start_trainer(farm: str, device: str = "nvidia/gpu", preference: str = "") -> None:
    """Start a job that holds a device until it is stopped, on a node that has the job image."""
    text = TRAINER.replace("IMAGE", job_image()).replace("DEVICE", device).replace("PREFERENCE", preference)
    nomad(farm, "job", "run", "-detach", "-", text=text)


def trainers(farm: str) -> list[dict[str, Any]]:
    """Return the allocations of that job which run."""
    return [each for each in api(farm, "/v1/job/trainer/allocations") if each["ClientStatus"] == "running"]


# Python as Debian's package has it, in the image that has a C library already.
PYTHON_RECIPE = (
    "; mkdir -p /image/usr/bin /image/usr/lib; cp -a /usr/bin/python3 /usr/bin/python3.[0-9]* /image/usr/bin/; "
    "cp -a /usr/lib/python3.[0-9]* /image/usr/lib/; "
    "ldd /usr/bin/python3 /usr/lib/python3.*/lib-dynload/*.so | sed -n 's|.*=> \\(/[^ ]*\\) .*|\\1|p' | sort -u "
    "| while read -r f; do [ -e /image/$L/${f##*/} ] || cp -L $f /image/$L/; done"
)


def python_image() -> str:
    """Return the name of the job image with Python in it."""
    return job_image("gpufarm-python", PYTHON_RECIPE)


def job_image(name: str = "gpufarm-job", more: str = "") -> str:
    """Return the name of a small image with a C library and busybox, made from the node's own packages."""
    parent = base("bookworm")
    recipe = (
        "set -e; apt-get update -q >/dev/null; apt-get install -qy --no-install-recommends busybox-static >/dev/null; "
        "mkdir -p /image/bin /image/lib64 /image/tmp /image/etc /image/proc /image/sys /image/dev /image/root; "
        "L=lib/$(uname -m)-linux-gnu; mkdir -p /image/$L; "
        "cp -a /$L/libc.so.6 /$L/libm.so.6 /$L/libdl.so.2 /$L/libpthread.so.0 /$L/librt.so.1 /image/$L/; "
        "cp -L /lib64/ld-linux-* /image/lib64/; cp /bin/busybox /image/bin/; "
        "for a in $(/bin/busybox --list); do [ $a = busybox ] || ln -s busybox /image/bin/$a; done"
    ) + more
    image = f"{name}:{key_of([parent, recipe])}"
    if not exists("image", image):
        container = docker("run", "--detach", "--network", "host", parent, "sh", "-c", recipe).strip()
        try:
            if docker("wait", container).strip() != "0":
                raise JobError(f"the job image was not made: {docker('logs', container)[-500:]}")
            export = subprocess.Popen([docker_binary(), "cp", f"{container}:/image/.", "-"], stdout=subprocess.PIPE)
            subprocess.run(
                [docker_binary(), "import", "--change", "ENV PATH=/usr/bin:/bin", "-", image],
                stdin=export.stdout, check=True, capture_output=True,
            )  # fmt: skip
            export.wait()
        finally:
            docker("rm", "--force", container)
    return image


def load_image(farm: str, node: str, image: str = "") -> None:
    """Put the job image, or another, into the node's own Docker; a versioned tag that is there is never pulled."""
    image = image or job_image()
    inside = [docker_binary(), "exec", "-i", f"{farm}-{node}", "docker"]
    if subprocess.run([*inside, "image", "inspect", image], capture_output=True, check=False).returncode == 0:
        return
    save = subprocess.Popen([docker_binary(), "save", image], stdout=subprocess.PIPE)
    result = subprocess.run([*inside, "load"], stdin=save.stdout, capture_output=True, check=False)
    save.wait()
    if result.returncode:
        raise JobError(f"{node}: docker load failed: {result.stderr.decode().strip()}")


def nomad(farm: str, *args: str, workdir: str = "/", text: str = "") -> str:
    """Run the nomad client on the farm's server, which reads the text, and return what it printed."""
    # Where it has something to read, `operator api` posts it.
    reads = ["--interactive"] * bool(text)
    command = [docker_binary(), "exec", *reads, "--workdir", workdir, f"{farm}-server", "nomad", *args]
    result = subprocess.run(command, input=text, capture_output=True, text=True, check=False)
    if result.returncode:
        raise JobError(
            f"nomad {' '.join(args)} failed ({result.returncode}): {(result.stderr or result.stdout).strip()}"
        )
    return result.stdout


@cache
def address(farm: str) -> str:
    """Return the address of the farm's server on this machine."""
    told = "{{range .NetworkSettings.Networks}}{{.IPAddress}}{{end}}"
    return docker("inspect", "--format", told, f"{farm}-server").strip()


def api(farm: str, path: str) -> Any:
    """Return what Nomad's API answers for a path; a client of Nomad's for each question costs ten times as much."""
    ask = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with ask.open(f"http://{address(farm)}:4646{path}", timeout=PATIENCE) as answer:
            return json.load(answer)
    except OSError as error:
        raise JobError(f"{path} of the farm {farm}: {error}") from error


def _with_files(farm: str, job: str, variables: dict[str, Any]) -> list[str]:
    """Have examples/jobs on the server, and return the arguments that name a job of it."""
    server = f"{farm}-server"
    docker("exec", server, "mkdir", "-p", f"{WORK}/examples")
    docker("cp", str(ROOT / "examples/jobs"), f"{server}:{WORK}/examples/")
    arguments: list[str] = []
    for name, value in variables.items():
        arguments += ["-var", f"{name}={value if isinstance(value, str) else json.dumps(value)}"]
    return [*arguments, f"examples/jobs/{job}.nomad.hcl"]


def plan(farm: str, job: str, variables: dict[str, Any]) -> str:
    """Return what Nomad says it would do with examples/jobs/<job>.nomad.hcl."""
    command = [
        docker_binary(), "exec", "--workdir", WORK, f"{farm}-server", "nomad", "job", "plan", "-no-color",
        *_with_files(farm, job, variables),
    ]  # fmt: skip
    # It ends with 1 where it would place something, and with 255 where the job is wrong.
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    return result.stdout + result.stderr


def run(farm: str, job: str, variables: dict[str, Any], timeout: float = PATIENCE) -> dict[str, Any]:
    """Run examples/jobs/<job>.nomad.hcl to its end and return its allocation."""
    arguments = _with_files(farm, job, variables)
    before = {each["ID"] for each in api(farm, f"/v1/job/{job}/allocations")}
    nomad(farm, "job", "run", "-detach", *arguments, workdir=WORK)
    deadline = time.monotonic() + timeout
    allocation: dict[str, Any] = {}
    while time.monotonic() < deadline:
        found = [each for each in api(farm, f"/v1/job/{job}/allocations") if each["ID"] not in before]
        if found:
            allocation = max(found, key=lambda item: item["CreateIndex"])
            if allocation["ClientStatus"] in ("complete", "failed", "lost"):
                break
        time.sleep(1)
    if not allocation:
        evaluations = api(farm, f"/v1/job/{job}/evaluations")
        failures = [evaluation.get("FailedTGAllocs") for evaluation in evaluations if evaluation.get("FailedTGAllocs")]
        raise JobError(f"{job}: no allocation within {timeout:.0f} s. Nomad says: {json.dumps(failures)[:800]}")
    if allocation["ClientStatus"] != "complete":
        raise JobError(f"{job}: {allocation['ClientStatus']} on {allocation['NodeName']}. {_events(allocation)}"
                       f" Next step: nomad alloc status {allocation['ID']}")  # fmt: skip
    detail: dict[str, Any] = api(farm, f"/v1/allocation/{allocation['ID']}")
    return detail


def _events(allocation: dict[str, Any]) -> str:
    told = []
    for task, state in (allocation.get("TaskStates") or {}).items():
        told += [f"{task}: {event['DisplayMessage']}" for event in state["Events"][-4:] if event["DisplayMessage"]]
    return "; ".join(told)


def assigned(allocation: dict[str, Any], task: str) -> list[str]:
    """Return the UUIDs of the devices that an allocation's task was given."""
    devices = allocation["AllocatedResources"]["Tasks"][task].get("Devices") or []
    return [uuid for device in devices for uuid in device["DeviceIDs"]]


def run_gpu_docker(farm: str, node: str, count: int) -> Seen:
    """Run the job gpu-docker and require that it listed exactly the GPUs that Nomad assigned."""
    allocation = run(farm, "gpu-docker", {"image": job_image(), "count": count, "node": node})
    given = assigned(allocation, "nvidia-smi")
    output = _whole_log(farm, allocation["ID"], "nvidia-smi", end="Processes:")
    listed = [match for line in output.splitlines() if line.startswith("GPU ") for match in UUID.findall(line)]
    # WSL cannot separate GPUs: a container there sees all of the machine's.
    if sorted(given) != sorted(listed) or len(given) != count:
        raise JobError(
            f"gpu-docker on {allocation['NodeName']}: the container listed {listed}. "
            f"Expected: the {count} GPU(s) that Nomad assigned, {given}.\n{output}"
        )
    return Seen(allocation["NodeName"], given, listed, output)


def _whole_log(farm: str, allocation: str, task: str, end: str) -> str:
    """Return a task's log, which comes to the node's disk some time after the task has ended."""
    deadline = time.monotonic() + PATIENCE
    while True:
        output = nomad(farm, "alloc", "logs", allocation, task)
        if end in output or time.monotonic() > deadline:
            return output
        time.sleep(0.5)


def run_gpu_python(farm: str) -> dict[str, Any]:
    """Run the job gpu-python and require that its result came home and names the GPU that Nomad assigned."""
    allocation = run(
        farm,
        "gpu-python",
        {"image": job_image(), "program": "examples/jobs/gpu-python/describe.py", "packages": ["nvidia-ml-py"]},
    )
    node = allocation["NodeName"]
    path = f"/srv/results/{allocation['ID']}/result.json"
    result: dict[str, Any] = json.loads(docker("exec", f"{farm}-{node}", "cat", path))
    given = assigned(allocation, "program")
    if [result["uuid"]] != given:
        raise JobError(f"gpu-python on {node}: the program saw {result['uuid']}. Expected: {given}, as Nomad assigned.")
    return {"node": node, **result}
