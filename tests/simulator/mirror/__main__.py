"""``python -m tests.simulator.mirror``: keys, artefacts and server of the double of upstream's servers."""

from __future__ import annotations

import argparse
import json
import sys
import time

from tests.simulator.docker import DockerError
from tests.simulator.mirror import build, layout, serve
from tests.simulator.mirror.pki import pki
from tests.simulator.tools import BuildError


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.simulator.mirror", description=__doc__)
    actions = parser.add_subparsers(dest="action", required=True)
    actions.add_parser("pki", help="make the test authority and the signing keys, or renew them")
    actions.add_parser("build", help="build what is missing and lay it out")
    variables = actions.add_parser("variables", help="print the roles' variables for a mirror, as JSON")
    variables.add_argument("--base", default=layout.BASE_URL, help="address that the mirror is served at")
    server = actions.add_parser("serve", help="serve the mirror over HTTPS")
    serve.arguments(server, required=False)
    options = parser.parse_args()
    try:
        keys = pki()
        if options.action == "pki":
            build.say(f"{keys.folder}\nreleases  {keys.releases_fingerprint}\npackages  {keys.packages_fingerprint}")
        elif options.action == "variables":
            build.say(json.dumps(layout.role_variables(keys, options.base), indent=2))
        elif options.action == "build":
            start = time.monotonic()
            www = build.mirror()
            build.say(f"{www}  ({time.monotonic() - start:.1f} s)")
        else:
            serve.serve(
                options.root or build.mirror(),
                options.cert or keys.server_cert,
                options.key or keys.server_key,
                port=options.port,
                bind=options.bind,
                faults=options.faults,
            )
    except (BuildError, DockerError) as error:
        sys.stderr.write(f"mirror: {error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
