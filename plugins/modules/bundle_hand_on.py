#!/usr/bin/python
# Copyright (c) 2026, gpufarm contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: bundle_hand_on
short_description: Hand a host what it installs from a bundle
version_added: 1.0.0
author:
  - gpufarm contributors (@gpufarm)
description:
  - Brings about the state "apt of this host can install these packages without a network". What the bundle on the
    control machine has for them is copied into C(/var/lib/gpufarm/bundle), but for packages that the host has in that
    version.
  - apt takes from there with C(APT_CONFIG=/var/lib/gpufarm/bundle/apt.conf) in its environment, and then from nowhere
    else. It verifies signatures as ever, by keyrings that the host has. Without that variable it is as it was.
  - The checksum of a file is compared with the manifest before it is handed on, and again on the host. Where one is not
    as it was collected the host keeps what it has.
attributes:
  action:
    support: full
    description: The control machine reads the bundle and copies from it.
  check_mode:
    support: full
    description: Tells what would be copied.
  diff_mode:
    support: none
    description: Packages have no difference that is worth showing.
  idempotent:
    support: full
    description: What is there and whole is not copied again.
  platform:
    platforms: debian
    support: full
    description: Runs where apt is.
options:
  bundle:
    description: Folder on the control machine, as M(gpufarm.core.bundle_collect) has made it.
    type: path
    required: true
  platform:
    description: Name of hosts like this one in the bundle.
    type: str
    required: true
  packages:
    description: What the host is to be able to install, as it was collected.
    type: list
    elements: str
    required: true
  files:
    description: What is needed of the bundle. The control machine says it.
    type: list
    elements: dict
    default: []
    suboptions:
      path:
        description: Path below the folder of the host.
        type: str
        required: true
      sha256:
        description: Its SHA-256.
        type: str
        required: true
      package:
        description: Name, version and architecture of a package, as in the name of its file.
        type: str
      staged:
        description: Where the host has a copy that is to be put there.
        type: path
  known:
    description: >-
      Paths of all that hosts like this one may have of the bundle. What else is there, from an older bundle, is
      removed. The control machine says it.
    type: list
    elements: str
    default: []
  texts:
    description: What else is to be there, by paths. The control machine says it.
    type: dict
    default: {}
seealso:
  - module: gpufarm.core.bundle_collect
"""

EXAMPLES = r"""
- name: apt can install Docker
  gpufarm.core.bundle_hand_on:
    bundle: /srv/bundle
    platform: debian-trixie-amd64
    packages: [docker.io, docker-cli, iptables]

- name: Docker is there
  ansible.builtin.apt:
    name: [docker.io, docker-cli, iptables]
    install_recommends: false
    update_cache: true
  environment:
    APT_CONFIG: /var/lib/gpufarm/bundle/apt.conf
"""

RETURN = r"""
handed:
  description: Paths in the bundle of the files that were, or in check mode would be, copied to the host.
  type: list
  elements: str
  returned: success
  sample: [apt/debian-trixie-amd64/nvidia-cuda/InRelease]
"""

import hashlib
import platform
import shutil
from pathlib import Path
from typing import Any

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.gpufarm.core.plugins.module_utils import release
from ansible_collections.gpufarm.core.plugins.module_utils.apt_bundle import ON_NODE, BundleError, is_inside

ROOT = Path(ON_NODE)


def installed(module: AnsibleModule) -> set[str]:
    """The packages of this host, as the files that they came in are called."""
    form = "${db:Status-Status} ${Package}_${Version}_${Architecture}.deb\\n"
    _code, out, _err = module.run_command(["dpkg-query", "--show", "--showformat", form], check_rc=True)
    return {line.partition(" ")[2] for line in out.splitlines() if line.startswith("installed ")}


def put(file: dict[str, Any]) -> None:
    """Have a staged file in its place, whole."""
    staged, target = Path(file["staged"]), ROOT / file["path"]
    found = release.checksum_of(staged)
    if found != file["sha256"]:
        raise BundleError(
            found=f"{file['path']} came with the SHA-256 {found or 'of no file'}",
            expected=file["sha256"],
            next_step="look at the free space of this host and at its connection, and run this again",
        )
    release.make_folder(target.parent)
    beside = target.with_name(f".{target.name}.part")
    shutil.move(str(staged), str(beside))
    # apt reads it as a user of its own.
    shutil.chown(beside, 0, 0)
    beside.chmod(0o644)
    beside.replace(target)


def write(texts: dict[str, str], check_mode: bool) -> bool:
    """Have these texts, and tell whether one was another."""
    others = {
        name: text
        for name, text in texts.items()
        if release.checksum_of(ROOT / name) != hashlib.sha256(text.encode()).hexdigest()
    }
    if not check_mode:
        for name in ("lists/partial", "cache/archives/partial", "sources.list.d"):
            release.make_folder(ROOT / name)
        for name, text in others.items():
            release.make_folder((ROOT / name).parent)
            (ROOT / name).write_text(text, encoding="utf-8")
            (ROOT / name).chmod(0o644)
    return bool(others)


def remove_others(known: set[str], check_mode: bool) -> bool:
    """Have nothing that no bundle has any more, and tell whether there was something."""
    places = [path for folder in ("apt", "keys", "sources.list.d") for path in (ROOT / folder).rglob("*")]
    others = [path for path in places if path.is_file() and path.relative_to(ROOT).as_posix() not in known]
    if not check_mode:
        for path in others:
            path.unlink()
    return bool(others)


def hand_on(module: AnsibleModule) -> dict[str, Any]:
    files = module.params["files"]
    # What is written here is written as root.
    for path in [*(each["path"] for each in files), *module.params["texts"]]:
        if not is_inside(path):
            raise BundleError(
                found=f"{path} is to be written, which is not below {ON_NODE}",
                expected="paths below that folder",
                next_step="ask whoever has made or carried the bundle; its manifest was changed",
            )
    staged = [each for each in files if each["staged"]]
    if staged:
        for each in staged:
            put(each)
        return {"changed": True, "missing": []}
    have = installed(module)
    missing = [
        each["path"]
        for each in files
        if (each["package"] or "").replace("%3a", ":") not in have
        and release.checksum_of(ROOT / each["path"]) != each["sha256"]
    ]
    removed = remove_others(set(module.params["known"]), module.check_mode)
    written = write(module.params["texts"], module.check_mode)
    return {"changed": removed or written or bool(missing), "missing": missing}


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "bundle": {"type": "path", "required": True},
            "platform": {"type": "str", "required": True},
            "packages": {"type": "list", "elements": "str", "required": True},
            "files": {
                "type": "list",
                "elements": "dict",
                "default": [],
                "options": {
                    "path": {"type": "str", "required": True},
                    "sha256": {"type": "str", "required": True},
                    "package": {"type": "str"},
                    "staged": {"type": "path"},
                },
            },
            "known": {"type": "list", "elements": "str", "default": []},
            "texts": {"type": "dict", "default": {}},
        },
        supports_check_mode=True,
    )
    try:
        result = hand_on(module)
    except BundleError as error:
        module.fail_json(msg=f"{platform.node()}: {error}")
    except OSError as error:
        module.fail_json(
            msg=f"{platform.node()}: {ON_NODE} cannot be written ({error}). Expected: room for what this host "
            "installs. Next step: check the free space there."
        )
    module.exit_json(**result)


if __name__ == "__main__":
    main()
