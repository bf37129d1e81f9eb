# Copyright (c) 2026, gpufarm contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""What apt says of repositories and of what it would download, as a bundle keeps it.

A bundle holds parts of repositories: what is signed, the indices that it vouches for, and the few packages that are
needed, each where upstream has it. So apt verifies them on a node as it verifies upstream's.
"""

from __future__ import annotations

import dataclasses
import re
from urllib.parse import unquote

from ansible_collections.gpufarm.core.plugins.module_utils.problem import FoundError
from ansible_collections.gpufarm.core.plugins.module_utils.release import without_login

# Where a node has its part of a bundle.
ON_NODE = "/var/lib/gpufarm/bundle"


class BundleError(FoundError):
    """A bundle cannot be made, or has not what is asked of it."""


@dataclasses.dataclass(frozen=True)
class Index:
    """A list of packages that apt has read, C(path) is the file; C(key) is its name in what is signed."""

    path: str
    key: str
    base: str
    repository: str
    component: str
    # The file of its entry and, after a colon, the number of a line, or of a stanza.
    entry: str

    @property
    def folder(self) -> str:
        """Where it is in its repository, with what is signed."""
        return path_below(self.base, self.repository)

    @property
    def suite(self) -> str:
        """What an entry of apt's calls the suite; a flat repository has a path, which ends in a slash."""
        return self.folder[len("dists/") :] if self.folder.startswith("dists/") else f"{self.folder}/"

    @property
    def extension(self) -> str:
        """How the file is compressed, which it is as upstream has it."""
        return self.path[self.path.rindex(flat(self.key)) + len(flat(self.key)) :]

    @property
    def signed(self) -> str:
        """How the paths of what vouches for it begin."""
        return self.path[: self.path.rindex(flat(self.key))]


def flat(key: str) -> str:
    """How apt writes a path as a part of a file's name."""
    return key.replace("/", "_")


def parse_indices(text: str) -> list[Index]:
    """What C(apt-get indextargets) prints, a paragraph an index, without what is no list of packages."""
    found = []
    for paragraph in text.split("\n\n"):
        said = dict(re.findall(r"^([A-Za-z-]+): *(.*)$", paragraph, re.MULTILINE))
        if said.get("Created-By") == "Packages":
            found.append(
                Index(
                    path=said["Filename"],
                    key=said["MetaKey"],
                    base=said["Base-URI"],
                    repository=said["Repo-URI"],
                    component=said.get("Component", ""),
                    entry=said.get("Sourcesentry", ""),
                )
            )
    return found


def keyring_of(text: str, number: int, one_line: bool) -> str:
    """What an entry names as C(Signed-By), which apt tells from version 3 on; the lines of a file have one each, or
    stanzas do. Those may have a key itself there.
    """
    if one_line:
        entry = text.splitlines()[number - 1]
    else:
        plain = re.sub(r"^#.*\n", "", text, flags=re.MULTILINE)
        entry = [stanza for stanza in re.split(r"\n[ \t]*\n", plain) if stanza.strip()][number - 1]
    found = re.search(
        r"signed-by=([^]\s]+)" if one_line else r"^Signed-By:(.*(?:\n[ \t].*)*)", entry, re.IGNORECASE | re.MULTILINE
    )
    return " ".join(found[1].split()) if found else ""


def parse_signed(text: str) -> dict[str, str]:
    """The SHA-256 of each file that an InRelease, or Release, vouches for."""
    found = re.search(r"^SHA256:[ \t]*\n((?:[ \t]+\S.*\n?)+)", text, re.MULTILINE)
    lines = re.findall(r"^[ \t]+([0-9a-f]{64})[ \t]+[0-9]+[ \t]+(\S+)", found[1] if found else "", re.MULTILINE)
    return {re.sub(r"^\./", "", name): digest for digest, name in lines}


@dataclasses.dataclass(frozen=True)
class Download:
    """A package that apt would download; C(name) is name_version_architecture.deb, as dpkg says them."""

    url: str
    name: str
    size: int
    sha256: str


def parse_downloads(text: str) -> list[Download]:
    """What C(apt-get --print-uris) prints."""
    lines = re.findall(r"^'([^']+)' (\S+) ([0-9]+) SHA256:([0-9a-f]{64})$", text, re.MULTILINE)
    return [Download(url, name, int(size), digest) for url, name, size, digest in lines]


def path_below(url: str, repository: str) -> str:
    """The path of a repository's file or folder, empty for its own; refused where it leads elsewhere."""
    path = "/".join(part for part in unquote(url[len(repository) :]).split("/") if part not in ("", "."))
    if not url.startswith(repository) or not (path == "" or is_inside(path)):
        raise BundleError(
            found=f"a repository has a file at {without_login(url)}",
            expected=f"files below {without_login(repository)}",
            next_step="look at what that repository lists",
        )
    return path


def is_inside(path: str) -> bool:
    """Whether a relative path stays in its folder."""
    return bool(path) and not path.startswith("/") and ".." not in path.split("/")


def folder_name(url: str) -> str:
    """The folder of a repository that no role has named."""
    return re.sub(r"[^A-Za-z0-9.-]+", "_", re.sub(r"^[a-z+]+://([^/@]*@)?", "", url)).strip("_")
