"""The Docker daemon of this machine: the one that runs, or one that is installed and started here."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from functools import cache
from pathlib import Path

from tests.simulator.cache import cache_dir
from tests.simulator.tools import BuildError, need

# What a systemd node with Docker and Nomad inside needs; narrower than --privileged, which some
# machines refuse and which would hand the node the machine's own devices.
CAPABILITIES = ["SYS_ADMIN", "NET_ADMIN", "SYS_PTRACE", "MKNOD"]
SECURITY_OPTS = ["seccomp=unconfined", "apparmor=unconfined"]


class DockerError(BuildError):
    """Docker cannot be had or did not do what was asked; the message holds the next step."""


@cache
def docker_binary() -> str:
    """Return the docker client: ``$GPUFARM_DOCKER``, the distribution's, or the first on PATH."""
    named = os.environ.get("GPUFARM_DOCKER")
    for candidate in [named, "/usr/bin/docker", shutil.which("docker")]:
        if candidate and Path(candidate).exists():
            return candidate
    return "/usr/bin/docker"


def docker(*args: str, stdin: bytes | None = None, timeout: float = 600) -> str:
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
        return subprocess.run([docker_binary(), "info"], capture_output=True, timeout=30, check=False).returncode == 0
    except (FileNotFoundError, subprocess.TimeoutExpired):
        return False


@cache
def cgroup_version() -> str:
    """Return the cgroup version that the daemon's machine uses: "1" or "2"."""
    return docker("info", "--format", "{{.CgroupVersion}}").strip()


@cache
def node_options() -> dict[str, object]:
    """Return the container options of a node, in Molecule's terms, for the cgroup version of this machine.

    cgroup v1 has no usable private namespace for systemd, so the machine's tree is mounted.
    cgroup v2 gives the node a namespace of its own, which the node's init makes writable.
    """
    version_1 = cgroup_version() == "1"
    return {
        "capabilities": CAPABILITIES,
        "security_opts": SECURITY_OPTS,
        "cgroupns_mode": "host" if version_1 else "private",
        "tmpfs": ["/run", "/run/lock"],
        "volumes": (["/sys/fs/cgroup:/sys/fs/cgroup:rw"] if version_1 else []) + ["/var/lib/docker"],
        "command": "/usr/sbin/gpufarm-node-init",
    }


def node_flags() -> list[str]:
    """Return node_options() as flags of ``docker run``."""
    options = node_options()
    flags = [f"--cap-add={capability}" for capability in CAPABILITIES]
    flags += [f"--security-opt={option}" for option in SECURITY_OPTS]
    flags += [f"--cgroupns={options['cgroupns_mode']}", "--tmpfs=/run", "--tmpfs=/run/lock"]
    flags += [f"--volume={volume}" for volume in options["volumes"]]  # type: ignore[attr-defined]
    return flags


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
    for _ in range(60):
        if running():
            return how
        time.sleep(1)
    raise DockerError(f"The Docker daemon did not answer within 60 s. Next step: read {log} or `journalctl -u docker`.")


if __name__ == "__main__":
    ensure_docker()
    sys.stdout.write(json.dumps(node_options(), indent=2) + "\n")
