"""What node_tuning sees of a host, asks of it, refuses and tells; nothing here touches this machine's kernel."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path
from typing import Any

import jinja2
import pytest
import yaml
from ansible.template import trust_as_template
from ansible_collections.gpufarm.core.tests.unit.roles import role_helper
from ansible_collections.gpufarm.core.tests.unit.roles.role_helper import ROLES

ROLE = ROLES / "node_tuning"
DOUBLES = ROLES.parent / "tests/simulator/tuning"
WSL = "6.6.87.2-microsoft-standard-WSL2"
OURS = "# Ansible managed\n"
SAID = """\
governor policy0 schedutil
governor policy4 schedutil
governors conservative performance schedutil
sysctl kernel.numa_balancing 1
sysctl vm.nr_hugepages 0
sysctl fs.nr_open 1048576
memory 16000000
page 2048
cmdline BOOT_IMAGE=/boot/vmlinuz ro quiet
virtual none
loader grub
boot root=/dev/sda1 ro quiet
"""
ALL = {
    "node_tuning_governor": "performance",
    "node_tuning_iommu_passthrough": True,
    "node_tuning_acs_off": True,
    "node_tuning_numa_balancing_off": True,
    "node_tuning_huge_pages": 512,
    "node_tuning_memlock": "unlimited",
    "node_tuning_open_files": 65536,
}


def value(name: str, said: str = SAID, kernel: str = "6.12.0", units: tuple[str, ...] = (), **given: Any) -> Any:
    known = {
        **role_helper.variables("_common", "node_tuning"),
        "ansible_facts": role_helper.facts("Debian: Debian 13.1", kernel),
        "_common_host": role_helper.host(),
        "__node_tuning_host": role_helper.host(units={unit: {"active": "active"} for unit in units}),
        "__node_tuning_files_to_write": [],
        "__node_tuning_said": {"stdout_lines": said.splitlines()},
    }
    return role_helper.value(name, {**known, **given})


def files(**given: Any) -> dict[str, str]:
    return {each["path"]: each["content"] for each in value("__node_tuning_files", **given)}


# --- what is asked for ---------------------------------------------------------------------------


def test_nothing_is_asked_for_unasked() -> None:
    assert files() == {}
    for name in ("governor", "acs", "iommu", "limited", "boot", "sysctl", "to_keep", "differs", "refusal"):
        assert not value(f"__node_tuning_{name}"), name


def test_all_of_it() -> None:
    dropin = f"{OURS}[Service]\nLimitMEMLOCK=infinity\nLimitNOFILE=65536\n"
    assert files(**ALL) == {
        "/etc/sysctl.d/99-zz-gpufarm-tuning.conf": f"{OURS}kernel.numa_balancing = 0\nvm.nr_hugepages = 512\n",
        "/etc/security/limits.d/99-zz-gpufarm-tuning.conf": (
            f"{OURS}* - memlock unlimited\n* - nofile 65536\nroot - memlock unlimited\nroot - nofile 65536\n"
        ),
        "/etc/default/grub.d/gpufarm-tuning.cfg": f'{OURS}GRUB_CMDLINE_LINUX="$GRUB_CMDLINE_LINUX iommu=pt"\n',
        **{
            f"/etc/systemd/system/{name}.service.d/gpufarm-tuning.conf": dropin
            for name in ("docker", "containerd", "nomad")
        },
    }
    assert value("__node_tuning_refusal", **ALL) == ""
    kept = [
        ("kernel.numa_balancing", "1"),
        ("vm.nr_hugepages", "0"),
        ("governor", "policy0=schedutil policy4=powersave"),
        ("acs", "0000:00:01.0=001d 0000:02:00.0=0000"),
        ("grub", "iommu=pt"),
    ]
    said = SAID.replace("policy4 schedutil", "policy4 powersave") + "acs 0000:00:01.0 001d\nacs 0000:02:00.0 0000\n"
    assert [(each["key"], each["value"]) for each in value("__node_tuning_to_keep", said, **ALL)] == kept


def test_absent_asks_for_nothing_and_gives_back_what_was_before() -> None:
    before = "before acs a=1 b=2\nbefore governor policy0=schedutil policy4=powersave\nbefore vm.nr_hugepages 0\n"
    assert files(**ALL, node_tuning_state="absent") == {}
    back = value("__node_tuning_back", SAID + before, **ALL, node_tuning_state="absent")
    assert [(each["key"], each["value"]) for each in back] == [
        ("acs", "a=1 b=2"), ("governor", "policy0=schedutil policy4=powersave"), ("vm.nr_hugepages", "0"),
    ]  # fmt: skip
    # As where one variable alone asks no more.
    back = value("__node_tuning_back", SAID + before, **{**ALL, "node_tuning_huge_pages": 0})
    assert [each["key"] for each in back] == ["vm.nr_hugepages"]


def test_systemd_reads_its_files_anew_for_a_change_of_one_of_them_alone() -> None:
    """A reload can take GPUs from running containers, so none is for files of others."""
    paths = files(**ALL)
    given = {
        **ALL,
        "__node_tuning_files_to_write": [{"path": path} for path in paths],
        "__node_tuning_files_to_go": list(paths),
        "__node_tuning_paths": [value("__node_tuning_unit")],
    }
    seen = []
    for task in yaml.safe_load((ROLE / "tasks/configure.yml").read_text(encoding="ascii")):
        module = next(task[name] for name in task if name.startswith("ansible.builtin."))
        path = "" if isinstance(module, str) else module.get("dest", module.get("path", ""))
        if "before" in path or not path or module.get("state") == "directory":
            continue
        looped = "item" in path
        found = value("found", **given, found=trust_as_template(task["loop"] if looped else path))
        found = [getattr(each, "get", {"path": each}.get)("path") for each in found] if looped else [found]
        assert [each.startswith("/etc/systemd/system/") for each in found] == ["notify" in task] * len(found), task[
            "name"
        ]
        seen += found
    assert {*paths, value("__node_tuning_program"), value("__node_tuning_unit")} == set(seen)


def test_one_limit_alone_leaves_the_other() -> None:
    content = files(node_tuning_memlock="65536", node_tuning_services=["docker"])
    assert (
        content["/etc/systemd/system/docker.service.d/gpufarm-tuning.conf"] == f"{OURS}[Service]\nLimitMEMLOCK=65536K\n"
    )
    assert (
        content["/etc/security/limits.d/99-zz-gpufarm-tuning.conf"]
        == f"{OURS}* - memlock 65536\nroot - memlock 65536\n"
    )


def test_on_wsl_what_is_windows_own_is_left_alone_and_told() -> None:
    given = {**ALL, "kernel": WSL, "said": re.sub("(?m)^(governor|loader|boot).*\n", "", SAID)}
    assert value("__node_tuning_left_alone", **given) == [
        f"node_tuning_{name}" for name in ("governor", "iommu_passthrough", "acs_off", "numa_balancing_off")
    ]
    assert value("__node_tuning_refusal", **given) == ""
    assert files(**given)["/etc/sysctl.d/99-zz-gpufarm-tuning.conf"] == f"{OURS}vm.nr_hugepages = 512\n"
    assert "/etc/default/grub.d/gpufarm-tuning.cfg" not in files(**given)
    assert value("__node_tuning_left_alone", **ALL) == []


def test_a_kernel_without_numa_balancing_has_none_to_switch_off() -> None:
    said = SAID.replace("sysctl kernel.numa_balancing 1\n", "")
    assert value("__node_tuning_sysctl", said, node_tuning_numa_balancing_off=True) == {}
    assert value("__node_tuning_differs", said, node_tuning_numa_balancing_off=True) == []


def test_rhel_has_the_argument_by_grubby() -> None:
    said = SAID.replace("loader grub\n", "loader grubby\n")
    assert files(said=said, node_tuning_iommu_passthrough=True) == {}
    (kept,) = value("__node_tuning_to_keep", said, node_tuning_iommu_passthrough=True)
    assert kept == {"key": "grubby", "value": "iommu=pt"}
    # An argument that somebody else has put there is not taken away later.
    assert value("__node_tuning_to_keep", said.replace(" quiet", " iommu=pt"), node_tuning_iommu_passthrough=True) == []
    for theirs in (said + "boot ro iommu=pt\n", said.replace("vmlinuz ro", "vmlinuz ro iommu=pt")):
        assert value("__node_tuning_to_keep", theirs, node_tuning_iommu_passthrough=True) == [
            {"key": "grubby", "value": ""}
        ]


def test_names_of_services() -> None:
    given = {"node_tuning_open_files": 4096, "node_tuning_services": ["docker.service", "docker", "nomad@a"]}
    paths = [path for path in files(**given) if "systemd" in path]
    assert paths == [f"/etc/systemd/system/{name}.service.d/gpufarm-tuning.conf" for name in ("docker", "nomad@a")]
    assert value("__node_tuning_refusal", **given) == ""


def test_files_that_have_the_last_word_are_told() -> None:
    said = f"{SAID}later /etc/sysctl.d/zz.conf\nlater /etc/security/limits.d/zz.conf\n"
    assert value("__node_tuning_later", said) == []
    assert value("__node_tuning_later", said, node_tuning_huge_pages=8) == ["/etc/sysctl.d/zz.conf"]
    assert value("__node_tuning_later", said, node_tuning_open_files=4096) == ["/etc/security/limits.d/zz.conf"]
    assert len(value("__node_tuning_later", said, **ALL)) == 2


# --- what is refused -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "said", "told"),
    [
        ({"node_tuning_governor": "ondemand"}, SAID,
         "its CPUs have the governors conservative, performance, schedutil. Expected: ondemand among them. Next step:"),
        ({"node_tuning_governor": "performance"}, SAID + "governors powersave\n", "its CPUs have no governor"),
        ({"node_tuning_governor": "performance"}, re.sub("(?m)^governor.*\n", "", SAID), "its CPUs have no governor"),
        ({"node_tuning_iommu_passthrough": True}, SAID.replace("loader grub", "loader systemd-boot"),
         "its boot loader is systemd-boot. Expected: GRUB with update-grub, or grubby. Next step: have iommu=pt on"),
        ({"node_tuning_iommu_passthrough": True}, SAID.replace("loader grub\n", ""),
         "its boot loader is none that is known. Expected: GRUB"),
        ({"node_tuning_acs_off": True}, SAID.replace("virtual none", "virtual kvm"),
         "it is a virtual machine (kvm). Expected: bare metal"),
        ({"node_tuning_huge_pages": 6789}, SAID,
         "node_tuning_huge_pages is 6789, which is 13903872 KiB in pages of 2048 KiB, and the memory has 16000000 KiB. "
         "Expected: at most 6788 pages"),
        ({"node_tuning_huge_pages": 440}, SAID.replace("memory 16", "memory 500").replace("2048", "1048576"),
         "node_tuning_huge_pages is 440, which is 461373440 KiB in pages of 1048576 KiB"),
        ({"node_tuning_huge_pages": 1}, SAID.replace("memory 16000000", "memory 2000000"),
         "node_tuning_huge_pages is 1, which"),
        ({"node_tuning_huge_pages": 8}, SAID.replace("sysctl vm.nr_hugepages 0\n", ""), "its kernel has no huge pages"),
        ({"node_tuning_open_files": 4096, "node_tuning_services": ["docker", "nomad.socket", "../x"]}, SAID,
         "node_tuning_services has nomad.socket, ../x. Expected: names of services"),
        ({"node_tuning_memlock": "64 GiB"}, SAID,
         'node_tuning_memlock is "64 GiB". Expected: a number of KiB from 64 to 2^53, or unlimited.'),
        ({"node_tuning_memlock": "0"}, SAID, 'node_tuning_memlock is "0". Expected: a number of KiB from 64'),
        ({"node_tuning_memlock": "18014398509481984"}, SAID, 'node_tuning_memlock is "18014398509481984". Expected: '),
        # With such a limit pam_limits lets nobody in, root neither.
        ({"node_tuning_open_files": 1048577}, SAID,
         "node_tuning_open_files is 1048577. Expected: from 1024 to 1048576, which is fs.nr_open of this kernel"),
        ({"node_tuning_open_files": -1}, SAID, "node_tuning_open_files is -1. Expected: from 1024"),
        ({"node_tuning_open_files": 3}, SAID, "node_tuning_open_files is 3. Expected: from 1024"),
        ({"node_tuning_reboot": "yes", "ansible_connection": "local"}, SAID,
         "its connection is local, and node_tuning_reboot is true. Expected: another machine to run Ansible on"),
        ({"node_tuning_governor": "performance", "units": ("tuned.service",)}, SAID,
         "tuned.service runs, and sets governors"),
    ],
)  # fmt: skip
def test_what_is_refused(given: dict[str, Any], said: str, told: str) -> None:
    refusal = value("__node_tuning_refusal", said, **given)
    assert refusal.startswith(told) and " Expected: " in refusal and " Next step: " in refusal
    # With nothing asked for, nothing is refused.
    assert value("__node_tuning_refusal", said, node_tuning_state="absent", **given) == ""


def test_numbers_at_their_ends_are_taken() -> None:
    assert value("__node_tuning_refusal", node_tuning_open_files=1048576, node_tuning_memlock="64") == ""
    assert value("__node_tuning_refusal", node_tuning_open_files=1024, node_tuning_memlock="unlimited") == ""
    assert value("__node_tuning_refusal", node_tuning_huge_pages=6788) == ""


# --- what is read back ---------------------------------------------------------------------------


def test_what_differs_is_told() -> None:
    limits = "limit docker memlock 8388608\nlimit docker open_files 65536\n"
    said = f"{SAID}{limits}acs 0000:00:01.0 001d\nacs 0000:02:00.0 0000\n"
    assert value("__node_tuning_differs", said, **ALL) == [
        "the kernel was started without iommu=pt",
        "the kernel has 0 of 512 huge pages",
        "docker runs with memlock 8388608 and not unlimited",
        "the governors are schedutil and not performance",
        "ACS is on at 0000:00:01.0",
        "kernel.numa_balancing is 1 and not 0",
    ]
    remedy = value("__node_tuning_remedy", said, **ALL)
    assert (
        "`journalctl -u gpufarm-tuning` and by `sysctl --load=/etc/sysctl.d/99-zz-gpufarm-tuning.conf` what" in remedy
    )
    remedy = value("__node_tuning_remedy", node_tuning_numa_balancing_off=True)
    assert "sysctl --load=" in remedy and "journalctl" not in remedy
    said = (
        re.sub("(policy.) schedutil", r"\1 performance", said).replace("balancing 1", "balancing 0")
        .replace("hugepages 0", "hugepages 512").replace("ro quiet", "ro quiet iommu=pt")
        .replace("memlock 8388608", "memlock unlimited").replace("001d", "0000")
    )  # fmt: skip
    assert value("__node_tuning_differs", said, **ALL) == []


def test_what_the_last_boot_did_not_bring_is_no_reason_for_another() -> None:
    dropin = "/etc/systemd/system/docker.service.d/gpufarm-tuning.conf"
    given = {**ALL, "said": f"{SAID}limit docker memlock 8388608\n".replace("ro quiet\n", "ro quiet iommu=pt\n", 1)}
    assert value("__node_tuning_differs_until_boot", **given) == [
        "the kernel has 0 of 512 huge pages", "docker runs with memlock 8388608 and not unlimited",
    ]  # fmt: skip
    assert value("__node_tuning_differs_in_spite", **given) == []
    given["said"] += f"booted {value('__node_tuning_sysctl_path')}\nbooted {dropin}\n"
    assert value("__node_tuning_differs_until_boot", **given) == []
    at_boot = "was there when this host was started"
    assert value("__node_tuning_differs_in_spite", **given) == [
        f"the kernel has 0 of 512 huge pages, though {value('__node_tuning_sysctl_path')} {at_boot}",
        f"docker runs with memlock 8388608 and not unlimited, though {dropin} {at_boot}",
    ]
    assert "does not reboot for it again" in value("__node_tuning_remedy", node_tuning_huge_pages=1, **{
        "said": f"{SAID}booted {value('__node_tuning_sysctl_path')}\n",
    })  # fmt: skip
    # The same of a command line whose entries were there.
    said = SAID.replace("sda1 ro quiet", "sda1 ro iommu=pt") + "booted /boot/grub/grub.cfg\n"
    for entries, until_boot in (
        (said, []),
        (said.replace("sda1 ro iommu=pt", "sda1 ro"), ["the kernel was started without iommu=pt"]),
    ):
        assert value("__node_tuning_differs_until_boot", entries, node_tuning_iommu_passthrough=True) == until_boot


def test_what_check_mode_foresees() -> None:
    """Before anything is written; huge pages may well be there without a boot."""
    dropin = "/etc/systemd/system/docker.service.d/gpufarm-tuning.conf"
    said = f"{SAID}limit docker memlock 8388608\nbooted /boot/grub/grub.cfg\nbooted {dropin}\n"
    written = {"__node_tuning_files_to_write": [{"path": dropin}]}
    assert value("__node_tuning_boot_foreseen", said, **ALL, **written) == [
        "the kernel was started without iommu=pt", "docker runs with memlock 8388608 and not unlimited",
    ]  # fmt: skip
    main = yaml.safe_load((ROLE / "tasks/main.yml").read_text(encoding="ascii"))
    (due,) = (
        task["ansible.builtin.set_fact"]["__node_tuning_due"] for task in main if task["name"].startswith("Note wh")
    )
    given = {**written, "ansible_check_mode": True, "node_tuning_reboot": True, "due": trust_as_template(due)}
    for name, asked, restarts in (
        ("node_tuning_memlock", "unlimited", True),
        ("node_tuning_memlock", "8192", False),
        ("node_tuning_huge_pages", 8, False),
    ):
        assert value("due", said, **given, **{name: asked}) is restarts, (name, asked)


def test_no_boot_for_entries_that_lack_the_argument() -> None:
    given = {"node_tuning_iommu_passthrough": True}
    told = value("__node_tuning_unready", **given)
    assert told.startswith(
        "1 of 1 boot entries of grub in /boot/grub/grub.cfg are without iommu=pt, the first has root=/dev/sda1 ro quiet"
    )
    assert "after /etc/default/grub.d/gpufarm-tuning.cfg, in a later file there" in told
    assert value("__node_tuning_remedy", **given).startswith("run gpufarm.core.node_tuning on this host, whose boot")
    grubby = SAID.replace("loader grub\n", "loader grubby\n") + "boot ro iommu=pt\n"
    told = value("__node_tuning_unready", grubby, **given)
    assert told.startswith("1 of 2 boot entries of grubby in /boot/loader/entries are without") and "--info=ALL" in told
    # One that shows no entries promises nothing.
    assert value("__node_tuning_unready", SAID.partition("boot root")[0], **given).startswith("0 of 0 boot entries")
    assert value("__node_tuning_unready", SAID.replace("sda1 ro quiet", "sda1 ro iommu=pt"), **given) == ""
    assert value("__node_tuning_unready", SAID.replace("vmlinuz ro", "vmlinuz iommu=pt ro"), **given) == ""
    assert value("__node_tuning_unready") == ""


def test_a_limit_in_kib_is_one_in_bytes_of_the_kernel() -> None:
    said = f"{SAID}limit nomad memlock 67108864\n"
    assert value("__node_tuning_differs", said, node_tuning_memlock="65536") == []
    assert value("__node_tuning_differs", said, node_tuning_memlock="65537") == [
        "nomad runs with memlock 67108864 and not 67109888"
    ]


# --- programs, over a machine that is a folder ---------------------------------------------------


@pytest.fixture
def machine(tmp_path: Path) -> Path:
    """A bare-metal machine as a folder: two frequency policies, three PCI devices of which two have ACS, and Docker."""
    written = {
        "proc/sys/kernel/numa_balancing": "1",
        "proc/sys/vm/nr_hugepages": "0",
        "proc/sys/fs/nr_open": "1048576",
        "proc/meminfo": "MemTotal:       16000000 kB\nHugepagesize:       2048 kB",
        "proc/stat": "cpu 1 2 3\nbtime 1000\nprocesses 9",
        "proc/cmdline": "BOOT_IMAGE=/boot/vmlinuz ro quiet",
        "proc/77/limits": "Max open files            1024                 524288               files     \n"
        "Max locked memory         8388608              8388608              bytes     ",
        "boot/grub/grub.cfg": "menuentry a {\n\tlinux\t/boot/vmlinuz-6 root=/dev/sda1 ro quiet\n}\n"
        "menuentry b {\n\tlinux16\t/boot/memtest86+ console\n}",
        "var/lib/gpufarm/tuning/governor": "ondemand",
        "sys/bus/pci/devices/0000:00:01.0/acs": "001d",
        "sys/bus/pci/devices/0000:02:00.0/acs": "0000",
        "sys/bus/pci/devices/0000:03:00.0/vendor": "0x10de",
    }
    for policy in (0, 1):
        folder = f"sys/devices/system/cpu/cpufreq/policy{policy}"
        written[f"{folder}/scaling_governor"] = "schedutil"
        written[f"{folder}/scaling_available_governors"] = "performance schedutil"
    for path, text in written.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(f"{text}\n", encoding="ascii")
    programs = tmp_path / "usr/sbin"
    programs.mkdir(parents=True)
    setpci = (DOUBLES / "setpci").read_text(encoding="ascii")
    for name, text in {
        "setpci": setpci.replace("/sys/", f"{tmp_path}/sys/"),
        "systemd-detect-virt": "#!/bin/sh\necho none\nexit 1\n",
        "systemctl": "#!/bin/sh\ncase $4 in docker.service) echo 77 ;; *) echo 0 ;; esac\n",
        "update-grub": "#!/bin/sh\n",
    }.items():
        (programs / name).write_text(text, encoding="ascii")
        (programs / name).chmod(0o755)
    return tmp_path


def run(machine: Path, program: str, *words: str) -> subprocess.CompletedProcess[str]:
    """Run a program of the role whose paths are those of the machine."""
    text = re.sub(r"(?<=[\s\"=])/(sys|proc|boot|efi|usr|var|etc)(?=[/\s])", rf"{machine}/\1", program)
    path = f"{machine}/usr/sbin:{os.environ['PATH']}"
    return subprocess.run(
        ["/bin/sh", "-c", text, "sh", *words], env={"PATH": path}, capture_output=True, text=True, check=False
    )


def looked(machine: Path, *words: str) -> list[str]:
    result = run(machine, (ROLE / "files/look.sh").read_text(encoding="ascii"), *words)
    assert (result.returncode, result.stderr) == (0, "")
    return result.stdout.splitlines()


def test_what_a_machine_has(machine: Path) -> None:
    assert looked(machine, "acs", "docker", "nomad") == [
        "governor policy0 schedutil",
        "governor policy1 schedutil",
        "governors performance schedutil",
        "sysctl kernel.numa_balancing 1",
        "sysctl vm.nr_hugepages 0",
        "sysctl fs.nr_open 1048576",
        "memory 16000000",
        "page 2048",
        "cmdline BOOT_IMAGE=/boot/vmlinuz ro quiet",
        "virtual none",
        "loader grub",
        "boot root=/dev/sda1 ro quiet",
        "before governor ondemand",
        "acs 0000:00:01.0 001d",
        "acs 0000:02:00.0 0000",
        "limit docker open_files 1024",
        "limit docker memlock 8388608",
    ]


def test_grubby_is_asked_for_each_kernel_and_systemd_boot_is_known(machine: Path) -> None:
    grubby = machine / "usr/sbin/grubby"
    grubby.write_text(
        '#!/bin/sh\nprintf \'index=0\\nargs="ro quiet"\\nindex=1\\nargs="ro iommu=pt"\\n\'\n', encoding="ascii"
    )
    grubby.chmod(0o755)
    assert [line for line in looked(machine) if line.startswith(("loader", "boot"))] == [
        "loader grubby", "boot ro quiet", "boot ro iommu=pt",
    ]  # fmt: skip
    grubby.unlink()
    (machine / "usr/sbin/update-grub").unlink()
    (machine / "boot/efi/loader").mkdir(parents=True)
    (machine / "boot/efi/loader/loader.conf").write_text("", encoding="ascii")
    assert [line for line in looked(machine) if line.startswith(("loader", "boot"))] == ["loader systemd-boot"]


def test_a_grub_cfg_that_systemd_boot_has_outlived_promises_nothing(machine: Path) -> None:
    loader = machine / "sys/firmware/efi/efivars/LoaderInfo-4a67b082-0a4c-41cf-b6c7-440b29bb8c4f"
    loader.parent.mkdir(parents=True)
    for name, told in (("GRUB 2.12", "loader grub"), ("systemd-boot 252", "loader systemd-boot")):
        loader.write_bytes(b"\x06\0\0\0" + f"{name}\0".encode("utf-16-le"))
        assert [line for line in looked(machine) if line.startswith("loader")] == [told]


def test_files_that_the_last_boot_has_read(machine: Path) -> None:
    dropin = machine / "etc/systemd/system/docker.service.d/gpufarm-tuning.conf"
    entry = machine / "boot/loader/entries/one.conf"
    for file, age in ((dropin, 999), (machine / value("__node_tuning_sysctl_path")[1:], 1001), (entry, 999)):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("", encoding="ascii")
        os.utime(file, (age, age))
    os.utime(machine / "boot/grub/grub.cfg", (1001, 1001))
    os.utime(entry.parent, (999, 999))

    def booted() -> list[str]:
        lines = [line for line in looked(machine) if line.startswith("booted")]
        return [line.removeprefix(f"booted {machine}") for line in lines]

    assert booted() == ["/boot/loader/entries", "/etc/systemd/system/docker.service.d/gpufarm-tuning.conf"]
    os.utime(entry, (1001, 1001))
    assert booted() == ["/etc/systemd/system/docker.service.d/gpufarm-tuning.conf"]
    (machine / "proc/stat").write_text("cpu 1 2\n", encoding="ascii")
    assert booted() == []


def program(**wanted: Any) -> str:
    text = (ROLE / "templates/gpufarm-tuning.j2").read_text(encoding="ascii")
    return jinja2.Environment(trim_blocks=True).from_string(text).render(
        __node_tuning_governor=wanted.get("governor", ""), __node_tuning_acs=wanted.get("acs", False)
    )  # fmt: skip


def test_acs_is_switched_off_where_there_is_some(machine: Path) -> None:
    assert run(machine, program(acs=True)).returncode == 0
    assert [line for line in looked(machine, "acs") if line.startswith("acs")] == [
        "acs 0000:00:01.0 0000",
        "acs 0000:02:00.0 0000",
    ]
    assert "governor policy0 schedutil" in looked(machine)


def test_without_setpci_acs_is_not_off(machine: Path) -> None:
    (machine / "usr/sbin/setpci").unlink()
    assert [line for line in looked(machine, "acs") if line.startswith("acs")] == ["acs setpci missing"]
    ran = run(machine, program(acs=True))
    assert (ran.returncode, ran.stderr) == (1, "setpci is missing, of the package pciutils\n")
    said = f"{SAID}acs setpci missing\n"
    assert value("__node_tuning_differs", said, node_tuning_acs_off=True) == ["ACS cannot be read without setpci"]
    assert value("__node_tuning_to_keep", said, node_tuning_acs_off=True) == [{"key": "acs", "value": ""}]


def test_a_policy_that_is_offline_is_left_out(machine: Path) -> None:
    governor = machine / "sys/devices/system/cpu/cpufreq/policy0/scaling_governor"
    governor.unlink()
    # Cannot be read by root either.
    governor.mkdir()
    assert run(machine, program(governor="performance")).returncode == 0
    assert [line for line in looked(machine) if line.startswith("governor ")] == ["governor policy1 performance"]


def given_back(machine: Path, key: str, value: str) -> list[str]:
    """Have back what was kept, by the program in the role's tasks; return what it says."""
    kept = machine / "var/lib/gpufarm/tuning" / key
    kept.parent.mkdir(exist_ok=True, parents=True)
    kept.write_text(f"{value}\n", encoding="ascii")
    tasks = yaml.safe_load((ROLE / "tasks/apply.yml").read_text(encoding="ascii"))
    (task,) = (each["ansible.builtin.command"] for each in tasks if each["name"].startswith("Have again what was"))
    ran = run(machine, f"set -eu\n{task['argv'][2]}", key, value, str(kept.parent))
    assert (ran.returncode, kept.exists()) == (0, False), ran.stderr
    return ran.stdout.splitlines()


