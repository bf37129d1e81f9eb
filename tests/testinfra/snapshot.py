"""What is on a node, in a form that two moments can be compared in."""

from __future__ import annotations

import re

from tests.simulator.docker import docker


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
