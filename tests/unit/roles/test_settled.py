# Copyright (c) 2026, gpufarm contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""When a role has nothing to do on a host, and each thing for which it has."""

from __future__ import annotations

import hashlib
from typing import Any

import pytest
from ansible_collections.gpufarm.core.tests.unit.roles import role_helper

UPGRADES = "/etc/apt/apt.conf.d/52gpufarm-nvidia"
PIN = "/etc/apt/preferences.d/nvidia-container-toolkit"
RUNS = {"enabled": "enabled", "active": "active"}
FABRIC = "nvidia-fabricmanager.service"
GPU = {"available": True, "reason": None, "driver_version": "580.95.05", "kernel_modules": "open", "gpus": []}
BASE: dict[str, Any] = {
    "ansible_facts": {**role_helper.facts("Debian: Debian 12.11"), "nvidia_smi": GPU}, "ansible_check_mode": False,
    "_common_is_wsl": False,
}  # fmt: skip


def texts(name: str, role: str) -> bytes:
    known = {**role_helper.variables("_common", role), **BASE}
    return str(role_helper.value(name, known)).encode()


def host_with(path: str, content: bytes) -> dict[str, Any]:
    looked = role_helper.host(path, units={"docker.service": RUNS, FABRIC: RUNS})
    looked["files"][0]["checksum"] = hashlib.sha1(content).hexdigest()  # noqa: S324 # as host_info tells it
    return looked


def unlike(values: dict[str, Any], name: str, roles: list[str], *changes: dict[str, Any]) -> list[bool]:
    """Return what a variable is worth with these values, and with each change of them."""
    found: list[bool] = role_helper.values(name, roles, [{**BASE, **values, **change} for change in ({}, *changes)])
    return found


def test_driver() -> None:
    roles = ["_common", "nvidia_repository", "nvidia_driver"]
    text = texts("__nvidia_driver_upgrades_text", "nvidia_driver")
    values = {
        "_common_repository_settled": True, "_common_host": host_with(UPGRADES, text),
        "__nvidia_driver_left_out": False, "__nvidia_driver_pinnings_of_others": [],
        "__nvidia_driver_headers_missing": [],
    }  # fmt: skip
    changes = (
        {"_common_repository_settled": False},
        {"__nvidia_driver_pinnings_of_others": ["nvidia-driver-pinning-570"]},
        {"__nvidia_driver_headers_missing": ["linux-headers-6.12.0"]},
        {"_common_host": host_with(UPGRADES, text + b"\n")},
    )
    assert unlike(values, "__nvidia_driver_settled", roles, *changes) == [True, False, False, False, False]
    skipped = {"__nvidia_driver_left_out": True, "_common_repository_settled": False}
    assert unlike({**values, **skipped}, "__nvidia_driver_settled", roles) == [True]


def test_what_a_driver_that_was_asked_lets_be_done() -> None:
    roles = ["_common", "nvidia_repository", "nvidia_driver"]
    values = {
        "_common_host": host_with(UPGRADES, b""), "__nvidia_driver_modules_missing": [],
        "__nvidia_driver_has_fabric": True, "__nvidia_driver_gpus_waiting": [], "__nvidia_driver_modules": [],
        "__nvidia_driver_fabric_installed": {}, "nvidia_driver_branch": "580", "nvidia_driver_version": "",
    }  # fmt: skip
    stopped = {**host_with(UPGRADES, b""), "units": {FABRIC: {**RUNS, "active": "inactive"}}}
    changes = (
        {"__nvidia_driver_modules_missing": ["nvidia-peermem"], "__nvidia_driver_has_fabric": False},
        *({f"__nvidia_driver_{what}": {"changed": True}} for what in ("installed", "fabric_installed", "rebooted")),
        {"__nvidia_driver_gpus_waiting": [{"index": 0}]},
        {"_common_host": stopped},
    )
    assert unlike(values, "__nvidia_driver_beside_due", roles, *changes) == [False, *[True] * len(changes)]
    without = {"__nvidia_driver_has_fabric": False, "_common_host": stopped}
    assert unlike({**values, **without}, "__nvidia_driver_beside_due", roles) == [False]

    changes = (
        {"__nvidia_driver_modules": ["ib_umad"]},
        {"nvidia_driver_gpudirect_rdma": True},
        # Taken back.
        {"_common_host": host_with("/etc/modules-load.d/gpufarm-nvidia.conf", b"")},
    )
    assert unlike(values, "__nvidia_driver_modules_asked", roles, *changes) == [False, True, True, True]

    told = [{**GPU, "reason": reason} for reason in ("driver_not_loaded", "library_mismatch", "access_blocked")]
    told.append({**GPU, "kernel_modules": "proprietary"})
    changes = tuple({"ansible_facts": {**BASE["ansible_facts"], "nvidia_smi": each}} for each in told)
    assert unlike(values, "__nvidia_driver_load_due", roles, *changes) == [False, True, True, False, True]


