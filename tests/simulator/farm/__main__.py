"""``python -m tests.simulator.farm ACTION [NAME]``: a farm of containers, for Molecule and for hand work.

build builds what every farm needs, and with --kubernetes the node image with Kubernetes as well, which few need; images
builds the node images alone; up starts the farm of inventory, nodes one of the Molecule platforms that come as JSON,
mirror the download servers alone; down removes a farm.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path

from tests.simulator import farm
from tests.simulator.docker import ensure_docker
from tests.simulator.farm import prepare
from tests.simulator.kubernetes.image import NAME
from tests.simulator.node.build import SUITES
from tests.simulator.tools import BuildError


def say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def of_scenario(environment: Mapping[str, str]) -> str:
    """Return the name of the farm that belongs to the Molecule scenario of this environment."""
    project = Path(environment.get("MOLECULE_PROJECT_DIRECTORY") or ".").resolve().name
    return environment.get("GPUFARM_FARM") or f"{project}-{environment.get('MOLECULE_SCENARIO_NAME') or 'default'}"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.simulator.farm", description=__doc__)
    parser.add_argument("action", choices=["build", "images", "up", "nodes", "mirror", "down"])
    parser.add_argument("name", nargs="?", default=of_scenario(os.environ))
    parser.add_argument("--without-mirror", action="store_true", help="start nodes without download servers")
    parser.add_argument("--kubernetes", action="store_true", help="build what a node with Kubernetes is made of, too")
    arguments = parser.parse_args()
    try:
        say(f"farm: Docker is {ensure_docker()}")
        if arguments.action == "down":
            say(f"removed: {', '.join(farm.remove(arguments.name)) or 'nothing'}")
            return 0
        bare = arguments.without_mirror or arguments.action == "images"
        nodes = farm.platform_nodes(json.load(sys.stdin), (*SUITES, NAME)) if arguments.action == "nodes" else []
        built = prepare.images() if bare else prepare.everything(say)
        if arguments.kubernetes or NAME in {node.suite for node in nodes}:
            built = prepare.with_kubernetes(built)
        if arguments.action == "mirror":
            prepare.start(arguments.name, built, [], say)
        elif arguments.action == "up":
            prepare.start(arguments.name, built, farm.inventory_nodes(arguments.name, {}), say)
        elif arguments.action == "nodes":
            prepare.start(arguments.name, built, nodes, say)
    except BuildError as error:
        say(f"FAILED: {error}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
