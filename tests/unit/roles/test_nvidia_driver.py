"""What the driver role works out from the node: packages, headers, RHEL's streams and locks, what modprobe said."""

from __future__ import annotations

import base64
import fcntl
import fnmatch
import hashlib
import json
import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from ansible.parsing.dataloader import DataLoader
from ansible.template import trust_as_template
from ansible_collections.gpufarm.core.tests.unit.playbooks.playbook_helper import LOCAL, run_playbook
from ansible_collections.gpufarm.core.tests.unit.roles import role_helper

ROLE = Path(__file__).resolve().parents[3] / "roles/nvidia_driver"
LOCKS = """\
nvidia-open-3:580.95.05-1.el10.*
kmod-nvidia-open-dkms-3:580.95.05-1.el10.*
nvidia-driver-3:570.195.03-1.el10.*
bash-0:5.2.26-4.el10.*
nvidia-container-toolkit-0:1.18.2-1.*
libnvidia-container1-0:1.18.2-1.*
nvidia-docker2-0:2.14.0-100.el10.*
nvidia-gds-13-0-0:13.0.1-1.*
nvidia-fs-dkms-0:2.26.6-1.*
libva-nvidia-driver-0:0.0.13-4.el10.*
cuda-drivers-0:570.195.03-1.el10.*"""


def value(name: str, **given: Any) -> Any:
    facts = role_helper.facts(given.pop("platform", "Debian: Debian 13.1"), kernel="6.12.57+deb13-amd64")
    facts.update(given.pop("facts", {}))
    known = {"ansible_facts": facts, "_common_is_wsl": False, "_common_host": role_helper.host()}
    roles = role_helper.variables("_common", "nvidia_repository", "nvidia_driver")
    return role_helper.value(name, {**roles, **known, **given})


def tasks_of(name: str) -> Any:
    return yaml.safe_load((ROLE / "tasks" / name).read_text(encoding="utf-8"))


def test_packages_are_asked_for_by_branch() -> None:
    assert value("__nvidia_driver_wanted", nvidia_driver_branch="570") == [
        "nvidia-driver-cuda=570.*",
        "nvidia-kernel-open-dkms=570.*",
    ]
    assert value("__nvidia_driver_wanted", nvidia_driver_packages=["mine"]) == ["mine"]


def test_unattended_upgrades_leave_the_driver_alone_and_nothing_else() -> None:
    """As unattended-upgrades compares a name: by its beginning."""
    patterns = re.findall(r'"(.*)";', value("__nvidia_driver_upgrades_text"))
    left_alone = (
        "nvidia-driver-580-open nvidia-dkms-580-server libnvidia-compute-580 libnvidia-ml1 nvidia-fabricmanager-580 "
        "libcuda1 libcudadebugger1 libnvcuvid1 libnvoptix1 libnvsdm libnvsdm-580 libnvidia-nscq-580 cuda-drivers "
        "cuda-drivers-580 firmware-nvidia-gsp xserver-xorg-video-nvidia-580"
    )
    others = (
        "libnvme1 libnvpair3linux libnvtt2 libcudart12 cuda-toolkit-13-0 linux-image-amd64 xserver-xorg-core "
        "nvidia-container-toolkit libnvidia-container1"
    )
    for names, stays in ((left_alone, True), (others, False)):
        for name in names.split():
            assert any(re.match(pattern, name) for pattern in patterns) is stays, name


def test_only_what_is_missing_is_asked_for() -> None:
    """apt would bring what matches a wildcard up to date, and take the GPUs from what runs on them."""
    missing = ["linux-headers-1", "nvidia-driver-cuda=570.*"]
    found = value(
        "__nvidia_driver_missing", nvidia_driver_branch="570", _common_repository_missing=missing,
        _common_host=role_helper.host(),
    )  # fmt: skip
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


HELD = "apt-mark unhold %s` on this host, and this again."


@pytest.mark.parametrize(
    ("lines", "missing", "given", "told"),
    [
        (["hi nvidia-driver-cuda=570.195.03-1", "hi libcuda1=570.195.03-1", "ii libnvidia-ml1=570.195.03-1"],
         ["nvidia-driver-cuda=580.*"], {}, HELD % "libcuda1 nvidia-driver-cuda"),
        (["hi nvidia-driver-570=3:570.1-0ubuntu1", "hi cuda-drivers=570.1-1"], ["mine"],
         {"nvidia_driver_packages": ["mine"]}, HELD % "cuda-drivers nvidia-driver-570"),
        (["hi nvidia-driver-pinning-570=570-1"], ["nvidia-driver-cuda=580.*"],
         {"__nvidia_driver_pinnings_of_others": ["nvidia-driver-pinning-570"]}, HELD % "nvidia-driver-pinning-570"),
        (["hi libcuda1=580.159.04-1"], ["nvidia-driver-cuda=580.95.05-*"], {"nvidia_driver_version": "580.95.05"},
         HELD % "libcuda1"),
        # The other kind of modules makes way, and Fabric Manager goes by the driver.
        (["hi nvidia-kernel-open-dkms=580.95.05-1"], ["nvidia-kernel-dkms=580.*"],
         {"nvidia_driver_kernel_modules": "proprietary"}, HELD % "nvidia-kernel-open-dkms"),
        (["hi nvidia-fabricmanager=580.95.05-1", "hi libcuda1=580.159.04-1"], ["nvidia-fabricmanager=580.159.04-*"], {},
         HELD % "nvidia-fabricmanager"),
        # What stays may be held, and what is not the driver's.
        (["hi libcuda1=580.95.05-1"], ["nvidia-kernel-open-dkms=580.*"], {}, ""),
        (["hi nvidia-container-toolkit=1.18.2-1", "hi libnvidia-container1=1.18.2-1", "hi nvidia-fs-dkms=2.26.6-1",
          "hi nvidia-settings=510.47.03-1", "hi docker-ce=5:28.1-1", "hi linux-image-amd64=570.1-1",
          "hc libcuda1=570.195.03-1"], ["nvidia-driver-cuda=580.*"], {}, ""),
        (["iF postfix=3.7-1", "iHRfoo=1", "iU bar=2"], ["nvidia-driver-cuda=580.*"], {},
         "dpkg has left foo half done. Expected: "),
        # What waits for triggers is well, and apt goes on with what an earlier run has unpacked and not configured.
        (["iW a=1", "it b=1", "rc c=1", "iF nvidia-kernel-open-dkms=580.95.05-1", "iU libcuda1=580.95.05-1"],
         ["nvidia-driver-cuda=580.*"], {}, ""),
    ],
)  # fmt: skip
def test_no_node_is_emptied_for_what_apt_refuses(
    lines: list[str], missing: list[str], given: dict[str, Any], told: str
) -> None:
    asked = "Ask dpkg for what keeps apt from the exchange"
    begun, failed = role_helper.begun(tasks_of("branch-pinning.yml"), asked)
    wanted = [asked, "Let the node work again", "Require packages that apt may exchange"]
    assert failed and begun[begun.index(asked) :] == wanted
    assert "Have no work where the driver is exchanged" not in begun
    tasks = {task["name"]: task for task in role_helper.tasks_of("nvidia_driver/tasks/branch-pinning.yml")}
    known: dict[str, Any] = {
        "__nvidia_driver_dpkg": {"rc": 0, "stdout_lines": lines}, "__nvidia_driver_missing": missing,
        "__nvidia_driver_pinnings_of_others": [], "inventory_hostname": "gpu1", **given,
    }  # fmt: skip
    # As Ansible asks: what is found fails at once, but what another apt is at is waited for.
    for name in ("failed_when", "until"):
        known[name] = trust_as_template("{{ " + tasks[asked][name] + " }}")
    for more, until in (([], True), (["locked"], "half done" not in told)):
        known["__nvidia_driver_dpkg"] = {"rc": 0, "stdout_lines": [*more, *lines]}
        assert (fabric_value("failed_when", **known), fabric_value("until", **known)) == (told != "", until)
    known["said"] = trust_as_template(tasks[wanted[-1]]["ansible.builtin.fail"]["msg"])
    assert not told or told in fabric_value("said", **known)


def test_whether_another_apt_is_at_work(tmp_path: Path) -> None:
    tasks = {task["name"]: task for task in role_helper.tasks_of("nvidia_driver/tasks/branch-pinning.yml")}
    asked = tasks["Ask dpkg for what keeps apt from the exchange"]["ansible.builtin.shell"]
    assert "/var/lib/dpkg/lock-frontend" in asked
    lock = tmp_path / "lock-frontend"
    (tmp_path / "dpkg-query").write_text("#!/bin/sh\necho 'iHRfoo=1'\n", encoding="ascii")
    (tmp_path / "dpkg-query").chmod(0o755)

    def said() -> list[str]:
        command = ["sh", "-c", asked.replace("/var/lib/dpkg/lock-frontend", str(lock))]
        environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
        return subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout.splitlines()

    assert said() == ["iHRfoo=1"]
    # As dpkg locks.
    with lock.open("w") as file:
        assert said() == ["iHRfoo=1"]
        fcntl.lockf(file, fcntl.LOCK_EX)
        assert said() == ["locked", "iHRfoo=1"]


def test_what_pins_other_branches() -> None:
    lines = [
        "installed nvidia-driver-pinning-580=580-1",
        "config-files nvidia-driver-pinning-570=570-1",
        "not-installed nvidia-driver-pinning-590=",
        "installed nvidia-driver-cuda=580.95.05-1",
    ]
    given = {"nvidia_driver_branch": "580", "_common_repository_installed": {"stdout_lines": lines}}
    assert value("__nvidia_driver_pinnings_of_others", **given) == ["nvidia-driver-pinning-570"]
    given["nvidia_driver_version"] = "580.95.05"
    found = value("__nvidia_driver_pinnings_of_others", **given)
    assert sorted(found) == ["nvidia-driver-pinning-570", "nvidia-driver-pinning-580"]


@pytest.mark.parametrize(
    ("pinned", "after", "said", "told"),
    [
        (True, ["ii libcuda1=570.1-1"], {}, "; the driver that is there stays, and is pinned as before"),
        (
            True,
            ["ii libcuda1=570.1-1", "ii nvidia-driver-pinning-580=580.1-1", "un nvidia-legacy="],
            {"msg": "no such host\n"},
            ", and nvidia-driver-pinning-570 could not be had again, so that the next upgrade by apt exchanges the "
            "driver (no such host)",
        ),
        # Part of the new driver is there, and the rest is to come of the same branch.
        (True, ["iU libcuda1=580.1-1"], {}, ""),
        (False, ["ii libcuda1=570.1-1"], {}, ""),
    ],
)
def test_what_is_pinned_where_a_driver_did_not_come(
    pinned: bool, after: list[str], said: dict[str, str], told: str
) -> None:
    given: dict[str, Any] = {
        "_common_repository_packages_there": [
            "installed nvidia-driver-pinning-570=570.1-1",
            "installed libcuda1=570.1-1",
        ],
        "__nvidia_driver_pinning": {"changed": pinned},
        "__nvidia_driver_pinned_back": said,
        "__nvidia_driver_before": {"stdout_lines": ["ii nvidia-driver-pinning-570=570.1-1", "ii libcuda1=570.1-1"]},
        "__nvidia_driver_after": {"stdout_lines": after},
    }
    assert value("__nvidia_driver_pins_told", **given) == told
    assert value("__nvidia_driver_pins_return", **given) is bool(told)
    # Of a driver that nobody had pinned there is nothing to tell.
    given["_common_repository_packages_there"] = ["installed libcuda1=570.1-1"]
    assert value("__nvidia_driver_pins_told", **given) == ""
    assert value("__nvidia_driver_pins_return", **given) is bool(told)


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


