#!/usr/bin/python
# Copyright (c) 2026, gpufarm contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: nvidia_container_runtime
short_description: Have NVIDIA's runtime in the settings of container engines
version_added: 1.0.0
author:
  - gpufarm contributors (@gpufarm)
description:
  - Has C(nvidia-ctk runtime configure) of NVIDIA's container toolkit work out the settings, and writes them where they
    differ from what is there. Settings that are there stay. Settings that cannot be read are an error, and are left as
    they are.
  - The engines do not read them by that. Docker does with a reload, containerd and CRI-O do with a restart.
  - Docker has the runtime in C(/etc/docker/daemon.json).
  - CRI-O has it in C(/etc/crio/crio.conf.d/99-nvidia-gpufarm.toml), a file of its own.
  - >-
    containerd has it in C(/etc/containerd/conf.d/99-nvidia-gpufarm.toml), and C(/etc/containerd/config.toml) gets one
    entry of C(imports). Before version 2.1 it takes a whole plugin from one file, so that file says all that
    C(containerd config dump) tells of the plugin. What C(nvidia-ctk) does by default is not enough: with settings that
    do not name C(runc), as those of Debian's package, the plugin of Kubernetes would not start any more.
  - containerd reads the new settings in a mount namespace of its own first. Where anything but the runtime would be
    other than before, nothing is written.
attributes:
  check_mode:
    support: full
    description: Tells what would change. Where the engine or C(nvidia-ctk) is yet to come, nothing is known of it.
  diff_mode:
    support: partial
    description: Shows the files before and after, except where one of them may hold a password, a key or a proxy.
  idempotent:
    support: full
    description: Files that say what is wanted are not touched.
  platform:
    platforms: posix
    support: full
    description: Runs on Linux, as root.
options:
  engines:
    description: The engines. One that is not installed is an error, except in check mode and with O(state=absent).
    type: list
    elements: str
    choices: [docker, containerd, crio]
    required: true
  state:
    description: >-
      Whether the runtime is in the settings. With V(absent) they are as they were before; of Docker's, its default
      becomes C(runc) where it was C(nvidia).
    type: str
    choices: [present, absent]
    default: present
  default:
    description: Whether containers have the runtime that ask for none.
    type: bool
    default: false
seealso:
  - module: gpufarm.core.container_engine_info
"""

EXAMPLES = r"""
- name: Have the runtime in containerd's settings
  gpufarm.core.nvidia_container_runtime:
    engines: [containerd]
  register: settings

- name: Have containerd read them
  ansible.builtin.systemd_service:
    name: containerd
    state: restarted
  when: settings.engines.containerd.changed
"""

RETURN = r"""
engines:
  description: What became of the settings of each of O(engines), by its name.
  type: dict
  returned: success
  contains:
    changed:
      description: Whether its files differ from what they were.
      type: bool
      sample: true
    known:
      description: Whether its settings are known; not so in check mode, where it or C(nvidia-ctk) is yet to come.
      type: bool
      sample: true
    files:
      description: The files that were changed, or taken away.
      type: list
      elements: str
      sample: [/etc/containerd/conf.d/99-nvidia-gpufarm.toml, /etc/containerd/config.toml]
    runtime:
      description: The program of the runtime; null where there is none, or nothing is known.
      type: str
      sample: /usr/bin/nvidia-container-runtime
    default:
      description: The default that the settings name; null where they name none.
      type: str
      sample: runc
  sample:
    containerd:
      changed: true
      known: true
      files: [/etc/containerd/conf.d/99-nvidia-gpufarm.toml, /etc/containerd/config.toml]
      runtime: /usr/bin/nvidia-container-runtime
      default: runc
