"""What is on a node, in a form that two moments can be compared in.

    python -m tests.testinfra.snapshot NODE...

writes what is there now into the scenario's folder, so that a test can compare it with what a removal leaves.
"""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path

from tests.simulator.docker import docker

# All but what lives for one boot.
FOR_ONE_BOOT = ("/dev", "/proc", "/run", "/sys", "/tmp", "/var/tmp")
EVERYWHERE = f"/ -xdev \\( {' -o '.join(f'-path {top}' for top in FOR_ONE_BOOT)} \\) -prune -o"
# What a removal may leave, and why; everything else of a node is as it was when it was fresh.
MAY_STAY = {
    r"/var/(backups|cache|log)(/|$)": "cache and logs, which the machine's own services empty",
    r"/var/lib/(apt|dpkg|systemd)(/|$)": "records; packages and units are compared by themselves",
    r"/etc/(passwd|group|shadow|gshadow)-?$": "users and groups are compared one by one",
    r"/etc/ld\.so\.cache$": "an index of the libraries that are there",
    r"/root/\.ansible(/|$)": "Ansible's own",
    r"/etc/\.pwd\.lock$": "the lock under which users and groups are changed",
    r"(/etc|/usr/lib|/usr/share)/python3.*/__pycache__(/|$)": "Python's compiled code",
    r"/(etc|usr/share)/gpufarm-simulator(/|$)": "the double's: which GPUs are plugged in",
    r"/usr/lib/modules(/|$)": "the double's module of the driver",
}


def files(node: str, places: str, units: str, other_each_time: re.Pattern[str] | None = None) -> dict[str, str]:
    """Return what each file and folder below the places is, the packages and the state of the units.

    Of a file and a folder that is type, owner, mode and target, of a file its content, too.
    """
    listed = docker(
        "exec", node, "sh", "-c",
        f"find {places} -printf '%p\\t%y %u:%g %m %l\\n'; find {places} -type f -exec sha256sum {{}} +; "
        "dpkg-query --show --showformat '${Package} ${Version} ${db:Status-Abbrev}\\n'; "
        f"systemctl list-unit-files --no-legend --plain {units}",
    )  # fmt: skip
    found: dict[str, str] = {}
    for line in listed.splitlines():
        if match := re.fullmatch(r"([0-9a-f]{64})  (.*)", line):
            path = match[2]
            found[f"content of {path}"] = "" if other_each_time and other_each_time.search(path) else match[1]
        elif "\t" in line:
            path, told = line.split("\t")
            found[path] = told
        else:
            name, _, told = line.partition(" ")
            found[name] = told
    return found


def whole(node: str) -> dict[str, str]:
    """Return all that is on a node, but what lies on file systems of its own, with its units and packages."""
    found = {
        name: told for name, told in files(node, EVERYWHERE, "").items() if not told.lstrip().startswith("transient")
    }
    for kind in ("passwd", "group"):
        for line in docker("exec", node, "getent", kind).splitlines():
            found[f"{kind} {line.partition(':')[0]}"] = line
    return found


def of_packages(node: str, *packages: str) -> set[str]:
    """Return the names of packages that are installed and of what they need."""
    options = "--recurse --installed --no-suggests --no-conflicts --no-breaks --no-replaces --no-enhances"
    return set(
        re.findall(
            r"^\w\S*$",
            docker("exec", node, "sh", "-c", f"apt-cache depends {options} {' '.join(packages)}"),
            re.MULTILINE,
        )
    )


def owned(node: str, paths: list[str]) -> set[str]:
    """Return which of these files and folders belong to a package, whose own state is compared."""
    script = "xargs --no-run-if-empty -d '\\n' dpkg-query --search 2>/dev/null | sed 's/^[^/]*: //' || true"
    return set(docker("exec", "-i", node, "sh", "-c", script, stdin="\n".join(paths).encode()).splitlines())


def kept(node: str) -> Path:
    """Return where what is on a fresh node is kept."""
    return Path(os.environ["MOLECULE_EPHEMERAL_DIRECTORY"]) / f"fresh-{node}.json"


def left(node: str, packages: tuple[str, ...], *also: str) -> dict[str, tuple[str | None, str | None]]:
    """Return what is otherwise than on the fresh node, as it was and as it is.

    Left out is what may stay by a pattern, and the packages that may, with what they need and their files.
    """
    before, now = json.loads(kept(node).read_text("utf-8")), whole(node)
    stays = re.compile("|".join((*MAY_STAY, *also)))
    other = {name: (before.get(name), now.get(name)) for name in before.keys() | now.keys()}
    found = {
        name: pair
        for name, pair in sorted(other.items())
        if pair[0] != pair[1] and not stays.match(name.removeprefix("content of "))
    }
    paths = {name: name.removeprefix("content of ") for name, pair in found.items() if pair[0] is None}
    of_those = owned(node, sorted({path for path in paths.values() if path.startswith("/")}))
    with_them = of_packages(node, *packages)
    return {
        name: pair
        for name, pair in found.items()
        if paths.get(name) not in of_those and paths.get(name) not in with_them
    }


if __name__ == "__main__":
    for each in sys.argv[1:]:
        kept(each).write_text(json.dumps(whole(each)), encoding="utf-8")