def changed_since(root: Path, started: int) -> str:
    """Return what the script says of a machine of files that was started at this time."""
    (root / "proc").mkdir(exist_ok=True)
    (root / "proc/stat").write_text(f"cpu 1 2\nbtime {started}\n", encoding="ascii")
    text = (ROLE / "files/changed_since_boot.sh").read_text(encoding="ascii")
    text = re.sub(r"(?<= )/(proc|lib|usr|etc|boot)(?=[/ ])", rf"{root}/\1", text)
    return subprocess.run(["/bin/sh", "-c", text], capture_output=True, text=True, check=True).stdout.strip()


def test_what_kdump_has_made_is_no_reason_for_a_reboot(tmp_path: Path) -> None:
    """On RHEL it makes the initramfs of its own kernel anew while it boots."""
    (tmp_path / "boot").mkdir()
    kdump, own = (tmp_path / f"boot/initramfs-5.14.0-503.el9.x86_64{kind}.img" for kind in ("kdump", ""))
    kdump.touch()
    started = int(kdump.stat().st_ctime) - 5
    assert changed_since(tmp_path, started) == "booted"
    own.touch()
    assert changed_since(tmp_path, started) == str(own)


def test_what_this_boot_began_with_is_no_reason_for_another(tmp_path: Path) -> None:
    """A GPU that is gone, or held by another driver, would have the node rebooted by every run."""
    for folder in ("proc", "lib/modules/6.12.0", "usr/lib", "etc/modprobe.d", "boot/grub"):
        (tmp_path / folder).mkdir(parents=True)
    module, nouveau = tmp_path / "lib/modules/6.12.0/nvidia-current.ko.xz", tmp_path / "etc/modprobe.d/nouveau.conf"
    module.touch()

    def said(started: int) -> dict[str, str]:
        return {"stdout": changed_since(tmp_path, started)}

    gone = {"__nvidia_driver_modprobe": {"stderr": "modprobe: ERROR: could not insert 'nvidia': No such device"}}
    at = 0
    for later in (module, nouveau, tmp_path / "boot/initrd.img-6.12.0"):
        later.touch()
        at = int(later.stat().st_ctime)
        assert value("__nvidia_driver_reboot_helps", **gone, __nvidia_driver_since_boot=said(at - 5)) is True
    now = {"__nvidia_driver_since_boot": said(at + 2)}
    assert now["__nvidia_driver_since_boot"] == {"stdout": "booted"}
    assert value("__nvidia_driver_reboot_helps", **gone, **now) is False
    facts = {"available": False, "platform": "linux", "message": "no", "gpus": [], "driver_version": None}
    for reason in ("driver_not_loaded", "library_mismatch"):
        told = told_by_the_check(facts={"nvidia_smi": {**facts, "reason": reason}}, **gone, **now)
        assert "lspci -k -d 10de:" in told and told.endswith("so this role does not reboot for it again.")
    # Check mode installs nothing that a boot would find, and announces the boot that another branch needs.
    announced = {"ansible_check_mode": True, "__nvidia_driver_installed": {"skipped": True}, **now}
    assert value("__nvidia_driver_reboot_helps", facts=smi(None, "570.195.03"), **announced) is True
    # After the role's own boot, of which the script knew nothing yet.
    booted: dict[str, Any] = {"__nvidia_driver_since_boot": {"stdout": "/x/nvidia.ko"}}
    booted |= {name: {"changed": True} for name in ("__nvidia_driver_installed", "__nvidia_driver_rebooted")}
    told = told_by_the_check(facts={"nvidia_smi": {**facts, "reason": "driver_not_loaded"}}, **gone, **booted)
    assert told.endswith("so this role does not reboot for it again.")


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
    assert sorted(value("__nvidia_driver_locks_of_others", **given)) == [
        "cuda-drivers-0:570.195.03-1.el10.*",
        "nvidia-driver-3:570.195.03-1.el10.*",
    ]
    assert value("__nvidia_driver_branch_is_new", **given) is False
    assert value("__nvidia_driver_branch_is_new", nvidia_driver_branch="590", **given) is True
    assert value("__nvidia_driver_branch_is_other", **given) is True
    given["__nvidia_driver_locks"] = {"stdout_lines": LOCKS.replace("570.195.03", "580.95.05").splitlines()}
    assert value("__nvidia_driver_branch_is_other", **given) is False
    # By `dnf install` alone, and locked by nobody.
    given["__nvidia_driver_locks"] = {"stdout_lines": []}
    for there, other in (("590.44.01", True), ("580.95.05", False)):
        host = role_helper.host(packages=(f"installed nvidia-open={there}-1.el10",))
        assert value("__nvidia_driver_branch_is_other", **given, _common_host=host) is other
        to_come = {"ansible_check_mode": True, "_common_host": host, "nvidia_driver_managed": True}
        assert value("__nvidia_driver_to_come", **given, **to_come) is other


@pytest.mark.parametrize("platform", ["RedHat: RedHat 9.4", "RedHat: RedHat 10.0"])
def test_a_driver_that_is_to_come_is_not_verified_by_check_mode(platform: str) -> None:
    """Its repository is there, and it is not: dnf is asked for no packages before the branch is chosen."""
    given = {"platform": platform, "ansible_check_mode": True, "nvidia_driver_managed": True}
    nothing = {"__nvidia_driver_stream_file": {"failed": False}, "__nvidia_driver_locks": {"stdout_lines": []}}
    assert value("__nvidia_driver_to_come", **given, **nothing) is True


def test_check_mode_tells_what_dnf_would_do_for_another_branch(tmp_path: Path) -> None:
    install = role_helper.tasks_of("nvidia_driver/tasks/install-dnf.yml")
    (sync,) = [task for task in install if "distro-sync" in str(task.get("ansible.builtin.command"))]
    include = [
        {"ansible.builtin.include_role": {
            "name": "gpufarm.core.nvidia_driver", "tasks_from": f"branch-{by}.yml", "rolespec_validate": False,
        }} for by in ("stream", "lock")
    ]  # fmt: skip
    other = {
        "__nvidia_driver_stream_now": "570-open", "__nvidia_driver_stream": "580-open",
        "__nvidia_driver_locks_of_others": ["nvidia-driver-3:570.195.03-1.el10.*"], "nvidia_driver_branch": "580",
        "__nvidia_driver_branch_is_new": True, "__nvidia_driver_branch_is_other": True,
    }  # fmt: skip
    play = {"hosts": "localhost", "gather_facts": False, "vars": LOCAL, "tasks": [*include, sync]}
    (tmp_path / "play.yml").write_text(json.dumps([play]), encoding="utf-8")
    ran = run_playbook(tmp_path, "localhost,", str(tmp_path / "play.yml"), "--check", "-e", json.dumps(other))
    assert ran.returncode == 0 and re.search(r"changed=5 ", ran.stdout), ran.stdout + ran.stderr


@pytest.mark.parametrize(
    ("platform", "given", "argv"),
    [
        ("RedHat: Rocky 9.4", {"__nvidia_driver_stream_now": "580-open"},
         "dnf --assumeyes module reset nvidia-driver"),
        ("RedHat: Rocky 9.4", {"__nvidia_driver_stream_file": {}}, ""),
        ("RedHat: RedHat 10.0", {"__nvidia_driver_locks": {"stdout_lines": LOCKS.splitlines()}},
         "dnf --assumeyes versionlock delete nvidia-open-3:580.95.05-1.el10.* "
         "kmod-nvidia-open-dkms-3:580.95.05-1.el10.* nvidia-driver-3:570.195.03-1.el10.* "
         "cuda-drivers-0:570.195.03-1.el10.*"),
        ("RedHat: RedHat 10.0", {"__nvidia_driver_locks": {"rc": 1}}, ""),
    ],
)  # fmt: skip
def test_the_choice_of_a_branch_goes_with_the_driver(platform: str, given: dict[str, Any], argv: str) -> None:
    """Or the machine would have none but this branch when somebody installs a driver again."""
    by = value("by", platform=platform, by=trust_as_template("{{ _common_platform.driver.branch_by }}"))
    absent = next(
        task for task in tasks_of("absent.yml") if task["name"] == "Have no branch of the driver chosen for dnf"
    )
    path = absent["ansible.builtin.include_tasks"].replace("{{ _common_platform.driver.branch_by }}", by)
    removal = yaml.safe_load((ROLE / "tasks" / path).read_text(encoding="utf-8"))[-1]
    wanted = trust_as_template("{{ " + removal["when"] + " }}")
    assert value("wanted", platform=platform, wanted=wanted, **given) is bool(argv)
    command = removal["ansible.builtin.command"]
    words = command.get("cmd") or value("argv", platform=platform, argv=trust_as_template(command["argv"]), **given)
    assert not argv or (words if isinstance(words, str) else " ".join(words)) == argv