"""

import dataclasses
import json
import os
import platform
import re
import shutil
from pathlib import Path
from typing import Any

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.gpufarm.core.plugins.module_utils.commands import answer_of, program_path
from ansible_collections.gpufarm.core.plugins.module_utils.container_engines import texts
from ansible_collections.gpufarm.core.plugins.module_utils.problem import FoundError
from ansible_collections.gpufarm.core.plugins.module_utils.text import clean

TITLES = {"docker": "Docker", "containerd": "containerd", "crio": "CRI-O"}
# Without which nothing can be said. Docker's settings can be there before Docker is.
PROGRAMS = {"docker": ("nvidia-ctk",), "containerd": ("nvidia-ctk", "containerd"), "crio": ("nvidia-ctk", "crio")}
ANSWER_S = 120
DOCKER = Path("/etc/docker/daemon.json")
CONTAINERD = Path("/etc/containerd")
CRIO = Path("/etc/crio")
CRIO_FILE = CRIO / "crio.conf.d/99-nvidia-gpufarm.toml"
DROP_IN = "conf.d/99-nvidia-gpufarm.toml"
# In a mount namespace of its own, so that whatever reads or writes the settings takes the copy for them.
IN_A_COPY = r"""
set -e
copy=$1; result=$2; shift 2
mount --bind "$copy" /etc/containerd
containerd config dump >"$result/before"
"$@" >&2
cp "$result/wanted" /etc/containerd/config.toml
containerd config dump >"$result/after"
"""


@dataclasses.dataclass(frozen=True)
class Settings:
    """Files with the text that they are to have, None for one that is to go; C(like) is whose mode new ones have."""

    files: dict[Path, str | None]
    runtime: str | None = None
    default: str | None = None
    like: Path | None = None


def text_of(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as error:
        raise unreadable(path, str(error)) from None


def unreadable(path: Path, said: str) -> FoundError:
    return FoundError(
        found=f"{path} cannot be read ({said})",
        expected="settings that the engine can read; the file is as it was",
        next_step="mend the file, or move it away",
    )


class Engines:
    """The settings of this machine's engines, worked out by NVIDIA's and the engines' own programs."""

    def __init__(self, module: AnsibleModule) -> None:
        self.module = module
        self.default: bool = module.params["default"]

    def configure(self, engine: str, *arguments: str) -> list[str]:
        return [
            "nvidia-ctk", "runtime", "configure", f"--runtime={engine}",
            f"--nvidia-set-as-default={str(self.default).lower()}", *arguments,
        ]  # fmt: skip

    def run(self, engine: str, path: Path, command: list[str]) -> str:
        """Run what reads an engine's settings, or fail with what it said."""
        answer = answer_of(command, ANSWER_S)
        if answer.returncode != 0:
            lines = answer.stderr.strip().splitlines()
            # As nvidia-ctk logs: time="..." level=error msg="..."
            said = re.sub(r'^time=\S+ level=\w+ msg="(.*)"$', r"\1", lines[-1] if lines else "nothing")
            expected = "Docker's settings as a JSON object" if engine == "docker" else "settings that it can read"
            raise FoundError(
                found=f"NVIDIA's runtime could not be added to {path} ({clean(said)})",
                expected=f"{expected}; the file is as it was",
                next_step="mend what it names, or move the file away",
            )
        return answer.stdout

    def docker(self) -> Settings:
        asked = self.run("docker", DOCKER, self.configure("docker", "--dry-run"))
        settings = texts.docker_with(asked, self.default)
        runtime = settings["runtimes"][texts.RUNTIME]["path"]
        return Settings({DOCKER: texts.json_text(settings)}, runtime, settings.get("default-runtime"))

    def docker_absent(self) -> Settings:
        before = text_of(DOCKER)
        try:
            settings = texts.docker_without(json.loads(before or "{}"))
        except (AttributeError, TypeError, ValueError) as error:
            raise unreadable(DOCKER, str(error)) from None
        wanted = before if settings is None else texts.json_text(settings) if settings else None
        return Settings({DOCKER: wanted})

    def crio(self) -> Settings:
        asked = self.run("crio", CRIO / "crio.conf", self.configure("crio", "--dry-run"))
        runtime = re.search(r'^\s*runtime_path = "(.*)"$', asked, re.MULTILINE)
        default = texts.RUNTIME if self.default else None
        return Settings({CRIO_FILE: asked.strip() + "\n"}, runtime[1] if runtime else None, default)

    def crio_absent(self) -> Settings:
        return Settings({CRIO_FILE: None})

    def containerd(self) -> Settings:
        top = CONTAINERD / "config.toml"
        there = text_of(top)
        wanted = texts.with_import(there or "")
        work = Path(self.module.tmpdir) / "containerd"
        copy, result = work / "copy", work / "result"
        # Links are followed, or what lies elsewhere would be written to.
        if CONTAINERD.is_dir():
            shutil.copytree(CONTAINERD, copy, ignore_dangling_symlinks=True)
        copy.mkdir(parents=True, exist_ok=True)
        result.mkdir()
        # What this module has brought must not say what comes of it.
        (copy / DROP_IN).unlink(missing_ok=True)
        before = texts.without_import(there or "")
        (copy / "config.toml").write_text(before or texts.BARE, encoding="utf-8")
        (result / "wanted").write_text(wanted, encoding="utf-8")
        command = self.configure(
            "containerd", "--config-source=command", f"--config={top}", f"--drop-in-config={CONTAINERD / DROP_IN}"
        )
        own = [
            "unshare",
            "--mount",
            "--propagation",
            "private",
            "/bin/sh",
            "-c",
            IN_A_COPY,
            "sh",
            str(copy),
            str(result),
        ]
        # The copy is mounted there; Ubuntu's package brings no such folder.
        made = not CONTAINERD.exists()
        CONTAINERD.mkdir(mode=0o755, parents=True, exist_ok=True)
        try:
            self.run("containerd", top, [*own, *command])
        finally:
            if made:
                CONTAINERD.rmdir()
        dumps = [(result / name).read_text(encoding="utf-8") for name in ("before", "after")]
        self.check_containerd(top, *dumps)
        drop_in = (copy / DROP_IN).read_text(encoding="utf-8")
        shutil.rmtree(work)
        runtime = re.search(rf'runtimes\.{texts.RUNTIME}\.options\]\n(?:.*\n)*?\s*BinaryName = "(.*)"', drop_in)
        # The file with the runtime comes first, and may be read by nobody who may not read the other.
        files: dict[Path, str | None] = {CONTAINERD / DROP_IN: drop_in, top: wanted}
        return Settings(files, runtime[1] if runtime else None, texts.default_in(dumps[1]), top if there else None)

    def check_containerd(self, top: Path, before: str, after: str) -> None:
        if texts.cri_is_off(before):
            raise FoundError(
                found=f"{top} has containerd's CRI plugin in disabled_plugins, which alone knows runtimes",
                expected="that it is on; nothing was changed",
                next_step="take it out of disabled_plugins, or containerd out of container_toolkit_engines",
            )
        lost = texts.lost(before, after)
        if lost or not texts.runtime_in(after):
            shown = [line for line in lost if not texts.SECRET.search(line)] or ["a setting"]
            raise FoundError(
                found=f"with the runtime, containerd would no longer have {', '.join(shown)} of {top} and its imports"
                if lost
                else f"containerd would not read {CONTAINERD / DROP_IN} with {top}",
                expected="that it goes by all that it went by before, and the runtime; nothing was changed",
                next_step=f'have "{texts.IMPORT}" as the last of its imports',
            )

    def containerd_absent(self) -> Settings:
        top = CONTAINERD / "config.toml"
        there = text_of(top)
        left = None if there is None else texts.without_import(there)
        return Settings({top: left or None if left != there else there, CONTAINERD / DROP_IN: None})


