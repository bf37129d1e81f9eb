#!/usr/bin/python
# Copyright (c) 2026, gpufarm contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: bundle_collect
short_description: Collect what hosts without internet are to install
version_added: 1.0.0
author:
  - gpufarm contributors (@gpufarm)
description:
  - Brings about the state "the bundle on the control machine has what these packages need on hosts like this one".
    The host that the task runs on has internet and downloads with its own apt; the control machine needs none.
  - What is signed, the lists of packages that it vouches for, and the packages are kept as upstream has them, so that
    a host verifies them as ever. All that the packages depend on is collected, as for a host that has nothing yet, and
    what this host would exchange for them.
  - The host is not changed, but for O(folder). It needs apt, its own entries for the distribution, and internet.
  - C(playbooks/bundle.yml) uses it.
attributes:
  action:
    support: full
    description: The control machine fetches what the host has collected.
  check_mode:
    support: none
    description: What is needed is known when it is downloaded.
  diff_mode:
    support: none
    description: Packages have no difference that is worth showing.
  idempotent:
    support: full
    description: What the bundle has and is whole is not downloaded again.
  platform:
    platforms: debian
    support: full
    description: Runs where apt is.
options:
  bundle:
    description: Folder on the control machine. It is created when it is missing.
    type: path
    required: true
  platform:
    description: Name of the hosts for which this one collects, such as V(debian-trixie-amd64).
    type: str
    required: true
  folder:
    description: >-
      Folder of the host that is for this task alone. Files that are below its folders C(keys) and C(releases) are put
      into the bundle as well.
    type: path
    required: true
  repositories:
    description: Repositories that this host need not know.
    type: list
    elements: dict
    default: []
    suboptions:
      name:
        description: Name of the repository in the bundle.
        type: str
        required: true
      url:
        description: Its address. Name and password may stand in it; they are shown nowhere.
        type: str
        required: true
      key:
        description: Path of the keyring that is pinned for it.
        type: path
        required: true
      obsolete:
        description: Names of entries of this host that are left aside.
        type: list
        elements: str
        default: []
  wanted:
    description: What hosts install, each with all that it depends on.
    type: list
    elements: dict
    required: true
    suboptions:
      packages:
        description: Packages as apt-get takes them, such as V(nvidia-driver-cuda=580.*).
        type: list
        elements: str
        required: true
      first:
        description: >-
          Those of the packages that are installed before the others, because they bring preferences of apt's.
        type: list
        elements: str
        default: []
      recommended:
        description: Whether they are installed with what they recommend, so that this is collected as well.
        type: bool
        default: false
      optional:
        description: >-
          Whether the bundle may be without them, with a warning, where this host cannot have them. Others may have them
          already.
        type: bool
        default: false
  origins:
    description: >-
      Where files of C(keys) and C(releases) come from, for the manifest, by path or by the name of that folder.
    type: dict
    default: {}
  partial:
    description: >-
      Whether hosts of the same platform may want more than O(wanted). What the bundle has for them then stays as it
      is, and nothing is removed. The task fails, and changes nothing, where the lists of their packages have moved
      since: apt would ask for newer ones.
    type: bool
    default: false
  have:
    description: SHA-256 of what the bundle has, by path. The control machine says it.
    type: dict
    default: {}
seealso:
  - module: gpufarm.core.bundle_hand_on
  - module: gpufarm.core.hashicorp_release_download
"""

EXAMPLES = r"""
- name: The bundle has Docker for hosts like this one
  gpufarm.core.bundle_collect:
    bundle: /srv/bundle
    platform: debian-trixie-amd64
    folder: /var/lib/gpufarm/collect
    wanted:
      - packages: [docker.io, docker-cli, iptables]
"""

RETURN = r"""
bundle:
  description: Path of the bundle on the control machine.
  type: str
  returned: success
  sample: /srv/bundle
platform:
  description: Name of the hosts for which was collected.
  type: str
  returned: success
  sample: debian-trixie-amd64