@pytest.mark.parametrize(
    ("version", "stream", "packages", "more", "exchanged"),
    [
        # What NVIDIA's guide installs for computing alone: the package that is asked for would bring the newest of all.
        ("9.4", "580-open", ("nvidia-driver-cuda=580.65.06", "nvidia-driver-cuda-libs=580.65.06"), {}, True),
        ("9.4", "580-open", ("cuda-drivers=580.65.06", "nvidia-driver-cuda=580.65.06"), {}, True),
        ("9.4", "580-open", ("nvidia-open=580.65.06", "nvidia-driver-cuda=580.65.06"), {}, False),
        ("10.0", "", ("nvidia-driver-cuda=570.195.03",), {}, True),
        ("10.0", "", ("nvidia-open=580.95.05", "nvidia-driver=580.95.05", "nvidia-driver-assistant=0.22"), {}, False),
        # Of packages of their own nobody but dnf knows by which of their names it has them.
        ("10.0", "", ("nvidia-driver-cuda=580.95.05",), {"nvidia_driver_packages": ["@nvidia"]}, False),
        ("10.0", "", ("nvidia-driver-cuda=580.95.05",),
         {"nvidia_driver_packages": ["nvidia-driver-cuda-580.105.08"], "__nvidia_driver_to_dnf": {"results": [
             "Installed: nvidia-driver-cuda-3:580.105.08-1.el10.x86_64",
             "Removed: nvidia-driver-cuda-3:580.95.05-1.el10.x86_64"]}}, True),
        ("10.0", "", ("nvidia-driver-cuda=580.95.05",),
         {"nvidia_driver_packages": ["cuda-drivers"], "__nvidia_driver_to_dnf": {"results": [
             "Installed: cuda-drivers-580.95.05-1.el10.noarch"]}}, True),
        ("10.0", "", ("nvidia-driver-cuda=580.95.05",),
         {"nvidia_driver_packages": ["@nvidia", "tuned"], "__nvidia_driver_to_dnf": {"results": [
             "Installed: tuned-2.24.0-1.el10.noarch", "Installed: nvidia-container-toolkit-1.18.2-1.x86_64",
             "Installed: libnvidia-container1-1.18.2-1.x86_64", "Removed: nvidia-xconfig-3:580.95.05-1.el10.x86_64"]}},
         False),
        ("10.0", "", ("nvidia-driver-cuda=580.95.05",),
         {"nvidia_driver_packages": ["gone"], "__nvidia_driver_to_dnf": {"failures": ["No package gone available."]}},
         False),
    ],
)  # fmt: skip
def test_a_driver_of_dnf_is_exchanged_where_a_package_of_it_comes(
    version: str, stream: str, packages: tuple[str, ...], more: dict[str, Any], exchanged: bool
) -> None:
    (task,) = [
        task for task in role_helper.tasks_of("nvidia_driver/tasks/install-dnf.yml")
        if task["name"] == "Have no work where the driver is exchanged"
    ]  # fmt: skip
    # It is asked as it is told to install, and before.
    begun, _failed = role_helper.begun(tasks_of("install-dnf.yml"))
    assert begun.index("Ask dnf what of these packages would come") < begun.index(task["name"])
    tasks = {task["name"]: task for task in role_helper.tasks_of("nvidia_driver/tasks/install-dnf.yml")}
    asks = tasks["Ask dnf what of these packages would come"]
    assert asks["ansible.builtin.dnf"] == tasks["Have the driver"]["ansible.builtin.dnf"]
    assert asks["check_mode"] is True and asks["register"] == "__nvidia_driver_to_dnf"
    file = {"content": base64.b64encode(f"stream={stream}\n".encode()).decode()}
    found = value(
        "due", due=trust_as_template("{{ " + task["when"] + " }}"), platform=f"RedHat: RedHat {version}",
        _common_host=role_helper.host(packages=tuple(f"installed {package}-1.el9" for package in packages)),
        __nvidia_driver_stream_file=file, **more,
    )  # fmt: skip
    assert found is exchanged


def test_a_driver_of_another_branch_is_brought_along_by_dnf() -> None:
    """By its own packages, too, where the one that asks for all of them is not there."""
    given = {"platform": "RedHat: RedHat 10.0", "_common_host": role_helper.host()}
    for package, other in (("nvidia-driver-cuda=570.195.03", True), ("nvidia-driver=580.95.05", False)):
        given["_common_host"] = role_helper.host(packages=(f"installed {package}-1.el10",))
        assert value("__nvidia_driver_branch_is_other", **given) is other


def test_the_stream_that_is_wanted_stays_enabled() -> None:
    """What is there of another branch is no reason to reset it, after which it would not be enabled again."""
    given = {
        "platform": "RedHat: RedHat 9.4",
        "_common_host": role_helper.host(packages=("installed nvidia-open=570.195.03-1.el9",)),
    }
    reset, enable = (trust_as_template("{{ " + task["when"] + " }}") for task in tasks_of("branch-stream.yml"))
    for stream, due in (("580-open", (False, False)), ("570-open", (True, True)), ("", (False, True))):
        file = {"content": base64.b64encode(f"stream={stream}\n".encode()).decode()}
        asked = {**given, "__nvidia_driver_stream_file": file}
        assert (value("due", due=reset, **asked), value("due", due=enable, **asked)) == due


@pytest.mark.parametrize(("kind", "more", "is_new"), [
    ("open", "", False),
    ("proprietary", "", True),
    ("proprietary", "cuda-drivers-0:570.195.03-1.el10.*", True),
    ("proprietary", "cuda-drivers-0:580.95.05-1.el10.*", False),
])  # fmt: skip
def test_a_proprietary_driver_is_locked_when_its_own_package_is(kind: str, more: str, is_new: bool) -> None:
    """An older role has locked what has nvidia in its name."""
    locks = {"stdout_lines": ["nvidia-driver-3:580.95.05-1.el10.*", "nvidia-kmod-common-3:580.95.05-1.el10.*", more]}
    found = value(
        "__nvidia_driver_branch_is_new", platform="RedHat: RedHat 10.0", nvidia_driver_kernel_modules=kind,
        __nvidia_driver_locks=locks,
    )  # fmt: skip
    assert found is is_new


@pytest.mark.parametrize(
    ("branch", "step"),
    [
        ("580", "run `apt-get install nvidia-driver-pinning-580` on this host and mend what it names"),
        ("1000", "bring that repository up to date, or set nvidia_repository_url to one that has the branch"),
        ("575", "set nvidia_driver_branch to one of them"),
    ],
)
def test_an_older_branch_is_advised_only_where_the_branch_cannot_come(branch: str, step: str) -> None:
    # NVIDIA's repository has one for each version, too.
    lines = [f"nvidia-driver-pinning-{kept}" for kept in ("580", "570", "580.95.05", "595", "570.211.01", "580.126.20")]
    given = {"nvidia_driver_branch": branch, "__nvidia_driver_branches": {"stdout_lines": lines}}
    assert value("__nvidia_driver_branches_found", **given) == [570, 580, 595]
    assert value("__nvidia_driver_branch_next_step", **given) == step
    of_branch = ["580.126.20", "580.95.05"] if branch == "580" else []
    assert value("__nvidia_driver_versions_found", **given) == of_branch


@pytest.mark.parametrize(
    ("version", "step"),
    [
        ("580.95.05", "run `apt-get install nvidia-driver-pinning-580.95.05` on this host and mend what it names"),
        ("580.1.1", "set nvidia_driver_version to one of them, or bring that repository up to date"),
    ],
)
def test_a_version_that_is_not_there_is_told_with_those_that_are(version: str, step: str) -> None:
    lines = ["nvidia-driver-pinning-580", "nvidia-driver-pinning-580.95.05"]
    given = {"nvidia_driver_version": version, "__nvidia_driver_branches": {"stdout_lines": lines}}
    assert value("__nvidia_driver_branch_next_step", **given) == step


STREAMS = """\
nvidia-cuda
Name             Stream           Profiles                 Summary
nvidia-driver    latest-dkms      default [d], fm, ks      Nvidia driver for latest-dkms branch
nvidia-driver    570-open         default [d], fm, ks      Nvidia driver for 570-open branch
nvidia-driver    580-dkms [d]     default [d], fm, ks      Nvidia driver for 580-dkms branch
nvidia-driver    580-open [e]     default [d], fm, ks      Nvidia driver for 580-open branch
"""
VERSIONS = """\
Installed Packages
nvidia-open.noarch    3:570.195.03-1.el10    @nvidia-cuda
Available Packages
nvidia-open.noarch    3:580.95.05-1.el10     nvidia-cuda
nvidia-open.noarch    3:580.126.20-1.el10    nvidia-cuda
"""


def test_dnf_brings_the_driver_to_the_branch_and_nothing_of_the_container_toolkit() -> None:
    """Which others keep at their version, and whose exchange ends what runs in containers."""
    tasks = {task["name"]: task for task in role_helper.tasks_of("nvidia_driver/tasks/install-dnf.yml")}
    argv = tasks["Bring the installed packages to the driver branch"]["ansible.builtin.command"]["cmd"].split()
    command = argv.index("distro-sync")
    options, wanted = argv[:command], argv[command + 1 :]
    excluded = [option.removeprefix("--exclude=") for option in options if option.startswith("--exclude=")]
    assert options[:2] == ["dnf", "--assumeyes"] and len(options) == 2 + len(excluded)
    assert wanted == ["*nvidia*", "cuda-drivers*"]
    drivers = "nvidia-driver nvidia-open kmod-nvidia-open-dkms libnvidia-ml libnvidia-cfg nvidia-fabricmanager"
    toolkits = "nvidia-container-toolkit nvidia-container-toolkit-base libnvidia-container1 libnvidia-container-tools"
    for names, stays in ((drivers, False), (toolkits, True)):
        for name in names.split():
            assert any(fnmatch.fnmatch(name, pattern) for pattern in excluded) is stays, name


@pytest.mark.parametrize(
    ("platform", "said", "branch", "told"),
    [
        ("RedHat: Rocky 9.4", STREAMS, "580", ""),
        ("RedHat: Rocky 9.4", STREAMS, "575",
         "found in the repository for this distribution: 570-open, 580-dkms, 580-open. Expected: 575-open among them. "
         "Next step: set nvidia_driver_branch to one of them, or bring that repository up to date."),
        ("RedHat: RedHat 10.0", VERSIONS, "570", ""),
        ("RedHat: RedHat 10.0", VERSIONS, "590",
         "found in the repository for this distribution: 570, 580. Expected: 590 among them. Next step: "),
        ("RedHat: RedHat 10.0", "", "580",
         "found in the repository for this distribution: no branch at all. Expected: 580 among them. Next "),
    ],
)  # fmt: skip
def test_a_branch_that_dnf_does_not_find_is_told_with_those_that_it_does(
    platform: str, said: str, branch: str, told: str
) -> None:
    given = {"platform": platform, "nvidia_driver_branch": branch, "__nvidia_driver_branches": {"stdout": said}}
    found = value("__nvidia_driver_branch_missing", **given)
    assert found.startswith(told) and bool(found) is bool(told)


@pytest.mark.parametrize("by", ["stream", "lock"])
def test_dnf_is_asked_for_the_branch_before_anything_changes(by: str) -> None:
    assert tasks_of(f"branch_found-{by}.yml")[-1]["name"] == "Find the driver branch"
    begun, _failed = role_helper.begun(tasks_of("install-dnf.yml"))
    wanted = ["Find the driver branch", "Have no work where the driver is exchanged", "Choose the driver branch"]
    assert [name for name in begun if name in wanted] == wanted


def test_without_any_branch_the_repository_is_what_is_wrong() -> None:
    step = value("__nvidia_driver_branch_next_step", __nvidia_driver_branches={"stdout_lines": []})
    assert step.startswith("bring that repository up to date")


def smi(reason: str | None, version: str | None = None) -> dict[str, Any]:
    driver = {"driver_version": version, "kernel_modules": "open" if version else None}
    return {"nvidia_smi": {"reason": reason, "available": reason is None, **driver}}


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


