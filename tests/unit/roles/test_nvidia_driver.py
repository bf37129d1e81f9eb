"""What the driver role works out from the node: packages, headers, RHEL's streams and locks, what modprobe said."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

import pytest
from ansible.parsing.dataloader import DataLoader
from ansible_collections.gpufarm.core.tests.unit.roles import role_helper

ROLE = Path(__file__).resolve().parents[3] / "roles/nvidia_driver"
LOCKS = """\
nvidia-open-3:580.95.05-1.el10.*
kmod-nvidia-open-dkms-3:580.95.05-1.el10.*
nvidia-driver-3:570.195.03-1.el10.*
bash-0:5.2.26-4.el10.*"""


def value(name: str, **given: Any) -> Any:
    facts = role_helper.facts(given.pop("platform", "Debian: Debian 13.1"), kernel="6.12.57+deb13-amd64")
    facts.update(given.pop("facts", {}))
    known = {**role_helper.variables("_common", "nvidia_driver"), "ansible_facts": facts, "_common_is_wsl": False}
    return role_helper.value(name, {**known, **given})


def test_packages_are_asked_for_by_branch() -> None:
    assert value("__nvidia_driver_wanted", nvidia_driver_branch="570") == [
        "nvidia-driver-cuda=570.*",
        "nvidia-kernel-open-dkms=570.*",
    ]
    assert value("__nvidia_driver_wanted", nvidia_driver_packages=["mine"]) == ["mine"]


def test_only_what_is_missing_is_asked_for() -> None:
    """apt would bring what matches a wildcard up to date, and take the GPUs from what runs on them."""
    missing = ["linux-headers-1", "nvidia-driver-cuda=570.*"]
    found = value("__nvidia_driver_missing", nvidia_driver_branch="570", _common_repository_missing=missing)
    assert found == ["nvidia-driver-cuda=570.*"]


@pytest.mark.parametrize(
    ("lines", "wanted", "missing"),
    [
        ([], True, ["linux-headers-6.9.0-mine"]),
        (["installed linux-headers-6.9.0-mine=6.9-1"], True, []),
        (["config-files linux-headers-6.9.0-mine=6.9-1"], True, ["linux-headers-6.9.0-mine"]),
        ([], "no", []),
    ],
)
def test_headers_that_are_missing(lines: list[str], wanted: object, missing: list[str]) -> None:
    found = value(
        "__nvidia_driver_headers_missing", facts={"kernel": "6.9.0-mine"}, nvidia_driver_kernel_headers=wanted,
        _common_host=role_helper.host(packages=tuple(lines)),
    )  # fmt: skip
    assert found == missing


def test_what_pins_other_branches() -> None:
    lines = [
        "installed nvidia-driver-pinning-580=580-1",
        "config-files nvidia-driver-pinning-570=570-1",
        "not-installed nvidia-driver-pinning-590=",
        "installed nvidia-driver-cuda=580.95.05-1",
    ]
    given = {"nvidia_driver_branch": "580", "_common_repository_installed": {"stdout_lines": lines}}
    assert value("__nvidia_driver_pinnings_of_others", **given) == ["nvidia-driver-pinning-570"]


@pytest.mark.parametrize("answer", [True, "true", "yes"])
def test_managed_may_be_a_string(answer: object) -> None:
    assert value("__nvidia_driver_install", nvidia_driver_managed=answer) is True
    assert value("__nvidia_driver_install", nvidia_driver_managed=answer, _common_is_wsl=True) is False


@pytest.mark.parametrize("answer", [False, "false", "no"])
def test_a_string_may_say_no(answer: object) -> None:
    assert value("__nvidia_driver_install", nvidia_driver_managed=answer) is False


@pytest.mark.parametrize(
    ("said", "helps"),
    [
        ("modprobe: ERROR: could not insert 'nvidia': Key was rejected by service", False),
        ("modprobe: FATAL: Module nvidia not found in directory /lib/modules/6.12.0", False),
        ("modprobe: FATAL: Module nvidia-current not found in directory /lib/modules/6.12.0", False),
        ("modprobe: ERROR: could not insert 'nvidia': No such device", True),
        ("", True),
    ],
)
def test_reboot_only_where_it_can_help(said: str, helps: bool) -> None:
    assert value("__nvidia_driver_reboot_helps", __nvidia_driver_modprobe={"stderr": said}) is helps


def test_reboot_helps_where_modprobe_was_not_needed() -> None:
    assert value("__nvidia_driver_reboot_helps", __nvidia_driver_modprobe={"skipped": True}) is True


@pytest.mark.parametrize(("platform", "step"), [("linux", "nvidia-modprobe"), ("wsl", "TCC mode")])
def test_next_step_where_the_system_keeps_the_gpu_away(platform: str, step: str) -> None:
    """On Linux /dev/nvidiactl is missing; only Windows has a mode in which WSL cannot use a card."""
    tasks = DataLoader().load_from_file(str(ROLE / "tasks/check.yml"), trusted_as_template=True)
    (steps,) = [task["vars"]["__nvidia_driver_next_step"] for task in tasks if "vars" in task]
    assert step in value("step", facts={"nvidia_smi": {"platform": platform}}, step=steps["access_blocked"])


@pytest.mark.parametrize(
    ("state", "stream", "is_new"),
    [
        ("[nvidia-driver]\nname=nvidia-driver\nstream=580-open\nprofiles=\nstate=enabled\n", "580-open", False),
        ("[nvidia-driver]\nname=nvidia-driver\nstream = 570-open\nprofiles=\nstate=enabled\n", "570-open", True),
        ("[nvidia-driver]\nname=nvidia-driver\nstream=\nprofiles=\nstate=\n", "", True),
        (None, "", True),
    ],
)
def test_stream_that_rhel_9_is_on(state: str | None, stream: str, is_new: bool) -> None:
    file = {"failed": False} if state is None else {"content": base64.b64encode(state.encode()).decode()}
    given = {"__nvidia_driver_stream_file": file, "platform": "RedHat: RedHat 9.4"}
    assert value("__nvidia_driver_stream_now", **given) == stream
    assert value("__nvidia_driver_branch_is_new", **given) is is_new
    assert value("__nvidia_driver_branch_is_other", **given) is bool(stream and is_new)


def test_locks_that_rhel_10_has() -> None:
    given = {
        "__nvidia_driver_locks": {"stdout_lines": LOCKS.splitlines()},
        "platform": "RedHat: RedHat 10.0",
    }
    assert value("__nvidia_driver_locks_of_others", **given) == ["nvidia-driver-3:570.195.03-1.el10.*"]
    assert value("__nvidia_driver_branch_is_new", **given) is False
    assert value("__nvidia_driver_branch_is_new", nvidia_driver_branch="590", **given) is True
    assert value("__nvidia_driver_branch_is_other", **given) is True
    given["__nvidia_driver_locks"] = {"stdout_lines": LOCKS.splitlines()[:2]}
    assert value("__nvidia_driver_branch_is_other", **given) is False


@pytest.mark.parametrize(
    ("branch", "step"),
    [
        ("580", "run `apt-get install nvidia-driver-pinning-580` on this host and mend what it names"),
        ("1000", "bring that repository up to date, or set nvidia_repository_url to one that has the branch"),
        ("575", "set nvidia_driver_branch to one of them"),
    ],
)
def test_an_older_branch_is_advised_only_where_the_branch_cannot_come(branch: str, step: str) -> None:
    lines = ["nvidia-driver-pinning-580", "nvidia-driver-pinning-570", "nvidia-driver-pinning-595"]
    given = {"nvidia_driver_branch": branch, "__nvidia_driver_branches": {"stdout_lines": lines}}
    assert value("__nvidia_driver_branches_found", **given) == [570, 580, 595]
    assert value("__nvidia_driver_branch_next_step", **given) == step


def test_without_any_branch_the_repository_is_what_is_wrong() -> None:
    step = value("__nvidia_driver_branch_next_step", __nvidia_driver_branches={"stdout_lines": []})
    assert step.startswith("bring that repository up to date")


def smi(reason: str | None, version: str | None = None) -> dict[str, Any]:
    return {"nvidia_smi": {"reason": reason, "available": reason is None, "driver_version": version}}


@pytest.mark.parametrize(
    ("facts", "check", "needed"),
    [
        (smi(None, "580.95.05"), False, False),
        (smi(None, "580.95.05"), True, False),
        (smi(None, "570.195.03"), True, True),
        (smi(None, "570.195.03"), False, False),
        (smi("library_mismatch"), False, True),
        (smi("library_mismatch"), True, True),
        (smi("driver_not_loaded"), False, True),
        # A module that check mode has not loaded may load.
        (smi("driver_not_loaded"), True, False),
        (smi("not_installed"), False, False),
        (smi("not_installed"), True, False),
    ],
)
def test_reboot_is_needed(facts: dict[str, Any], check: bool, needed: bool) -> None:
    assert value("__nvidia_driver_reboot_needed", facts=facts, ansible_check_mode=check) is needed


@pytest.mark.parametrize(
    ("given", "to_come"),
    [
        ({}, False),
        ({"_common_repository_unread": True}, True),
        ({"_common_repository_unread": False}, False),
        ({"__nvidia_driver_pinning": {"changed": True}}, True),
        ({"__nvidia_driver_installed": {"changed": True}}, True),
        ({"__nvidia_driver_modprobe": {"changed": True}}, True),
        ({"__nvidia_driver_rebooted": {"changed": True}}, True),
        ({"__nvidia_driver_rebooted": {"changed": False, "skipped": True}}, False),
        ({"__nvidia_driver_rebooted": {"changed": True}, "nvidia_driver_managed": False}, False),
    ],
)
def test_check_mode_verifies_what_is_not_to_come(given: dict[str, Any], to_come: bool) -> None:
    assert value("__nvidia_driver_to_come", ansible_check_mode=True, **given) is to_come
    assert value("__nvidia_driver_to_come", ansible_check_mode=False, **given) is False
