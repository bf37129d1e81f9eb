"""Makes apt's lists of what a node has and may get by the collection's roles, run while its image is made.

With all of Debian's 63,000 packages each apt-get costs a second of a processor, and each change of a source two. These
are Debian's own, and apt takes them for the whole list until the distribution's changes. Nodes of a farm have them
(gpufarm-node-init); nodes for other roles, of which nobody knows what they install, have all.
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path

LISTS = Path("/var/lib/apt/lists")
SHORT = Path("/usr/share/gpufarm-simulator/lists")
INSTALLED = Path("/var/lib/dpkg/status")
# What roles and scenarios install, besides what depends on it. Who needs another one is told by apt that there is none.
MAY_COME = (
    "acl age apparmor apt-utils autofs bridge-utils busybox-static cachefilesd cgroupfs-mount conntrack "
    "containerd containernetworking-plugins curl dbus-user-session dkms docker-cli docker.io dnsmasq "
    "e2fsprogs etcd-server ethtool file gcc git gnupg gnupg2 gpg infiniband-diags iptables jq kmod libarchive13t64 "
    "linux-headers-amd64 logrotate make mokutil nfs-common nfs-kernel-server openssh-client openssh-server "
    "openssl pciutils podman prometheus-node-exporter psmisc python3-venv rsync runc screen seccomp socat "
    "sqv tini tuned unattended-upgrades unzip user-mode-linux util-linux util-linux-extra wget xfsprogs xz-utils zstd "
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
    """Write the short lists; they have the others' times, by which apt asks whether there are newer ones."""
    SHORT.mkdir()
    installed = re.findall(r"^Package: (\S+)$", INSTALLED.read_text(encoding="utf-8"), re.MULTILINE)
    for path in LISTS.glob("*_Packages"):
        short = SHORT / path.name
        short.write_text(kept(path.read_text(encoding="utf-8"), [*installed, *MAY_COME.split()]), encoding="utf-8")
        shutil.copystat(path, short)


if __name__ == "__main__":
    main()