NVSWITCH = {"address": "0000:05:00.0", "vendor": "10de", "device": "22a3", "class": "068000", "nvswitch_bridge": False}
BRIDGE = {"address": "0000:19:00.0", "vendor": "15b3", "device": "1021", "class": "020700", "nvswitch_bridge": True}
UNIT = "nvidia-fabricmanager.service"
GPU = {**NVSWITCH, "device": "2330", "class": "030200"}
CARD = {**BRIDGE, "nvswitch_bridge": False}
NFORCE = {**NVSWITCH, "device": "03ef"}
DRIVERS = {
    "Debian: Debian 13.1": "nvidia-driver-cuda",
    "Debian: Ubuntu 24.04": "nvidia-open",
    "RedHat: RedHat 9.4": "nvidia-open",
    "RedHat: Rocky 10.1": "nvidia-open",
}


def fabric_value(name: str, *devices: dict[str, Any], packages: tuple[str, ...] = (), **given: Any) -> Any:
    return value(name, _common_host=role_helper.host(packages=packages, pci_devices=list(devices)), **given)


@pytest.mark.parametrize(
    ("devices", "found"),
    [
        ([], False),
        ([GPU, CARD, NFORCE], False),
        ([GPU, NVSWITCH], True),
        ([GPU, {**NVSWITCH, "device": "1af1"}], True),
        ([GPU, BRIDGE], True),
    ],
)
def test_nvswitches_are_found_on_the_bus(devices: list[dict[str, Any]], found: bool) -> None:
    assert fabric_value("__nvidia_driver_has_fabric", *devices) is found
    assert fabric_value("__nvidia_driver_has_fabric", *devices, _common_is_wsl=True) is False
    assert ("fabric" in fabric_value("__nvidia_driver_facts", *devices)) is found
    assert bool(fabric_value("__nvidia_driver_fabric_wanted", *devices)) is found
    repository = fabric_value("__nvidia_driver_repository", *devices)
    assert ("nvidia-fabricmanager=580.*" in repository["packages"]) is found


@pytest.mark.parametrize(
    ("platform", "branch", "package"),
    [
        ("Debian: Debian 12.11", "570", "nvidia-fabricmanager-570"),
        ("Debian: Debian 13.1", "580", "nvidia-fabricmanager"),
        ("Debian: Ubuntu 24.04", "575", "nvidia-fabricmanager-575"),
        ("Debian: Ubuntu 22.04", "595", "nvidia-fabricmanager"),
        ("RedHat: RedHat 9.4", "570", "nvidia-fabric-manager"),
        ("RedHat: Rocky 10.1", "580", "nvidia-fabricmanager"),
    ],
)
def test_the_name_of_fabric_managers_package(platform: str, branch: str, package: str) -> None:
    given = {"platform": platform, "nvidia_driver_branch": branch}
    assert fabric_value("__nvidia_driver_fabric_package", NVSWITCH, **given) == package
    own = {**given, "nvidia_driver_fabric_manager_package": "mine"}
    assert fabric_value("__nvidia_driver_fabric_wanted", NVSWITCH, **own) == [f"mine={branch}.*"]


@pytest.mark.parametrize("platform", list(DRIVERS))
@pytest.mark.parametrize(
    ("version", "wanted"),
    [
        ("580.95.05-1", "580.95.05-*"),
        ("580.95.05-1.el9", "580.95.05-*"),
        ("3:580.126.20-0ubuntu0.24.04.1", "580.126.20-*"),
        # It is exchanged, and both come in their newest versions.
        ("570.195.03-1", "580.*"),
    ],
)
def test_fabric_manager_has_exactly_the_version_of_the_driver_that_stays(
    platform: str, version: str, wanted: str
) -> None:
    there = (f"installed {DRIVERS[platform]}={version}", "installed nvidia-fabricmanager=580.159.04-1")
    found = fabric_value("__nvidia_driver_fabric_wanted", NVSWITCH, platform=platform, packages=there)
    assert found == [f"nvidia-fabricmanager={wanted}"]


def test_packages_of_ones_own_tell_the_version_by_the_first() -> None:
    there = ("installed nvidia-headless-580-server=580.126.20-0ubuntu3", "installed nvidia-driver-cuda=580.95.05-1")
    own = {"nvidia_driver_packages": ["nvidia-headless-580-server=580.*"]}
    own["nvidia_driver_fabric_manager_package"] = "nvidia-fabricmanager-580"
    found = fabric_value("__nvidia_driver_fabric_wanted", NVSWITCH, packages=there, **own)
    assert found == ["nvidia-fabricmanager-580=580.126.20-*"]


def test_behind_network_cards_it_needs_the_subnet_manager() -> None:
    assert fabric_value("__nvidia_driver_fabric_wanted", BRIDGE) == [
        "nvidia-fabricmanager=580.*", "nvlsm", "infiniband-diags",
    ]  # fmt: skip


def test_what_is_exchanged_is_named() -> None:
    there = ("installed nvidia-driver-cuda=580.95.05-1",)
    wanted = "nvidia-fabricmanager=580.95.05-*"
    for missing, told in (
        ([wanted], "Fabric Manager 580.95.05"),
        ([wanted, "nvidia-kernel-open-dkms=580.*"], "the driver of branch 580"),
    ):
        given = {"packages": there, "_common_repository_missing": missing}
        assert fabric_value("__nvidia_driver_exchanged", NVSWITCH, **given) == told
    new = {"_common_repository_missing": ["nvidia-fabricmanager=580.*"]}
    assert fabric_value("__nvidia_driver_exchanged", NVSWITCH, **new) == "the driver of branch 580"


def joined(state: str | None = "Completed", status: str | None = "Success") -> dict[str, Any]:
    return {"index": 3, "fabric_state": state, "fabric_status": status}


@pytest.mark.parametrize(
    ("version", "unit", "gpus", "broken"),
    [
        ("580.95.05", ("enabled", "active"), [joined()], False),
        ("580.95.05", ("enabled", "active"), [joined(), joined("In Progress", None)], True),
        ("580.95.05", ("enabled", "active"), [joined(), joined("Not Started", None)], True),
        ("580.95.05", ("enabled", "active"), [joined("Completed", "Insufficient Resources")], True),
        ("580.159.04", ("enabled", "active"), [joined()], True),
        ("580.95.05", ("enabled", "failed"), [joined()], True),
        # An A100 tells no state; it may not run here, as outside of a virtual machine.
        ("580.95.05", ("enabled", "active"), [joined(None, None)], False),
        ("580.95.05", ("disabled", "inactive"), [joined(None, None)], True),
        ("", ("", ""), [joined(None, None)], True),
        ("", ("", ""), [joined()], False),
    ],
)
def test_a_fabric_that_is_not_as_it_should_be(
    version: str, unit: tuple[str, str], gpus: list[dict[str, Any]], broken: bool
) -> None:
    lines = [f"installed nvidia-fabricmanager={version}-1"] if version else []
    given: dict[str, Any] = {
        "__nvidia_driver_beside": {
            "packages": lines,
            "units": {"nvidia-fabricmanager.service": {"enabled": unit[0], "active": unit[1]}},
        },
        "facts": {"nvidia_smi": {"available": True, "driver_version": "580.95.05", "gpus": gpus}},
    }
    assert fabric_value("__nvidia_driver_fabric_broken", NVSWITCH, **given) is broken
    assert fabric_value("__nvidia_driver_fabric_broken", GPU, **given) is False
    given["facts"]["nvidia_smi"]["available"] = False
    assert fabric_value("__nvidia_driver_fabric_broken", NVSWITCH, **given) is False


@pytest.mark.parametrize(
    ("devices", "given", "modules"),
    [
        ([GPU, NVSWITCH, CARD], {}, []),
        ([GPU, BRIDGE], {}, ["ib_umad"]),
        # Open modules share memory by dma-buf.
        ([GPU, CARD], {"nvidia_driver_gpudirect_rdma": "yes"}, []),
        ([GPU, CARD], {"nvidia_driver_gpudirect_rdma": True, "nvidia_driver_kernel_modules": "proprietary"},
         ["nvidia-peermem"]),
        ([GPU, CARD], {"nvidia_driver_gpudirect_rdma": "no", "nvidia_driver_kernel_modules": "proprietary"}, []),
        ([GPU, BRIDGE], {"nvidia_driver_managed": False}, []),
    ],
)  # fmt: skip
def test_kernel_modules_beside_the_drivers(
    devices: list[dict[str, Any]], given: dict[str, Any], modules: list[str]
) -> None:
    assert fabric_value("__nvidia_driver_modules", *devices, **given) == modules
    assert fabric_value("__nvidia_driver_modules_missing", *devices, **given) == modules
    # As the kernel writes them.
    loaded = role_helper.host("/sys/module/ib_umad", "/sys/module/nvidia_peermem", pci_devices=devices)
    assert value("__nvidia_driver_modules_missing", _common_host=loaded, **given) == []
    later = {"__nvidia_driver_beside": loaded, **given}
    assert fabric_value("__nvidia_driver_modules_missing", *devices, **later) == []


def told_by_the_check(*devices: dict[str, Any], **given: Any) -> str:
    tasks = DataLoader().load_from_file(str(ROLE / "tasks/check.yml"), trusted_as_template=True)
    (variables,) = [task["vars"] for task in tasks if "vars" in task]
    facts = {
        "available": True,
        "platform": "linux",
        "driver_version": "580.95.05",
        "kernel_modules": given.get("nvidia_driver_kernel_modules", "open"),
        "gpus": [joined("In Progress", None)],
    }
    given = {"facts": {"nvidia_smi": facts}, "__nvidia_driver_fabric_said": {}, **variables, **given}
    return str(fabric_value("__nvidia_driver_wrong", *devices, **given))


def test_what_is_told_of_fabric_manager() -> None:
    none = {"__nvidia_driver_beside": role_helper.host(units={UNIT: {"enabled": "", "active": ""}})}
    assert told_by_the_check(NVSWITCH, **none) == (
        "no package of Fabric Manager is installed and its unit is not there; GPU 3 has fabric state In Progress with "
        "status unknown, and CUDA ends there with error 802 (system not yet initialized). Expected: Fabric Manager "
        "580.95.05, the driver's own version, active, and every GPU with fabric state Completed and status Success. "
        "Next step: run gpufarm.core.nvidia_driver on this host."
    )
    own = told_by_the_check(NVSWITCH, nvidia_driver_managed=False, **none)
    assert own.endswith("install that version and run `systemctl enable --now nvidia-fabricmanager`.")
    assert told_by_the_check(GPU, **none) == ""


