"""Leaves in apt's lists what a node has and may get, run while its image is made.

With all of Debian's 63,000 packages each apt-get costs a second of a processor, and each change of a source two. What
is left is Debian's own, and apt takes it for the whole list until the distribution's changes.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

LISTS = Path("/var/lib/apt/lists")
INSTALLED = Path("/var/lib/dpkg/status")
# What roles and scenarios install, besides what depends on it. Who needs another one is told by apt that there is none.
MAY_COME = (
    "acl age apparmor apt-utils autofs bridge-utils busybox-static cachefilesd cgroupfs-mount conntrack "
    "containerd containernetworking-plugins curl dbus-user-session dkms docker-cli docker.io dnsmasq "
    "e2fsprogs etcd-server ethtool file gcc git gnupg gnupg2 gpg iptables infiniband-diags jq kmod linux- "
    "headers-amd64 logrotate make mokutil nfs-common nfs-kernel-server openssh-client openssh-server "
    "openssl pciutils podman prometheus-node-exporter psmisc python3-venv rsync runc screen seccomp socat "
    "sqv tini tuned unattended-upgrades unzip util-linux util-linux-extra wget xfsprogs xz-utils zstd "
)
KIND = re.compile(r"^(?:Pre-Depends|Depends|Recommends): (.*)$", re.MULTILINE)
PROVIDES = re.compile(r"^Provides: (.*)$", re.MULTILINE)


def names(relation: str) -> list[str]:
    """Return the packages that a relation names, alternatives included."""
    return [part.split()[0].split(":")[0] for group in relation.split(",") for part in group.split("|")]


def kept(text: str, wanted: list[str]) -> str:
    """Return the records of a list that are wanted, and of what they need or what provides that."""
    records = {record.split("\n", 1)[0].removeprefix("Package: "): record for record in text.strip().split("\n\n")}
    providers: dict[str, list[str]] = {}
    for name, record in records.items():
        for relation in PROVIDES.findall(record):
            for provided in names(relation):
                providers.setdefault(provided, []).append(name)
    done: set[str] = set()
    todo = list(wanted)
    while todo:
        name = todo.pop()
        if name in done:
            continue
        done.add(name)
        if name in records:
            todo += [needed for relation in KIND.findall(records[name]) for needed in names(relation)]
        else:
            todo += providers.get(name, [])
    return "".join(f"{record}\n\n" for name, record in records.items() if name in done)


def main() -> None:
    """Rewrite the lists in place; their times stay, by which apt asks whether there are newer ones."""
    installed = re.findall(r"^Package: (\S+)$", INSTALLED.read_text(encoding="utf-8"), re.MULTILINE)
    for path in LISTS.glob("*_Packages"):
        status = path.stat()
        text = kept(path.read_text(encoding="utf-8"), [*installed, *MAY_COME.split()])
        path.write_text(text, encoding="utf-8")
        os.utime(path, (status.st_atime, status.st_mtime))


if __name__ == "__main__":
    main()