fetched:
  description: Paths of the files of the bundle that are new or were not whole.
  type: list
  elements: str
  returned: success
  sample: [apt/debian-trixie-amd64/nvidia-cuda/InRelease]
removed:
  description: Paths of files that nothing in the bundle needs any more, and that were removed.
  type: list
  elements: str
  returned: success
  sample: []
"""

import contextlib
import functools
import os
import platform
import shutil
import tempfile
import urllib.parse
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.gpufarm.core.plugins.module_utils import apt_bundle, release
from ansible_collections.gpufarm.core.plugins.module_utils.apt_bundle import BundleError, Download, Index

APT_HELPER = "/usr/lib/apt/apt-helper"
ETC = Path("/etc/apt")
# A bundle is first for hosts that have nothing yet, and then for those that are as this one.
STATUS_OF_HOST = "/var/lib/dpkg/status"
SETTINGS = {
    "Dir::Etc::sourcelist": "/dev/null",
    "Dir::Etc::preferences": "/dev/null",
    "Acquire::Languages": "none",
    "Acquire::PDiffs": "false",
    "Acquire::ForceHash": "SHA256",
    "Acquire::GzipIndexes": "true",
    # The smallest that upstreams have.
    "Acquire::IndexTargets::deb::Packages::KeepCompressedAs": "xz",
    "Acquire::Retries": "3",
    "APT::Install-Recommends": "false",
    "APT::Install-Suggests": "false",
}
FOLDERS = {
    "Dir::Etc::sourceparts": "sources.list.d",
    "Dir::Etc::netrcparts": "auth.conf.d",
    "Dir::Etc::preferencesparts": "preferences.d",
    "Dir::State::lists": "lists",
    "Dir::Cache": "cache",
}


class UnknownError(BundleError):
    """No repository has what is asked for, or not together with all that it needs; a download is another matter."""


class Apt:
    """apt that has nothing of this host but its entries, its proxies and its logins."""

    def __init__(self, module: AnsibleModule, folder: Path) -> None:
        self.module = module
        self.folder = folder
        for name in (*FOLDERS.values(), "lists/partial", "cache/archives/partial", "packages"):
            release.make_folder(folder / name)
        (folder / "status").touch()
        places = {name: str(folder / place) for name, place in FOLDERS.items()}
        lines = [f'{name} "{value}";\n' for name, value in {**SETTINGS, **places}.items()]
        lines.append(f'Dir::State::extended_states "{folder}/extended_states";\n')
        (folder / "apt.conf").write_text("".join(lines), encoding="utf-8")

    def know(self, repositories: list[dict[str, Any]]) -> None:
        """Have the entries of the host, and those of these repositories in place of its own of them."""
        aside = {name for each in repositories for name in [f"{each['name']}.sources", *each["obsolete"]]}
        for path in [ETC / "sources.list", *(ETC / "sources.list.d").glob("*")]:
            if path.is_file() and path.name not in aside:
                (self.folder / "sources.list.d" / f"host-{path.name}").symlink_to(path)
        for path in (ETC / "auth.conf.d").glob("*"):
            # As apt reads them, Ubuntu Pro's among them.
            if path.suffix in ("", ".conf"):
                (self.folder / "auth.conf.d" / f"host-{path.name}").symlink_to(path)
        for each in repositories:
            login = urllib.parse.urlsplit(each["url"])
            url = release.without_login(each["url"]).rstrip("/")
            entry = f"Types: deb\nURIs: {url}/\nSuites: /\nSigned-By: {each['key']}\n"
            (self.folder / "sources.list.d" / f"{each['name']}.sources").write_text(entry, encoding="utf-8")
            if login.username:
                closed = self.folder / "auth.conf.d" / f"{each['name']}.conf"
                closed.touch(mode=0o600)
                name, password = (unquote(part or "") for part in (login.username, login.password))
                closed.write_text(f"machine {url}/ login {name} password {password}\n", encoding="utf-8")

    def log_in(self, urls: set[str]) -> None:
        """Have the logins that stand in entries of the host where only apt reads them."""
        lines = {
            f"machine {site} login {unquote(login.username)} password {unquote(login.password or '')}\n"
            for login in map(urllib.parse.urlsplit, urls)
            if login.username
            for site in [f"{login.scheme}://{login.netloc.rpartition('@')[2]}"]
        }
        if lines:
            closed = self.folder / "auth.conf.d/host-entries.conf"
            closed.touch(mode=0o600)
            closed.write_text("".join(sorted(lines)), encoding="utf-8")

    def run(self, *arguments: str, status: str = "", failure: type[BundleError] = BundleError) -> str:
        """What a command of apt's prints."""
        code, out, err = self.module.run_command(
            [*arguments, "-o", f"Dir::State::status={status or self.folder / 'status'}"],
            environ_update={
                "APT_CONFIG": str(self.folder / "apt.conf"), "LC_ALL": "C", "DEBIAN_FRONTEND": "noninteractive"
            },
        )  # fmt: skip
        if code:
            lines = [line.strip() for line in f"{err}\n{out}".splitlines() if line.strip()]
            told = [line for line in lines if line.startswith("E:") or "Depends:" in line] or lines[-1:]
            raise failure(
                found=release.without_login(f"apt could not collect what is wanted ({' '.join(told).rstrip('.')})"),
                expected="packages that the repositories of this host have, and servers that answer with a signature "
                "that holds",
                next_step="mend what apt names, or correct the variable of the role that wants it",
            )
        return str(out)

    def read(self) -> list[Index]:
        """Read the lists of packages."""
        # Otherwise a server that does not answer is no error.
        self.run("apt-get", "-qq", "update", "-o", "APT::Update::Error-Mode=any")
        return apt_bundle.parse_indices(self.run("apt-get", "indextargets"))

    def needed(self, packages: list[str], *, recommended: bool = False, status: str = "") -> list[Download]:
        """What apt would download for these packages."""
        # With -qq it would not say what stands in the way.
        simulated = ["apt-get", "-q", "--yes", "--print-uris", "--allow-downgrades", "--allow-change-held-packages"]
        simulated += ["-o", "APT::Install-Recommends=true"] * recommended
        said = self.run(*simulated, "install", *packages, status=status, failure=UnknownError)
        return apt_bundle.parse_downloads(said)

    def fetch(self, downloads: list[Download]) -> None:
        """Have the files of these packages."""
        folder = self.folder / "packages"
        with contextlib.suppress(LookupError):
            # Who speaks to servers for apt may write nowhere else.
            shutil.chown(folder, "_apt")
        missing = [each for each in downloads if not (folder / each.name).is_file()]
        if missing:
            # Everybody on the host sees the arguments of a command; apt itself has the logins from a file.
            self.log_in({each.url for each in missing})
            asked = [
                (release.without_login(each.url), str(folder / each.name), f"SHA256:{each.sha256}") for each in missing
            ]
            self.run(APT_HELPER, "download-file", *(word for words in asked for word in words))

    def as_signed(self, index: Index, signed: list[str]) -> tuple[str, Path]:
        """The name and a file of a list as it is vouched for: apt may have compressed it anew."""
        text = Path(index.signed + signed[0]).read_text(encoding="utf-8", errors="replace") if signed else ""
        sums = apt_bundle.parse_signed(text)
        path = Path(index.path)
        plain = self.folder / "plain" / path.name
        if index.extension:
            with path.open("rb") as file:
                if release.sha256(file) == sums.get(index.key + index.extension):
                    return index.key + index.extension, path
            release.make_folder(plain.parent)
            _code, out, _err = self.module.run_command(
                [APT_HELPER, "cat-file", str(path)], check_rc=True, encoding=None
            )
            plain.write_bytes(out)
        with (plain if index.extension else path).open("rb") as file:
            if release.sha256(file) != sums.get(index.key):
                raise BundleError(
                    found=f"{release.without_login(index.base)} vouches for no list of packages that apt has read",
                    expected=f"the SHA-256 of {index.key}, or of that compressed with xz, in what is signed",
                    next_step="tell its owner, or leave that repository out of the entries of this host",
                )
            return index.key, plain if index.extension else path

    def prefer(self, package: Path) -> None:
        """Have the preferences that come with a package."""
        with tempfile.TemporaryDirectory() as unpacked:
            self.module.run_command(["dpkg-deb", "--extract", str(package), unpacked], check_rc=True)
            for path in Path(unpacked, "etc/apt/preferences.d").glob("*"):
                shutil.copy(path, self.folder / "preferences.d")

    def closure(self, wanted: dict[str, Any], have: set[str]) -> list[Download]:
        """What a host needs for these packages that has none of them; what nobody has is fetched."""
        for path in (self.folder / "preferences.d").glob("*"):
            path.unlink()
        names = {package.partition("=")[0] for package in wanted["first"]}
        if names:
            first = [each for each in self.needed(wanted["first"]) if each.name.partition("_")[0] in names]
            self.fetch(first)
            for each in first:
                self.prefer(self.folder / "packages" / each.name)
        asked = functools.partial(self.needed, wanted["packages"], recommended=wanted["recommended"])
        found = {each.name: each for each in asked()}
        # What stands in the way on this host does not on others.
        with contextlib.suppress(BundleError):
            found.update({each.name: each for each in asked(status=STATUS_OF_HOST)})
        self.fetch([each for each in found.values() if each.sha256 not in have])
        return list(found.values())