def test_what_is_told_of_kernel_modules() -> None:
    host = role_helper.host(units={UNIT: {"enabled": "enabled", "active": "failed"}})
    told = told_by_the_check(BRIDGE, __nvidia_driver_beside=host)
    assert told == (
        "of ib_umad the kernel has not loaded ib_umad. Expected: all of them; Fabric Manager reaches the NVSwitches by "
        "ib_umad. Next step: run gpufarm.core.nvidia_driver on this host."
    )
    said = "modprobe: ERROR: could not insert 'nvidia_peermem': Invalid argument"
    told = told_by_the_check(
        CARD, __nvidia_driver_beside=host, __nvidia_driver_modules_loaded={"stderr": said},
        nvidia_driver_gpudirect_rdma=True, nvidia_driver_kernel_modules="proprietary",
    )  # fmt: skip
    assert f'; modprobe says "{said}". Expected: all of them; nvidia-peermem, which' in told
    assert told.endswith("mend what modprobe names, or set `nvidia_driver_gpudirect_rdma: false`.")


@pytest.mark.parametrize(
    ("platform", "key"),
    [
        ("Debian: Debian 13.1", "/var/lib/dkms/mok.pub"),
        ("Debian: Ubuntu 24.04", "/var/lib/shim-signed/mok/MOK.der"),
    ],
)
def test_what_is_told_of_a_key_that_secure_boot_does_not_know(platform: str, key: str) -> None:
    smi = {"available": False, "platform": "linux", "reason": "driver_not_loaded", "message": "couldn't communicate"}
    said = "modprobe: ERROR: could not insert 'nvidia': Key was rejected by service"
    given: dict[str, Any] = {"platform": platform, "facts": {"nvidia_smi": smi}}
    assert told_by_the_check(GPU, **given, __nvidia_driver_modprobe={"stderr": said}) == (
        f'nvidia-smi says "couldn\'t communicate" (driver_not_loaded); modprobe says "{said}". Expected: a driver that '
        "lists at least one GPU. Next step: run `mokutil --sb-state`, then enrol the key that DKMS signs with "
        f"(`mokutil --import {key}`, confirmed at the console of the next boot) or switch Secure Boot off."
    )
    assert "mokutil" not in told_by_the_check(GPU, **given)


DKMS_MODULE = "/lib/modules/6.12.0/updates/dkms/nvidia.ko.xz"
DKMS_KEY = "DKMS module signing key"
SECURE_BOOT = "SecureBoot enabled"


@pytest.mark.parametrize(
    ("module", "said", "helps"),
    [
        (DKMS_MODULE, ("is not enrolled", DKMS_KEY, SECURE_BOOT), False),
        (DKMS_MODULE, ("is not enrolled", "", SECURE_BOOT), False),
        (DKMS_MODULE, ("is already enrolled", DKMS_KEY, SECURE_BOOT), True),
        ("/lib/modules/6.12.0/extra/nvidia.ko.xz", ("is not enrolled", DKMS_KEY, SECURE_BOOT), False),
        # Signed by the distribution, by a key of the site's, or nothing is known of it.
        ("/lib/modules/6.12.0/kernel/nvidia-580/nvidia.ko", ("is not enrolled", "", SECURE_BOOT), True),
        (DKMS_MODULE, ("is not enrolled", "Example Ltd modules", SECURE_BOOT), True),
        ("", ("is not enrolled", DKMS_KEY, SECURE_BOOT), True),
        (DKMS_MODULE, ("", DKMS_KEY, SECURE_BOOT), True),
        (DKMS_MODULE, ("is not enrolled", DKMS_KEY, f"{SECURE_BOOT}\nSecureBoot validation is disabled in shim"), True),
    ],
)
def test_no_reboot_into_a_module_whose_key_is_not_enrolled(
    tmp_path: Path, module: str, said: tuple[str, str, str], helps: bool
) -> None:
    """The one that is loaded has another key, so modprobe was not asked, and the next boot would have no driver."""
    (task,) = (task for task in tasks_of("load.yml") if task.get("register") == "__nvidia_driver_key_asked")
    assert "__nvidia_driver_reboot_needed" not in str(task["when"])
    answer, signer, state = said
    key = str(tmp_path / "mok.pub")
    Path(key).write_bytes(b"\x30\x82\x0c" + DKMS_KEY.encode() + b"\x30\x00")
    programs = {
        "modinfo": f"""case $* in
            "--field filename nvidia-current-open") [ -n "{module}" ] && echo "{module}" ;;
            "--field signer {module}") echo "{signer}" ;;
            *) exit 1 ;;
            esac""",
        "mokutil": f"""case $* in
            --sb-state) echo "{state}" ;;
            "--test-key {key}") [ -n "{answer}" ] && echo "{key} {answer}" ;;
            *) exit 1 ;;
            esac""",
        "grep": 'exec /bin/grep "$@"',
    }
    for name, script in programs.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{script}\n", encoding="ascii")
        (tmp_path / name).chmod(0o755)
    script = value("script", script=trust_as_template(task["ansible.builtin.shell"]), __nvidia_driver_mok=key)
    asked = subprocess.run(
        ["/bin/sh", "-c", script], env={"PATH": str(tmp_path)}, capture_output=True, text=True, check=False
    )
    given: dict[str, Any] = {task["register"]: {"stdout": asked.stdout}}
    assert value("__nvidia_driver_reboot_helps", **given) is helps
    facts = {"available": False, "platform": "linux", "message": "no", "gpus": [], "driver_version": None}
    told = told_by_the_check(facts={"nvidia_smi": {**facts, "reason": "library_mismatch"}}, **given)
    assert ("`mokutil --import /var/lib/dkms/mok.pub`" in told) is not helps
    assert ("reboot this host" in told) is helps


def test_what_dnf_is_asked_for() -> None:
    """As branch-stream.yml and branch-lock.yml leave it to fabric_manager-dnf.yml."""
    given: dict[str, Any] = {"platform": "RedHat: RedHat 9.4"}

    def missing(*packages: str) -> Any:
        given["_common_repository_packages_there"] = ["installed nvidia-open=580.95.05-1.el9", *packages]
        wanted = fabric_value("__nvidia_driver_fabric_wanted", NVSWITCH, **given)
        return fabric_value("__nvidia_driver_missing", NVSWITCH, common_repository={"packages": wanted}, **given)

    assert missing("installed nvidia-fabricmanager=580.95.05-1.el9") == []
    for other in ("nvidia-fabricmanager=580.82.07-1.el9", "nvidia-fabric-manager=570.195.03-1.el9"):
        assert missing(f"installed {other}") == ["nvidia-fabricmanager=580.95.05-*"]


@pytest.mark.parametrize(
    ("given", "refused"),
    [
        ({}, True),
        ({"nvidia_driver_managed": False}, False),
        ({"_common_is_wsl": True}, False),
        # Who takes a machine out of the farm takes nothing of it away that packages have not brought.
        ({"common_scope": "remove"}, False),
    ],
)
def test_a_driver_of_nvidias_installer_is_not_overwritten(given: dict[str, Any], refused: bool) -> None:
    known = {"__nvidia_repository_refusal": "", **given}
    found = value("__nvidia_driver_refusal", _common_host=role_helper.host("/usr/bin/nvidia-uninstall"), **known)
    assert found.startswith("the driver here came by an installer of its own") == refused
    assert ("Next step: run `nvidia-uninstall` on this host" in found) == refused
    assert value("__nvidia_driver_refusal", _common_host=on_the_bus(H100), **known) == ""


@pytest.mark.parametrize(
    ("devices", "given", "refused", "left_out"),
    [
        ([], {}, True, False),
        # What drives no display and computes nothing.
        ([NVSWITCH, NFORCE], {}, True, False),
        ([GPU], {}, False, False),
        ([], {"_common_is_wsl": True}, False, False),
        ([], {"_common_is_wsl": True, "nvidia_driver_without_gpu": "skip"}, False, False),
        ([], {"nvidia_driver_managed": False}, False, False),
        ([], {"common_scope": "remove"}, False, False),
        # Who collects packages for others need not be like them.
        ([], {"common_scope": "bundle"}, False, False),
        ([], {"nvidia_driver_without_gpu": "skip"}, False, True),
        ([GPU], {"nvidia_driver_without_gpu": "skip"}, False, False),
    ],
)
def test_a_host_without_a_gpu(
    devices: list[dict[str, Any]], given: dict[str, Any], refused: bool, left_out: bool
) -> None:
    known = {"__nvidia_repository_refusal": "", **given}
    found = fabric_value("__nvidia_driver_refusal", *devices, **known)
    assert found.startswith("no NVIDIA GPU is on the PCI bus (/sys/bus/pci/devices). Expected: ") is refused
    assert ("Next step: see that the card is seated" in found) is refused and bool(found) is refused
    assert fabric_value("__nvidia_driver_left_out", *devices, **known) is left_out


@pytest.mark.parametrize("connection", ["local", "ansible.builtin.local", "ssh", None])
def test_a_machine_that_runs_ansible_is_not_to_reboot(connection: str | None) -> None:
    """Ansible itself refuses it, but after the node was taken out of work."""
    known: dict[str, Any] = {"__nvidia_repository_refusal": "", "nvidia_driver_reboot": "yes"}
    if connection:
        known["ansible_connection"] = connection
    found = fabric_value("__nvidia_driver_refusal", GPU, **known)
    if connection in ("ssh", None):
        assert found == ""
        return
    assert found.startswith(
        "its connection is local, and nvidia_driver_reboot is true. Expected: another machine to run"
    )
    assert "Next step: run this from another machine, or set `nvidia_driver_reboot: false`" in found
    for more in ({"nvidia_driver_reboot": False}, {"nvidia_driver_managed": False}, {"common_scope": "remove"}):
        assert fabric_value("__nvidia_driver_refusal", GPU, **{**known, **more}) == ""


OTHER = ("installed nvidia-driver-580=580.95.05-0ubuntu1", "config-files nvidia-driver-cuda=580.95.05-1")
THERE = {"packages": ("installed nvidia-driver-cuda=580.95.05-1", "installed nvidia-kernel-open-dkms=580.95.05-1")}