def test_somebodys_own_argument_stays(machine: Path) -> None:
    grubby = machine / "usr/sbin/grubby"
    grubby.write_text(f'#!/bin/sh\necho "$*" >>{machine}/asked\n', encoding="ascii")
    grubby.chmod(0o755)
    assert given_back(machine, "grubby", "") == ["the kernel's argument stays, because some boot entries had it before"]
    assert not (machine / "asked").exists()
    assert given_back(machine, "grubby", "iommu=pt") == []
    assert (machine / "asked").read_text(encoding="ascii") == "--update-kernel=ALL --remove-args=iommu=pt\n"


def test_files_that_are_read_later(machine: Path) -> None:
    for path, text in {
        "etc/sysctl.d/99-zz-gpufarm-tuning.conf": "vm.nr_hugepages = 8",
        "etc/sysctl.d/99-sysctl.conf": "vm.nr_hugepages = 9",
        "etc/sysctl.d/zz-theirs.conf": "vm/nr_hugepages = 9",
        "etc/sysctl.d/zz-notes.conf": "# vm.nr_hugepages = 9\nvm.swappiness = 1",
        "usr/lib/sysctl.d/zzz.conf": "kernel.numa_balancing=1",
        "etc/security/limits.d/zz.conf": "* hard nofile 1024",
    }.items():
        (machine / path).parent.mkdir(parents=True, exist_ok=True)
        (machine / path).write_text(f"{text}\n", encoding="ascii")
    lines = [line for line in looked(machine) if line.startswith("later")]
    assert [line.removeprefix(f"later {machine}/") for line in lines] == [
        "etc/sysctl.d/zz-theirs.conf", "usr/lib/sysctl.d/zzz.conf", "etc/security/limits.d/zz.conf",
    ]  # fmt: skip


