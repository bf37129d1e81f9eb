"""docs/packages.md: what the roles install on each platform and from where, told by their own variables and tasks.

Nothing here knows a package, an address or a key: a host is made up by its facts, and what a role would ask for there
is what Ansible makes of the role's expressions.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import jinja2
import yaml
from ansible.parsing.dataloader import DataLoader
from ansible.template import Templar, trust_as_template
from ansible_collections.gpufarm.core.tests.unit.roles import role_helper

from tests.readmes import HERE
from tests.simulator.cache import ROOT

PATH = ROOT / "docs/packages.md"
ROLES = ("_common", "nvidia_repository", "nvidia_driver", "cuda", "docker", "container_toolkit")
ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}
# Made from RHEL under names of their own.
REBUILDS = ("Rocky", "AlmaLinux")
# The roles' own, one from before Fabric Manager's package changed its name, and the first that Ubuntu 26.04 has.
BRANCHES = ("570", "580", "595")
# Which task has dnf or apt keep to the branch, by what the platform does it.
KEEPS = {
    "pinning": "Have the driver branch pinned",
    "stream": "Enable the module stream of the driver branch",
    "lock": "Lock the driver branch",
}
WSL_KERNEL = "6.6.87.2-microsoft-standard-WSL2"
# What only a machine tells: it is written so in the tables.
KERNEL = "KERNEL"
VERSION = "VERSION"
# As a version that the roles' expressions take for one; no driver has it.
_VERSION = ".0.0"
SWITCH = {"address": "0000:05:00.0", "vendor": "10de", "device": "22a3", "class": "068000", "nvswitch_bridge": False}
BRIDGE = {"address": "0000:05:00.0", "vendor": "15b3", "device": "1021", "class": "020700", "nvswitch_bridge": True}


@dataclass(frozen=True)
class Host:
    """A machine of a platform, as Ansible's facts tell it."""

    platform: str
    architecture: str
    wsl: bool = False

    def given(self, **more: Any) -> dict[str, Any]:
        """Return all variables of the roles for it."""
        family, _colon, name = self.platform.partition(": ")
        kernel = WSL_KERNEL if self.wsl else KERNEL
        # Debian's stock kernels end in the architecture, by which the next kernel's headers are known, and RHEL's in
        # the distribution and the architecture, by which they are told from those of others.
        if not self.wsl:
            kernel += f"-{ARCHITECTURES[self.architecture]}" if name.startswith("Debian") else ""
            kernel += f".el{name.split()[-1]}.{self.architecture}" if family == "RedHat" else ""
        facts = {**role_helper.facts(f"{family}: {name}", kernel), "architecture": self.architecture}
        looked_at = role_helper.host(pci_devices=more.pop("pci_devices", []), packages=more.pop("packages", ()))
        return {**_variables(), "ansible_facts": facts, "_common_host": looked_at, **more}


@cache
def _variables() -> dict[str, Any]:
    return role_helper.variables(*ROLES)


def value(name: str, given: dict[str, Any]) -> Any:
    """Return what a variable is worth there."""
    return role_helper.value(name, given)


def argument(role: str, file: str, task: str, of: str, given: dict[str, Any]) -> Any:
    """Return what a task hands its module there: all of it, or one option."""
    (found,) = [each for each in _tasks(role, file) if each["name"] == task]
    (action,) = [found[key] for key in found if key.startswith("ansible.builtin.")]
    wanted = action if of == "" else action[of]
    if isinstance(wanted, bool):
        return wanted
    return Templar(DataLoader(), variables=given).template(trust_as_template(wanted))


@cache
def _tasks(role: str, file: str) -> list[dict[str, Any]]:
    found = []
    waiting = yaml.safe_load((ROOT / "roles" / role / "tasks" / file).read_text(encoding="utf-8"))
    while waiting:
        task = waiting.pop(0)
        if "block" in task:
            waiting = [*task["block"], *waiting]
        else:
            found.append(task)
    return found


def repository(host: Host, variable: str) -> Iterator[tuple[str, str]]:
    """Yield address, key and what is verified of a repository."""
    given = host.given()
    given["common_repository"] = value(variable, given)
    found = given["common_repository"]
    yield "address", code(value("_common_repository_url", given))
    yield "key", code(found["key_url"])
    yield (
        "its fingerprint",
        ", ".join(map(code, found["fingerprints"]))
        or "none is known: the role stops until `nvidia_repository_key_fingerprints` says it",
    )
    if value("_common_family", given)["packages"] == "apt":
        signed = [line for line in value("_common_repository_entry_text", given).splitlines() if "Signed-By" in line]
        yield "verified", f"the signed lists, by `{signed[0]}`"
    else:
        where = ("_common", "dnf_repository.yml", "Have the repository {{ common_repository.name }}")
        checks = {check: argument(*where, check, given) for check in ("gpgcheck", "repo_gpgcheck")}
        yield "verified", ", ".join(code(f"{check}={int(wanted)}") for check, wanted in checks.items())


def toolkit(host: Host) -> Iterator[tuple[str, str]]:
    """Yield the packages of the container toolkit, and how they stay at their version."""
    given = host.given()
    manager = value("_common_family", given)["packages"]
    name = "__container_toolkit_wanted_packages"
    if manager == "apt":
        yield "packages", codes(value(name, given))
        pin = value("__container_toolkit_pin_text", given).splitlines()
        path = value("__container_toolkit_pin_path", given)
        yield "kept by", f"`{path}`: {codes([line for line in pin if not line.startswith('#')])}"
    else:
        yield "packages", codes(argument("container_toolkit", "install-dnf.yml", "Have the toolkit", "name", given))
        kept = [task["name"] for task in _tasks("container_toolkit", "install-dnf.yml") if "pinned" in task["name"]]
        yield "kept by", ", ".join(kept) or "nothing; the next run of the role brings it back"


