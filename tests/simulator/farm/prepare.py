"""Builds what a farm is made of, in parallel where it can be, and starts its containers."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from tests.simulator import farm
from tests.simulator.docker import make_room
from tests.simulator.farm import Node
from tests.simulator.farm.jobs import job_image
from tests.simulator.gpu.faults import start_kernel_log
from tests.simulator.kubernetes.image import NAME, kubernetes_image
from tests.simulator.mirror.build import mirror
from tests.simulator.mirror.pki import pki
from tests.simulator.node.build import SUITES, base
from tests.simulator.node.image import node_image


@dataclass(frozen=True)
class Built:
    """What was built, or found in the cache; www is None for nodes without download servers."""

    images: dict[str, str]
    www: Path | None = None


def images() -> Built:
    """Build, or find in the cache, the node images alone: what nodes need whose roles bring nothing of this farm."""
    pki()
    return Built({suite: node_image(suite) for suite in SUITES})


def everything(say: Callable[[str], None]) -> Built:
    """Build, or find in the cache, the mirror's content, the node images and the job image."""
    pki()
    with ThreadPoolExecutor() as pool:
        # The mirror's builder is made of bookworm, so trixie is made beside it.
        www = pool.submit(mirror)
        pool.submit(base, SUITES[0]).result()
        built = images()
        job_image()
    say(f"      mirror: {www.result()}")
    return Built(built.images, www.result())


def with_kubernetes(built: Built) -> Built:
    """Build, or find in the cache, the node image with Kubernetes as well."""
    return Built({**built.images, NAME: kubernetes_image()}, built.www)


def start(name: str, built: Built, nodes: list[Node], say: Callable[[str], None]) -> None:
    """Start the farm's mirror and nodes, keeping what runs already, and wait until every node has booted."""
    make_room()
    farm.make_network(name)
    if built.www:
        farm.start_mirror(name, built.images[SUITES[0]], built.www)
    with ThreadPoolExecutor() as pool:
        new = list(pool.map(lambda node: farm.start_node(name, node, built.images[node.suite]), nodes))
        list(pool.map(lambda node: farm.wait_for_systemd(node.container), nodes))
        logged = [node.container for node, fresh in zip(nodes, new, strict=True) if fresh and node.own_kernel_log]
        list(pool.map(start_kernel_log, logged))
    farm.start_windows(name, nodes)
    for node, fresh in zip(nodes, new, strict=True):
        say(f"      {node.container}: {'started' if fresh else 'kept'}")