def test_docker() -> None:
    roles = ["_common", "docker"]
    values = {
        "_common_host": host_with("/etc/x", b""), "__docker_foreign": False, "__docker_missing": [],
        "docker_managed": True,
    }  # fmt: skip
    missing = {"__docker_missing": ["docker.io"]}
    stopped = {**values["_common_host"], "units": {"docker.service": {"enabled": "disabled", "active": "active"}}}
    changes = (
        missing, {"_common_host": stopped}, {**missing, "__docker_foreign": True}, {**missing, "docker_managed": False},
        {"_common_host": stopped, "docker_managed": False},
    )  # fmt: skip
    assert unlike(values, "__docker_settled", roles, *changes) == [True, False, False, True, True, False]


def test_container_toolkit() -> None:
    roles = ["_common", "docker", "container_toolkit"]
    text = texts("__container_toolkit_pin_text", "container_toolkit")
    values = {
        "_common_repository_settled": True, "_common_host": host_with(PIN, text), "__docker_settled": True,
        "__container_toolkit_engine_packages": [], "__container_toolkit_stopped": [],
    }  # fmt: skip
    changes = (
        {"_common_repository_settled": False},
        {"_common_host": host_with(PIN, text + b"\n")},
        {"__container_toolkit_engine_packages": ["podman"]},
        {"__container_toolkit_stopped": ["crio.service"]},
        {"__docker_settled": False},
    )
    assert unlike(values, "__container_toolkit_settled", roles, *changes) == [True, *[False] * len(changes)]
    other = {"container_toolkit_engines": ["podman"], "__docker_settled": False}
    assert unlike({**values, **other}, "__container_toolkit_settled", roles) == [True]


@pytest.mark.parametrize(
    ("name", "roles", "values", "changes"),
    [
        (
            "__nvidia_driver_speaks",
            ["_common", "nvidia_repository", "nvidia_driver"],
            {
                "__nvidia_driver_refusal": "", "__nvidia_driver_left_out": False, "__nvidia_driver_in_the_way": [],
                "__nvidia_driver_undriven": [], "__nvidia_driver_install": True,
            },
            (
                {"__nvidia_driver_refusal": "no"}, {"__nvidia_driver_left_out": True},
                {"__nvidia_driver_in_the_way": ["nouveau"]}, {"__nvidia_driver_undriven": [["1340", "old"]]},
            ),
        ),
        (
            "__container_toolkit_speaks",
            ["_common", "docker", "container_toolkit"],
            {"__docker_refusal": "", "__container_toolkit_refusal": "", "container_toolkit_engines": ["docker"]},
            (
                {"__docker_refusal": "no"}, {"__container_toolkit_refusal": "no"},
                {"container_toolkit_engines": ["containerd"]},
            ),
        ),
    ],
)  # fmt: skip
def test_a_preflight_that_has_something_to_say(
    name: str, roles: list[str], values: dict[str, Any], changes: tuple[dict[str, Any], ...]
) -> None:
    assert unlike(values, name, roles, *changes) == [False, *[True] * len(changes)]
