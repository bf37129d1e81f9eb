#!/usr/bin/python
# Copyright (c) 2026, gpufarm contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: host_info
short_description: Look once at the files, packages and units of a host that roles keep
version_added: 1.0.0
author:
  - gpufarm contributors (@gpufarm)
description:
  - Answers with one task what otherwise each task of a role asks for itself, so that a run in which nothing is to be
    done has few tasks. It tells of nothing but what it is asked for.
  - What is not there is no error.
attributes:
  check_mode:
    support: full
    description: Changes nothing in any mode.
  diff_mode:
    support: N/A
    description: Changes nothing.
  idempotent:
    support: full
    description: Changes nothing.
  platform:
    platforms: posix
    support: full
    description: >-
      Runs on Linux with dpkg or rpm, and systemd. Where one of them is missing, nothing is known of its packages or
        units.
options:
  asked_at:
    description: >-
      Seconds since 1970 by the clock of who asks, which comes back beside those of the host's clock. A clock that is
      behind it is behind; one that is ahead of it may have been asked for longer.
    type: int
  files:
    description: Paths of files and folders, or patterns as a shell has them, such as V(/etc/nomad.d/*.hcl).
    type: list
    elements: str
    default: []
  links:
    description: Paths of links. They are not followed, because what they lead to may not answer.
    type: list
    elements: str
    default: []
  certificates:
    description: Paths of files with a certificate in PEM.
    type: list
    elements: str
    default: []
  agent_files:
    description: Paths of files of the configuration of a Nomad agent. Of what they say nothing else is told.
    type: list
    elements: str
    default: []
  json_files:
    description: Paths of files that have to be JSON where they are there. Of what they say nothing is told.
    type: list
    elements: str
    default: []
  toml_files:
    description: >-
      Paths of files that have to be TOML where they are there. Of what they say nothing is told, and nothing at all
      where the host's Python is older than 3.11, which cannot read them.
    type: list
    elements: str
    default: []
  keyrings:
    description: Paths of OpenPGP keyrings.
    type: list
    elements: str
    default: []
  nomad_config:
    description: >-
      Path of a file with the configuration of Nomad's agent that these roles have written. What somebody else has
      written there is not read.
    type: path
  nomad_data_dir:
    description: Path of the folder in which the agent is to keep its state, for O(nomad_config).
    type: path
  packages:
    description: Names of packages, or patterns such as V(nvidia-driver-pinning-*).
    type: list
    elements: str
    default: []
  pci_vendors:
    description: IDs of vendors of PCI devices, as four hexadecimal digits such as V(10de) for NVIDIA.
    type: list
    elements: str
    default: []
  programs:
    description: Names of programs that are looked for in the folders of the system.
    type: list
    elements: str
    default: []
  units:
    description: Names of units of systemd, with their ending.
    type: list
    elements: str
    default: []
seealso:
  - plugin: gpufarm.core.has_path
    plugin_type: filter
  - module: ansible.builtin.find
  - module: ansible.builtin.package_facts
  - module: ansible.builtin.service_facts
"""

EXAMPLES = r"""
- name: Look at what Docker has here
  gpufarm.core.host_info:
    json_files: [/etc/docker/daemon.json]
    packages: [docker.io, docker-ce]
    programs: [dockerd]
    units: [docker.service]
  register: host

- name: Refuse settings that Docker cannot read
  ansible.builtin.fail:
    msg: "{{ host.json_errors['/etc/docker/daemon.json'] }}"
  when: host.json_errors
"""

RETURN = r"""
clock:
  description: Seconds since 1970.
  type: dict
  returned: success
  contains:
    asked_at:
      description: O(asked_at); null where it was not given.
      type: int
      sample: 1795536000
    host:
      description: By the host's clock, when it began to answer.
      type: int
      sample: 1795536001
kernel:
  description: The release of the kernel that runs.
  type: str
  returned: success
  sample: 6.12.57+deb13-amd64
user_id:
  description: The ID of the user who looked.
  type: int
  returned: success
  sample: 0
files:
  description: What is there of O(files), sorted by path; a link stands for itself. C(lstat) and the content tell it.
  type: list
  elements: dict
  returned: success
  contains:
    path:
      description: Its path.
      type: str
      sample: /etc/nomad.d/nomad.hcl
    mode:
      description: Its permissions in four octal digits.
      type: str
      sample: "0640"
    uid:
      description: The ID of its owner.
      type: int
      sample: 0
    gid:
      description: The ID of its group.
      type: int
      sample: 0
    isdir:
      description: Whether it is a folder, or a link to one.
      type: bool
      sample: false
    isreg:
      description: Whether it is a regular file.
      type: bool
      sample: true
    checksum:
      description: SHA-1 of its content, null where it is no regular file, cannot be read or has more than 1 MiB.
      type: str
      sample: da39a3ee5e6b4b0d3255bfef95601890afd80709
    managed:
      description: >-
        Whether it begins with C(# Ansible managed) and with what is managed right below, as what the roles write into
        Nomad's folder does; not known to, and so false, where RV(files[].checksum) is null.
      type: bool
      sample: true
links:
  description: By path, where each of O(links) leads, as it is written there; null where it is not there or no link.
  type: dict
  returned: success
  sample: {/usr/bin/docker: /mnt/wsl/docker-desktop/cli-tools/usr/bin/docker}
certificates:
  description: >-
    By path, the first certificate in each of O(certificates), in PEM, null where there is none; of a key nothing is
    told.
  type: dict
  returned: success
  sample: {/etc/nomad.d/tls/agent.pem: "-----BEGIN CERTIFICATE-----\nMIIB...\n-----END CERTIFICATE-----"}
certificate_ends:
  description: By path, when the certificate of RV(certificates) ends, in seconds since 1970, null where nothing tells.
  type: dict
  returned: success
  sample: {/etc/nomad.d/tls/agent.pem: 1827072000}
certificate_names:
  description: By path, the DNS names that the certificate of RV(certificates) is for, none where nothing tells.
  type: dict
  returned: success
  sample: {/etc/nomad.d/tls/agent.pem: [client.global.nomad, localhost]}
agent_acl:
  description: By path, whether each of O(agent_files) has a block C(acl); null where it is not there or cannot be read.
  type: dict
  returned: success
  sample: {/etc/nomad.d/nomad.hcl: true}
agent_tls:
  description: By path, whether each of O(agent_files) has a block C(tls); null where it is not there or cannot be read.
  type: dict
  returned: success
  sample: {/etc/nomad.d/nomad.hcl: true}
json_errors:
  description: By path, why one of O(json_files) is no JSON.
  type: dict
  returned: success
  sample: {/etc/docker/daemon.json: "Expecting value: line 1 column 1 (char 0)"}
toml_errors:
  description: By path, why one of O(toml_files) is no TOML.
  type: dict
  returned: success
  sample: {/etc/containerd/config.toml: "Invalid value (at line 1, column 5)"}
keyrings:
  description: >-
    By path, the fingerprints of the primary keys in each of O(keyrings), sorted. None for a file that is not there or
    no keyring, or is not in the form that its name says, armored for C(.asc) and binary otherwise.
  type: dict
  returned: success
  sample: {/etc/apt/keyrings/nvidia-cuda.asc: [EB693B3035CD5710E231E123A4B469963BF863CC]}
nomad_state_left:
  description: >-
    What Nomad's agent has kept in the folder that O(nomad_config) names, the identity of a node and the data of a
    server; nothing where that folder is O(nomad_data_dir).
  type: list
  elements: str
  returned: success
  sample: [/opt/nomad/data/client/client-id]
packages:
  description: >-
    What dpkg or rpm knows of O(packages), as state, name and version; dpkg also knows the states V(config-files) and
    V(half-configured).
  type: list
  elements: str
  returned: success
  sample: ["installed docker.io=20.10.24+dfsg1-1+deb12u1", "config-files nvidia-driver-pinning-570=570-1"]
packages_auto:
  description: >-
    Those of them that apt has installed only for others and would take away with these, from
    C(/var/lib/apt/extended_states).
  type: list
  elements: str
  returned: success
  sample: [iptables]
pci_devices:
  description: What is on the bus of O(pci_vendors), sorted by address, from C(/sys/bus/pci/devices).
  type: list
  elements: dict
  returned: success
  contains:
    address:
      description: Its address.
      type: str
      sample: "0000:05:00.0"
    vendor:
      description: The ID of its vendor.
      type: str
      sample: 10de
    device:
      description: Its vendor's ID of it.
      type: str
      sample: 22a3
    class:
      description: Its class, subclass and programming interface.
      type: str
      sample: "068000"
    nvswitch_bridge:
      description: >-
        Whether it is a network card that does nothing but lead to NVSwitches, as on NVIDIA's boards since Blackwell.
        Such a card says so in its vital product data.
      type: bool
      sample: false
programs:
  description: >-
    By name, the package that has brought each of O(programs); its path where no package has, and an empty text where it
    is not there.
  type: dict
  returned: success
  sample: {dockerd: docker.io}
units:
  description: By name, how systemd has each of O(units). The word is empty where it does not know the unit.
  type: dict
  returned: success
  sample: {docker.service: {enabled: enabled, active: active}}
"""

import glob
import hashlib
import json
import os
import platform
import re
import shutil
import stat
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.gpufarm.core.plugins.module_utils import certificates, openpgp, pci
from ansible_collections.gpufarm.core.plugins.module_utils.commands import answer_of
from ansible_collections.gpufarm.core.plugins.module_utils.problem import FoundError

try:
    import tomllib
except ImportError:  # before Python 3.11
    tomllib = None  # type: ignore[assignment]

SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
EXTENDED_STATES = "/var/lib/apt/extended_states"
PCI_DEVICES = "/sys/bus/pci/devices"
LARGE = 1 << 20
# Other people's roles, which begin their files like this too, leave a line empty then, or go on with their comment.
MANAGED = re.compile(rb"# Ansible managed(?:\n(?![\r\n#])|\Z)")
DATA_DIR = re.compile(rb'^data_dir *= *"([^"\\]+)"$', re.M)
# By which a node is known, and what a server knows.
NOMAD_STATE = ("client/client-id", "server")
# What holds a lock of packages, or systemd, may never let go.
ANSWER_S = 120


def content_of(path: str) -> bytes | None:
    try:
        return Path(path).read_bytes()
    except OSError:
        return None


def look_at_files(patterns: list[str]) -> list[dict[str, Any]]:
    found = []
    # What looks like a pattern may be a name.
    for path in sorted({path for pattern in patterns for path in [pattern, *glob.glob(pattern)]}):  # noqa: PTH207
        try:
            # A name that is no text cannot be told, and is none of ours.
            path.encode()
            state = os.lstat(path)
        except (OSError, UnicodeEncodeError):
            continue
        regular = stat.S_ISREG(state.st_mode)
        content = content_of(path) if regular and state.st_size <= LARGE else None
        found.append(
            {
                "path": path,
                "mode": f"{stat.S_IMODE(state.st_mode):04o}",
                "uid": state.st_uid,
                "gid": state.st_gid,
                # A Path of Python 3.13 and before raises where a network drive does not answer.
                "isdir": os.path.isdir(path),  # noqa: PTH112
                "isreg": regular,
                # As ansible.builtin.find tells it.
                "checksum": None if content is None else hashlib.sha1(content).hexdigest(),  # noqa: S324
                "managed": MANAGED.match(content or b"") is not None,
            }
        )
    return found


def state_left(config: str, wanted: str) -> list[str]:
    content = content_of(config) or b""
    match = DATA_DIR.search(content) if MANAGED.match(content) else None
    folder = match[1].decode(errors="replace") if match else wanted
    # A link, or a folder that was mounted in its place.
    if os.path.realpath(folder) == os.path.realpath(wanted):
        return []
    return [path for path in (f"{folder}/{name}" for name in NOMAD_STATE) if os.path.lexists(path)]


def target_of(path: str) -> str | None:
    try:
        return os.readlink(path)  # noqa: PTH115
    except OSError:
        return None


def certificate_of(path: str) -> str | None:
    match = certificates.PEM.search(content_of(path) or b"")
    return match[0].decode("ascii") if match else None


def told_of(certificate: str | None, tell: Callable[[bytes], Any]) -> Any:
    try:
        return tell(certificates.certificates_of((certificate or "").encode())[0])
    except (IndexError, ValueError):
        return None


def has_block(path: str, name: bytes) -> bool | None:
    content = content_of(path)
    return None if content is None else re.search(rb"^" + name + rb"\s*\{", content, re.MULTILINE) is not None


def errors_of(paths: list[str], read: Callable[[str], Any]) -> dict[str, str]:
    errors = {}
    for path in paths:
        if os.path.lexists(path):
            try:
                read(Path(path).read_text(encoding="utf-8"))
            except (OSError, ValueError) as error:
                errors[path] = str(error)
    return errors


def keys_of(path: str) -> list[str]:
    data = content_of(path)
    try:
        if not data or openpgp.is_armored(data) != path.endswith(".asc"):
            return []
        return sorted({key.fingerprint for key in openpgp.read_keys(data)})
    except openpgp.OpenPGPError:
        return []


def installed(patterns: list[str]) -> list[str]:
    """Return what dpkg or rpm knows; both end with an error where they do not know one of the names."""
    if not patterns:
        return []
    if dpkg := shutil.which("dpkg-query", path=SYSTEM_PATH):
        form = "${db:Status-Status} ${Package}=${Version}\n"
        answer = answer_of([dpkg, "--show", "--showformat", form, *patterns], ANSWER_S).stdout
        return [line for line in answer.splitlines() if not line.startswith("not-installed ")]
    if rpm := shutil.which("rpm", path=SYSTEM_PATH):
        form = "installed %{NAME}=%{VERSION}-%{RELEASE}\n"
        answer = answer_of([rpm, "--query", "--all", "--queryformat", form, *patterns], ANSWER_S).stdout
        return sorted(answer.splitlines())
    return []


def automatic(lines: list[str]) -> list[str]:
    """Return those of the packages that nobody has asked for by name."""
    text = (content_of(EXTENDED_STATES) or b"").decode(errors="replace")
    entries = [dict(line.split(": ", 1) for line in entry.splitlines() if ": " in line) for entry in text.split("\n\n")]
    marked = {entry.get("Package") for entry in entries if entry.get("Auto-Installed") == "1"}
    return sorted({name for name in (line.partition(" ")[2].partition("=")[0] for line in lines) if name in marked})


def owner(program: str) -> str:
    path = shutil.which(program, path=SYSTEM_PATH)
    if not path:
        return ""
    if dpkg := shutil.which("dpkg-query", path=SYSTEM_PATH):
        command, end = [dpkg, "--search", path], ":"
    elif rpm := shutil.which("rpm", path=SYSTEM_PATH):
        command, end = [rpm, "--query", "--queryformat", "%{NAME}\n", "--file", path], "\n"
    else:
        return path
    answer = answer_of(command, ANSWER_S)
    return answer.stdout.split(end)[0] if answer.returncode == 0 else path


def units(names: list[str]) -> dict[str, dict[str, str]]:
    """Return how systemd has the units; it answers in their order, with an empty line between two."""
    found = {name: {"enabled": "", "active": ""} for name in names}
    if names and (systemctl := shutil.which("systemctl", path=SYSTEM_PATH)):
        asked = [systemctl, "show", "--property=UnitFileState,ActiveState", "--", *names]
        answer = answer_of(asked, ANSWER_S).stdout
        for name, entry in zip(names, answer.split("\n\n")):
            said = dict(line.split("=", 1) for line in entry.splitlines() if "=" in line)
            enabled = said.get("UnitFileState", "")
            found[name] = {"enabled": enabled, "active": said.get("ActiveState", "") if enabled else ""}
    return found


def main() -> None:
    names = (
        "files", "links", "certificates", "agent_files", "json_files", "toml_files", "keyrings", "packages",
        "pci_vendors", "programs", "units",
    )  # fmt: skip
    argument_spec: dict[str, dict[str, Any]] = {
        name: {"type": "list", "elements": "str", "default": []} for name in names
    }
    argument_spec["keyrings"]["no_log"] = False
    argument_spec["asked_at"] = {"type": "int"}
    argument_spec["nomad_config"] = argument_spec["nomad_data_dir"] = {"type": "path"}
    now = int(time.time())
    module = AnsibleModule(
        argument_spec=argument_spec,
        required_together=[("nomad_config", "nomad_data_dir")],
        supports_check_mode=True,
    )
    params = module.params
    try:
        packages = installed(params["packages"])
        brought = {program: owner(program) for program in params["programs"]}
        known = units(params["units"])
    except FoundError as error:
        module.fail_json(msg=f"{platform.node()}: {error}")
    held = {path: certificate_of(path) for path in params["certificates"]}
    module.exit_json(
        changed=False,
        clock={"asked_at": params["asked_at"], "host": now},
        kernel=os.uname().release,
        user_id=os.getuid(),
        files=look_at_files(params["files"]),
        links={path: target_of(path) for path in params["links"]},
        certificates=held,
        certificate_ends={path: told_of(text, certificates.end_of) for path, text in held.items()},
        certificate_names={path: told_of(text, certificates.names_of) or [] for path, text in held.items()},
        agent_acl={path: has_block(path, b"acl") for path in params["agent_files"]},
        agent_tls={path: has_block(path, b"tls") for path in params["agent_files"]},
        json_errors=errors_of(params["json_files"], json.loads),
        toml_errors=errors_of(params["toml_files"], tomllib.loads) if tomllib else {},
        keyrings={path: keys_of(path) for path in params["keyrings"]},
        nomad_state_left=state_left(params["nomad_config"], params["nomad_data_dir"]) if params["nomad_config"] else [],
        packages=packages,
        packages_auto=automatic(packages),
        pci_devices=pci.devices_of(params["pci_vendors"], Path(PCI_DEVICES)),
        programs=brought,
        units=known,
    )


if __name__ == "__main__":
    main()
