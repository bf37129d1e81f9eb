# Copyright (c) 2026, gpufarm contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
name: wsl
short_description: WSL distributions of Windows machines
version_added: 1.0.0
author:
  - gpufarm contributors (@gpufarm)
description:
  - Asks Windows machines for their WSL distributions, each in one connection and all at the same time.
  - Windows machines are in the group C(wsl_hosts), distributions in the group C(wsl_instances), each with the variables
    of its connection.
  - A machine that does not answer is a warning; its host has C(wsl_reachable) V(false) and the reason in C(wsl_error).
  - The configuration is a YAML file whose name ends in C(.wsl.yml) or C(.wsl.yaml).
extends_documentation_fragment:
  - constructed
  - inventory_cache
requirements:
  - OpenSSH's client, for machines with O(windows_hosts[].connection=ssh)
  - community.general 10.6.0 or newer and paramiko, to run tasks in distributions of these machines; community.general
    12.2.0 or newer where their SSH starts PowerShell
  - pypsrp, for machines with O(windows_hosts[].connection=psrp)
options:
  plugin:
    description: The name of this plugin.
    type: str
    required: true
    choices:
      - gpufarm.core.wsl
  windows_hosts:
    description:
      - The Windows machines.
      - Of each the distributions of one user are found, because they belong to a user.
      - Values may be templates, the names may not.
    type: list
    elements: dict
    required: true
    suboptions:
      name:
        description: Name of the machine in the inventory.
        type: str
        required: true
      connection:
        description:
          - How the machine is asked.
          - V(local) is the Windows below the distribution that Ansible runs in, through interop; its own tasks run by
            P(gpufarm.core.wsl_windows#connection).
          - V(ssh) is OpenSSH's own client, so its keys, agent, jump hosts and C(~/.ssh/config) count. It asks for no
            password. The shell on the other side may be cmd or PowerShell.
          - V(psrp) is PowerShell Remoting.
        type: str
        choices:
          - local
          - ssh
          - psrp
        default: ssh
      address:
        description: Address, or name in C(~/.ssh/config). If not set, it is the name.
        type: str
      port:
        description: Port, if it is not the usual one.
        type: int
      user:
        description: The Windows user who owns the distributions.
        type: str
      password:
        description: Password of the user, for V(psrp).
        type: str
      private_key:
        description: File with the private key, for V(ssh).
        type: path
      ssh_arguments:
        description: More arguments for C(ssh), such as C(-J jump).
        type: list
        elements: str
      psrp:
        description:
          - More arguments of pypsrp's C(WSMan), such as C(ssl), C(auth), C(cert_validation) or C(path).
          - Tasks on the machine itself get those that P(ansible.builtin.psrp#connection) knows.
        type: dict
      wsl_exe:
        description:
          - Path of C(wsl.exe). For V(local), it is that which this distribution sees.
          - If not set, it is the first on E(PATH), else that of WSL's own package, which may be the only one that works
            while nobody is logged on.
        type: path
      list_addresses:
        description:
          - Whether a machine with V(local) tells its addresses, too, as the others do. It takes a start of
            C(powershell.exe) beside those of C(wsl.exe). Where that gives none, the machine has the reason in
            C(wsl_addresses_error), and a warning tells it.
        type: bool
        default: false
      distribution_connection:
        description:
          - How tasks run in the distributions.
          - V(wsl) is P(gpufarm.core.wsl#connection) for V(local), and P(community.general.wsl#connection) for V(ssh).
          - V(ssh) is each distribution's own SSH server. The Windows machine is the jump host to its address, where
            O(windows_hosts[].connection=ssh). With V(psrp) there is no other way than V(ssh), and the Windows machine's
            own address has to lead there.
        type: str
        choices:
          - wsl
          - ssh
        default: wsl
      distribution_user:
        description: User in the distributions. If not set, it is each one's default user.
        type: str
      distribution_ssh_port:
        description: Port of the distributions' own SSH servers.
        type: int
        default: 22
  details:
    description:
      - Which distributions are looked into for release, address, systemd, kernel and GPUs.
      - V(running) starts none, V(all) starts those that are stopped.
    type: str
    choices:
      - none
      - running
      - all
    default: running
  exclude_distributions:
    description:
      - Patterns of names that are left out; by default appliances that no task should run in.
      - V(*) stands for any text, V(?) for one character, upper and lower case differ.
    type: list
    elements: str
    default:
      - docker-desktop*
      - podman-*
      - rancher-desktop*
  hostname:
    description:
      - Template of a distribution's name in the inventory, made of its variables.
      - If not set, it is the name of the Windows machine, a dash and the name of the distribution.
    type: str
  filters:
    description:
      - Conditions on the variables of a distribution, in order. The first that is true decides.
      - A distribution for which none is true is in the inventory.
    type: list
    elements: dict
    default: []
    suboptions:
      include:
        description: Condition under which a distribution is in the inventory.
        type: str
      exclude:
        description: Condition under which it is not.
        type: str
  workers:
    description: How many machines are asked at the same time.
    type: int
    default: 100
  timeout:
    description: Seconds after which a machine counts as one that does not answer.
    type: int
    default: 30
notes:
  - O(compose), O(groups), O(keyed_groups) and O(filters) see the variables of distributions; Windows machines have none
    of them.
  - What a machine has answered is kept in the cache, what could not be asked is not.
  - What comes from the machines, and the names of hosts, are never templates.
"""

EXAMPLES = r"""
# lab.wsl.yml: two Windows machines by SSH, and the one that Ansible runs on
plugin: gpufarm.core.wsl
windows_hosts:
  - name: gaming-pc
    user: alice
  - name: workstation
    address: 192.0.2.32
    user: bob
    distribution_user: root
  - name: here
    connection: local
groups:
  # One of a machine, because WSL 2 has one network for all.
  gpu_nodes: wsl_version == 2 and wsl_default and wsl_running
keyed_groups:
  - key: wsl_host
    prefix: at
filters:
  - exclude: wsl_distribution.startswith('old-')
cache: true
cache_plugin: ansible.builtin.jsonfile
cache_connection: ~/.cache/gpufarm-wsl

# PowerShell Remoting, with the password from the environment
# plugin: gpufarm.core.wsl
# windows_hosts:
#   - name: workstation
#     connection: psrp
#     user: bob
#     password: "{{ lookup('ansible.builtin.env', 'BOB') }}"
#     psrp:
#       auth: ntlm
#       cert_validation: false
"""

import hashlib
import json
import os
import re
import shlex
import subprocess
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, fields
from typing import Any

from ansible import constants
from ansible.errors import AnsibleParserError
from ansible.module_utils.parsing.convert_bool import boolean
from ansible.plugins.inventory import BaseInventoryPlugin, Cacheable, Constructable
from ansible.plugins.loader import connection_loader
from ansible_collections.gpufarm.core.plugins.module_utils.problem import sentences
from ansible_collections.gpufarm.core.plugins.module_utils.text import clean
from ansible_collections.gpufarm.core.plugins.plugin_utils import wsl

NUMBERS = ("port", "distribution_ssh_port")
KINDS: Mapping[str, Callable[[Any], Any]] = {
    **dict.fromkeys(NUMBERS, int),
    "list_addresses": boolean,
    "psrp": dict,
    "ssh_arguments": lambda value: tuple(map(str, value)),
}
CHOICES = {"connection": tuple(wsl.ASK), "distribution_connection": ("wsl", "ssh")}
DETAILS = ("release", "release_id", "release_version", "kernel", "systemd", "ip", "gpus", "error")
# What pypsrp calls an option, and what Ansible's connection psrp does.
PSRP_VARIABLES = {
    **{
        name: name
        for name in (
            "auth", "path", "proxy", "certificate_key_pem", "certificate_pem", "connection_timeout",
            "credssp_auth_mechanism", "credssp_disable_tlsv1_2", "credssp_minimum_version", "max_envelope_size",
            "negotiate_delegate", "negotiate_hostname_override", "negotiate_send_cbt", "negotiate_service",
            "operation_timeout", "read_timeout", "reconnection_backoff", "reconnection_retries",
        )
    },
    "encryption": "message_encryption",
    "no_proxy": "ignore_proxy",
}  # fmt: skip
# By which tasks for Windows get there.
CONNECTIONS = {"local": "gpufarm.core.wsl_windows", "ssh": "ssh", "psrp": "psrp"}
REMOTE_WSL = "community.general.wsl"
OF_EVERY_CONNECTION = {"ansible_connection", "ansible_remote_tmp"}
# Of these the first that is there hides the file that is configured; the usual one is always read.
SHARED_KNOWN_HOSTS = ("/etc/ssh/ssh_known_hosts", "/etc/openssh/ssh_known_hosts")
KNOWN_HOSTS = "~/.ssh/known_hosts"
# A file of it may be no file, or on a server that is away.
ANSWER_S = 60
# Which of ssh's options name a jump host; a way to it must not lead through it.
JUMPS = re.compile("(proxyjump|proxycommand)[ =]", re.IGNORECASE)


def host_of(described: Any) -> wsl.Host:
    """A Windows machine from its description; what cannot be meant is refused."""
    if not isinstance(described, Mapping) or not described.get("name"):
        # Never the values: a password may be one of them.
        found_keys = ", ".join(sorted(map(str, described))) if isinstance(described, Mapping) else "no dictionary"
        raise ValueError(f"each of windows_hosts needs a name, found {found_keys or 'nothing'}")
    name = str(described["name"])
    unknown = sorted(set(described) - {each.name for each in fields(wsl.Host)})
    if unknown:
        raise ValueError(f"{name} has unknown options: {', '.join(unknown)}")
    found = {key: value for key, value in described.items() if value is not None}
    for key in NUMBERS:
        if key in found and not str(found[key]).isdecimal():
            raise ValueError(f"{key} of {name} is no number: {found[key]!r}")
    for key, choices in CHOICES.items():
        if found.get(key, choices[0]) not in choices:
            raise ValueError(f"{key} of {name} is {found[key]!r}. Expected: one of {', '.join(choices)}")
    if str(found.get("list_addresses", False)).lower() not in ("true", "false"):
        raise ValueError(f"list_addresses of {name} is {found['list_addresses']!r}. Expected: true or false")
    if not isinstance(found.get("ssh_arguments", []), list) or not isinstance(found.get("psrp", {}), Mapping):
        raise ValueError(f"ssh_arguments of {name} must be a list, psrp a dictionary")
    settings = {"address": name, **{key: KINDS.get(key, str)(value) for key, value in found.items()}}
    host = wsl.Host(**settings)
    if host.address.startswith("-"):
        raise ValueError(f"address of {name} begins with a dash: {host.address!r}")
    return host


def windows_variables(host: wsl.Host, answer: Mapping[str, Any] | None) -> dict[str, Any]:
    """What connects to the Windows machine itself."""
    found: dict[str, Any] = {"wsl_connection": host.connection, "ansible_connection": CONNECTIONS[host.connection]}
    # What all others of a farm may have set; sudo is no program of Windows.
    found["ansible_become"] = False
    if answer:
        found["wsl_exe"] = answer["program"]
        found["wsl_computer_name"] = answer["computer_name"]
        found["wsl_addresses"] = answer["addresses"]
        found["wsl_addresses_error"] = addresses_error(answer)
        found["wsl_distributions"] = [each["name"] for each in answer["distributions"]]
    if host.connection != "local":
        found |= machine_variables(host, answer)
    return {key: value for key, value in found.items() if value is not None}


def addresses_error(answer: Mapping[str, Any]) -> str | None:
    """Why addresses that were asked for are not known."""
    if not answer.get("addresses_error"):
        return None
    return sentences(
        f"the addresses of Windows are not known ({answer['addresses_error']})",
        "an answer of powershell.exe, because list_addresses is true",
        "run `powershell.exe -NoProfile -Command 1` here and mend what it says, or raise the option timeout",
    )


def is_whole(answer: Mapping[str, Any]) -> bool:
    """Whether all has been told that was asked for, so that a cache may have it."""
    return not addresses_error(answer) and not any(each.get("error") for each in answer["distributions"])


def machine_variables(host: wsl.Host, answer: Mapping[str, Any] | None) -> dict[str, Any]:
    """Variables of Ansible's own connections to another machine."""
    found: dict[str, Any] = {"ansible_host": host.address, "ansible_port": host.port, "ansible_user": host.user}
    if host.connection == "psrp":
        found["ansible_password"] = host.password
        for key, value in host.psrp.items():
            if key == "ssl":
                found["ansible_psrp_protocol"] = "https" if value else "http"
            elif key == "cert_validation":
                found["ansible_psrp_cert_validation"] = "validate" if value else "ignore"
                # Of pypsrp, it may be the file with the certificates, too.
                found["ansible_psrp_ca_cert"] = value if isinstance(value, str) else None
            elif key in PSRP_VARIABLES:
                found[f"ansible_psrp_{PSRP_VARIABLES[key]}"] = value
    else:
        found["ansible_ssh_private_key_file"] = host.private_key
        found["ansible_ssh_common_args"] = shlex.join(host.ssh_arguments) or None
        found["ansible_shell_type"] = (answer or {}).get("shell")
    return found


def connection_variables(host: wsl.Host, answer: Mapping[str, Any], distribution: Mapping[str, Any]) -> dict[str, Any]:
    """What runs tasks in a distribution."""
    found: dict[str, Any] = {"wsl_user": host.distribution_user}
    if host.connection == "psrp" or host.distribution_connection == "ssh":
        found |= {
            "ansible_connection": "ssh",
            "ansible_host": host.address if host.connection == "psrp" else distribution.get("ip") or None,
            "ansible_port": host.distribution_ssh_port,
            "ansible_user": host.distribution_user,
        }
        if host.connection == "ssh":
            # An address behind NAT is known to its Windows machine only.
            proxy = shlex.join(["ssh", "-W", "[%h]:%p", *wsl.ssh_options(host), "--", host.address])
            found["ansible_ssh_common_args"] = f"-o ProxyCommand={shlex.quote(proxy)}"
    elif host.connection == "local":
        found |= {
            "ansible_connection": "gpufarm.core.wsl",
            "ansible_user": host.distribution_user,
            "ansible_wsl_exe": answer["program"],
        }
    else:
        # That connection does not read ~/.ssh/config, so it gets what ssh makes of it.
        ssh = answer["ssh"]
        found |= {
            "ansible_connection": REMOTE_WSL,
            # The home of ansible_user is that of the Windows user, whom the distribution does not know.
            "ansible_remote_tmp": "$HOME/.ansible/tmp",
            "ansible_host": ssh.get("hostname", host.address),
            "ansible_port": int(ssh.get("port", host.port or 22)),
            "ansible_user": ssh.get("user", host.user),
            "ansible_ssh_private_key_file": host.private_key or next(iter(keys_of(ssh)), None),
            "ansible_paramiko_proxy_command": proxy_command(host, ssh),
            "ansible_paramiko_user_known_hosts_file": known_hosts_of(ssh),
            "ansible_paramiko_host_key_checking": None if checked(ssh) else False,
            # Only where it is not the default, for community.general before 12.2.0 does not know it.
            "wsl_remote_ssh_shell_type": "powershell" if answer["shell"] == "powershell" else None,
        }
    return {key: value for key, value in found.items() if value is not None}


def obstacle(host: wsl.Host, answer: Mapping[str, Any], variables: Mapping[str, Any]) -> tuple[str, str, str] | None:
    """Why tasks will not run in a distribution with these variables: found, expected, next step."""
    if variables["ansible_connection"] == "ssh" and "ansible_host" not in variables:
        return "its address is not known", "it runs and tells it", "start it, or set details: all"
    if variables["ansible_connection"] != REMOTE_WSL:
        return None
    if answer["program"] != wsl.PROGRAMS[0]:
        return (
            f"{answer['program']} is what answers on {host.name}, and {REMOTE_WSL} starts the wsl.exe of PATH",
            "that works in a session of SSH, too",
            f"update WSL on {host.name} and leave wsl_exe out, or set distribution_connection: ssh",
        )
    known = known_variables()
    missing = sorted(set(variables) - OF_EVERY_CONNECTION - known)
    if missing:
        lacking = f"the installed community.general does not know {', '.join(missing)}"
        return (
            lacking if known else "community.general is not installed",
            "community.general 12.2.0 or newer",
            "`ansible-galaxy collection install -U community.general`",
        )
    return key_obstacle(host, answer["ssh"], variables)


def key_obstacle(host: wsl.Host, ssh: Mapping[str, Any], variables: Mapping[str, Any]) -> tuple[str, str, str] | None:
    """What ssh goes by, where it is configured so, and a connection that does not read its configuration cannot."""
    keys = keys_of(ssh)
    # An agent holds keys for both.
    if len(keys) > 1 and not host.private_key and "SSH_AUTH_SOCK" not in os.environ:
        return (
            f"ssh has several keys for {host.name} ({', '.join(keys)}), and {REMOTE_WSL} takes one",
            "the one that is let in",
            f"set private_key of {host.name}, or start ssh-agent and add the keys",
        )
    if not checked(ssh) or not constants.HOST_KEY_CHECKING:
        return None
    known, alias = known_hosts_of(ssh), ssh.get("hostkeyalias")
    # What the usual file has is what ssh has just gone by.
    if not alias and known in (None, expanded(KNOWN_HOSTS)):
        return None
    place, port = str(variables["ansible_host"]).lower(), variables["ansible_port"]
    name = place if port == 22 else f"[{place}]:{port}"
    shared = [path for path in SHARED_KNOWN_HOSTS if os.access(path, os.R_OK)]
    read = list(dict.fromkeys([*(shared or [known or KNOWN_HOSTS])[:1], KNOWN_HOSTS]))
    if any(has_key(name, path) for path in read):
        return None
    return (
        f"{REMOTE_WSL} looks for the host key of {name} in {' and '.join(read)}, where there is none",
        f"the key that ssh knows{f' as {alias} (HostKeyAlias)' if alias else ''}",
        f"copy its line from {known or KNOWN_HOSTS} to {KNOWN_HOSTS}, for {name}, or set distribution_connection: ssh",
    )


def checked(ssh: Mapping[str, Any]) -> bool:
    """Whether ssh lets only a machine pass whose key it knows, or remembers from here on."""
    strict = ssh.get("stricthostkeychecking")
    return strict != "false" and not (strict == "accept-new" and known_hosts_of(ssh) is None)


def known_hosts_of(ssh: Mapping[str, Any]) -> str | None:
    """The file in which ssh remembers keys, if it does."""
    first = ssh.get("userknownhostsfile", "").partition(" ")[0]
    return None if first in ("", "none", os.devnull) else first


def keys_of(ssh: Mapping[str, Any]) -> list[str]:
    """Private keys that are configured, but for those that paramiko tries by itself, and usual ones that it cannot."""
    keys = ssh.get("identityfiles", [])
    if len(keys) == 1:
        return list(keys)
    kinds = ("rsa", "dsa", "ecdsa", "ed25519", "ecdsa_sk", "ed25519_sk", "xmss")
    usual = {expanded(f"~/.ssh/id_{kind}") for kind in kinds}
    return [key for key in keys if os.access(expanded(key), os.F_OK) and expanded(key) not in usual]


def expanded(path: str) -> str:
    return os.path.expanduser(path)  # noqa: PTH111 # that of a user who is not there stays as it is


def has_key(name: str, path: str) -> bool:
    """Whether a file has a host's own key, hashed or not; that of an authority is nothing that paramiko knows."""
    try:
        done = subprocess.run(
            ["ssh-keygen", "-F", name, "-f", expanded(path)],
            capture_output=True, text=True, check=False, timeout=ANSWER_S,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired):
        return True
    return any(not line.startswith(("#", "@")) for line in done.stdout.splitlines())


def known_variables(connection: str = REMOTE_WSL) -> set[str]:
    """What a connection reads, in the version that is installed."""
    plugin = connection_loader.get(connection, class_only=True)
    return set(constants.config.get_plugin_vars("connection", plugin._load_name)) if plugin else set()


def proxy_command(host: wsl.Host, ssh: Mapping[str, str]) -> str | None:
    """The way through jump hosts, for a connection that knows a command only, and has no shell for it."""
    if "proxycommand" in ssh:
        command = ssh["proxycommand"]
    elif "proxyjump" in ssh:
        *before, last = ssh["proxyjump"].split(",")
        jump = ["-J", ",".join(before)] if before else []
        arguments = [*_without_jump(host.ssh_arguments), *jump, "--", _as_url(last)]
        command = shlex.join(["ssh", "-W", "[%h]:%p", *arguments])
    else:
        return None
    return shlex.join(["sh", "-c", f"exec {command}"])


def _without_jump(arguments: Sequence[str]) -> list[str]:
    found: list[str] = []
    words = iter(arguments)
    for word in words:
        if word == "-J":
            next(words, None)
        elif word == "-o":
            value = next(words, "")
            found += [] if JUMPS.match(value) else [word, value]
        elif not word.startswith("-J") and not (word.startswith("-o") and JUMPS.match(word[2:])):
            found.append(word)
    return found


def _as_url(jump: str) -> str:
    # As a destination of its own, a jump host with a port is written as an address of ssh.
    return jump if "://" in jump else f"ssh://{jump}"


def distribution_variables(host: wsl.Host, distribution: Mapping[str, Any]) -> dict[str, Any]:
    """What is known of a distribution."""
    known = {
        "wsl_host": host.name,
        "wsl_distribution": distribution["name"],
        "wsl_state": distribution["state"],
        "wsl_running": distribution["running"],
        "wsl_version": distribution["version"],
        "wsl_default": distribution["default"],
    }
    return known | {f"wsl_{key}": distribution[key] for key in DETAILS if key in distribution}


class InventoryModule(BaseInventoryPlugin, Constructable, Cacheable):  # type: ignore[misc] # ansible-core has no types
    """Windows machines and their distributions."""

    NAME = "gpufarm.core.wsl"

    def verify_file(self, path: str) -> bool:
        return bool(super().verify_file(path)) and path.endswith((".wsl.yml", ".wsl.yaml"))

    def parse(self, inventory: Any, loader: Any, path: str, cache: bool = True) -> None:
        super().parse(inventory, loader, path, cache)
        self._read_config_data(path)
        hosts = self._hosts(path)
        question = wsl.Question(
            details=str(self.get_option("details")),
            exclude=tuple(str(each) for each in self.get_option("exclude_distributions")),
            timeout_s=self.get_option("timeout"),
        )
        for pattern in question.exclude:
            if not re.fullmatch(r"[a-zA-Z0-9._*?-]+", pattern):
                raise AnsibleParserError(
                    f"{path}: exclude_distributions has {pattern!r}, which no name can match. Expected: letters, "
                    "digits, dots, underscores, dashes, * and ?. Next step: write each name out."
                )
        answers = self._answers(hosts, question, path, cache)
        self._ours: set[str] = set()
        self.inventory.add_group("wsl_hosts")
        self.inventory.add_group("wsl_instances")
        for host in hosts:
            self._add_windows(host, answers[host.name])
        for host in hosts:
            answer = answers[host.name]
            if not isinstance(answer, wsl.WslError):
                for distribution in answer["distributions"]:
                    if not question.excludes(distribution["name"]):
                        self._add_distribution(host, answer, distribution)

    def _hosts(self, path: str) -> list[wsl.Host]:
        hosts = []
        try:
            for described in self.get_option("windows_hosts"):
                templated = {
                    key: value if key == "name" else self.templar.template(value) for key, value in described.items()
                }
                hosts.append(host_of(templated))
            names = [host.name for host in hosts]
            twice = sorted({name for name in names if names.count(name) > 1})
            if twice:
                raise ValueError(f"two of windows_hosts have the same name: {', '.join(twice)}")
        except ValueError as error:
            raise AnsibleParserError(f"{path}: {error}. Next step: correct windows_hosts there.") from None
        for option in ("workers", "timeout"):
            number = self.get_option(option)
            if number < 1:
                raise AnsibleParserError(
                    f"{path}: {option} is {number}. Expected: 1 or more. Next step: correct it there."
                )
        return hosts

    def _answers(
        self, hosts: list[wsl.Host], question: wsl.Question, path: str, cache: bool
    ) -> dict[str, dict[str, Any] | wsl.WslError]:
        """Each host's answer, or why there is none: from the cache, or from all others at the same time."""
        cached = self.get_option("cache")
        known: dict[str, Any] = {}
        if cached and cache:
            try:
                known = self._cache[self.get_cache_key(path)]
            except KeyError:
                known = {}
        keys = {host.name: fingerprint(host, question) for host in hosts}
        missing = [host for host in hosts if keys[host.name] not in known]

        def ask(host: wsl.Host) -> dict[str, Any] | wsl.WslError:
            try:
                return wsl.ASK[host.connection](host, question)
            except wsl.WslError as error:
                return error
            except Exception as error:  # one machine's oddity is not the others' end
                found = f"asking it failed with {type(error).__name__}: {clean(str(error)).rstrip('.')}"
                return wsl.WslError(host, found, "an answer of wsl.exe", "report it as a bug, with the output of -vvv")

        answers: dict[str, dict[str, Any] | wsl.WslError] = {
            host.name: known[keys[host.name]] for host in hosts if host not in missing
        }
        with ThreadPoolExecutor(max(1, min(self.get_option("workers"), len(missing)))) as pool:
            answers |= zip([host.name for host in missing], pool.map(ask, missing), strict=True)
        if cached and missing:
            self._cache[self.get_cache_key(path)] = {
                keys[name]: answer
                for name, answer in answers.items()
                if not isinstance(answer, wsl.WslError) and is_whole(answer)
            }
        return answers

    def _add_windows(self, host: wsl.Host, answer: dict[str, Any] | wsl.WslError) -> None:
        name = self._new_host(host.name, "wsl_hosts")
        failure = answer if isinstance(answer, wsl.WslError) else None
        variables = windows_variables(host, None if isinstance(answer, wsl.WslError) else answer)
        variables["wsl_reachable"] = failure is None
        if failure:
            variables["wsl_error"] = str(failure)
            self.display.warning(str(failure))
        elif "wsl_addresses_error" in variables:
            self.display.warning(f"{host.name}: {variables['wsl_addresses_error']}")
        self._set(name, variables)

    def _add_distribution(self, host: wsl.Host, answer: Mapping[str, Any], distribution: Mapping[str, Any]) -> None:
        connection = connection_variables(host, answer, distribution)
        variables = distribution_variables(host, distribution) | connection
        if not self._wanted(variables):
            return
        name = f"{host.name}-{distribution['name']}"
        template = self.get_option("hostname")
        if template:
            self.templar.available_variables = variables
            try:
                name = str(self.templar.template(template))
            except Exception as error:
                raise AnsibleParserError(
                    f"hostname cannot be made for {name}: {str(error).rstrip('.')}. Expected: a template of variables "
                    "that every distribution has. Next step: correct the option hostname."
                ) from None
        if distribution.get("error"):
            self.display.warning(f"{name}: nothing is known from inside: {distribution['error']}")
        name = self._new_host(name, "wsl_instances")
        why = obstacle(host, answer, connection)
        if why:
            variables["wsl_connection_error"] = sentences(*why)
            self.display.warning(f"{name}: no task will run in it: {sentences(*why)}")
        self._set(name, variables)
        strict = self.get_option("strict")
        self._set_composite_vars(self.get_option("compose"), variables, name, strict=strict)
        self._add_host_to_composed_groups(self.get_option("groups"), variables, name, strict=strict)
        self._add_host_to_keyed_groups(self.get_option("keyed_groups"), variables, name, strict=strict)

    def _wanted(self, variables: Mapping[str, Any]) -> bool:
        self.templar.available_variables = variables
        for condition in self.get_option("filters"):
            if len(condition) != 1 or not set(condition) <= {"include", "exclude"}:
                raise AnsibleParserError(
                    f"One of filters is {dict(condition)!r}. Expected: either include or exclude, with a condition. "
                    "Next step: correct it."
                )
            ((kind, expression),) = condition.items()
            try:
                if self.templar.evaluate_conditional(expression):
                    return bool(kind == "include")
            except Exception as error:
                if self.get_option("strict"):
                    where = f"{variables['wsl_host']}, {variables['wsl_distribution']}"
                    raise AnsibleParserError(
                        f"The filter {expression!r} fails for {where}: {str(error).rstrip('.')}. Expected: a condition "
                        "of variables that every distribution has. Next step: correct it, or set strict: false, which "
                        "goes on without it."
                    ) from None
        return True

    def _new_host(self, name: str, group: str) -> str:
        if name in self._ours:
            raise AnsibleParserError(
                f"Two hosts are named {name}. Expected: a name for each. Next step: give another hostname, or other "
                "names."
            )
        self._ours.add(name)
        self.inventory.add_host(name, group=group)
        return name

    def _set(self, name: str, variables: Mapping[str, Any]) -> None:
        # None of these is a template: what machines say was never trusted, and str() takes it from a configuration.
        for key, value in variables.items():
            self.inventory.set_variable(name, key, value)


def fingerprint(host: wsl.Host, question: wsl.Question) -> str:
    """What an answer belongs to, without the password: whoever changes it asks anew."""
    described = [{**asdict(host), "password": None, "psrp": sorted(host.psrp)}, asdict(question)]
    return hashlib.sha256(json.dumps(described, sort_keys=True).encode()).hexdigest()