@pytest.mark.parametrize(
    ("said", "modules", "given", "told"),
    [
        (b"\x06\0\0\0\x01", (), {}, ["Secure Boot is on"]),
        (b"\x06\0\0\0\0", (), {}, []),
        (None, ("nouveau",), {}, ["nouveau is loaded"]),
        (b"\x06\0\0\0\x01", ("nouveau",), {}, ["nouveau is loaded", "Secure Boot is on"]),
        # Of the distribution, by a key that the kernel knows; what replaces it may have another.
        (b"\x06\0\0\0\x01", ("nvidia",), {}, ["Secure Boot is on"]),
        (b"\x06\0\0\0\x01", ("nvidia", "nouveau"), {"nvidia_driver_packages": ["mine"]}, ["Secure Boot is on"]),
        (b"\x06\0\0\0\x01", ("nvidia",), {"nvidia_driver_branch": "590"}, ["Secure Boot is on"]),
        (b"\x06\0\0\0\0", ("nvidia", "nouveau"), {}, []),
        # Nothing is to come.
        (b"\x06\0\0\0\x01", ("nvidia",), THERE, []),
        (b"\x06\0\0\0\x01", ("nvidia",), {"nvidia_driver_packages": ["nvidia-driver-cuda=580.95.05-1"], **THERE}, []),
        (b"\x06\0\0\0\x01", ("nouveau",), {"nvidia_driver_managed": False}, []),
        (b"\x06\0\0\0\x01", ("nvidia",), {"nvidia_driver_managed": False, "_common_platform": {}}, []),
    ],
)
def test_what_stands_between_a_new_driver_and_its_gpus_is_told(
    said: bytes | None, modules: tuple[str, ...], given: dict[str, Any], told: list[str]
) -> None:
    host = role_helper.host(*[f"/sys/module/{name}" for name in modules], packages=given.get("packages", OTHER))
    if said is not None:
        checksum = hashlib.sha1(said).hexdigest()  # noqa: S324
        host["files"].append({"path": value("__nvidia_driver_secure_boot_path"), "checksum": checksum})
    found = value("__nvidia_driver_in_the_way", _common_host=host, **given)
    assert [text[: len(start)] for text, start in zip(found, told, strict=True)] == told
    for platform, key in (
        ("Debian: Ubuntu 24.04", "/var/lib/shim-signed/mok/MOK.der"),
        ("Debian: Debian 12.9", "dkms/mok.pub"),
    ):
        found = value("__nvidia_driver_in_the_way", _common_host=host, platform=platform, **given)
        assert not [text for text in found if "Secure Boot" in text and f"{key}`" not in text]


@pytest.mark.parametrize(
    ("enabled", "active", "modes", "told"),
    [
        ("static", "active", ["Disabled", "Enabled", "Disabled"], [0, 2]),
        # By a drop-in.
        ("static", "active", ["Enabled"], []),
        ("static", "active", [None], []),
        # It is started after the GPUs were asked.
        ("static", "inactive", ["Disabled"], []),
        ("disabled", "inactive", ["Disabled"], []),
        ("", "", ["Disabled"], []),
    ],
)
def test_a_persistence_daemon_that_keeps_no_gpu_initialised(
    enabled: str, active: str, modes: list[str | None], told: list[int]
) -> None:
    """Ubuntu's own packages start it with --no-persistence-mode."""
    units = {"nvidia-persistenced.service": {"enabled": enabled, "active": active}}
    gpus = [{"index": index, "persistence_mode": mode} for index, mode in enumerate(modes)]
    given = {"_common_host": role_helper.host(units=units), "facts": {"nvidia_smi": {"gpus": gpus}}}
    assert value("__nvidia_driver_not_kept", **given) == told
    if told:
        message = tasks_of("service.yml")[-1]["ansible.builtin.debug"]["msg"]
        found = value("message", message=trust_as_template(message), inventory_hostname="gpu1", **given)
        assert found.startswith(
            "gpu1: nvidia-persistenced runs, and persistence mode is Disabled on GPU 0, 2. Expected: "
        )
        assert "/etc/systemd/system/nvidia-persistenced.service.d/" in found


def test_all_of_the_role_but_its_end_is_left_out_there() -> None:
    tasks = yaml.safe_load((ROLE / "tasks/main.yml").read_text(encoding="utf-8"))
    outside = [task["name"] for task in tasks if task.get("when") != "not __nvidia_driver_left_out"]
    assert outside == [
        "Know the variables of NVIDIA's repository",
        "Check that the driver can be installed here",
        "Have the driver's packages",
        "Let a node work again that was taken out",
    ]  # fmt: skip
    (check,) = (task for task in yaml.safe_load((ROLE / "tasks/verify.yml").read_text()) if "Check" in task["name"])
    left_out = "{{ " + check["when"] + " }}"
    for reason, looked in (("not_installed", False), ("driver_not_loaded", True), (None, True)):
        given = {"__nvidia_driver_left_out": True, "asked": trust_as_template(left_out), "facts": smi(reason)}
        assert value("asked", **given) is looked


def on_the_bus(*gpus: str) -> dict[str, Any]:
    """By PCI ID; those of a server are no display controllers."""
    servers = (V100, A100, H100, B200, GH200)
    devices = [
        {"vendor": "10de", "class": "030200" if gpu in servers else "030000", "device": gpu, "nvswitch_bridge": False}
        for gpu in gpus
    ]
    # The HD audio of a card.
    devices += [{"vendor": "10de", "class": "040300", "device": "0fb0", "nvswitch_bridge": False}]
    return role_helper.host(pci_devices=devices)


GT_710, V100, GTX_1080, QUADRO_P400, T4, A100, H100, GH200, RTX_4090, B200, RTX_5090 = (
    "128b", "1db4", "1b80", "1cb3", "1eb8", "20b0", "2330", "2342", "2684", "2901", "2b85",
)  # fmt: skip


@pytest.mark.parametrize(
    ("gpus", "asked", "kind"),
    [
        ([], "auto", "open"),
        ([T4, A100], "auto", "open"),
        ([RTX_5090], "auto", "open"),
        ([V100], "auto", "proprietary"),
        ([GTX_1080, RTX_4090], "auto", "proprietary"),
        ([RTX_4090], "proprietary", "proprietary"),
        # A display's card beside those of a server.
        ([H100, QUADRO_P400], "auto", "open"),
        ([V100, RTX_5090], "auto", "proprietary"),
        # No kind drives both; the one that drives the newer.
        ([RTX_5090, GTX_1080], "auto", "open"),
    ],
)
def test_kernel_modules_go_by_the_gpus(gpus: list[str], asked: str, kind: str) -> None:
    given = {"_common_host": on_the_bus(*gpus), "nvidia_driver_kernel_modules": asked}
    assert value("__nvidia_driver_kind", **given) == kind
    packages = {"open": "nvidia-kernel-open-dkms=580.*", "proprietary": "nvidia-kernel-dkms=580.*"}
    assert packages[kind] in value("__nvidia_driver_wanted", **given)
    assert value("__nvidia_driver_misfit", **given) == ""


PROPRIETARY, OPEN = {"nvidia_driver_kernel_modules": "proprietary"}, {"nvidia_driver_kernel_modules": "open"}


def test_a_kernel_module_of_the_other_kind_is_no_driver_that_was_asked_for() -> None:
    """Libraries and module are of one version, so that nvidia-smi is content, and the next boot exchanges it."""

    def told(loaded: str | None, gpu: str, more: dict[str, Any]) -> str:
        facts = {"available": True, "reason": None, "platform": "linux", "driver_version": "580.95.05", "gpus": []}
        facts["kernel_modules"] = loaded
        card = {**GPU, "device": gpu}
        given = {"facts": {"nvidia_smi": facts}, "ansible_check_mode": False, **more}
        wrong = told_by_the_check(card, **given)
        for name in ("__nvidia_driver_kind_is_other", "__nvidia_driver_reboot_needed", "__nvidia_driver_load_due"):
            assert fabric_value(name, card, **given) is bool(wrong), name
        return wrong

    for gpu, wanted, more in (
        (H100, "open", {}), (V100, "proprietary", {}), (H100, "proprietary", PROPRIETARY), (H100, "open", OPEN),
    ):  # fmt: skip
        for loaded in ("open", "proprietary", None):
            wrong = told(loaded, gpu, more)
            assert bool(wrong) is (loaded not in (None, wanted))
            fits = "" if more else ", which fit the GPUs of this host"
            assert not wrong or wrong == (
                f"the {loaded} kernel modules of driver 580.95.05 are loaded. Expected: {wanted} ones{fits}. "
                "Next step: run gpufarm.core.nvidia_driver on this host, reboot it if that is done or set "
                f"`nvidia_driver_reboot` so that Ansible may; or set `nvidia_driver_kernel_modules: {loaded}`."
            )
            for other in (
                {"nvidia_driver_managed": False}, {"nvidia_driver_packages": ["mine"]}, {"_common_is_wsl": True},
            ):  # fmt: skip
                assert told(loaded, gpu, {**more, **other}) == ""
    since = {"__nvidia_driver_since_boot": {"stdout": "booted"}}
    wrong = told("proprietary", H100, since)
    assert "Next step: run `modinfo nvidia` on this host" in wrong and "does not reboot for it again; or" in wrong
    key = {"__nvidia_driver_key_asked": {"stdout": "/x is not enrolled"}}
    assert "mokutil --import" in told("proprietary", H100, key)


@pytest.mark.parametrize(
    ("gpus", "given", "told"),
    [
        ([GT_710], {}, "a GPU, 10de:128b, is older than Maxwell. Expected: branch 470 or an older one. Next step: "),
        ([V100], {"nvidia_driver_branch": "595"}, 'Next step: set `nvidia_driver_branch: "580"` for this host.'),
        (
            [B200],
            {"nvidia_driver_branch": "550"},
            "10de:2901, is of Blackwell or newer. Expected: branch 570 or a",
        ),
        (
            [V100],
            OPEN,
            "10de:1db4, is older than Turing. Expected: proprietary kernel modules. Next step: leave ",
        ),
        ([RTX_5090], PROPRIETARY, "10de:2b85, is of a kind that has open kernel modules alone. Expected: open kernel"),
        ([GH200], PROPRIETARY, "10de:2342, is of a kind that has open kernel modules alone. Expected: open kernel"),
    ],
)
def test_a_gpu_that_what_is_wanted_does_not_drive_is_named(gpus: list[str], given: dict[str, Any], told: str) -> None:
    known = {"__nvidia_repository_refusal": "", **given}
    assert told in value("__nvidia_driver_refusal", _common_host=on_the_bus(*gpus), **known)
    for other in ({"nvidia_driver_managed": False}, {"nvidia_driver_packages": ["mine"]}, {"common_scope": "remove"}):
        assert value("__nvidia_driver_refusal", _common_host=on_the_bus(*gpus), **{**known, **other}) == ""


@pytest.mark.parametrize(
    ("gpus", "given", "aside"),
    [
        ([H100, GT_710], {}, [GT_710]),
        ([H100, QUADRO_P400], {}, [QUADRO_P400]),
        ([H100, QUADRO_P400], {"nvidia_driver_branch": "595"}, [QUADRO_P400]),
        ([RTX_5090, GTX_1080], {}, [GTX_1080]),
        ([RTX_4090, T4], {}, []),
        ([GH200], {"nvidia_driver_branch": "550"}, []),
    ],
)
def test_what_the_driver_leaves_aside_is_told_and_refuses_nothing(
    gpus: list[str], given: dict[str, Any], aside: list[str]
) -> None:
    known = {"_common_host": on_the_bus(*gpus), "__nvidia_repository_refusal": "", **given}
    assert [card[0] for card in value("__nvidia_driver_undriven", **known)] == aside
    assert value("__nvidia_driver_refusal", **known) == ""


