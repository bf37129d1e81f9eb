"""Times playbooks/site.yml where nothing is to be done: what decides whether it is run every night.

    make demo && python tests/bench/second_run.py [CHECKOUT ...]

On the demo's farm, with `ansible -m setup` beside it, which asks each host once. With other checkouts of this
repository the farm goes to the state of each, and what is timed is the run after that one; by turns, so that the
machine's other work meets all of them. Prints the medians, the ratios to this checkout, and the lines `ok` of the log;
then the Nomad roles alone on one finished node, by the time in which setup asks that node.
"""

from __future__ import annotations

import argparse
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.simulator import farm
from tests.simulator.cache import ROOT
from tests.simulator.docker import exists
from tests.simulator.farm import ansible

FARM = "gpufarm-demo"
NODE = "t4"
# A peer's roles took 11 times setup's time.
LIMIT = 6
# What older checkouts call variables of the demo's inventory.
OLDER = {
    f"{role}_repository_{what}": f"{{{{ nvidia_repository_{what} }}}}"
    for role in ("nvidia_driver", "cuda")
    for what in ("url", "key_fingerprints")
}

# A client with its plugin, by the roles alone.
NOMAD = f"""
- hosts: {NODE}
  become: true
  gather_facts: false
  roles:
    - gpufarm.core.nomad_device_nvidia
    - gpufarm.core.nomad_client
"""


def environment(checkout: Path, folder: Path) -> dict[str, str]:
    """Return the environment in which Ansible runs the collection of a checkout."""
    collections = folder / "ansible_collections/gpufarm"
    collections.mkdir(parents=True)
    (collections / "core").symlink_to(checkout)
    ours = {"ANSIBLE_CONFIG": str(checkout / "ansible.cfg"), "ANSIBLE_COLLECTIONS_PATH": str(folder)}
    return {**farm.environment(FARM), **ours}


def timed(command: list[str], given: dict[str, str]) -> tuple[float, str]:
    """Return the seconds of a command that succeeds, and what it said."""
    begun = time.monotonic()
    result = subprocess.run(command, cwd=ROOT, env=given, capture_output=True, text=True, check=False)
    if result.returncode:
        raise SystemExit(f"{' '.join(command[:4])} ended with {result.returncode}:\n{result.stdout[-3000:]}")
    return time.monotonic() - begun, result.stdout


def site(checkout: Path, given: dict[str, str]) -> tuple[float, str]:
    return timed(ansible.command(str(checkout / "playbooks/site.yml"), OLDER), given)


def nomad_roles(turns: int, given: dict[str, str], folder: Path) -> float:
    """Print how long the Nomad roles take on a node that has all of it, and return by how many times setup's time."""
    play = folder / "nomad.yml"
    play.write_text(NOMAD, encoding="utf-8")
    asked, seconds, said = [], [], ""
    for _turn in range(turns):
        asked.append(timed(setup(NODE), given)[0])
        took, said = timed(ansible.command(str(play)), given)
        seconds.append(took)
    one, roles = statistics.median(asked), statistics.median(seconds)
    sys.stdout.write(
        f"Nomad roles again, {NODE} alone {roles:6.1f} s, {roles / one:.1f} times setup's {one:.1f} s "
        f"(limit {LIMIT:g}); changed: {ansible.recap(said.splitlines())[NODE]['changed']}\n"
    )
    return roles / one


def setup(hosts: str) -> list[str]:
    return [str(Path(sys.executable).with_name("ansible")), "-i", str(farm.INVENTORY), hosts, "-m", "setup"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkout", nargs="*", type=Path, help="another checkout, to be compared with this one")
    parser.add_argument("--turns", type=int, default=3, help="how often each is timed (%(default)s)")
    arguments = parser.parse_args()
    if not exists("container", f"{FARM}-{NODE}"):
        sys.stdout.write("second run: left out, no farm of the demo is here. Next step: make demo.\n")
        return 0
    checkouts = [ROOT, *(path.resolve() for path in arguments.checkout)]
    seconds: dict[Path, list[float]] = {checkout: [] for checkout in checkouts}
    counts: dict[Path, tuple[int, int]] = {}
    asked = []
    with tempfile.TemporaryDirectory() as folder:
        given = {path: environment(path, Path(folder, str(number))) for number, path in enumerate(checkouts)}
        for _turn in range(arguments.turns):
            asked.append(timed(setup("all:!wsl_hosts"), given[ROOT])[0])
            for checkout in checkouts:
                if len(checkouts) > 1 or not seconds[checkout]:
                    site(checkout, given[checkout])
                took, said = site(checkout, given[checkout])
                recap = ansible.recap(said.splitlines())
                changed = {host: count["changed"] for host, count in recap.items() if count["changed"]}
                if changed:
                    sys.stdout.write(f"{checkout}: the second run changed {changed}; expected: nothing\n")
                seconds[checkout].append(took)
                lines = re.findall(r"^ok: \[(\S+?)\]", said, re.MULTILINE)
                counts[checkout] = (lines.count(NODE), len(lines))
        # The last checkout may have left another state.
        if len(checkouts) > 1:
            site(ROOT, given[ROOT])
        times = nomad_roles(arguments.turns, given[ROOT], Path(folder))
    ours = statistics.median(seconds[ROOT])
    sys.stdout.write(f"ansible -m setup              {statistics.median(asked):7.1f} s\n")
    for checkout in checkouts:
        median = statistics.median(seconds[checkout])
        name = "site.yml again" if checkout == ROOT else f"of {os.path.relpath(checkout)}"
        sys.stdout.write(
            f"{name:<29} {median:7.1f} s  {median / ours:4.2f}  "
            f"{counts[checkout][0]} lines `ok: [{NODE}]`, {counts[checkout][1]} of all hosts\n"
        )
    return int(times > LIMIT)


if __name__ == "__main__":
    sys.exit(main())