def test_governors_are_given_back_as_they_were(machine: Path) -> None:
    assert run(machine, program(governor="performance")).returncode == 0
    said = given_back(machine, "governor", "policy0=performance policy1=schedutil policy7=schedutil")
    assert said == ["policy7 has the governor schedutil no more and keeps its own"]
    assert [line for line in looked(machine) if line.startswith("governor ")] == [
        "governor policy0 performance", "governor policy1 schedutil",
    ]  # fmt: skip
    assert given_back(machine, "governor", "policy0=warp") == [
        "policy0 has the governor warp no more and keeps its own"
    ]
    assert "governor policy0 performance" in looked(machine)


def test_acs_is_given_back_as_it_was(machine: Path) -> None:
    assert run(machine, program(acs=True)).returncode == 0
    assert given_back(machine, "acs", "0000:00:01.0=001d 0000:02:00.0=0000") == []
    assert [line for line in looked(machine, "acs") if line.startswith("acs")] == [
        "acs 0000:00:01.0 001d", "acs 0000:02:00.0 0000",
    ]  # fmt: skip
    (machine / "usr/sbin/setpci").unlink()
    said = given_back(machine, "acs", "0000:00:01.0=001d")
    assert said == ["ACS stays off until the next boot, because setpci is missing"]


def test_every_policy_has_the_governor(machine: Path) -> None:
    assert run(machine, program(governor="performance")).returncode == 0
    assert [line for line in looked(machine, "acs") if line.startswith(("governor ", "acs"))] == [
        "governor policy0 performance", "governor policy1 performance",
        "acs 0000:00:01.0 001d", "acs 0000:02:00.0 0000",
    ]  # fmt: skip