def driver(host: Host, branch: str) -> Iterator[tuple[str, str]]:
    """Yield what a driver branch is, by the kind of its kernel modules, and how the machine keeps to it."""
    for modules in ("open", "proprietary"):
        given = host.given(nvidia_driver_branch=branch, nvidia_driver_kernel_modules=modules)
        yield f"{modules} modules", codes(driver_packages(given))
        yield f"{modules} modules kept by", code(kept_by(given))
    # The names are those of either kind.
    yield "Fabric Manager, NVSwitches on the bus", codes(fabric_manager(host, branch, SWITCH))
    yield "Fabric Manager, NVSwitches behind network cards", codes(fabric_manager(host, branch, BRIDGE))


def driver_packages(given: dict[str, Any]) -> list[str]:
    """Return them as the package manager is asked for them."""
    if value("_common_family", given)["packages"] == "apt":
        return list(value("__nvidia_driver_wanted", given))
    return list(argument("nvidia_driver", "install-dnf.yml", "Have the driver", "name", given))


def kept_by(given: dict[str, Any]) -> str:
    """Return the package or the command that does it."""
    way = value("_common_platform", given)["driver"]["branch_by"]
    where = ("nvidia_driver", f"branch-{way}.yml", KEEPS[way])
    return str(argument(*where, "name" if way == "pinning" else "cmd", given))


def fabric_manager(host: Host, branch: str, device: dict[str, Any]) -> list[str]:
    """Return its packages: with apt those that come with a driver, with dnf those that come after it."""
    given = host.given(nvidia_driver_branch=branch, pci_devices=[device])
    if value("_common_family", given)["packages"] == "apt":
        return list(value("__nvidia_driver_fabric_wanted", given))
    (first, *_rest) = driver_packages(given)
    given = host.given(
        nvidia_driver_branch=branch, pci_devices=[device], packages=(f"installed {first}={branch}{_VERSION}-1",)
    )
    given["common_repository"] = {"packages": value("__nvidia_driver_fabric_wanted", given)}
    asked = argument(
        "nvidia_driver", "fabric_manager-dnf.yml", "Have Fabric Manager of the driver's version", "name", given
    )
    return [name.replace(f"{branch}{_VERSION}", VERSION) for name in asked]


@cache
def rows(host: Host) -> dict[str, str]:
    """Return all that is decided for a machine, by its name in a table."""
    given = host.given()
    found = {f"NVIDIA's repository: {name}": text for name, text in repository(host, "__nvidia_repository_cuda")}
    if not host.wsl:
        for branch in BRANCHES:
            found |= {f"driver {branch}: {name}": text for name, text in driver(host, branch)}
        found["kernel headers"] = codes(value("__nvidia_driver_headers", given))
    found["CUDA"] = codes(argument("cuda", "install.yml", "Have the CUDA toolkit", "name", given))
    confined = ", `apparmor` where the kernel has AppArmor on" if value("__docker_apparmor", given) else ""
    found["Docker"] = codes(value("__docker_wanted", given)) + confined
    found |= {
        f"toolkit's repository: {name}": text for name, text in repository(host, "__container_toolkit_repository")
    }
    return found | {f"container toolkit: {name}": text for name, text in toolkit(host)}


def platforms() -> Iterator[tuple[str, str, bool]]:
    """Yield the name of each for people; its family, distribution and version for Ansible; that it is not on WSL."""
    for name in role_helper.variables("_common")["_common_platforms"]:
        distribution, version = name.split()
        if distribution == "RedHat":
            yield f"RHEL {version}", f"RedHat: {name}", False
            yield from ((f"{rebuild} {version}", f"RedHat: {rebuild} {version}", False) for rebuild in REBUILDS)
        else:
            yield name, f"Debian: {name}", False


def sections() -> dict[str, list[dict[str, str]]]:
    """Return what is decided for each platform, by its name, for each architecture; those that are alike are one."""
    alike: list[tuple[list[str], list[dict[str, str]]]] = []
    for name, platform, wsl in [*platforms(), ("WSL2, here with Ubuntu 24.04", "Debian: Ubuntu 24.04", True)]:
        decided = [rows(Host(platform, architecture, wsl)) for architecture in ARCHITECTURES]
        for names, of_others in alike:
            if of_others == decided:
                names.append(name)
                break
        else:
            alike.append(([name], decided))
    return {", ".join(names): decided for names, decided in alike}


def text() -> str:
    """Return the document."""
    environment = jinja2.Environment(trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined)
    template = environment.from_string((HERE / "packages.md.j2").read_text(encoding="utf-8"))
    return template.render(
        sections=sections(), architectures=list(ARCHITECTURES), kernel=KERNEL, version=VERSION,
        defaults=role_helper.variables("nvidia_driver", "cuda", "container_toolkit"),
    )  # fmt: skip


def code(said: str) -> str:
    """Return it as code in a cell of a table."""
    return f"`{said}`".replace("|", r"\|")


def codes(said: list[str]) -> str:
    """Return each as code."""
    return ", ".join(map(code, said))