class Collection:
    """What was collected, as the manifest of the bundle has it."""

    def __init__(self, params: dict[str, Any]) -> None:
        self.platform = params["platform"]
        self.folder = Path(params["folder"])
        self.origins = params["origins"]
        self.named = {f"{release.without_login(each['url']).rstrip('/')}/": each for each in params["repositories"]}
        self.files: dict[str, dict[str, Any]] = {}

    def place(self, repository: str) -> str:
        """The folder of a repository in the bundle."""
        role = self.named.get(repository)
        return f"apt/{self.platform}/{role['name'] if role else apt_bundle.folder_name(repository)}"

    def add(self, path: str, source: Path, url: str) -> None:
        """Have a file of this host."""
        with source.open("rb") as file:
            digest = release.sha256(file)
        self.files[path] = {
            "sha256": digest,
            "size": source.stat().st_size,
            "from": release.without_login(url),
            "source": str(source),
        }

    def add_packages(self, downloads: list[Download], indices: list[Index]) -> list[str]:
        """Have packages; those that the bundle has already are on this host not."""
        paths = []
        for each in downloads:
            (repository, *_others) = sorted(
                {index.repository for index in indices if each.url.startswith(index.repository)}, key=len, reverse=True
            )
            path = f"{self.place(repository)}/{apt_bundle.path_below(each.url, repository)}"
            source = self.folder / "packages" / each.name
            known = {"sha256": each.sha256, "size": each.size, "from": release.without_login(each.url)}
            self.files[path] = {**known, "package": each.name, "source": str(source) if source.is_file() else ""}
            paths.append(path)
        return sorted(paths)

    def add_indices(self, apt: Apt, indices: list[Index]) -> list[dict[str, Any]]:
        """Have what is signed of the repositories from which packages come, and tell how apt has to know them."""
        used = {path.split("/")[2] for path in self.files}
        entries: dict[tuple[str, str], dict[str, Any]] = {}
        for index in indices:
            place = self.place(index.repository)
            name = place.split("/")[2]
            if name not in used:
                continue
            root = f"{place}/{index.folder}".rstrip("/")
            signed = [each for each in ("InRelease", "Release", "Release.gpg") if Path(index.signed + each).is_file()]
            for each in signed:
                self.add(f"{root}/{each}", Path(index.signed + each), index.base + each)
            kept, path = apt.as_signed(index, signed)
            self.add(f"{root}/{kept}", path, index.base + kept)
            entry = entries.setdefault((name, index.suite), {"name": name, "suite": index.suite, "components": []})
            entry["components"] += [index.component] if index.component not in ("", *entry["components"]) else []
            # A distribution's keyring is on its hosts, and a role has the key of its own.
            of_role = index.repository in self.named
            entry.update({"of_role": of_role, "signed_by": "" if of_role else keyring_of(index)})
        return list(entries.values())

    def add_others(self) -> None:
        """Have what lies below keys and releases."""
        for path in sorted([*(self.folder / "keys").rglob("*"), *(self.folder / "releases").rglob("*")]):
            if path.is_file() and not path.name.startswith("."):
                name = path.relative_to(self.folder).as_posix()
                kept = name.replace("keys/", f"keys/{self.platform}/", 1) if name.startswith("keys/") else name
                folder, _slash, rest = name.partition("/")
                self.add(kept, path, self.origins.get(name) or f"{self.origins.get(folder, '')}/{rest}")


