"""Farms of node containers on this machine: made from an inventory, run by name, removed by name."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import yaml

from tests.simulator.cache import ROOT, cache_dir
from tests.simulator.docker import DockerError, docker, docker_binary, exists, node_flags, node_options
from tests.simulator.mirror.build import ca_bundle
from tests.simulator.mirror.pki import pki

HERE = Path(__file__).resolve().parent
INVENTORY = HERE / "inventory.yml"
LABEL = "gpufarm.farm"


def environment(farm: str) -> dict[str, str]:
    """Return the environment in which Ansible and Molecule run against ``farm``."""
    keys = pki()
    options = node_options()
    docker_folder = str(Path(docker_binary()).parent)
    environment = {
        **os.environ,
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), docker_folder, os.environ["PATH"]]),
        "GPUFARM_FARM": farm,
        "GPUFARM_NETWORK": network(farm),
        "GPUFARM_RELEASES_KEY": keys.releases_fingerprint,
        "GPUFARM_PACKAGES_KEY": keys.packages_fingerprint,
        "GPUFARM_NODE_CAPABILITIES": _flow(options["capabilities"]),
        "GPUFARM_NODE_SECURITY_OPTS": _flow(options["security_opts"]),
        "GPUFARM_NODE_CGROUPNS": str(options["cgroupns_mode"]),
        "GPUFARM_NODE_TMPFS": _flow(options["tmpfs"]),
        "GPUFARM_NODE_VOLUMES": _flow(options["volumes"]),
        "GPUFARM_NODE_COMMAND": str(options["command"]),
        "ANSIBLE_CONFIG": str(ROOT / "ansible.cfg"),
        "ANSIBLE_COLLECTIONS_PATH": str(ROOT / ".collections"),
    }
    # An agent in a node must not inherit the caller's world, and neither must Ansible's own child processes.
    environment.pop("AWS_CA_BUNDLE", None)
    return environment


def _flow(value: Any) -> str:
    return yaml.safe_dump(value, default_flow_style=True, width=10_000).strip()


def network(farm: str) -> str:
    """Return the name of the farm's Docker network."""
    return f"{farm}-net"


def nodes() -> dict[str, dict[str, Any]]:
    """Return the nodes of the farm's inventory: name → suite and GPU profile (or None)."""
    inventory = yaml.safe_load(INVENTORY.read_text(encoding="utf-8"))
    found: dict[str, dict[str, Any]] = {}
    for group in inventory["all"]["children"].values():
        for name, given in group["hosts"].items():
            variables = given or {}
            found[name] = {
                "suite": variables.get("simulator_suite", "trixie"),
                "profile": variables.get("simulator_gpu_profile"),
            }
    return found


def start_mirror(farm: str, image: str, www: Path) -> None:
    """Start the farm's mirror, reachable as https://mirror.gpufarm.test inside its network."""
    name = f"{farm}-mirror"
    keys = pki()
    if not exists("network", network(farm)):
        docker("network", "create", "--label", f"{LABEL}={farm}", network(farm))
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


def start_node(farm: str, name: str, image: str, profile: str | None, publish: list[str]) -> bool:
    """Start one node container and tell whether it is new; one that runs on the same image is kept."""
    container = f"{farm}-{name}"
    if exists("container", container):
        same = docker("inspect", "--format", "{{.Config.Image}}", container).strip() == image
        running = docker("inspect", "--format", "{{.State.Running}}", container).strip() == "true"
        if same and running:
            return False
        docker("rm", "--force", "--volumes", container)
    flags = node_flags()
    if profile:
        flags += ["--env", f"GPUFARM_GPU_PROFILE={profile}"]
    bundle = ca_bundle()
    if bundle:
        flags += ["--volume", f"{bundle}:/usr/share/gpufarm-simulator/host-ca.crt:ro"]
    for port in publish:
        flags += ["--publish", port]
    docker("run", "--detach", "--name", container, "--hostname", name, "--network", network(farm),
           "--label", f"{LABEL}={farm}", *flags, image, str(node_options()["command"]))  # fmt: skip
    return True


def wait_for_systemd(farm: str, name: str) -> None:
    """Wait until the node has booted; a failed unit is an error that names it."""
    container = f"{farm}-{name}"
    state = ""
    for _ in range(120):
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
    raise DockerError(f"{container}: systemd is '{state}' after 60 s. Next step: docker logs {container}")


def remove(farm: str) -> list[str]:
    """Remove every container, volume and network of the farm and return the containers' names."""
    selection = ("--filter", f"label={LABEL}={farm}")
    names = docker("ps", "--all", "--format", "{{.Names}}", *selection).split()
    if names:
        docker("rm", "--force", "--volumes", *names)
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