OWN = "nvidia-driver-580-open=580.126.09-0ubuntu0.24.04.1"


@pytest.mark.parametrize(
    ("packages", "given", "named"),
    [
        (["installed " + OWN, "installed libnvidia-compute-580=580.126.09-0ubuntu0.24.04.1"], {}, [OWN]),
        (["installed nvidia-headless-580-server=580.126.09-0ubuntu0.24.04.1"], {},
         ["nvidia-headless-580-server=580.126.09-0ubuntu0.24.04.1"]),
        # NVIDIA's, which have these names beneath those that are asked for.
        (["installed " + OWN, "installed nvidia-open=580.159.04-1ubuntu1"], {}, []),
        (["installed " + OWN, "installed cuda-drivers=580.159.04-1ubuntu1"], {}, []),
        (["installed nvidia-driver-580-open=580.159.04-1ubuntu1"], {}, []),
        # Another branch is asked for, and one that stays.
        (["installed nvidia-driver-535=535.288.01-0ubuntu0.24.04.1"], {}, []),
        (["config-files " + OWN], {}, []),
        (["installed " + OWN], {"nvidia_driver_packages": ["nvidia-driver-580-open"]}, []),
        (["installed " + OWN], {"nvidia_driver_managed": False}, []),
        (["installed " + OWN], {"platform": "Debian: Debian 13.1"}, []),
        (["installed " + OWN], {"platform": "Debian: Ubuntu 20.04"}, [OWN]),
    ],
)  # fmt: skip
def test_ubuntus_own_driver_is_named_that_makes_way(
    packages: list[str], given: dict[str, Any], named: list[str]
) -> None:
    known = {
        "platform": "Debian: Ubuntu 24.04", "_common_host": {**on_the_bus(H100), "packages": packages},
        "__nvidia_repository_refusal": "", "inventory_hostname": "gpu1", **given,
    }  # fmt: skip
    (task,) = [
        task for task in role_helper.tasks_of("nvidia_driver/tasks/preflight.yml")
        if task["name"] == "Say which driver makes way for NVIDIA's packages"
    ]  # fmt: skip
    due = value("due", due=trust_as_template("{{ " + task["when"] + " }}"), **known)
    assert due is bool(named)
    assert not due or value("__nvidia_driver_speaks", **known) is True
    told = value("said", said=trust_as_template(task["ansible.builtin.debug"]["msg"]), **known)
    for package in named:
        assert told.startswith(f"gpu1: found {package}, Ubuntu's own driver of branch 580, which NVIDIA's takes the")
        assert told.endswith(f"`nvidia_driver_packages: [{package.partition('=')[0]}]`.")


def test_one_version_of_a_branch() -> None:
    """As apt has it, of Fabric Manager too; a driver of another version is exchanged, as it is told."""
    given = {"nvidia_driver_version": "580.95.05", "_common_host": role_helper.host(pci_devices=[NVSWITCH])}
    driver = ["nvidia-driver-cuda=580.95.05-*", "nvidia-kernel-open-dkms=580.95.05-*"]
    assert value("__nvidia_driver_wanted", **given) == driver
    asked = value("__nvidia_driver_repository", **given)["packages"]
    assert asked == ["nvidia-driver-pinning-580.95.05", *driver, "nvidia-fabricmanager=580.95.05-*"]
    for there in ("580.159.04", "580.95.05", "580.95.051"):
        given["_common_repository_packages_there"] = [f"installed nvidia-driver-cuda={there}-1"]
        assert value("__nvidia_driver_fabric_wanted", **given) == ["nvidia-fabricmanager=580.95.05-*"]
        assert value("__nvidia_driver_version_there", **given) == (there if there == "580.95.05" else "")
    assert value("__nvidia_driver_exchanged", **given, __nvidia_driver_missing=driver) == "driver 580.95.05"
    for version, other in (("580.95.05", False), ("580.159.04", True)):
        assert value("__nvidia_driver_is_other", facts=smi(None, version), **given) is other
        assert value("__nvidia_driver_is_other", facts=smi(None, version)) is False


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({}, ""),
        ({"nvidia_driver_managed": False, "nvidia_driver_version": "570.172.08"}, ""),
        ({"_common_is_wsl": True, "nvidia_driver_version": "570.172.08"}, ""),
        (
            {"nvidia_driver_version": "570.172.08"},
            "nvidia_driver_version is 570.172.08, and nvidia_driver_branch 580. Expected: a version of that branch, "
            "such as 580.95.05. Next step: set both to what is wanted.",
        ),
        ({"nvidia_driver_version": "580.95.05-1"}, "nvidia_driver_version is 580.95.05-1, and"),
        ({"nvidia_driver_version": "5800.1"}, "nvidia_driver_version is 5800.1, and nvidia_driver_branch 580."),
        # YAML's number.
        ({"nvidia_driver_version": 580.9}, ""),
        (
            {"platform": "RedHat: Rocky 9.4", "nvidia_driver_version": "580.95.05"},
            "nvidia_driver_version is 580.95.05, and the packages of Rocky are dnf's. Expected: Debian or Ubuntu, for "
            "which alone this role keeps one version. Next step: leave it out, so that the branch is kept, and lock "
            "the version of what is installed by `dnf versionlock`.",
        ),
    ],
)  # fmt: skip
def test_a_version_that_cannot_be_kept(given: dict[str, Any], told: str) -> None:
    known = {"__nvidia_repository_refusal": "", **given}
    found = value("__nvidia_driver_refusal", _common_host=on_the_bus(H100), **known)
    assert found.startswith(told) and bool(found) is bool(told), found
    assert value("__nvidia_driver_refusal", _common_host=on_the_bus(H100), **known, common_scope="remove") == ""


@pytest.mark.parametrize(
    ("name", "failing"),
    [
        ("install-dnf.yml", "Choose the driver branch"),
        ("install-dnf.yml", "Bring the installed packages to the driver branch"),
        ("install-dnf.yml", "Have the driver"),
        ("branch-pinning.yml", "Have the driver"),
        ("fabric_manager-dnf.yml", "Have no Fabric Manager by another name"),
        ("fabric_manager-dnf.yml", "Have Fabric Manager of the driver's version"),
    ],
)
def test_a_node_works_again_whose_driver_was_not_exchanged(name: str, failing: str) -> None:
    begun, failed = role_helper.begun(tasks_of(name), failing)
    after = begun[begun.index(failing) + 1 :]
    assert failed and "Let the node work again" in after and after[-1].startswith("Require ")
    assert ("Have the choice of the driver branch as it was" in after) is (name == "install-dnf.yml")
    # One that is refused, or knows no such branch, has changed nothing.
    for asked in ("Find the driver branch", "Have no work where the driver is exchanged"):
        begun, failed = role_helper.begun(tasks_of("install-dnf.yml"), asked)
        assert failed and begun[-1] == asked


@pytest.mark.parametrize(
    ("platform", "kernel", "name", "failing", "expected"),
    [
        ("RedHat: Rocky 9.5", "5.14.0-503.el9.x86_64", "install-dnf.yml",
         "Have the headers of the running kernel, from which DKMS builds the module",
         "kernel-devel-5.14.0-503.el9.x86_64, kernel-headers, kernel-devel-matched-5.14.0-503.el9.x86_64"),
        ("Debian: Debian 13.1", "6.12.57+deb13-amd64", "branch-pinning.yml",
         "Ask apt for the headers from which DKMS builds the module",
         "linux-headers-6.12.57+deb13-amd64, linux-headers-amd64"),
    ],
)  # fmt: skip
def test_headers_that_no_repository_has_any_more(
    platform: str, kernel: str, name: str, failing: str, expected: str
) -> None:
    """It is known before the node is emptied. Those of a newer kernel that are there are not taken for them."""
    begun, failed = role_helper.begun(tasks_of(name), failing)
    after = begun[begun.index(failing) + 1 :]
    assert failed and after == ["Let the node work again", "Require the headers of the running kernel"]
    assert "Have no work where the driver is exchanged" not in begun
    tasks = {task["name"]: task for task in role_helper.tasks_of(f"nvidia_driver/tasks/{name}")}
    if name == "install-dnf.yml":
        assert tasks[failing]["ansible.builtin.dnf"]["allow_downgrade"] is True
    else:
        assert tasks[failing]["check_mode"] is True and tasks[failing]["changed_when"] is False
    told = value(
        "said", said=trust_as_template(tasks[after[-1]]["ansible.builtin.fail"]["msg"]),
        platform=platform, facts={"kernel": kernel}, inventory_hostname="gpu1",
        __nvidia_driver_failure="No package of them available.",
    )  # fmt: skip
    assert told == (
        "gpu1: the headers of the running kernel could not be installed (No package of them available.). "
        f"Expected: {expected}. Next step: boot the newest kernel first, because repositories need not keep what "
        "belongs to an older one; or set `nvidia_driver_kernel_headers: false` where the headers are there by other "
        "means."
    )


@pytest.mark.parametrize(
    ("kernel", "there", "matched"),
    [
        ("5.14.0-570.el9.x86_64", "", ["kernel-devel-matched-5.14.0-570.el9.x86_64"]),
        ("6.12.0-124.8.1.el10_1.x86_64", "", ["kernel-devel-matched-6.12.0-124.8.1.el10_1.x86_64"]),
        ("5.14.0-570.el9.aarch64+64k", "", ["kernel-64k-devel-matched-5.14.0-570.el9.aarch64"]),
        # DKMS is content with that of any kernel, and no repository need have the older one any more.
        ("5.14.0-570.el9.x86_64", "kernel-devel-matched=5.14.0-611.el9", []),
        ("5.14.0-570.el9.aarch64+64k", "kernel-devel-matched=5.14.0-570.el9",
         ["kernel-64k-devel-matched-5.14.0-570.el9.aarch64"]),
        ("5.14.0-570.el9.x86_64", "dkms=3.2.2-1.el9", []),
        # There is none.
        ("5.14.0-570.el9.x86_64+rt", "", []),
        ("5.15.0-300.163.18.el9uek.x86_64", "", []),
        ("6.1.1-1.el9.elrepo.x86_64", "", []),
    ],
)  # fmt: skip
def test_dkms_brings_no_newer_kernel(kernel: str, there: str, matched: list[str]) -> None:
    given = {
        "platform": "RedHat: OracleLinux 9.6", "facts": {"kernel": kernel},
        "_common_host": role_helper.host(packages=(f"installed {there}",) if there else ()),
    }  # fmt: skip
    headers = value("_common_family", **given)["headers"]
    assert value("__nvidia_driver_headers", **given) == headers + matched
    asked = value("__nvidia_repository_looks_at", **given)["packages"]
    for name in ("kernel-devel-matched", "kernel-64k-devel-matched", "dkms"):
        assert any(fnmatch.fnmatch(name, pattern) for pattern in asked)
    (install,) = (
        task for task in role_helper.tasks_of("nvidia_driver/tasks/install-dnf.yml")
        if task.get("ansible.builtin.dnf", {}).get("allow_downgrade")
    )  # fmt: skip
    assert install["ansible.builtin.dnf"]["name"] == "{{ __nvidia_driver_headers }}"


