# Copyright (c) 2026, gpufarm contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What roles say of input that is wrong, and nothing of what is right, where no other test reads it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
from ansible.parsing.dataloader import DataLoader
from ansible.template import Templar, trust_as_template
from ansible_collections.gpufarm.core.tests.unit.roles import role_helper

DEBIAN = "Debian: Debian 12.11"
# As dnf's module tells what no repository has.
UNKNOWN = {
    "msg": "Failed to install some of the specified packages", "failures": ["No package docker-ce available."],
}  # fmt: skip
BOOTED = role_helper.host("/run/systemd/system")


def tasks_of(listed: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    for task in listed:
        yield task
        for part in ("block", "rescue"):
            yield from tasks_of(task.get(part) or [])


def told_by(path: str, name: str, **given: Any) -> str:
    """Return what a task that requires something says where it is not so, and nothing where it is."""
    role = path.partition("/")[0]
    tasks = DataLoader().load_from_file(str(role_helper.ROLES / path), trusted_as_template=True)
    (task,) = [each for each in tasks_of(tasks) if each["name"] == name]
    options = task.get("ansible.builtin.assert") or task["ansible.builtin.fail"]
    known = {
        "inventory_hostname": "node1", "ansible_check_mode": False, "ansible_facts": role_helper.facts(DEBIAN),
        **role_helper.variables("_common", *([role] if role != "_common" else [])), **task.get("vars", {}), **given,
    }  # fmt: skip
    templar = Templar(DataLoader(), variables=known)
    if "that" in options and templar.template(trust_as_template(f"{{{{ {options['that']} }}}}")):
        return ""
    return str(templar.template(options["fail_msg" if "that" in options else "msg"]))


REQUIRED: list[tuple[str, str, dict[str, Any], str]] = [
    (
        "_common/tasks/main.yml",
        "Refuse direct use",
        {},
        "gpufarm.core._common is internal and was used as a role. Expected: one of its task files, entered by another "
        "role of the collection. Next step: use gpufarm.core.nomad_client, nomad_server, container_toolkit, "
        "nvidia_driver or cuda.",
    ),
    ("farm/tasks/accept_before.yml", "Require a number of nodes", {"accept_max_closed": "20%"}, ""),
    (
        "farm/tasks/accept_before.yml",
        "Require a number of nodes",
        {"accept_max_closed": "2\n"},
        "accept_max_closed is 2\n. Expected: a number of nodes such as 2, or a percentage such as 20%. Next step: set "
        "it to one.",
    ),
    ("farm/tasks/report_options.yml", "Require a path of a page", {"report_path": "a.html"}, ""),
    (
        "farm/tasks/report_options.yml",
        "Require a path of a page",
        {"report_path": "a.html\n"},
        "report_path is a.html\n. Expected: a path that ends in .html, because the same data is written beside it as "
        ".json. Next step: set report_path to such a path, or leave it out.",
    ),
    ("farm/tasks/bundle_wanted.yml", "Require a folder for the bundle", {"gpufarm_bundle": "/srv/bundle"}, ""),
    (
        "farm/tasks/bundle_wanted.yml",
        "Require a folder for the bundle",
        {"gpufarm_bundle": ""},
        "gpufarm_bundle is empty. Expected: a folder on the control machine. Next step: set it in the inventory, or "
        "with --extra-vars.",
    ),
    (
        "farm/tasks/report_folder.yml",
        "Require a folder that can be written to",
        # One that is to be made has no such answer.
        {"__farm_report_folder": {"stat": {"exists": False}}},
        "",
    ),
    (
        "farm/tasks/report_folder.yml",
        "Require a folder that can be written to",
        {
            "__farm_report_folder": {"stat": {"writeable": False, "path": "/srv", "pw_name": "root"}},
            "__farm_report_option": "verify_report",
        },
        "found /srv, where verify_report lies, owned by root and not writable for who runs Ansible. Expected: a folder "
        "to write the report to. Next step: set verify_report to a file in a folder of your own.",
    ),
    ("node_tuning/tasks/main.yml", "Require that a host may restart that would have to",
     {"__node_tuning_boot_foreseen": []}, ""),
    (
        "node_tuning/tasks/main.yml",
        "Require that a host may restart that would have to",
        {"__node_tuning_boot_foreseen": ["the kernel has no iommu=pt", "GPU 3 has ACS"]},
        "the kernel has no iommu=pt; GPU 3 has ACS, which only a boot changes. Expected: what node_tuning_* asks for. "
        "Next step: set `node_tuning_reboot` so that Ansible may reboot it, or do so after the run, which fails here "
        "with all of it written.",
    ),
    ("kubernetes_node/tasks/own.yml", "Require the runtime in its containerd's settings",
     {"__kubernetes_node_has": [["distribution", "k3s"], ["runtime", "nvidia"]]}, ""),
    (
        "kubernetes_node/tasks/own.yml",
        "Require the runtime in its containerd's settings",
        {"__kubernetes_node_has": [["distribution", "rke2"]], "__kubernetes_node_distribution": "rke2"},
        "the containerd of rke2 has no runtime nvidia in /var/lib/rancher/rke2/agent/etc/containerd. Expected: one, "
        "which it adds when it starts and finds /usr/bin/nvidia-container-runtime. Next step: restart rke2-server or "
        "rke2-agent on this host, by which no pod ends, and run this again.",
    ),
    ("cuda/tasks/install.yml", "Require that no driver comes with it",
     {"__cuda_would_come": {"stdout": "Inst cuda-nvcc-12-8 (12.8.93-1 x)\n"}, "_common_is_wsl": True}, ""),
    (
        "cuda/tasks/install.yml",
        "Require that no driver comes with it",
        {
            "__cuda_would_come": {"stdout": "Inst libcuda1 (570.1-1 x)\nInst nvidia-driver-570 (570.1-1 x)\n"},
            "cuda_version": "12.8",
            "_common_is_wsl": True,
        },
        "with cuda-toolkit-12-8 would come libcuda1, nvidia-driver-570. Expected: the toolkit and no part of a driver, "
        "which gpufarm.core.nvidia_driver alone installs. Next step: read apt-get --simulate install "
        "cuda-toolkit-12-8 on this host, and hold or take away what asks for the driver.",
    ),
    (
        "docker/tasks/install.yml",
        "Require Docker's packages",
        {
            "ansible_facts": role_helper.facts("RedHat: Rocky 10.1", "6.12.0-124.el10_1.x86_64"),
            "_common_host": {**BOOTED, "packages": ["installed docker-ce=29.1-1", "installed docker-ce-cli=29.1-1"]},
            "ansible_failed_result": UNKNOWN,
        },
        "Docker's packages could not be installed (Failed to install some of the specified packages: No package "
        "docker-ce available). Expected: docker-ce, docker-ce-cli, containerd.io, "
        "kernel-modules-extra-6.12.0-124.el10_1.x86_64. Next step: boot the newest kernel first, or set "
        "docker_packages if this one has xt_addrtype; else add Docker's own repository to this host where it has "
        "none; else mend what the package manager names, and run this again.",
    ),
    (
        "docker/tasks/install.yml",
        "Require Docker's packages",
        {
            "ansible_facts": role_helper.facts(DEBIAN),
            "_common_host": BOOTED,
            "ansible_failed_result": {"msg": "'apt-get' failed: E: x", "stderr": "E: No space left on device.\n"},
        },
        "Docker's packages could not be installed (E: No space left on device). Expected: docker.io, iptables. Next "
        "step: mend what the package manager names, and run this again.",
    ),
    (
        "container_toolkit/tasks/engines.yml",
        "Require engines that can be had",
        {"__container_toolkit_engine_packages": ["cri-o"], "_common_bundle": "", "ansible_failed_result": UNKNOWN},
        "cri-o could not be installed (Failed to install some of the specified packages: No package docker-ce "
        "available). Expected: packages that this host's repositories have. Next step: add the repository of its "
        "makers, install the engine yourself, or leave it out of container_toolkit_engines.",
    ),
    (
        "container_toolkit/tasks/install-dnf.yml",
        "Require the version to exist",
        {
            "ansible_facts": role_helper.facts("RedHat: Rocky 9.5"),
            "common_repository": {"name": "nvidia-container-toolkit", "url": "https://me:s3cret@h/rpm/x86_64"},
            "ansible_failed_result": {**UNKNOWN, "failures": ["No package nvidia-container-toolkit-1.20.1 available."]},
        },
        "version 1.20.1 of the container toolkit could not be installed (Failed to install some of the specified "
        "packages: No package nvidia-container-toolkit-1.20.1 available). Expected: it in the repository "
        "nvidia-container-toolkit (https://h/rpm/x86_64), and what it needs in this host's others. Next step: mend "
        "what dnf names, or set container_toolkit_version to one that `dnf list --showduplicates "
        "nvidia-container-toolkit` has on this host, and run this again.",
    ),
    # RHEL 10 has none.
    (
        "nomad_client/tasks/bridge.yml",
        "Require what networks of groups need",
        {
            "ansible_facts": role_helper.facts("RedHat: Rocky 10.1"), "_common_host": BOOTED,
            "ansible_failed_result": {**UNKNOWN, "failures": ["No package containernetworking-plugins available."]},
            "__nomad_client_cni": {"stdout": "missing bridge\nmissing portmap\n/usr/sbin/iptables"},
        },
        "containernetworking-plugins could not be installed (Failed to install some of the specified packages: No "
        "package containernetworking-plugins available). Expected: what nomad_client_bridge needs. Next step: unpack "
        "a release of containernetworking/plugins into /opt/cni/bin on this host, where its distribution has none; "
        "else mend what the package manager names, and run this again; or set nomad_client_bridge to false.",
    ),
    (
        "nomad_client/tasks/bridge.yml",
        "Require what networks of groups need",
        {
            "ansible_facts": role_helper.facts(DEBIAN), "_common_host": BOOTED, "_common_bundle": "",
            "ansible_failed_result": {"msg": "'apt-get' failed: E: x", "stderr": "E: No space left on device.\n"},
            "__nomad_client_cni": {"stdout": "/opt/cni/bin/bridge\nmissing iptables"},
        },
        "iptables could not be installed (E: No space left on device). Expected: what nomad_client_bridge needs. Next "
        "step: mend what the package manager names, and run this again; or set nomad_client_bridge to false.",
    ),
    # A part whose upstream asks for the driver.
    (
        "cuda/tasks/install.yml",
        "Require that no driver comes with it",
        {
            "__cuda_would_come": {"stdout": "Inst cuda-drivers (580.1-1 x)\nInst cuda-runtime-13-0 (13.0.2-1 x)\n"},
            "cuda_packages": ["cuda-nvcc", "cuda-runtime"],
            "_common_is_wsl": False,
        },
        "with cuda-nvcc-13-0, cuda-runtime-13-0 would come cuda-drivers. Expected: the toolkit and no part of a "
        "driver, which gpufarm.core.nvidia_driver alone installs. Next step: read apt-get --simulate install "
        "cuda-nvcc-13-0 cuda-runtime-13-0 on this host, and hold or take away what asks for the driver.",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("path", "name", "given", "told"), REQUIRED)
def test_what_a_task_requires(path: str, name: str, given: dict[str, Any], told: str) -> None:
    host = "localhost" if "report_folder" in path else "node1"
    assert told_by(path, name, **given) == (f"{host}: {told}" if told else "")


OTHER = "the architecture is ppc64le. Expected: x86_64 or aarch64. Next step: take this host out of the group."
USER = (
    "tasks run as the user with the ID 1000. Expected: root (0), because drivers, Docker and a Nomad client need it. "
    "Next step: set `become: true` for this host."
)


@pytest.mark.parametrize(
    ("architecture", "user_id", "told"),
    [("x86_64", 0, ""), ("aarch64", 0, ""), ("ppc64le", 0, OTHER), ("x86_64", 1000, USER)],
)
def test_a_host_that_is_none_for_any_role(architecture: str, user_id: int, told: str) -> None:
    given = {
        "ansible_facts": {**role_helper.facts(DEBIAN), "architecture": architecture},
        "_common_host": {**BOOTED, "user_id": user_id},
        "ansible_check_mode": False,
    }
    assert role_helper.value("_common_refusal", {**role_helper.variables("_common"), **given}) == told


NO_LOGIN = (
    "{} has an @ that ends no login, for one of / ? # stands before it. Expected: an address such as "
    "https://name:password@mirror.example.com/path, with / ? # @ in a password as %2F %3F %23 %40. Next step: "
    "correct it."
)


def test_an_address_whose_password_would_be_taken_for_a_part_of_it() -> None:
    """What follows would be shown, and written where everybody reads it."""
    names = ("nvidia_repository_url", "container_toolkit_repository_url", "nomad_release_url", "nomad_release_key_url")
    known = {
        **role_helper.variables("_common"), "ansible_facts": role_helper.facts(DEBIAN), "_common_host": BOOTED,
        "ansible_check_mode": False,
    }  # fmt: skip
    wrong = ("https://me:p#s3cret@h/x", "https://me:1/s3cret@h/x", "http://me:p?s3cret@h")
    for name in names:
        for url in wrong:
            assert role_helper.value("_common_refusal", {**known, name: url}) == NO_LOGIN.format(name)
    for url in wrong:
        given = {**known, "nomad_device_nvidia_program": {"url": url, "checksum": "0" * 64}}
        told = NO_LOGIN.format("nomad_device_nvidia_program.url")
        assert role_helper.value("_common_refusal", given) == told
    for program in ({}, {"path": "/srv/@plugin"}, {"url": "https://me:p%2Fs@h/x"}):
        assert role_helper.value("_common_refusal", {**known, "nomad_device_nvidia_program": program}) == ""
    right = ("https://me:p%23%2Fs@h/x", "https://me:p@ss@h:80/x", "https://h/x", "/srv/@mirror", "https://h/a%40b?c#d")
    for url in right:
        assert role_helper.value("_common_refusal", {**known, names[0]: url}) == ""
    given = {**known, names[0]: "https://me:1/s3cret@h/x", "common_scope": "remove"}
    assert role_helper.value("_common_refusal", given) == ""


def test_a_login_that_apts_file_cannot_hold() -> None:
    known = {
        **role_helper.variables("_common"), "ansible_facts": role_helper.facts(DEBIAN), "_common_host": BOOTED,
        "ansible_check_mode": False,
    }  # fmt: skip
    for name in ("nvidia_repository_url", "container_toolkit_repository_url"):
        for url in (
            "https://me:s3%20cret@h/x",
            "https://m%20e:s3cret@h",
            "https://me:s3%0Acret@h",
            "https://me:s3 c@h",
        ):
            assert role_helper.value("_common_refusal", {**known, name: url}) == (
                f"{name} has a name or a password with a blank or the end of a line in it. Expected: neither, because "
                "apt reads logins from a file that cannot hold it. Next step: have another password for this mirror."
            )
            dnf = {**known, name: url, "ansible_facts": role_helper.facts("RedHat: RedHat 9.6")}
            assert role_helper.value("_common_refusal", dnf) == ""
            given = {**known, name: url, "common_scope": "remove"}
            assert role_helper.value("_common_refusal", given) == ""
        for url in ("https://me:s3+cr%2Fet@h/x", "https://h/a%20b"):
            assert role_helper.value("_common_refusal", {**known, name: url}) == ""


def test_what_downloads_has_the_environment_of_the_farm_and_no_login() -> None:
    known = {
        **role_helper.variables("_common"), "ansible_facts": role_helper.facts(DEBIAN), "_common_host": BOOTED,
        "ansible_check_mode": False,
    }  # fmt: skip
    for login in ("http://me:s3cret@proxy:3128", "me:s3cret@proxy:3128", "http://me@proxy"):
        told = role_helper.value("_common_refusal", {**known, "gpufarm_environment": {"https_proxy": login, "a": "b"}})
        assert told.startswith("https_proxy of gpufarm_environment has a login, ") and "s3cret" not in told
    for wrong in ("http://proxy", [], {"https_proxy": 1}, {"https_proxy": None}):
        told = role_helper.value("_common_refusal", {**known, "gpufarm_environment": wrong})
        assert bool(wrong) is told.startswith("gpufarm_environment is "), told
    given = {**known, "gpufarm_environment": {"https_proxy": "http://proxy:3128", "no_proxy": "10.0.0.0/8,.a.b"}}
    assert role_helper.value("_common_refusal", given) == ""
    assert role_helper.value("_common_packages_environment", given) == given["gpufarm_environment"]
    assert list(role_helper.value("_common_packages_environment", {**given, "_common_bundle": "/b"})) == ["APT_CONFIG"]
    assert role_helper.value("_common_packages_environment", known) == {}


# What asks upstream on a host; apt and dnf have ways of their own besides.
FETCHES = {
    "gpufarm.core.openpgp_key", "gpufarm.core.hashicorp_release", "gpufarm.core.hashicorp_release_download",
    "gpufarm.core.bundle_collect", "ansible.builtin.get_url", "ansible.builtin.pip",
}  # fmt: skip


def test_nothing_asks_upstream_without_the_environment_of_the_farm() -> None:
    found = []
    for path in sorted(role_helper.ROLES.glob("*/tasks/*.yml")):
        name = str(path.relative_to(role_helper.ROLES))
        tasks = role_helper.tasks_of(name)
        block = next((task for task in tasks if "environment" in task and "block" in task), {})
        inside = [each["name"] for each in block.get("block", [])]
        for task in tasks:
            # What only looks, or has what was handed to it, asks nobody; a control machine has its own environment.
            if not FETCHES & set(task) or name.endswith("/verify.yml") or name == "nomad/tasks/hand_on.yml":
                continue
            of = block if task["name"] in inside else task
            assert of.get("environment") == "{{ _common_download_environment }}", f"{name}: {task['name']}"
            found.append(name)
    assert len(found) > 8, found


def test_a_plugin_that_is_not_released_for_an_architecture() -> None:
    smi = {"nvidia_smi": {"available": True}}
    known = role_helper.variables("_common", "nomad", "nomad_device_nvidia")
    own = {"nomad_device_nvidia_program": {"path": "/plugin", "checksum": "0" * 64}, "_common_bundle": ""}
    cases: list[tuple[str, dict[str, Any]]] = [("x86_64", {}), ("aarch64", own), ("aarch64", {})]
    *right, told = [
        role_helper.value(
            "__nomad_device_nvidia_refusal",
            {**known, **given, "ansible_facts": {**smi, "architecture": architecture}, "ansible_check_mode": False},
        )
        for architecture, given in cases
    ]
    assert right == ["", ""]
    assert told == (
        "the architecture is aarch64. Expected: x86_64, the only one that HashiCorp releases nomad-device-nvidia for "
        "(nomad-device-nvidia#86). Next step: take this host out of the group, or give a plugin in "
        "nomad_device_nvidia_program."
    )


def test_a_host_of_kubernetes_that_cannot_be_reached() -> None:
    known = {**role_helper.variables("kubernetes"), "groups": {}, "inventory_hostname": "gpu-7"}
    said = {"unreachable": True, "msg": "Connection timed out\n"}
    assert role_helper.value("__kubernetes_refusal", {**known, "__kubernetes_said": said}) == (
        "gpu-7 is unreachable (Connection timed out). Expected: the host from which the cluster is asked. Next step: "
        "mend the connection to it, or name another in kubernetes_api_host."
    )


@pytest.mark.parametrize(
    ("interval", "reads"),
    [
        *((span, True) for span in ("1min", "90", 90, "1h 30min", "1h30min", "2.5 hours", ".5d", "1 2", "5M")),
        # By the calendar, which a timer has for other settings, and what systemd does not know or never ends.
        *((span, False) for span in ("hourly", "*:0/5", "", " ", "0", "0min", "-1min", "5Min", "infinity")),
        *((span, False) for span in ("5 min\nOnCalendar=hourly", "1min\n", "1.", "1 fortnight", "9" * 40 + "x")),
    ],
)  # fmt: skip
def test_the_gate_asks_for_an_interval_that_systemd_reads(interval: object, reads: bool) -> None:
    told = told_by(
        "gpu_health/tasks/preflight.yml", "Require an interval that systemd reads", gpu_health_interval=interval
    )
    assert told == (
        "" if reads else f'node1: gpu_health_interval is "{interval}". Expected: a span of time as systemd writes it, '
        "longer than nothing, such as 90s, 5min or 1h 30min. Next step: correct it."
    )  # fmt: skip


@pytest.mark.parametrize(
    ("role", "pattern", "right"),
    [
        ("container_toolkit", "__container_toolkit_version", "1.20.1"),
        ("node_tuning", "__node_tuning_service", "docker"),
        ("nomad_server", "__nomad_server_gossip_pattern", "A" * 43 + "="),
        ("shared_data", "__shared_data_client", "192.0.2.0/24"),
        ("shared_data", "__shared_data_option", "soft"),
        ("shared_data", "__shared_data_folder", "/srv/data"),
    ],
)
def test_what_is_written_into_files_ends_no_line(role: str, pattern: str, right: str) -> None:
    """As the text of `|` in YAML does, of which $ takes the end."""
    known = role_helper.variables(role)
    assert re.match(known[pattern], right) and not re.match(known[pattern], f"{right}\n")
