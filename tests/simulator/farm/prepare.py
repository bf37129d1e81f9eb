"""Builds what a farm is made of, in parallel where it can be, and starts its containers."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from tests.simulator import farm
from tests.simulator.farm.jobs import job_image
from tests.simulator.gpu.faults import start_kernel_log
from tests.simulator.mirror.build import mirror
from tests.simulator.mirror.pki import pki
from tests.simulator.node.build import SUITES, base
from tests.simulator.node.image import node_image


@dataclass(frozen=True)
class Built:
    """What was built, or found in the cache."""

    www: Path
    images: dict[str, str]


def everything(say: Callable[[str], None]) -> Built:
    """Build, or find in the cache, the mirror's content, the node images and the job image."""
    pki()
    with ThreadPoolExecutor() as pool:
        # The mirror's builder is made of bookworm, so trixie is made beside it.
        www = pool.submit(mirror)
        pool.submit(base, SUITES[0]).result()
        images = {suite: node_image(suite) for suite in SUITES}
        job_image()
    say(f"      mirror: {www.result()}")
    return Built(www.result(), images)


def start(name: str, built: Built, publish: dict[str, list[str]], say: Callable[[str], None]) -> None:
    """Start the farm's mirror and nodes, keeping what runs already, and wait until every node has booted."""
    farm.start_mirror(name, built.images["trixie"], built.www)
    nodes = farm.nodes()
    with ThreadPoolExecutor() as pool:
        new = dict(
            zip(
                nodes,
                pool.map(
                    lambda item: farm.start_node(
                        name, item[0], built.images[item[1]["suite"]], item[1]["profile"], publish.get(item[0], [])
                    ),
                    nodes.items(),
                ),
                strict=True,
            )
        )
        list(pool.map(lambda node: farm.wait_for_systemd(name, node), nodes))
        # Under WSL the driver is Windows', and so is its log.
        logged = [
            node for node, is_new in new.items() if is_new and not (nodes[node]["profile"] or "-wsl").endswith("-wsl")
        ]
        list(pool.map(lambda node: start_kernel_log(f"{name}-{node}"), logged))
    for node, fresh in new.items():
        say(f"      {name}-{node}: {'started' if fresh else 'kept'}")
