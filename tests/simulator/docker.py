"""The Docker daemon of this machine: the one that runs, or one that is installed and started here."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from contextlib import suppress
from functools import cache
from pathlib import Path

from tests.simulator.cache import cache_dir
from tests.simulator.tools import BuildError, need

# What a systemd node with Docker and Nomad inside needs; narrower than --privileged, which some
# machines refuse and which would hand the node the machine's own devices.
CAPABILITIES = ["SYS_ADMIN", "NET_ADMIN", "SYS_PTRACE", "MKNOD"]
SECURITY_OPTS = ["seccomp=unconfined", "apparmor=unconfined"]
NODE_INIT = "/usr/sbin/gpufarm-node-init"
# Seconds for what a machine does whose cores are all busy with something else: only what hangs takes longer.
PATIENCE = 1800
# A node's systemd and daemons take about eight inotify instances of the 128 that root has by default.
INOTIFY = Path("/proc/sys/fs/inotify/max_user_instances")
INOTIFY_INSTANCES = 1024


class DockerError(BuildError):
    """Docker cannot be had or did not do what was asked; the message holds the next step."""


def docker_client() -> str:
    """Return Docker's own client: the distribution's, or the first on PATH."""
    return "/usr/bin/docker" if Path("/usr/bin/docker").exists() else shutil.which("docker") or "/usr/bin/docker"


@cache
def docker_binary() -> str:
    """Return the client that is used: ``$GPUFARM_DOCKER``, or Docker's own."""
    named = os.environ.get("GPUFARM_DOCKER")
    return named if named and Path(named).exists() else docker_client()


def docker(*args: str, stdin: bytes | None = None, timeout: float = PATIENCE) -> str:
    """Run the docker client and return what it printed; a failure raises DockerError with its words."""
    result = subprocess.run([docker_binary(), *args], input=stdin, capture_output=True, timeout=timeout, check=False)
    if result.returncode:
        raise DockerError(f"docker {' '.join(args[:6])} failed ({result.returncode}): {result.stderr.decode().strip()}")
    return result.stdout.decode()


def exists(kind: str, name: str) -> bool:
    """Tell whether a container, image, network or volume of that name exists."""
    command = [docker_binary(), kind, "inspect", name]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


def running() -> bool:
    """Tell whether a daemon answers."""
    try:
        return subprocess.run([docker_binary(), "info"], capture_output=True, timeout=300, check=False).returncode == 0
    except (FileNotFoundError, subprocess.TimeoutExpired):
        return False


@cache
def cgroup_version() -> str:
    """Return the cgroup version that the daemon's machine uses: "1" or "2"."""
    return docker("info", "--format", "{{.CgroupVersion}}").strip()


def node_flags() -> list[str]:
    """Return the flags of ``docker run`` for a node, for the cgroup version of this machine.

    cgroup v1 has no usable private namespace for systemd, so the machine's tree is mounted.
    cgroup v2 gives the node a namespace of its own, which the node's init makes writable.
    """
    flags = [f"--cap-add={capability}" for capability in CAPABILITIES]
    flags += [f"--security-opt={option}" for option in SECURITY_OPTS]
    if cgroup_version() == "1":
        flags += ["--cgroupns=host", "--volume=/sys/fs/cgroup:/sys/fs/cgroup:rw"]
    else:
        flags += ["--cgroupns=private"]
    # A reboot ends the container.
    flags += ["--restart=unless-stopped"]
    return [*flags, "--tmpfs=/run", "--tmpfs=/run/lock", "--volume=/var/lib/docker"]


def make_room() -> None:
    """Let root have inotify instances for many nodes; without one a unit fails with "Too many open files"."""
    with suppress(OSError):  # somebody else's machine, or not root: a few nodes run there, too
        if int(INOTIFY.read_text(encoding="ascii")) < INOTIFY_INSTANCES:
            INOTIFY.write_text(str(INOTIFY_INSTANCES), encoding="ascii")


def ensure_docker() -> str:
    """Make sure that a daemon answers and return how: "running", "started" or "installed"."""
    if running():
        return "running"
    how = "started"
    if not shutil.which("dockerd"):
        need("dockerd")
        how = "installed"
    if running():
        return how
    log = cache_dir() / "dockerd.log"
    if Path("/run/systemd/system").is_dir():
        subprocess.run(["systemctl", "start", "docker"], check=False)
    elif os.geteuid() == 0:
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("ab") as output:
            subprocess.Popen(
                ["dockerd"], stdout=output, stderr=output, stdin=subprocess.DEVNULL, start_new_session=True
            )
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline:
        if running():
            return how
        time.sleep(1)
    raise DockerError(
        f"The Docker daemon did not answer within {PATIENCE} s. Next step: read {log} or `journalctl -u docker`."
    )
