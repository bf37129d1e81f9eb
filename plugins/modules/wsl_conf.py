#!/usr/bin/python
# Copyright (c) 2026, gpufarm contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: wsl_conf
short_description: Change settings of a WSL distribution in /etc/wsl.conf
version_added: 1.0.0
author:
  - gpufarm contributors (@gpufarm)
description:
  - Sets keys of C(/etc/wsl.conf) one by one. Whatever else is in the file, with its comments and its order, stays as it
    is.
  - WSL reads the file when it starts the distribution, so a change waits for C(wsl.exe --terminate). The module
    remembers that in C(/run), which the distribution loses with its end.
  - It knows the file as WSL reads it. Names count in any case, and of a key that is there twice the first does. At a
    line that WSL cannot read it stops, so such a line is an error, and nothing is changed.
attributes:
  check_mode:
    support: full
    description: Tells what would change.
  diff_mode:
    support: full
    description: Shows the file before and after.
  idempotent:
    support: full
    description: A file that says what is wanted is not touched, however it says it.
  platform:
    platforms: posix
    support: full
    description: Runs in the distribution.
options:
  settings:
    description:
      - "Sections with their keys and values, such as V({boot: {systemd: true}}). An empty value takes the key out."
      - A key that WSL is not known to have is a warning. A user who is not there is refused as the default one, for WSL
        could start no shell then.
    type: dict
    required: true
  path:
    description:
      - The file.
    type: path
    default: /etc/wsl.conf
  backup:
    description:
      - Whether what was there before a change is kept beside it.
    type: bool
    default: true
seealso:
  - plugin: gpufarm.core.wsl
    plugin_type: connection
"""

EXAMPLES = r"""
- name: Have systemd, and files of Windows that Linux may own
  gpufarm.core.wsl_conf:
    settings:
      boot:
        systemd: true
      automount:
        options: metadata,umask=022
  register: conf

- name: Say what is to be done
  ansible.builtin.debug:
    msg: Run `wsl.exe --terminate` for this distribution.
  when: conf.pending
"""

RETURN = r"""
settings:
  description: All that the file says, or in check mode would say, by section and key in small letters.
  type: dict
  returned: success
  sample: {boot: {systemd: "true"}, user: {default: alice}}
pending:
  description:
    - Whether the file says something else than it did when this module first changed it since the distribution has
      started, so that the distribution does not run by it yet.
    - In check mode a change that is only announced counts, too.
  type: bool
  returned: success
  sample: true
backup_file:
  description: Where the file is that was there before.
  type: str
  returned: if the file was there and has changed
  sample: /etc/wsl.conf.4711.2026-01-31@12:00:00~
"""

import hashlib
import os
import platform
import pwd
from pathlib import Path
from typing import Any

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.gpufarm.core.plugins.module_utils import wsl_settings
from ansible_collections.gpufarm.core.plugins.module_utils.problem import FoundError

# Emptied with the distribution's end.
RUN = Path("/run/gpufarm")
# src/linux/init/WslDistributionConfig.cpp of microsoft/WSL.
KNOWN = {
    "automount": ("enabled", "mountfstab", "root", "options", "ldconfig", "cgroups"),
    "boot": ("systemd", "command", "protectbinfmt", "inittimeout"),
    "fileserver": ("enabled", "logfile", "loglevel", "logtruncate"),
    "filesystem": ("umask",),
    "general": ("guiapplications",),
    "gpu": ("enabled", "appendlibpath"),
    "interop": ("enabled", "appendwindowspath"),
    "network": ("hostname", "generatehosts", "generateresolvconf"),
    "time": ("usewindowstimezone",),
    "user": ("default",),
}


def refuse(module: AnsibleModule, found: str, expected: str, next_step: str) -> None:
    module.fail_json(msg=f"{platform.node()}: found {found}. Expected: {expected}. Next step: {next_step}.")


def check(module: AnsibleModule, settings: Any) -> None:
    for section, keys in settings.items():
        if not isinstance(keys, dict):
            refuse(
                module, f"{section!r} in 'settings'", "sections with keys and values", "write {boot: {systemd: true}}"
            )
        for key, value in keys.items():
            try:
                wsl_settings.changed("", {section: {key: value}}, windows=False)
            except FoundError as error:
                module.fail_json(msg=f"{platform.node()}: found {error}")
            if str(key).lower() not in KNOWN.get(section.lower(), ()):
                module.warn(f"WSL is not known to have the key {key} in [{section}] of {module.params['path']}.")
            if (section.lower(), str(key).lower()) == ("user", "default") and value is not None:
                try:
                    pwd.getpwnam(str(value))
                except KeyError:
                    refuse(
                        module, f"no user {value!r} in this distribution", "the default user is there",
                        "make the user first, or name another",
                    )  # fmt: skip


def marker(path: str) -> Path:
    return RUN / f"{hashlib.sha256(path.encode()).hexdigest()[:16]}.wsl-conf"


def shown(text: str) -> str:
    """A file's text for a result, in which bytes that are no UTF-8 cannot be."""
    return text.encode("utf-8", errors="surrogateescape").decode("utf-8", errors="replace")


def apply(module: AnsibleModule) -> dict[str, Any]:
    # What a link leads to is changed, and the link stays.
    path = Path(os.path.realpath(module.params["path"]))
    there = path.exists()
    before = path.read_bytes().decode("utf-8", errors="surrogateescape") if there else ""
    after = wsl_settings.changed(before, module.params["settings"], windows=False)
    change = before != after
    invalid = wsl_settings.first_invalid(after, windows=False)
    if invalid:
        refuse(
            module, f"line {invalid[0]} of {path}, {shown(invalid[1])!r}, at which WSL stops reading the file",
            "[section], key = value, # comment or nothing", "correct the line; nothing was changed",
        )  # fmt: skip
    result: dict[str, Any] = {"changed": change, "settings": wsl_settings.read(shown(after), windows=False)}
    mark, started_with = marker(str(path)), hashlib.sha256(before.encode(errors="surrogateescape")).hexdigest()
    if mark.exists():
        started_with = mark.read_text(encoding="ascii")
    elif change and not module.check_mode:
        # Ahead of the change: a run that ends in between must not hide it.
        mark.parent.mkdir(mode=0o755, exist_ok=True)
        mark.write_text(started_with, encoding="ascii")
    if change and not module.check_mode:
        if there and module.params["backup"]:
            result["backup_file"] = module.backup_local(str(path))
        staged = Path(module.tmpdir) / path.name
        staged.write_bytes(after.encode("utf-8", errors="surrogateescape"))
        module.atomic_move(str(staged), str(path), keep_dest_attrs=there)
        if not there:
            path.chmod(0o644)
    result["pending"] = hashlib.sha256(after.encode(errors="surrogateescape")).hexdigest() != started_with
    if module._diff:
        result["diff"] = {
            "before": shown(before), "after": shown(after), "before_header": str(path), "after_header": str(path),
        }  # fmt: skip
    return result


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "settings": {"type": "dict", "required": True},
            "path": {"type": "path", "default": "/etc/wsl.conf"},
            "backup": {"type": "bool", "default": True},
        },
        supports_check_mode=True,
    )
    check(module, module.params["settings"])
    try:
        result = apply(module)
    except OSError as error:
        refuse(
            module, f"that {module.params['path']} cannot be changed ({error})", "a file that this task may write",
            "use 'become'",
        )  # fmt: skip
    module.exit_json(**result)


if __name__ == "__main__":
    main()
