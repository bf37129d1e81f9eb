#!/usr/bin/python
# Copyright (c) 2026, gpufarm contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: nvidia_gpu_gate_code
short_description: Have the code of the node's own gate on the node
version_added: 1.0.0
author:
  - gpufarm contributors (@gpufarm)
description:
  - Writes the Python files of the gate that the role P(gpufarm.core.gpu_health#role) runs by a timer, and removes those
    of an older version. They are the ones with which M(gpufarm.core.nvidia_gpu_health) judges, so both judge alike.
    They belong to the user who runs this task, and nobody else may write them.
  - What Ansible brings to the node to run this module are these very files; nothing is downloaded.
attributes:
  check_mode:
    support: full
    description: Tells which files would be written and removed.
  diff_mode:
    support: full
    description: Shows their names before and after, each with the start of its checksum.
  idempotent:
    support: full
    description: Files that are as they should be are not touched.
  platform:
    platforms: posix
    support: full
    description: Runs on the node.
options:
  dest:
    description:
      - Folder for the files, which is to be in Python's path. Python files of this collection that are there and do not
        belong to the gate are removed.
    type: path
    required: true
seealso:
  - module: gpufarm.core.nvidia_gpu_health
"""

EXAMPLES = r"""
- name: Have the code of the gate
  gpufarm.core.nvidia_gpu_gate_code:
    dest: /usr/local/lib/gpufarm
"""

RETURN = r"""
files:
  description: Paths of the files, sorted.
  type: list
  elements: str
  returned: success
  sample: [/usr/local/lib/gpufarm/ansible_collections/gpufarm/core/plugins/module_utils/gate_status.py]
"""

import hashlib
import os
import platform
import shutil
import sys
from pathlib import Path
from typing import Any

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.gpufarm.core.plugins.module_utils import gate_service

PACKAGE = gate_service.__name__.rpartition(".")[0]


def sources() -> dict[str, bytes]:
    """What has been imported with the gate, by path."""
    found = {}
    for name, loaded in list(sys.modules.items()):
        if name.startswith(f"{PACKAGE}."):
            path = name.replace(".", "/") + ("/__init__.py" if hasattr(loaded, "__path__") else ".py")
            found[path] = loaded.__spec__.loader.get_source(name).encode()  # type: ignore[union-attr]
    return found


def folder_of(dest: Path) -> Path:
    return dest / PACKAGE.replace(".", "/")


def present(dest: Path) -> dict[str, bytes]:
    return {str(path.relative_to(dest)): path.read_bytes() for path in folder_of(dest).rglob("*.py")}


def write(module: AnsibleModule, path: Path, content: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    staged = Path(module.tmpdir) / path.name
    staged.write_bytes(content)
    module.atomic_move(str(staged), str(path))


def attributes(module: AnsibleModule, path: Path, mode: str) -> bool:
    owner = {"owner": str(os.geteuid()), "group": str(os.getegid())}
    arguments = module.load_file_common_arguments({**owner, "mode": mode}, path=str(path))
    return bool(module.set_fs_attributes_if_different(arguments, False))


def apply(module: AnsibleModule) -> dict[str, Any]:
    dest = Path(module.params["dest"])
    before, after = present(dest), sources()
    # A package hides the module of its name that an older version has brought, so it comes when its parts are there.
    for name, content in sorted(after.items(), key=lambda item: item[0].endswith("__init__.py")):
        if before.get(name) != content and not module.check_mode:
            write(module, dest / name, content)
    for name in before.keys() - after.keys():
        if not module.check_mode:
            (dest / name).unlink()
    changed = before != after
    # Python tells what it has compiled of an older file by its time, in seconds, and its size. What a gate that runs
    # meanwhile puts there again may stay.
    if changed and not module.check_mode:
        for compiled in list(folder_of(dest).rglob("__pycache__")):
            shutil.rmtree(compiled, ignore_errors=True)
    folders = {folder for name in after for folder in (dest / name).parents if folder == dest or dest in folder.parents}
    for path, mode in [*((folder, "0755") for folder in folders), *((dest / name, "0644") for name in after)]:
        if path.exists():
            changed = attributes(module, path, mode) or changed
    result = {"changed": changed, "files": sorted(str(dest / name) for name in after)}
    if module._diff:
        result["diff"] = {"before": told(before), "after": told(after)}
    return result


def told(files: dict[str, bytes]) -> str:
    return "".join(f"{name} {hashlib.sha256(content).hexdigest()[:16]}\n" for name, content in sorted(files.items()))


def main() -> None:
    module = AnsibleModule(argument_spec={"dest": {"type": "path", "required": True}}, supports_check_mode=True)
    try:
        result = apply(module)
    except OSError as error:
        module.fail_json(
            msg=f"{platform.node()}: found that {module.params['dest']} cannot be written ({error}). Expected: a "
            "folder that this task may write to, with room. Next step: check 'dest' and the free space, or use "
            "'become'."
        )
    module.exit_json(**result)


if __name__ == "__main__":
    main()
