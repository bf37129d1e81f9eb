"""The node image: a Debian machine plus what stands in for firmware, kernel and test network.

That is the GPU double's files, the test CA and the init that sets them up.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from pathlib import Path

from tests.simulator.cache import ROOT, key_of
from tests.simulator.docker import docker, exists
from tests.simulator.mirror.build import gpu_double
from tests.simulator.mirror.pki import pki
from tests.simulator.node.build import SUITES, base

HERE = Path(__file__).resolve().parent
QUICK = HERE.parent / "quick"


def node_image(suite: str) -> str:
    """Return the name of the node image of ``suite``, building it if it is missing."""
    profiles = ROOT / "tests/simulator/gpu/profiles"
    double = gpu_double()
    authority = Path(pki().ca_cert)
    parent = base(suite)
    key = key_of([HERE, QUICK, profiles, parent, str(double), authority.read_text(encoding="utf-8")])
    image = f"gpufarm-node:{suite}-{key}"
    if exists("image", image):
        docker("tag", image, f"gpufarm-node:{suite}")
        return image
    with tempfile.TemporaryDirectory(prefix="gpufarm-node-") as folder:
        context = Path(folder)
        for source in (HERE, QUICK):
            shutil.copytree(source, context / source.name, ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copytree(double, context / "gpu")
        shutil.copytree(profiles, context / "profiles")
        shutil.copy(authority, context / "gpufarm-test-ca.crt")
        docker("build", "--quiet", "--build-arg", f"BASE={parent}", "--tag", image,
               "--file", str(context / "node/Dockerfile"), folder)  # fmt: skip
    docker("tag", image, f"gpufarm-node:{suite}")
    return image


if __name__ == "__main__":
    for name in sys.argv[1:] or SUITES:
        sys.stdout.write(node_image(name) + "\n")
