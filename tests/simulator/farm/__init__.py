"""Farms of node containers on this machine: made from an inventory or from Molecule's platforms, removed by name."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from tests.simulator.cache import ROOT, cache_dir
from tests.simulator.docker import NODE_INIT, PATIENCE, DockerError, docker, docker_binary, exists, node_flags
from tests.simulator.kubernetes.image import DEVICE_RULES
from tests.simulator.kubernetes.image import NAME as KUBERNETES
from tests.simulator.mirror.build import ca_bundle
from tests.simulator.mirror.pki import pki
from tests.simulator.windows.host import Distribution, Machine, Windows

HERE = Path(__file__).resolve().parent
INVENTORY = HERE / "inventory"
# Found by the inventory plugin, as the distribution of the farm's Windows machine.
WSL = {"wsl": {"suite": "trixie", "profile": "rtx4090-wsl"}}
LABEL = "gpufarm.farm"
IMAGE = "gpufarm-node:"
# What a Molecule platform may say of a node.
KEYS = {"name", "hostname", "image", "env", "groups", "children"}


@dataclass(frozen=True)
class Node:
    """One container of a farm; ``environment`` says what its init plugs in (node/gpufarm-node-init)."""

    container: str
    hostname: str
    suite: str
    environment: dict[str, str] = field(default_factory=dict)
    publish: list[str] = field(default_factory=list)

    @property
    def is_wsl(self) -> bool:
        """Tell whether the node is a WSL distribution."""
        return self.environment.get("GPUFARM_GPU_PROFILE", "").endswith("-wsl")

    @property
    def own_kernel_log(self) -> bool:
        """Tell whether a driver would write to the node's kernel log; under WSL it is Windows' and so is its log.

        A kubelet reads it, too, and cannot where a FIFO stands in for it.
        """
        return bool(self.environment.get("GPUFARM_GPU_PROFILE")) and not self.is_wsl and self.suite != KUBERNETES


def environment(farm: str) -> dict[str, str]:
    """Return the environment in which Ansible runs against ``farm``."""
    docker_folder = str(Path(docker_binary()).parent)
    environment = {
        **os.environ,
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), docker_folder, os.environ["PATH"]]),
        "GPUFARM_FARM": farm,
        "ANSIBLE_CONFIG": str(ROOT / "ansible.cfg"),
        "ANSIBLE_COLLECTIONS_PATH": str(ROOT / ".collections"),
    }
    # An agent in a node must not inherit the caller's world, and neither must Ansible's own child processes.
    environment.pop("AWS_CA_BUNDLE", None)
    return environment


def network(farm: str) -> str:
    """Return the name of the farm's Docker network."""
    return f"{farm}-net"


def nodes() -> dict[str, dict[str, Any]]:
    """Return the nodes of the farm's inventory: name → suite and GPU profile (or None)."""
    inventory = yaml.safe_load((INVENTORY / "farm.yml").read_text(encoding="utf-8"))
    found: dict[str, dict[str, Any]] = {}
    for group in inventory["all"]["children"].values():
        for name, given in group["hosts"].items():
            variables = given or {}
            found[name] = {
                "suite": variables.get("simulator_suite", "trixie"),
                "profile": variables.get("simulator_gpu_profile"),
            }
    return found | WSL


def inventory_nodes(farm: str, publish: dict[str, list[str]]) -> list[Node]:
    """Return the farm's inventory as containers, named after the farm."""
    return [
        Node(f"{farm}-{name}", name, node["suite"],
             {"GPUFARM_GPU_PROFILE": node["profile"]} if node["profile"] else {}, publish.get(name, []))
        for name, node in nodes().items()
    ]  # fmt: skip


def platform_nodes(platforms: list[dict[str, Any]], suites: Sequence[str]) -> list[Node]:
    """Return Molecule's platforms as containers; a platform that asks for what nodes do not have is an error."""
    images = [f"{IMAGE}{suite}" for suite in suites]
    found = []
    for platform in platforms:
        unknown = sorted(set(platform) - KEYS)
        if unknown or platform.get("image") not in images:
            raise DockerError(
                f"platform {platform['name']}: image {platform.get('image')}, keys {unknown}. "
                f"Expected: image {' or '.join(images)}, keys {sorted(KEYS)}. Next step: edit molecule.yml."
            )
        suite = platform["image"].removeprefix(IMAGE)
        name = platform["name"]
        found.append(Node(name, platform.get("hostname", name), suite, platform.get("env", {})))
    return found


def make_network(farm: str) -> None:
    """Make the farm's network, if it is not there."""
    if not exists("network", network(farm)):
        docker("network", "create", "--label", f"{LABEL}={farm}", network(farm))


