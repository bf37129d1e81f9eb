"""What the toolkit role works out: Docker's settings, the runtimes it follows, what check mode only announces."""

from __future__ import annotations

import json
from typing import Any

import pytest
from ansible_collections.gpufarm.core.tests.unit.roles import role_helper

NVIDIA = {"nvidia": {"path": "nvidia-container-runtime", "args": []}}


def value(name: str, **given: Any) -> Any:
    return role_helper.value(name, {**role_helper.variables("_common", "docker", "container_toolkit"), **given})


def settings(default: object, **wanted: Any) -> Any:
    asked = {"rc": 0, "stdout": json.dumps({"runtimes": NVIDIA, **wanted})}
    return value(
        "__container_toolkit_settings", container_toolkit_default_runtime=default, __container_toolkit_asked=asked
    )


@pytest.mark.parametrize("default", [False, "false", "no"])
def test_a_default_that_the_role_had_set_is_taken_back(default: object) -> None:
    assert settings(default, **{"default-runtime": "nvidia", "debug": True}) == {
        "runtimes": NVIDIA,
        "default-runtime": "runc",
        "debug": True,
    }


def test_a_default_of_the_owners_stays() -> None:
    assert settings(False, **{"default-runtime": "mine"})["default-runtime"] == "mine"
    assert "default-runtime" not in settings(False)


@pytest.mark.parametrize("default", [True, "true", "yes"])
def test_the_default_that_is_asked_for_stays(default: object) -> None:
    assert settings(default, **{"default-runtime": "nvidia"})["default-runtime"] == "nvidia"


@pytest.mark.parametrize(
    ("running", "follows"),
    [
        ({"runtimes": NVIDIA, "default": "runc"}, True),
        ({"runtimes": NVIDIA, "default": "nvidia"}, False),
        ({"runtimes": {"nvidia": {"path": "/other"}}, "default": "runc"}, False),
        ({"runtimes": {"runc": {}}, "default": "runc"}, False),
        ({"runtimes": None, "default": ""}, False),
        (None, False),
    ],
)
def test_docker_follows_what_it_has_read(running: dict[str, Any] | None, follows: bool) -> None:
    asked = {"rc": 0, "stdout": json.dumps({"runtimes": NVIDIA, "default-runtime": "nvidia"})}
    state = {"stdout_lines": ["" if running is None else json.dumps(running), "nvidia.com/gpu=all"]}
    given = {"__container_toolkit_asked": asked, "__container_toolkit_state": state}
    assert value("__container_toolkit_docker_follows", **given) is follows


def test_versions_of_the_repository() -> None:
    told = {
        "stdout_lines": [
            "nvidia-container-toolkit |   1.20.1-1 | https://mirror.example/deb  Packages",
            "nvidia-container-toolkit |   1.20.0-1 | https://mirror.example/deb  Packages",
        ]
    }
    assert value("__container_toolkit_versions_found", __container_toolkit_versions=told) == ["1.20.1-1", "1.20.0-1"]


THERE = {"__container_toolkit_asked": {"rc": 0}}


@pytest.mark.parametrize(
    ("given", "to_come"),
    [
        ({}, False),
        ({"__container_toolkit_asked": {"rc": 2}}, True),
        *[
            ({f"__container_toolkit_{name}": {"changed": True}}, True)
            for name in ("pin", "installed", "written", "state", "refreshed")
        ],
        *[({f"__docker_{name}": {"changed": True}}, True) for name in ("installed", "service")],
        # As apt and as dnf say it.
        ({"__docker_installed": {"changed": False, "msg": "No package matching 'docker.io'"}}, True),
        ({"__docker_installed": {"changed": False, "rc": 1, "msg": "Failed to download metadata"}}, True),
        ({"__docker_installed": {"changed": False, "rc": 0, "msg": "Nothing to do"}}, False),
    ],
)  # fmt: skip
def test_what_is_only_announced_is_not_verified(given: dict[str, Any], to_come: bool) -> None:
    assert value("__container_toolkit_to_come", **{**THERE, **given}, ansible_check_mode=True) is to_come
    assert value("__container_toolkit_to_come", **{**THERE, **given}, ansible_check_mode=False) is False


@pytest.mark.parametrize(("register", "to_come"), [("installed", True), ("service", False)])
def test_docker_that_is_to_come_is_not_started(register: str, to_come: bool) -> None:
    given = {f"__docker_{register}": {"changed": True}}
    assert value("__docker_to_come", **given, ansible_check_mode=True) is to_come
    assert value("__docker_to_come", **given, ansible_check_mode=False) is False


@pytest.mark.parametrize(
    ("owner", "packages", "foreign", "exchanged"),
    [
        ("", [], False, False),
        ("docker.io", [], False, False),
        ("docker-ce", [], True, False),
        ("/usr/local/bin/dockerd", [], True, False),
        ("docker-ce", ["docker-ce"], False, False),
        ("", ["docker-ce"], False, False),
        # apt would remove docker.io with all of its containers.
        ("docker.io", ["docker-ce"], False, True),
    ],
)
def test_docker_from_elsewhere(owner: str, packages: list[str], foreign: bool, exchanged: bool) -> None:
    facts = role_helper.facts("Debian: Debian 12.11")
    host = role_helper.host(programs={"dockerd": owner})
    given = {"_common_host": host, "docker_packages": packages, "ansible_facts": facts}
    assert (value("__docker_foreign", **given), value("__docker_exchanged", **given)) == (foreign, exchanged)


@pytest.mark.parametrize(
    ("packages", "auto", "missing"),
    [
        ((), [], ["docker.io", "iptables"]),
        (("installed docker.io=20-1", "installed iptables=1.8"), [], []),
        (("installed docker.io=20-1", "config-files iptables=1.8"), [], ["iptables"]),
        # It would go with the package that it came for.
        (("installed docker.io=20-1", "installed iptables=1.8"), ["iptables"], ["iptables"]),
    ],
)
def test_packages_of_docker_that_are_missing(packages: tuple[str, ...], auto: list[str], missing: list[str]) -> None:
    host = role_helper.host(packages=packages, packages_auto=auto)
    given = {"_common_host": host, "ansible_facts": role_helper.facts("Debian: Debian 12.11")}
    assert value("__docker_missing", **given) == missing


def test_settings_that_are_no_json_are_refused_before_anything_changes() -> None:
    facts = role_helper.facts("Debian: Debian 12.11")
    errors = {"/etc/docker/daemon.json": "Expecting value: line 1 column 1 (char 0)"}
    given = {"ansible_facts": facts, "_common_host": role_helper.host(json_errors=errors)}
    refusal = value("__container_toolkit_refusal", **given)
    assert "(Expecting value: line 1 column 1 (char 0)). Expected: Docker's settings" in refusal
    assert value("__container_toolkit_refusal", ansible_facts=facts, _common_host=role_helper.host()) == ""
