"""``python -m tests.simulator.farm up|mirror|down NAME``: a farm of containers, for Molecule and for hand work."""

from __future__ import annotations

import argparse
import sys

from tests.simulator import farm
from tests.simulator.docker import ensure_docker
from tests.simulator.farm import prepare
from tests.simulator.tools import BuildError


def say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.simulator.farm", description=__doc__)
    parser.add_argument("action", choices=["up", "mirror", "down"])
    parser.add_argument("name")
    arguments = parser.parse_args()
    try:
        ensure_docker()
        if arguments.action == "down":
            say(f"removed: {', '.join(farm.remove(arguments.name)) or 'nothing'}")
            return 0
        built = prepare.everything(say)
        if arguments.action == "mirror":
            farm.start_mirror(arguments.name, built.images["trixie"], built.www)
        else:
            prepare.start(arguments.name, built, {}, say)
    except BuildError as error:
        say(f"FAILED: {error}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
