"""What the role wsl makes of a distribution's answers: refusals, what waits for its end, the way to Windows."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
import yaml
from ansible.parsing.dataloader import DataLoader
from ansible_collections.gpufarm.core.tests.unit.playbooks import playbook_helper
from ansible_collections.gpufarm.core.tests.unit.roles import role_helper

from tests.simulator.cache import ROOT

GPU = "GPU-323c8947-8478-b3a5-69f7-a496b426e4b"
OLD, NEW = ("/usr/lib/wsl/drivers/nv_dispi.inf_amd64_" + each for each in ("old", "new"))
GOOD = ["systemd", "cgroup cpuset cpu io memory", f"gpu 0: NVIDIA GeForce RTX 4090 (UUID: {GPU}0)"]
SECOND = f"gpu 1: NVIDIA RTX A2000 (UUID: {GPU}1)"
KERNEL = "6.6.87.2-microsoft-standard-WSL2"
# As in a distribution, which has processes of its own; what runs on this machine is nothing of it.
ALONE = ("unshare", "--pid", "--fork", "--mount-proc", "--kill-child", "--")
SIBLING = {
    "wsl_distribution": "Debian", "wsl_host": "pc", "inventory_hostname": "pc-Debian",
    "hostvars": {"pc": {"wsl_connection": "local", "wsl_exe": "/mnt/c/Program Files/WSL/wsl.exe"}},
}  # fmt: skip


def value(
    name: str, *lines: str, kernel: str = KERNEL, has: tuple[str, ...] = ("/dev/dxg",), clock: int = 0,
    systemd: bool = True, **given: Any,
) -> Any:  # fmt: skip
    now = int(time.time())
    answer = [f"clock {now + clock} {now}", "here kernel pid:[1]"]
    answer += ["dxg"] if "/dev/dxg" in has else []
    answer += [each for each in lines or GOOD if systemd or each != "systemd"]
    known = {
        **role_helper.variables("_common", "wsl"),
        **SIBLING,
        "ansible_facts": role_helper.facts("Debian: Debian 13.1", kernel),
        "_common_host": role_helper.host(*has),
        "__wsl_asked": {"stdout_lines": answer},
        "__wsl_conf_written": {"pending": False},
        "__wsl_control_node": "kernel pid:[2]",
        "ansible_check_mode": False,
    }
    return role_helper.value(name, {**known, **given})


def refusal(*lines: str, **given: Any) -> str:
    found: str = value("__wsl_refusal", *lines, **given)
    assert not found or ("Expected: " in found and "Next step: " in found and found.endswith("."))
    return found


def test_a_distribution_that_can_be_a_node() -> None:
    assert refusal() == ""
    # Its own kernel does not name itself; it has no toolkit yet, or one whose specification is that of the driver.
    assert refusal(kernel="6.6.1-mine", has=("/dev/dxg", "/usr/lib/wsl/lib")) == ""
    assert refusal(*GOOD, "cdi /run/cdi/nvidia.yaml " + NEW, "store " + NEW, __wsl_cdi_made=True) == ""


NO_CPUSET = (
    "Expected: cpuset among them, without which Nomad reserves no cores (nomad#10709). Next step: run `wsl.exe "
    "--update` in Windows, and see that neither /etc/wsl.conf nor the kernelCommandLine of .wslconfig asks for cgroup "
    "v1."
)
NO_GPU = (
    "Expected: a GPU of Windows. Next step: install the NVIDIA driver in Windows, run nvidia-smi.exe there, and see "
    "that gpuSupport of .wslconfig and enabled in [gpu] of /etc/wsl.conf are not false."
)
CLOCK = (
    "that of the control node. Expected: at most 30 s. Next step: run `hwclock --hctosys` in it, or `wsl.exe "
    "--shutdown` in Windows, which ends every distribution."
)
SYSTEMD = "Expected: true, because Docker and Nomad are its services. Next step: take it out."


@pytest.mark.parametrize(
    ("told", "lines", "given"),
    [
        (
            "the kernel is 6.12.1, without /dev/dxg and /usr/lib/wsl/lib. Expected: a WSL distribution. Next step: "
            "take this host out of the play.",
            [],
            {"kernel": "6.12.1", "has": ()},
        ),
        (
            "the kernel is 4.4.0-22621-Microsoft, that of WSL 1, which has no GPUs. Expected: WSL 2. Next step: run "
            "`wsl.exe --set-version Debian 2` in Windows.",
            [],
            {"kernel": "4.4.0-22621-Microsoft"},
        ),
        (f"wsl_conf has boot.systemd: False. {SYSTEMD}", [], {"wsl_conf": {"boot": {"systemd": False}}}),
        (f"wsl_conf has boot.systemd: no. {SYSTEMD}", [], {"wsl_conf": {"boot": {"systemd": "no"}}}),
        (
            "systemd does not run here. Expected: it is the first process. Next step: set `wsl_terminate: true` for "
            "this host, so that gpufarm.core.wsl may set systemd=true in /etc/wsl.conf and run `wsl.exe --terminate "
            "Debian`, which ends all that runs there; or do both yourself.",
            [],
            {"systemd": False},
        ),
        (
            "systemd is not installed. Expected: it is, because a distribution that /etc/wsl.conf tells to start by "
            "systemd may not start without it. Next step: install the package systemd-sysv (Debian, Ubuntu) or "
            "systemd.",
            [*GOOD, "systemless"],
            {"systemd": False, "wsl_terminate": True},
        ),
        (f"cgroup v2 has no controllers here. {NO_CPUSET}", ["systemd", "cgroup"], {}),
        (f"cgroup v2 has cpu, io. {NO_CPUSET}", ["systemd", "cgroup cpu io"], {}),
        (f"there is no /dev/dxg; nvidia-smi says: nothing. {NO_GPU}", GOOD[:2], {"has": ()}),
        (
            f"there is no GPU here; nvidia-smi says: GPU access blocked. {NO_GPU}",
            [*GOOD[:2], "smi GPU access blocked"],
            {},
        ),
        (f"the clock is 31 s behind {CLOCK}", [], {"clock": -31}),
        (f"the clock is N s ahead of {CLOCK}", [], {"clock": 1000}),
        (
            "the networking mode is none. Expected: nat or mirrored, because a node connects to its servers. Next "
            "step: set networkingMode of .wslconfig so, and run `wsl.exe --shutdown` in Windows, which ends every "
            "distribution.",
            [*GOOD, "network none"],
            {},
        ),
        (
            "the network is bridged, so it has an address of its own, and Nomad would advertise one of pc's. "
            "Expected: its own. Next step: set nomad_advertise_addr for this host to what `hostname -I` prints there.",
            [*GOOD, "network bridged"],
            {"hostvars": {"pc": {"wsl_addresses": [{"address": "192.0.2.31"}]}}},
        ),
        (
            "a Linux driver is in the way: libcuda1, libnvidia-ml1. Expected: none, because its libraries are found "
            "before those of Windows' driver in /usr/lib/wsl/lib. Next step: remove these packages; nothing was "
            "removed here.",
            [*GOOD, "driver libnvidia-ml1:amd64: /usr/lib/x86_64-linux-gnu/libnvidia-ml.so.1", "driver libcuda1"],
            {},
        ),
    ],
)
def test_what_a_node_cannot_work_with(told: str, lines: list[str], given: dict[str, Any]) -> None:
    # By the time of the question it is less than it was.
    assert re.sub("[0-9]+ s ahead", "N s ahead", refusal(*lines, **given)) == told


@pytest.mark.parametrize(
    ("lines", "given"),
    [
        ([], {"clock": -31, "wsl_clock_offset_max": 60}),
        # The task may have waited for hours; only what no waiting explains is wrong.
        ([], {"clock": 29}),
        (["systemd", "cgroup", *GOOD[2:]], {"wsl_cgroup_v2": "no"}),
        ([*GOOD, SECOND], {"wsl_several_gpus": "shared"}),
        ([*GOOD, SECOND], {"nomad_device_nvidia_ignored_gpu_ids": [GPU + "0"]}),
        ([*GOOD, "driver nvidia-driver-pinning-580"], {}),
        # Its own address, by somebody or by nobody; an older WSL does not tell its mode.
        (
            [*GOOD, "network bridged"],
            {
                "hostvars": {"pc": {"wsl_addresses": [{"address": "192.0.2.31"}]}},
                "nomad_advertise_addr": "192.0.2.77",
            },
        ),
        *[([*GOOD, f"network {mode}"], {}) for mode in ("bridged", "nat", "mirrored", "virtioproxy", "")],
        # What a rescan has not been tried on is no refusal, and neither is what cannot be compared.
        ([*GOOD, "cdi /run/cdi/nvidia.yaml " + OLD, "store " + NEW], {}),
        ([*GOOD, "cdi /run/cdi/nvidia.yaml " + OLD, "store"], {"__wsl_cdi_made": True}),
        ([*GOOD, "cdi /run/cdi/nvidia.yaml " + OLD], {"__wsl_cdi_made": True}),
    ],
)
def test_what_is_allowed(lines: list[str], given: dict[str, Any]) -> None:
    assert refusal(*lines, **given) == ""


@pytest.mark.parametrize(
    ("lines", "settings"),
    [(["systemd", "cgroup"], {"automount": {"cgroups": "v2"}}), (GOOD[:2], {"gpu": {"enabled": True}})],
)
def test_what_the_new_start_is_to_bring_is_not_missed_before(lines: list[str], settings: dict[str, Any]) -> None:
    given: dict[str, Any] = {"wsl_conf": settings, "__wsl_conf_written": {"pending": True}}
    lines = [*lines, *GOOD[2:]] if "cgroup" in lines else lines
    assert refusal(*lines, wsl_terminate=True, **given) == ""
    assert refusal(*lines, wsl_terminate=False, **given)
    assert refusal(*lines, wsl_terminate=True, __wsl_terminated=True, **given)
    assert refusal(*lines, wsl_terminate=True, __wsl_conf_written={"pending": True})


@pytest.mark.parametrize(
    ("lines", "given"),
    [(["systemd", "cgroup"], {}), (GOOD[:2], {}), (GOOD, {"clock": -31}), ([*GOOD, "network none"], {})],
    ids=["cgroup", "gpu", "clock", "network"],
)
def test_what_windows_is_to_bring_is_not_missed_before(lines: list[str], given: dict[str, Any]) -> None:
    lines = [*lines, *GOOD[2:]] if "cgroup" in lines else lines
    assert refusal(*lines, common_windows_to_come=True, **given) == ""
    assert refusal(*lines, **given)


@pytest.mark.parametrize(
    ("windows", "to_come"),
    [({}, False), ({"wsl_update": "no"}, False), ({"wsl_shutdown": "yes"}, True), ({"wsl_config": {"wsl2": {}}}, True)],
)
def test_wsl_waits_for_windows_only_where_that_changes(windows: dict[str, Any], to_come: bool) -> None:
    first = DataLoader().load_from_file(str(ROOT / "playbooks/wsl.yml"), trusted_as_template=True)[0]
    asked = first["vars"]["common_windows_to_come"]
    assert value("asked", asked=asked, hostvars={"pc": windows}) is to_come


def test_packages_and_files_of_a_driver_have_other_ways_out() -> None:
    found = refusal(*GOOD, "driver libcuda1", "driver /usr/lib/libcuda.so.580")
    assert "/usr/lib/libcuda.so.580, libcuda1. Expected" in found
    assert "Next step: remove it as it was installed; nothing was removed here." in found


def test_several_gpus_are_told_with_what_to_set() -> None:
    found = refusal(*GOOD, SECOND, f"gpu 2: NVIDIA RTX A2000 (UUID: {GPU}2)")
    assert found == (
        f"Nomad would hand out {GPU}0, {GPU}1, {GPU}2, and WSL keeps no GPU from a job (nvidia-container-toolkit#21). "
        "Expected: one, or jobs that keep to theirs. Next step: set `wsl_several_gpus: first` for this host, which "
        f"stands for `nomad_device_nvidia_ignored_gpu_ids: [{GPU}1, {GPU}2]`, or `wsl_several_gpus: shared` if all "
        "jobs set CUDA_VISIBLE_DEVICES to NVIDIA_VISIBLE_DEVICES."
    )
    # What hides them could not, so that something else goes before it.
    assert refusal(*GOOD, SECOND, wsl_several_gpus="first") == (
        f"Nomad would hand out {GPU}0, {GPU}1, and WSL keeps no GPU from a job (nvidia-container-toolkit#21). "
        "Expected: one, or jobs that keep to theirs. Next step: take nomad_device_nvidia_ignored_gpu_ids off the "
        "command line, where it goes before `wsl_several_gpus: first`."
    )


# By which each part of the farm goes by the GPUs of a node, whatever comes of it here: role and file.
GOES_BY_GPUS = {
    "site": ("wsl", "check"),
    "plugin": ("nomad_device_nvidia", "preflight"),
    "gate_of_the_node": ("gpu_health", "main"),
    "gate_of_the_farm_and_acceptance": ("farm", "gate_probe"),
    "verify": ("farm", "verify_node"),
    "report": ("farm", "report_node"),
    "maintenance": ("node_maintenance", "put_back"),
}
HIDDEN = "{{ nomad_device_nvidia_ignored_gpu_ids | default([]) | map('last') | join(' and ') }}"


def entering(name: str) -> dict[str, Any]:
    """Of one task for all, Ansible would enter one file of a role for the hosts of another one, too."""
    role, tasks = GOES_BY_GPUS[name]
    given = {"name": f"gpufarm.core.{role}", "tasks_from": f"{tasks}.yml", "rolespec_validate": False}
    return {"ansible.builtin.include_role": given, "when": f"part == '{name}'"}


ENTER = [
    {
        "hosts": "all",
        "gather_facts": False,
        "tasks": [
            {"ansible.builtin.import_role": {"name": "gpufarm.core._common", "tasks_from": "variables.yml"}},
            {
                "block": [entering(name) for name in GOES_BY_GPUS],
                "rescue": [{"ansible.builtin.debug": {"msg": "It is no node."}}],
                "always": [{"ansible.builtin.debug": {"msg": "{{ inventory_hostname }} hides " + HIDDEN + "."}}],
            },
        ],
    }
]


def test_of_several_gpus_nomad_has_the_first_if_that_is_wanted(tmp_path: Path) -> None:
    """Whatever is run: what verify expected, or the gate judged, would otherwise be another node."""
    smi = tmp_path / "nvidia-smi"
    lines = [*GOOD[2:], SECOND, f"gpu 2: NVIDIA RTX A2000 (UUID: {GPU}2)", "  MIG 1g.5gb Device 0: (UUID: MIG-1)"]
    smi.write_text("#!/bin/sh\n[ $* = -L ] && cat <<'END'\n" + "\n".join(lines).replace("gpu ", "GPU ") + "\nEND\n")
    smi.chmod(0o755)
    hosts: dict[str, dict[str, Any]] = {}
    wanted: dict[str, str] = {}

    def enter(name: str, hides: str, **more: Any) -> None:
        host = f"{name}_{len(hosts)}"
        hosts[host] = {"part": name, "wsl_several_gpus": "first", "smi": str(tmp_path), **more}
        wanted[host] = hides

    for name in GOES_BY_GPUS:
        enter(name, "1 and 2")
        enter(name, "", wsl_several_gpus="shared")
    enter("verify", "0 and 2", nomad_device_nvidia_ignored_gpu_ids=[GPU + "0"])
    enter("verify", "0 and 2", nomad_device_nvidia_ignored_gpu_ids=GPU + "0")
    # A host that is no WSL distribution has no such nvidia-smi.
    enter("verify", "", smi="/usr/lib/nowhere")
    # One that hangs, and may answer whoever asks next, hides nothing and is told.
    (tmp_path / "hangs").mkdir()
    (tmp_path / "hangs/nvidia-smi").write_text("#!/bin/sh\nexit 137\n")
    (tmp_path / "hangs/nvidia-smi").chmod(0o755)
    enter("verify", "", smi=str(tmp_path / "hangs"))
    known = {**playbook_helper.LOCAL, "nomad_tls": "off", "nomad_acl_enabled": False}
    past = {"_common_is_wsl": True, "__wsl_lib": "{{ smi }}", "common_scope": "site"}
    (tmp_path / "play.yml").write_text(yaml.safe_dump(ENTER))
    done = playbook_helper.run_playbook(
        tmp_path, {"all": {"hosts": hosts, "vars": known}}, str(tmp_path / "play.yml"), "--check",
        "-e", json.dumps(past), under=ALONE if os.geteuid() == 0 else (),
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert dict(re.findall(r"msg: (\S+) hides (.*)\.$", done.stdout, re.MULTILINE)) == wanted
    assert done.stdout.count("rc: 137") == 1


def test_a_specification_that_names_another_driver_store() -> None:
    lines = [*GOOD, "cdi /etc/cdi/mine.yaml " + OLD, "cdi /run/cdi/nvidia.yaml " + NEW, "store " + NEW]
    assert value("__wsl_cdi_stale", *lines) == ["/etc/cdi/mine.yaml"]
    assert refusal(*lines, __wsl_cdi_made=True) == (
        f"the CDI specification in /etc/cdi/mine.yaml names another driver store than {NEW} after nvidia-cdi-refresh "
        "has made it again. Expected: the present one. Next step: remove the file if it is not in /run/cdi, else read "
        "`journalctl -u nvidia-cdi-refresh`."
    )


NO_WAY = (
    "nothing says how its Windows machine is asked for `wsl.exe --terminate`. Expected: wsl_distribution, and in "
    "wsl_host a machine that has answered, as an inventory of gpufarm.core.wsl has them. Next step: run it in Windows, "
    "and then this again, or use such an inventory."
)


def test_systemd_that_may_come() -> None:
    may = {"systemd": False, "wsl_terminate": "yes"}
    assert refusal(**may) == ""
    assert refusal(**may, __wsl_terminated=True) == (
        "systemd does not run here. Expected: it is the first process. Next step: see why it does not start: "
        "`systemctl` is there, and `wsl.exe -d Debian` in Windows warns of what it could not do."
    )
    assert refusal(**may, hostvars={}) == NO_WAY
    assert "set `wsl_terminate: true`" in refusal(systemd=False)
    # A distribution that has to end and cannot is refused before its file changes; without consent nothing ends it.
    pending: dict[str, Any] = {"__wsl_conf_written": {"pending": True}, "hostvars": {}}
    assert "how its Windows machine is asked" in refusal(wsl_terminate=True, **pending)
    assert refusal(**pending) == ""
    for waits in ({"__wsl_conf_written": {"pending": True}}, {"systemd": False}):
        assert value("__wsl_terminate_needed", **waits)
    assert not value("__wsl_terminate_needed")


@pytest.mark.parametrize(
    ("windows", "command"),
    [
        (SIBLING["hostvars"]["pc"], "& 'wsl.exe'"),  # type: ignore[index]
        (
            {"wsl_connection": "ssh", "wsl_exe": r"C:\Program Files\WSL\wsl.exe"},
            r"& 'C:\Program Files\WSL\wsl.exe'",
        ),
        (
            {"wsl_connection": "ssh", "wsl_exe": r"C:\Program Files\WSL\wsl.exe", "ansible_shell_type": "cmd"},
            r'"C:\Program Files\WSL\wsl.exe"',
        ),
    ],
)
def test_windows_shell_takes_the_path(windows: dict[str, str], command: str) -> None:
    assert value("__wsl_windows_command", hostvars={"pc": windows}) == command
    assert value("__wsl_no_way", hostvars={"pc": windows}) == ""


def test_the_specification_names_each_way_to_windows() -> None:
    windows = yaml.safe_load((ROOT / "roles/wsl/vars/windows.yml").read_text(encoding="utf-8"))
    told = " ".join(windows["__wsl_windows_refusal"].split())
    ways = told.partition("one to Windows itself, which is ")[2].partition(". Next step")[0]
    specs = yaml.safe_load((ROOT / "roles/wsl/meta/argument_specs.yml").read_text(encoding="utf-8"))
    described = " ".join(specs["argument_specs"]["windows"]["description"])
    assert ways == "ssh, psrp, winrm or gpufarm.core.wsl_windows"
    for way in ("SSH", "PSRP", "WinRM", "P(gpufarm.core.wsl_windows#connection)"):
        assert way in described


def test_no_way_to_windows() -> None:
    for given in (
        {"hostvars": {}},
        {"hostvars": {"pc": {"wsl_connection": "ssh", "wsl_reachable": False}}},
    ):
        assert value("__wsl_no_way", **given) == NO_WAY
    # Whoever ends what Ansible runs in ends Ansible, however it is reached.
    for connection in ("local", "ssh"):
        windows = {"pc": {"wsl_connection": connection, "wsl_exe": "wsl.exe"}}
        here: dict[str, Any] = {"__wsl_control_node": "kernel pid:[1]", "hostvars": windows}
        told = (
            "Ansible itself runs in Debian and would end with it. Expected: a start of Debian by what /etc/wsl.conf "
            "says now. Next step: run `wsl.exe --terminate Debian` in Windows, and then this again"
        )
        assert value("__wsl_no_way", **here, __wsl_conf_written={"pending": True}) == f"{told}."
        # The file says it already, so something else keeps systemd away.
        assert value("__wsl_no_way", **here) == (
            f"{told}; if it says the same then, see what `wsl.exe -d Debian` warns of there."
        )
    assert value("__wsl_no_way", __wsl_control_node="kernel2 pid:[1]") == ""


@pytest.mark.parametrize(
    ("check", "change", "word"),
    [(False, True, "has changed"), (True, True, "would change"), (True, False, "has changed")],
)
def test_what_waits_for_the_end_of_a_distribution(check: bool, change: bool, word: str) -> None:
    written = {"pending": True, "changed": change}
    assert value("__wsl_waiting", ansible_check_mode=check, __wsl_conf_written=written) == (
        f"/etc/wsl.conf {word} since Debian started, which so does not run by it. Expected: `wsl.exe --terminate "
        "Debian`, which ends all that runs there. Next step: set `wsl_terminate: true` for this host, so that this "
        "role may, or run it in Windows."
    )


def test_the_control_node_and_the_distribution_tell_where_they_are_alike() -> None:
    """By the kernel that runs and the PID namespace, of which each distribution has one."""
    asked = role_helper.variables("wsl")["__wsl_control_node"]
    command = asked.partition("'ansible.builtin.pipe', '")[2].partition("')")[0]
    told = subprocess.run(["/bin/sh", "-c", command], capture_output=True, text=True, check=True).stdout
    script = ROOT / "roles/wsl/files/ask.sh"
    answer = subprocess.run(["/bin/sh", str(script), "0", ":", ":"], capture_output=True, text=True, check=True).stdout
    assert f"here {' '.join(told.split())}" in answer.splitlines()
    assert len(told.split()) == 2


@pytest.mark.skipif(os.geteuid() != 0, reason="only root has processes of its own")
@pytest.mark.parametrize(
    ("holder", "held"),
    [
        ("/bin/sleep infinity", True),
        (":", False),
        # Of a service, or of somebody's own.
        ("sleep infinity", False),
        ("/bin/sleep 86400", False),
        # Of a container, which Windows has not started.
        ("unshare --pid --fork --kill-child /bin/sleep infinity", False),
    ],
)
def test_what_the_task_of_windows_holds_a_distribution_by_is_found(holder: str, held: bool) -> None:
    # It is there once it has become the program that is looked for, and has not the shell's words any more.
    script = f"""{holder} &
    while cmp -s /proc/$!/cmdline /proc/$$/cmdline; do sleep 0.1; done
    exec /bin/sh {ROOT / "roles/wsl/files/ask.sh"} 0 : :"""
    answer = subprocess.run([*ALONE, "/bin/sh", "-c", script], capture_output=True, text=True, check=True).stdout
    assert ("held" in answer.splitlines()) is held


def test_the_distribution_is_asked_for_the_mode_of_its_network(tmp_path: Path) -> None:
    tool = tmp_path / "wslinfo"
    tool.write_text('#!/bin/sh\n[ "$*" = --networking-mode ] && echo bridged\n')
    for mode, found in ((0o755, "network bridged"), (0o644, "network ")):
        tool.chmod(mode)
        answer = subprocess.run(
            ["/bin/sh", str(ROOT / "roles/wsl/files/ask.sh"), "0", ":", ":"],
            capture_output=True, text=True, check=True, env={"PATH": f"{tmp_path}:{os.environ['PATH']}"},
        ).stdout  # fmt: skip
        assert found in answer.splitlines()


def test_a_distribution_counts_as_held_that_was_so_before_this_run_ended_it() -> None:
    """Its task is started again, so that is nothing to run the playbook of Windows for."""
    assert value("__wsl_held", *GOOD, "held")
    assert value("__wsl_held", __wsl_held_before=True)
    assert not value("__wsl_held")
    (noted,) = [
        task["ansible.builtin.set_fact"]
        for task in yaml.safe_load((ROOT / "roles/wsl/tasks/start_again.yml").read_text())
        if "ansible.builtin.set_fact" in task
    ]
    assert noted["__wsl_held_before"] == "{{ __wsl_held }}"


def test_systemd_is_wanted_whatever_else_is() -> None:
    assert value("__wsl_settings", wsl_conf={"boot": {"command": "x"}, "user": {"default": "bob"}}) == {
        "boot": {"command": "x", "systemd": True},
        "user": {"default": "bob"},
    }


@pytest.mark.parametrize(
    ("given", "to_come"),
    [
        ({}, True),
        ({"wsl_terminate": False}, False),
        # Its server would be built before the role brings systemd.
        ({"groups": {"gpu_nodes": ["pc-Debian"], "nomad_servers": ["pc-Debian"]}}, False),
        ({"ansible_run_tags": ["nomad"]}, False),
        ({"ansible_run_tags": ["wsl", "nomad"]}, True),
        ({"ansible_skip_tags": ["wsl"]}, False),
    ],
)
def test_site_waits_for_systemd_only_where_this_role_will_bring_it(given: dict[str, Any], to_come: bool) -> None:
    plays = DataLoader().load_from_file(str(ROOT / "playbooks/site_preflight.yml"), trusted_as_template=True)
    (asked,) = [play["vars"]["common_systemd_to_come"] for play in plays if play["name"] == "What the roles refuse"]
    known = {
        "inventory_hostname": "pc-Debian", "groups": {"gpu_nodes": ["pc-Debian"]}, "wsl_terminate": True,
        "ansible_run_tags": ["all"], "ansible_skip_tags": [],
    }  # fmt: skip
    assert role_helper.value("asked", {"asked": asked, **known, **given}) is to_come


@pytest.mark.parametrize(
    ("kernel", "to_come", "refused"),
    [(KERNEL, False, True), (KERNEL, True, False), ("6.12.0", True, True)],
)
def test_no_other_role_works_without_systemd(kernel: str, to_come: bool, refused: bool) -> None:
    found = value(
        "_common_refusal", kernel=kernel, has=(), common_systemd_to_come=to_come
    )  # fmt: skip
    assert ("systemd does not run here" in found) is refused


PREFLIGHT = [
    {
        "hosts": "all",
        "gather_facts": False,
        "tasks": [{"ansible.builtin.import_role": {"name": "gpufarm.core.wsl", "tasks_from": "preflight.yml"}}],
    }
]
# /etc and /run are a copy, in which the role may write.
APART = (
    "unshare",
    "--mount",
    "sh",
    "-c",
    'mount --bind "$1/etc" /etc; mount --bind "$1/run" /run; shift; exec "$@"',
    "sh",
)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root has files of its own in /etc")
def test_a_node_without_its_agent_that_stays_out_is_said(tmp_path: Path) -> None:
    """Of this run: what another one has taken out is not known to be ours."""
    shutil.copytree("/etc", tmp_path / "etc", symlinks=True)
    (tmp_path / "run").mkdir()
    play = [{"hosts": "all", "gather_facts": False, "roles": ["gpufarm.core.wsl"]}]
    (tmp_path / "play.yml").write_text(yaml.safe_dump(play))
    known = {**playbook_helper.LOCAL, "nomad_tls": "off", "nomad_acl_enabled": False, "wsl_distribution": "Debian"}
    past = {
        "_common_is_wsl": True, "common_scope": "site", "_common_puts_back": True,
        "__wsl_asked": {"stdout_lines": [*GOOD, "dxg"]}, "__wsl_conf_written": {"pending": False},
    }  # fmt: skip

    def run(**more: Any) -> subprocess.CompletedProcess[str]:
        return playbook_helper.run_playbook(
            tmp_path, {"all": {"hosts": {"pc-Debian": known}}}, str(tmp_path / "play.yml"),
            "-e", json.dumps({**past, **more}), under=(*ALONE, *APART, str(tmp_path)),
        )  # fmt: skip

    done = run(__node_maintenance_out={"maintenance": {"owner": "gpufarm.core"}})
    assert done.returncode == 2, done.stdout + done.stderr
    said = " ".join((done.stdout + done.stderr).split())
    assert "pc-Debian: this run took the node out of work, and no Nomad agent runs that could take it back (" in said
    assert (
        "). Expected: one that runs again after the distribution's start. Next step: run `systemctl enable --now "
        "nomad` there, and this role again."
    ) in said
    for marked in (None, {"maintenance": None}):
        done = run(__node_maintenance_out=marked or {})
        assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.skipif(os.geteuid() != 0, reason="only root has files of its own in /etc")
def test_where_ansible_itself_runs_the_file_is_written_and_its_user_ends_it(tmp_path: Path) -> None:
    """systemd does not run there, so the first run has to bring what the next one goes by."""
    shutil.copytree("/etc", tmp_path / "etc", symlinks=True)
    (tmp_path / "run").mkdir()
    conf = tmp_path / "etc/wsl.conf"
    conf.write_text("# mine\n")
    (tmp_path / "play.yml").write_text(yaml.safe_dump(PREFLIGHT))
    known = {**playbook_helper.LOCAL, "_common_is_wsl": True, "wsl_terminate": True, "wsl_distribution": "Debian"}

    def run(*options: str) -> str:
        done = playbook_helper.run_playbook(
            tmp_path, {"all": {"hosts": {"pc-Debian": known}}}, str(tmp_path / "play.yml"), *options,
            "-e", '{"_common_is_wsl": true}', under=(*APART, str(tmp_path)),
        )  # fmt: skip
        assert done.returncode == 2, done.stdout + done.stderr
        return " ".join((done.stdout + done.stderr).split())

    assert "Next step: run this without --check." in run("--check")
    assert conf.read_text() == "# mine\n"
    for _ in range(2):
        said = run()
        assert "Ansible itself runs in Debian and would end with it. Expected: a start of Debian by what" in said
        assert "Next step: run `wsl.exe --terminate Debian` in Windows, and then this again." in said
        assert conf.read_text() == "# mine\n\n[boot]\nsystemd=true\n"
        (backup,) = conf.parent.glob("wsl.conf.*~")
        assert backup.read_text() == "# mine\n"
    # It starts, and loses /run.
    shutil.rmtree(tmp_path / "run")
    (tmp_path / "run/systemd/system").mkdir(parents=True)
    assert "Ansible itself" not in run()
