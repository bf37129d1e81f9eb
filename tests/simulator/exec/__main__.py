"""``python -m tests.simulator.exec``: print where the program is."""

import sys

from tests.simulator.exec import quick_docker

sys.stdout.write(f"{quick_docker()}\n")