def write(module: AnsibleModule, path: Path, text: str | None, like: Path | None) -> None:
    """Write a file as it was owned; what a link leads to is changed, and the link stays."""
    real = Path(os.path.realpath(path))
    if text is None:
        # Its folder stays, because nobody knows who made it.
        path.unlink()
        return
    real.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
    staged = Path(module.tmpdir) / "settings"
    staged.write_text(text, encoding="utf-8")
    new = not real.exists()
    try:
        if new:
            state = like.stat() if like else None
            # Before there is anything to read in it.
            real.touch(0o600, exist_ok=False)
            os.chown(real, state.st_uid if state else 0, state.st_gid if state else 0)
            real.chmod(state.st_mode & 0o777 if state else 0o644)
        module.atomic_move(str(staged), str(real), keep_dest_attrs=True)
    # By its version it raises, or ends the module.
    except BaseException:
        if new:
            # Empty settings are none to an older Docker, nor to the next run.
            real.unlink(missing_ok=True)
        raise


def apply(module: AnsibleModule) -> dict[str, Any]:
    engines = Engines(module)
    present = module.params["state"] == "present"
    told: dict[str, Any] = {}
    planned: list[tuple[Path, str | None, str | None, Path | None]] = []
    for name in module.params["engines"]:
        missing = [one for one in PROGRAMS[name] if present and not program_path(one, None)]
        if missing and not module.check_mode:
            raise FoundError(
                found=f"there is no {missing[0]}",
                expected=f"{TITLES[name]} and NVIDIA's container toolkit",
                next_step="install it, or run gpufarm.core.container_toolkit on this host",
            )
        if missing:
            told[name] = {"changed": False, "known": False, "files": [], "runtime": None, "default": None}
            continue
        settings = getattr(engines, name if present else f"{name}_absent")()
        changes = [
            (path, before, text, settings.like)
            for path, text in settings.files.items()
            for before in [text_of(path)]
            if before != text
        ]
        planned += changes
        told[name] = {
            "changed": bool(changes),
            "known": True,
            "files": [str(path) for path, *_rest in changes],
            "runtime": settings.runtime,
            "default": settings.default,
        }
    # Nothing is written before all is known to be right.
    if not module.check_mode:
        for path, _before, text, like in planned:
            write(module, path, text, like)
    result: dict[str, Any] = {"changed": bool(planned), "engines": told}
    if module._diff:
        result["diff"] = [
            {"before": before or "", "after": text or "", "before_header": str(path), "after_header": str(path)}
            for path, before, text, _like in planned
            if not texts.SECRET.search((before or "") + (text or ""))
        ]
    return result


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "engines": {"type": "list", "elements": "str", "choices": [*PROGRAMS], "required": True},
            "state": {"type": "str", "choices": ["present", "absent"], "default": "present"},
            "default": {"type": "bool", "default": False},
        },
        supports_check_mode=True,
    )
    try:
        module.exit_json(**apply(module))
    except FoundError as error:
        module.fail_json(msg=f"{platform.node()}: {error}")


if __name__ == "__main__":
    main()