def keyring_of(index: Index) -> str:
    """The keyring that the entry of a list of packages names."""
    path, _colon, number = index.entry.rpartition(":")
    text = Path(path).read_text(encoding="utf-8", errors="replace")
    keyring = apt_bundle.keyring_of(text, int(number), path.endswith(".list"))
    if "-----BEGIN" in keyring:
        raise BundleError(
            found=f"{Path(path).resolve()} has the key of {release.without_login(index.repository)} in itself",
            expected="an entry that names a file with it, which hosts of the bundle have as well",
            next_step="store the key as a file below /etc/apt/keyrings, on this host and on those, and name that after "
            "Signed-By",
        )
    return keyring


def collect(module: AnsibleModule) -> dict[str, Any]:
    # Whoever Ansible logs in as fetches the files.
    os.umask(0o022)
    repositories = [dict(each) for each in module.params["repositories"]]
    for each in module.params["repositories"]:
        # What Ansible shows at -vvv.
        each["url"] = release.shown(each["url"])
    module.params["origins"] = {name: release.shown(url) for name, url in module.params["origins"].items()}
    found = Collection(module.params)
    apt = Apt(module, found.folder)
    apt.know(repositories)
    indices = apt.read()
    have = set(module.params["have"].values())
    wanted = []
    for each in module.params["wanted"]:
        try:
            downloads = apt.closure(each, have)
        except UnknownError as error:
            if not each["optional"]:
                raise
            names = ", ".join(each["packages"])
            module.warn(
                f"{platform.node()}: the bundle is without {names}: {error.found}. Hosts that lack them are told."
            )
            continue
        wanted.append({"packages": each["packages"], "files": found.add_packages(downloads, indices)})
    entries = found.add_indices(apt, indices)
    found.add_others()
    return {"changed": False, "collected": {"files": found.files, "repositories": entries, "wanted": wanted}}


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "bundle": {"type": "path", "required": True},
            "platform": {"type": "str", "required": True},
            "folder": {"type": "path", "required": True},
            "repositories": {
                "type": "list",
                "elements": "dict",
                "default": [],
                "options": {
                    "name": {"type": "str", "required": True},
                    "url": {"type": "str", "required": True},
                    "key": {"type": "path", "required": True, "no_log": False},
                    "obsolete": {"type": "list", "elements": "str", "default": []},
                },
            },
            "wanted": {
                "type": "list",
                "elements": "dict",
                "required": True,
                "options": {
                    "packages": {"type": "list", "elements": "str", "required": True},
                    "first": {"type": "list", "elements": "str", "default": []},
                    "recommended": {"type": "bool", "default": False},
                    "optional": {"type": "bool", "default": False},
                },
            },
            "origins": {"type": "dict", "default": {}},
            "partial": {"type": "bool", "default": False},
            "have": {"type": "dict", "default": {}},
        },
    )
    try:
        result = collect(module)
    except BundleError as error:
        module.fail_json(msg=f"{platform.node()}: {error}")
    except OSError as error:
        module.fail_json(
            msg=f"{platform.node()}: the files cannot be kept in {module.params['folder']} ({error}). Expected: a "
            "folder that this task may write to, with room for all packages. Next step: check 'folder' and the free "
            "space."
        )
    module.exit_json(**result)


if __name__ == "__main__":
    main()
