"""``python -m tests.simulator.farm ACTION [NAME]``: a farm of containers, for Molecule and for hand work.

build builds what every farm needs; up starts the farm of inventory.yml, nodes one of the Molecule platforms that come
as JSON, mirror the download servers alone; down removes a farm.
"""

from __future__ import annotations

import argparse
import json
import sys

from tests.simulator import farm
from tests.simulator.docker import ensure_docker
from tests.simulator.farm import prepare
from tests.simulator.node.build import SUITES
from tests.simulator.tools import BuildError


def say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.simulator.farm", description=__doc__)
    parser.add_argument("action", choices=["build", "up", "nodes", "mirror", "down"])
    parser.add_argument("name", nargs="?", default="gpufarm")
    arguments = parser.parse_args()
    try:
        say(f"farm: Docker is {ensure_docker()}")
        if arguments.action == "down":
            say(f"removed: {', '.join(farm.remove(arguments.name)) or 'nothing'}")
            return 0
        built = prepare.everything(say)
        if arguments.action == "mirror":
            farm.start_mirror(arguments.name, built.images[SUITES[0]], built.www)
        elif arguments.action == "up":
            prepare.start(arguments.name, built, farm.inventory_nodes(arguments.name, {}), say)
        elif arguments.action == "nodes":
            prepare.start(arguments.name, built, farm.platform_nodes(json.load(sys.stdin), SUITES), say)
    except BuildError as error:
        say(f"FAILED: {error}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