def start_mirror(farm: str, image: str, www: Path) -> None:
    """Start the farm's mirror, reachable as https://mirror.gpufarm.test inside its network."""
    name = f"{farm}-mirror"
    keys = pki()
    make_network(farm)
    faults = faults_file(farm)
    faults.parent.mkdir(parents=True, exist_ok=True)
    if exists("container", name):
        same = docker("inspect", "--format", '{{index .Config.Labels "gpufarm.www"}}', name).strip() == str(www)
        running = docker("inspect", "--format", "{{.State.Running}}", name).strip() == "true"
        if same and running:
            return
        docker("rm", "--force", "--volumes", name)
    faults.write_text("{}", encoding="utf-8")
    docker(
        "run", "--detach", "--name", name, "--label", f"{LABEL}={farm}", "--label", f"gpufarm.www={www}",
        "--network", network(farm), "--network-alias", "mirror.gpufarm.test",
        "--volume", f"{www}:/srv/www:ro", "--volume", f"{keys.server_cert}:/srv/tls.crt:ro",
        "--volume", f"{keys.server_key}:/srv/tls.key:ro", "--volume", f"{faults.parent}:/srv/faults:ro",
        "--volume", f"{ROOT / 'tests/simulator/mirror/serve.py'}:/srv/serve.py:ro",
        image, "python3", "/srv/serve.py", "--root", "/srv/www", "--cert", "/srv/tls.crt", "--key", "/srv/tls.key",
        "--port", "443", "--faults", f"/srv/faults/{faults.name}",
    )  # fmt: skip


def faults_file(farm: str) -> Path:
    """Return the file by which a test tells the farm's mirror to misbehave."""
    return cache_dir() / "farms" / farm / "mirror-faults.json"


def start_node(farm: str, node: Node, image: str) -> bool:
    """Start one node and tell whether it is new; one that runs on the same image is kept."""
    if exists("container", node.container):
        same = docker("inspect", "--format", "{{.Config.Image}}", node.container).strip() == image
        running = docker("inspect", "--format", "{{.State.Running}}", node.container).strip() == "true"
        if same and running:
            return False
        docker("rm", "--force", "--volumes", node.container)
    flags = node_flags() + (DEVICE_RULES if node.suite == KUBERNETES else [])
    # Where there is a mirror, it is the collection's own roles that come.
    short = {"GPUFARM_SHORT_LISTS": "1"} if exists("container", f"{farm}-mirror") else {}
    for name, value in {**short, **node.environment}.items():
        flags += ["--env", f"{name}={value}"]
    bundle = ca_bundle()
    if bundle:
        flags += ["--volume", f"{bundle}:/usr/share/gpufarm-simulator/host-ca.crt:ro"]
    for port in node.publish:
        flags += ["--publish", port]
    docker("run", "--detach", "--name", node.container, "--hostname", node.hostname, "--network", network(farm),
           "--label", f"{LABEL}={farm}", *flags, image, NODE_INIT)  # fmt: skip
    return True


def windows(farm: str) -> Windows:
    """Return the farm's Windows machine."""
    return Windows(cache_dir() / "farms" / farm / "windows")


def start_windows(farm: str, nodes: Sequence[Node]) -> None:
    """Have a Windows machine whose WSL distributions are those of these nodes that run, if there are any."""
    distributions = [
        Distribution(node.hostname, container=node.container, default=number == 0)
        for number, node in enumerate(node for node in nodes if node.is_wsl)
    ]
    if distributions:
        Windows.create(windows(farm).folder, Machine(farm, distributions))


def wait_for_systemd(container: str) -> None:
    """Wait until the node has booted; a failed unit is an error that names it."""
    state = ""
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline:
        result = subprocess.run(
            [docker_binary(), "exec", container, "systemctl", "is-system-running"],
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        state = result.stdout.strip()
        if state == "running":
            return
        if state == "degraded":
            failed = docker("exec", container, "systemctl", "--failed", "--plain", "--no-legend").strip()
            raise DockerError(f"{container}: failed units: {failed}. Next step: docker exec {container} journalctl -b")
        time.sleep(0.5)
    raise DockerError(f"{container}: systemd is '{state}' after {PATIENCE} s. Next step: docker logs {container}")


def remove(farm: str) -> list[str]:
    """Remove every container, volume and network of the farm and return the containers' names."""
    selection = ("--filter", f"label={LABEL}={farm}")
    names: list[str] = []
    deadline = time.monotonic() + PATIENCE
    while left := docker("ps", "--all", "--format", "{{.Names}}", *selection).split():
        if names and time.monotonic() > deadline:
            raise DockerError(f"{', '.join(left)} did not go in {PATIENCE} s. Next step: docker rm --force {left[0]}")
        names = names or left
        try:
            docker("rm", "--force", "--volumes", *left)
        except DockerError as error:
            # What a killed run began the daemon brings to its end.
            if not re.search("already in progress|No such container", str(error)):
                raise
            time.sleep(0.5)
    networks = docker("network", "ls", "--format", "{{.Name}}", *selection).split()
    if networks:
        docker("network", "rm", *networks)
    faults_file(farm).unlink(missing_ok=True)
    return names


def port_is_free(port: int) -> bool:
    """Tell whether nothing listens on the loopback port."""
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) != 0


def gpu_nodes() -> list[str]:
    """Return the names of the farm's GPU nodes."""
    return [name for name, node in nodes().items() if node["profile"]]
