# Copyright (c) gpufarm contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What engines' settings have to say, as text: nothing here touches a file."""

from __future__ import annotations

import json
import re
from typing import Any

RUNTIME = "nvidia"
# Of containerd: a pattern, because a file that is named and is not there keeps it from starting, and one that is not as
# wide as nvidia-ctk's *.toml, because that would bring in whatever else lies in the folder.
IMPORT = "/etc/containerd/conf.d/99-nvidia*.toml"
LINE = f'imports = ["{IMPORT}"]\n'
BARE = "version = 2\n"
IMPORTS = re.compile(r"^imports[ \t]*=[ \t]*\[(.*?)\]", re.MULTILINE | re.DOTALL)
# What a result must not show.
SECRET = re.compile(r"prox(?:y|ies)|auth|cred|key|passw|secret|token|://[^\s\"']*@", re.IGNORECASE)


def json_text(settings: dict[str, Any]) -> str:
    return json.dumps(settings, indent=4, sort_keys=True) + "\n"


def docker_with(asked: str, default: bool) -> dict[str, Any]:
    """Docker's settings from what nvidia-ctk printed.

    It takes no default back, and Docker keeps one that is merely gone until it restarts; so runc is named.
    """
    settings: dict[str, Any] = json.loads(asked)
    if not default and settings.get("default-runtime") == RUNTIME:
        settings["default-runtime"] = "runc"
    return settings


def docker_without(settings: dict[str, Any]) -> dict[str, Any] | None:
    """Docker's settings without the runtime, None where they never had it. A default is taken back as above."""
    runtimes = settings.get("runtimes") or {}
    default = settings.get("default-runtime")
    if RUNTIME not in runtimes and default != RUNTIME:
        return None
    left = {key: value for key, value in settings.items() if key != "runtimes"}
    others = {name: value for name, value in runtimes.items() if name != RUNTIME}
    return {
        **left,
        **({"runtimes": others} if others else {}),
        **({"default-runtime": "runc"} if default == RUNTIME else {}),
    }


def imports(text: str) -> list[str]:
    """The files that settings of containerd bring in."""
    found = IMPORTS.search(text)
    return re.findall(r"""["']([^"'\n]+)["']""", found[1]) if found else []


def with_import(text: str) -> str:
    """Settings of containerd that bring in the file with the runtime, after all others; the rest stays as it is."""
    if {IMPORT, "/etc/containerd/conf.d/*.toml"} & set(imports(text)):
        return text
    found = IMPORTS.search(text)
    if not found:
        # Ahead of the first table, where alone it is not a part of one.
        return LINE + (text or BARE)
    inner = found[1].rstrip()
    at = found.start(1) + len(inner)
    # With a comma behind it only where the list has one, so that it can be told what was there.
    added = f' "{IMPORT}",' if inner.endswith(",") else f', "{IMPORT}"' if inner else f'"{IMPORT}"'
    return text[:at] + added + text[at:]


def without_import(text: str) -> str:
    """The settings as they were before C(with_import); empty where there were none."""
    if text.startswith(LINE):
        left = text[len(LINE) :]
        return "" if left == BARE else left
    name = re.escape(IMPORT)
    return re.sub(rf' "{name}",|, "{name}"|"{name}"', "", text)


def runtime_in(dump: str) -> bool:
    """Whether `containerd config dump` lists the runtime; its plugin has had several names."""
    return re.search(rf"^\s*\[plugins\..*\.containerd\.runtimes\.{RUNTIME}\]$", dump, re.MULTILINE) is not None


def default_in(dump: str) -> str | None:
    found = re.search(r'^\s*default_runtime_name = ["\'](.*)["\']$', dump, re.MULTILINE)
    return found[1] if found else None


def cri_is_off(dump: str) -> bool:
    """Whether settings switch off the plugin that alone knows runtimes, as Docker's package containerd.io does."""
    found = re.search(r"^disabled_plugins = \[(.*?)\]", dump, re.MULTILINE | re.DOTALL)
    names = re.findall(r"""["']([^"']+)["']""", found[1]) if found else []
    return bool({"cri", "io.containerd.grpc.v1.cri", "io.containerd.cri.v1.runtime"} & set(names))


def settings_of(dump: str) -> list[str]:
    """The lines of a dump, each with the table that it stands in."""
    found = []
    table = ""
    for line in map(str.strip, dump.splitlines()):
        if line.startswith("[") and line.endswith("]"):
            table = line
        elif line:
            found.append(f"{line} in {table}" if table else line)
    return found


def lost(before: str, after: str) -> list[str]:
    """What a dump has and another one has no more, but for what a runtime's coming has to change."""
    there = set(settings_of(after))
    return [
        line
        for line in settings_of(before)
        if line not in there and not re.match("(?:imports|default_runtime_name) =", line)
    ]