NEXT = "5.14.0-611.5.1.el9_7"


@pytest.mark.parametrize(
    ("default", "there", "repository", "did", "told"),
    [
        (f"/boot/vmlinuz-{NEXT}.x86_64", "", "kernel-devel", ["dnf", "dkms"], ""),
        (f"/boot/vmlinuz-{NEXT}.x86_64+rt", "", "kernel-rt-devel", ["dnf", "dkms"], ""),
        (f"/boot/vmlinuz-{NEXT}.x86_64", "nvidia", "kernel-devel", [], ""),
        (f"/boot/vmlinuz-{NEXT}.x86_64", "", "nothing", ["dnf", "dkms"], "has no headers"),
        ("/boot/vmlinuz-5.14.0-570.el9.x86_64", "", "kernel-devel", [], ""),
        ("/boot/vmlinuz-0-rescue-0123456789abcdef", "", "kernel-devel", [], ""),
        # Without a boot loader, as in a container.
        ("", "", "kernel-devel", [], ""),
    ],
)
def test_a_kernel_that_the_next_boot_takes_gets_its_module(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, default: str, there: str, repository: str, did: list[str],
    told: str,
) -> None:  # fmt: skip
    kernel = default.rpartition("vmlinuz-")[2]
    headers, module = tmp_path / "headers", tmp_path / "module"
    module.write_text(there, encoding="utf-8")
    doubles = {
        "grubby": f'[ "$*" = --default-kernel ] && [ -n "{default}" ] && echo {default}',
        "modinfo": f'[ "$*" = "-k {kernel} nvidia" ] && grep -q nvidia {module}',
        "dnf": f'echo dnf >>{tmp_path}/log; [ "$*" = "install {repository}-{NEXT}.x86_64" ] && touch {headers}',
        "dkms": f'echo dkms >>{tmp_path}/log; [ "$*" = "autoinstall -k {kernel}" ] || exit 2\n'
        f"[ -e {headers} ] || {{ echo {kernel} has no headers >&2; exit 21; }}\necho nvidia >{module}",
    }
    (tmp_path / "bin").mkdir()
    for name, text in doubles.items():
        (tmp_path / "bin" / name).write_text(f"#!/bin/sh\n{text}\n", encoding="utf-8")
        (tmp_path / "bin" / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:{os.environ['PATH']}")
    tasks = tasks_of("next_kernel.yml")
    for task in tasks[-1]["block"]:
        if "ansible.builtin.dnf" in task:
            package = task.pop("ansible.builtin.dnf")
            task["ansible.builtin.command"] = {"argv": ["dnf", "install", package["name"]]}
    roles = role_helper.variables("_common", "nvidia_driver")
    names = ("_common_kernel_package", "__nvidia_driver_next_kernel", "__nvidia_driver_next_headers")
    known = {**{name: roles[name] for name in names}, "_common_kernel": "5.14.0-570.el9.x86_64"}
    play = {"hosts": "localhost", "gather_facts": False, "tasks": tasks,
            "vars": {**LOCAL, **known, "nvidia_driver_kernel_headers": True}}  # fmt: skip
    (tmp_path / "play.yml").write_text(json.dumps([play]), encoding="utf-8")
    ran = run_playbook(tmp_path, "localhost,", str(tmp_path / "play.yml"))
    log = tmp_path / "log"
    assert ran.returncode == 0 and (log.read_text("utf-8").split() if log.exists() else []) == did, ran.stdout
    said = " ".join(ran.stdout.split())
    assert (f"found no module of the driver for {kernel}, the kernel of the next boot" in said) is bool(told)
    assert told in said
    again = run_playbook(tmp_path, "localhost,", str(tmp_path / "play.yml"))
    assert told or "changed=0" in again.stdout, again.stdout


def test_dnf_is_asked_for_the_next_kernels_module_when_the_driver_is_there() -> None:
    begun, _failed = role_helper.begun(tasks_of("install-dnf.yml"))
    assert begun.index("Have the driver") < begun.index("Have the driver at the next boot, too")


def test_a_driver_that_answers_no_more_hides_no_failure() -> None:
    begun, failed = role_helper.begun(tasks_of("exchange_back.yml"), "Let the node work again whose GPUs are well")
    assert begun[-1] == "Note why it stays out of work" and not failed
    assert value("__nvidia_driver_node_told") == ""
    told = value("__nvidia_driver_node_told", __nvidia_driver_stays_out="gpu1: a GPU is sick.")
    assert told == " The node stays out of work (gpu1: a GPU is sick)."


@pytest.mark.parametrize(
    ("given", "out"),
    [
        ({}, False),
        ({"__node_maintenance_out": {"maintenance": None}}, False),
        ({"__node_maintenance_out": {"msg": "a job runs"}}, False),
        ({"__node_maintenance_out": {"maintenance": "the driver of branch 590"}}, True),
        # Of a node that Kubernetes alone has, Nomad knows nothing.
        ({"__node_maintenance_out": {"maintenance": None}, "__node_maintenance_pods": {"maintenance": "x"}}, True),
        ({"__node_maintenance_out": {"maintenance": "x"}, "ansible_check_mode": True}, False),
    ],
)
def test_who_is_out_of_work(given: dict[str, Any], out: bool) -> None:
    assert value("_common_out_of_work", **{"ansible_check_mode": False, **given}) is out


def test_a_check_tells_that_the_node_stays_out_of_work() -> None:
    """Whatever it refuses: nobody would know that a boot alone does not end it."""
    (task,) = (task for task in role_helper.tasks_of("nvidia_driver/tasks/check.yml", templates=True) if "vars" in task)
    text = task["ansible.builtin.assert"]["fail_msg"]
    known = {"text": text, "inventory_hostname": "gpu1", "__nvidia_driver_wrong": "all. Next step: reboot this host."}
    assert value("text", ansible_check_mode=False, **known) == "gpu1: all. Next step: reboot this host."
    for name in ("__node_maintenance_out", "__node_maintenance_pods"):
        said = value("text", ansible_check_mode=False, **known, **{name: {"maintenance": "the driver of branch 590"}})
        assert said == "gpu1: all. Next step: reboot this host. The node stays out of work until this is run again."
    # A verification comes when playbooks have let the node work again.
    assert tasks_of("verify.yml")[-1]["vars"] == {"_common_out_of_work": False}


@pytest.mark.parametrize(
    ("failed", "why"),
    [
        ({"msg": "non-zero return code", "stderr": "Error: Failed to download metadata\n"},
         "Error: Failed to download metadata"),
        ({"msg": "Failed to install some of the specified packages", "failures": ["No package nvidia-open available."]},
         "Failed to install some of the specified packages: No package nvidia-open available"),
        ({}, "no reason given"),
    ],
)  # fmt: skip
def test_why_an_exchange_failed(failed: dict[str, Any], why: str) -> None:
    said = tasks_of("exchange_back.yml")[0]["ansible.builtin.set_fact"]["__nvidia_driver_failure"]
    assert value("said", said=trust_as_template(said), ansible_failed_result=failed) == why


STREAM = "[nvidia-driver]\nname=nvidia-driver\nstream=570-open\nprofiles=\nstate=enabled\n"
NOW = "nvidia-open-3:590.44.01-1.el10.*\nnvidia-gds-13-0-0:13.0.1-1.*"
BEFORE = "nvidia-open-3:580.95.05-1.el10.*\nnvidia-gds-13-0-0:13.0.1-1.*"


@pytest.mark.parametrize(
    ("platform", "before", "commands"),
    [
        ("RedHat: Rocky 9.4", STREAM, ["module reset nvidia-driver", "module enable nvidia-driver:570-open"]),
        ("RedHat: Rocky 9.4", "", ["module reset nvidia-driver"]),
        ("RedHat: RedHat 10.0", BEFORE,
         ["versionlock delete nvidia-open-3:590.44.01-1.el10.*",
          "versionlock add --raw nvidia-open-3:580.95.05-1.el10.*"]),
        ("RedHat: RedHat 10.0", "",
         ["versionlock delete nvidia-gds-13-0-0:13.0.1-1.* nvidia-open-3:590.44.01-1.el10.*"]),
    ],
)  # fmt: skip
def test_dnf_keeps_to_the_former_branch_where_nothing_of_another_has_come(
    tmp_path: Path, platform: str, before: str, commands: list[str]
) -> None:
    given: dict[str, Any] = {
        "platform": platform,
        "nvidia_driver_branch": "590",
        "__nvidia_driver_stream_file": {"content": base64.b64encode(before.encode()).decode()},
        "__nvidia_driver_locks": {"stdout_lines": before.splitlines()},
        "__nvidia_driver_locks_after": {"stdout_lines": NOW.splitlines()},
        "__nvidia_driver_before": {"stdout_lines": ["nvidia-open-580.95.05-1", "nvidia-driver-580.95.05-1"]},
        "__nvidia_driver_after": {"stdout_lines": ["nvidia-driver-580.95.05-1", "nvidia-open-580.95.05-1"]},
    }
    if "9.4" in platform:
        given["__nvidia_driver_locks"] = {}
    by = value("by", platform=platform, by=trust_as_template("{{ _common_platform.driver.branch_by }}"))
    script = trust_as_template(tasks_of(f"branch_back-{by}.yml")[-1]["ansible.builtin.shell"])
    (tmp_path / "dnf").write_text(f'#!/bin/sh\nshift\necho "$*" >>{tmp_path}/asked\n', encoding="ascii")
    (tmp_path / "dnf").chmod(0o755)
    subprocess.run(["sh", "-c", value("script", script=script, **given)], env={"PATH": f"{tmp_path}:/bin"}, check=True)
    assert (tmp_path / "asked").read_text(encoding="ascii").splitlines() == commands

    assert value("__nvidia_driver_choice_returns", **given) is True
    kept = "; the driver that is there stays, and dnf keeps to its branch as before"
    assert value("__nvidia_driver_choice_told", **given) == (kept if before else "")
    given["__nvidia_driver_chosen_back"] = {"rc": 1, "stderr": "Error: no such module\n"}
    assert value("__nvidia_driver_choice_told", **given).endswith("(Error: no such module)") is bool(before)
    # Part of it is there, and the rest is to come of the same branch.
    given["__nvidia_driver_after"] = {"stdout_lines": ["nvidia-open-590.44.01-1"]}
    assert value("__nvidia_driver_choice_returns", **given) is False
    assert value("__nvidia_driver_choice_told", **given) == ""
