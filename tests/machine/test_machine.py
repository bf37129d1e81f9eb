"""What only a whole machine shows: a kernel of its own with modules, an initramfs, firmware and real reboots.

One machine, and each test goes on where the one before it has ended. `make test-machine` runs them.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.machine import repository
from tests.machine.image import ARCHIVES, DISTRIBUTIONS, DRIVER, DRIVER_MODULES, DRIVER_PROGRAMS, SUITE, modules
from tests.machine.qemu import PATIENCE, Machine, free_port, machine
from tests.simulator.cache import ROOT
from tests.simulator.docker import docker, ensure_docker
from tests.simulator.farm import jobs
from tests.simulator.mirror.build import mirror

HERE = Path(__file__).resolve().parent
PLAYBOOKS = ROOT / "playbooks"
PROFILE = "a100-40gb-x2"
SHARE = "/usr/share/gpufarm-simulator"
# As the kernel asks for a driver of such a GPU.
ALIAS = "pci:v000010DEd000020B0sv000010DEsd00001450bc03sc02i00"


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machine]:
    with machine(tmp_path_factory.mktemp("machine")) as one:
        yield one


@pytest.fixture(scope="module")
def driver(whole: Machine, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """Give the machine what DKMS has built of Debian's driver, and the variables by which the role has that driver."""
    built = modules()
    (archive,) = built.glob("*.dkms.tar.gz")
    whole.put(archive, ARCHIVES)
    for part in ("mok.key", "mok.pub"):
        whole.put(built / part, "/var/lib/dkms")
    version = archive.name.removeprefix(f"{DRIVER_MODULES}-").removesuffix(".dkms.tar.gz")
    branch = version.split(".", maxsplit=1)[0]
    folder = tmp_path_factory.mktemp("repository")
    repository.lay_out(folder / "www", DISTRIBUTIONS[SUITE], branch, version)
    with repository.served(folder / "www", free_port(), folder / "log") as variables:
        yield {
            **variables,
            "nvidia_driver_branch": branch,
            "nvidia_driver_packages": [DRIVER, DRIVER_PROGRAMS],
            "nvidia_driver_reboot_timeout": PATIENCE,
        }


@pytest.fixture(scope="module")
def farm(driver: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """Give the variables by which site.yml makes the machine a farm: what is not the driver's comes from the mirror."""
    # In which the job image is made.
    ensure_docker()
    with repository.served(mirror(), free_port(), tmp_path_factory.mktemp("mirror") / "log") as variables:
        yield {**variables, **{name: value for name, value in driver.items() if name.startswith("nvidia_")}}


def play(whole: Machine, playbook: str | Path, *, fails: bool = False, **variables: Any) -> str:
    """Run a playbook, one of this folder by its name, and return what it printed on one line, as errors are folded."""
    environment = {
        **os.environ,
        "ANSIBLE_CONFIG": str(ROOT / "ansible.cfg"),
        "ANSIBLE_COLLECTIONS_PATH": str(ROOT / ".collections"),
    }
    command = [
        str(Path(sys.executable).with_name("ansible-playbook")), "-i", str(whole.inventory()),
        str(HERE / playbook), "--extra-vars", json.dumps(variables),
    ]  # fmt: skip
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    with (whole.folder / "ansible.log").open("a", encoding="utf-8") as log:
        log.write(result.stdout + result.stderr)
    assert bool(result.returncode) == fails, result.stdout[-6000:] + result.stderr[-2000:]
    return " ".join((result.stdout + result.stderr).split())


def look(whole: Machine) -> dict[str, Any]:
    """Return what the collection knows of the machine."""
    path = whole.folder / "look.json"
    play(whole, "look.yml", look_at=str(path))
    known: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return known


def test_a_machine_has_what_a_container_lacks(whole: Machine) -> None:
    assert whole.ssh("systemd-detect-virt --container").stdout.strip() == "none"
    assert whole.said("stat --file-system --format=%T /sys/fs/cgroup") == "cgroup2fs"
    assert whole.said("systemctl is-system-running --wait", timeout=PATIENCE) == "running"
    assert whole.said("mokutil --sb-state").splitlines()[0] == "SecureBoot disabled"
    # What a GPU would meet.
    assert "nouveau" in drivers(whole)


def test_without_a_gpu_it_is_left_alone(whole: Machine) -> None:
    known = look(whole)
    assert (known["gpus"], known["left_out"], known["wsl"]) == ([], True, False)
    assert known["secure_boot"] is False
    assert known["headers"] == [f"linux-headers-{whole.said('uname -r')}", "linux-headers-amd64"]


def test_gpus_are_found_beside_what_is_on_the_bus(whole: Machine) -> None:
    really = whole.said("ls /sys/bus/pci/devices").split()
    whole.said(
        f"cd {SHARE} && ./install-driver.sh . profiles/{PROFILE}.yml && ldconfig && systemctl daemon-reload && "
        "systemctl enable --now gpufarm-bus.service && systemctl enable gpufarm-gpu-devices.service"
    )
    known = look(whole)
    assert known["gpus"] == ["20b0", "20b0"]
    assert known["left_out"] is False
    assert set(really) < set(whole.said("ls /sys/bus/pci/devices").split())


def test_modules_are_of_its_own_kernel_and_no_reboot_comes_without_consent(
    whole: Machine, driver: dict[str, Any]
) -> None:
    before, kernel = whole.boot_id(), whole.said("uname -r")
    said = play(whole, "driver.yml", fails=True, **driver)
    assert "reboot this host, or set `nvidia_driver_reboot` so that Ansible may" in said
    assert whole.boot_id() == before
    status = whole.said(f"dkms status -m {DRIVER_MODULES} -k {kernel}")
    assert status.endswith(": installed")
    assert module(whole, "vermagic").split()[0] == kernel
    assert module(whole, "version").split(".")[0] == driver["nvidia_driver_branch"]
    # The kernel took it, signed or not, and it found none of its GPUs.
    assert "No such device" in whole.ssh("modprobe nvidia").stderr


def test_nouveau_is_kept_out(whole: Machine) -> None:
    assert "nouveau" not in drivers(whole)
    for initramfs in whole.said("ls /boot/initrd.img-*").split():
        files = whole.said(f"lsinitramfs {initramfs}").split()
        assert [file for file in files if "/nouveau." in file] == []
        # So that it does not come by what is in the initramfs either.
        assert [file for file in files if file.endswith("nvidia-blacklists-nouveau.conf")]


def test_a_reboot_by_consent_brings_the_driver(whole: Machine, driver: dict[str, Any]) -> None:
    before = whole.boot_id()
    play(whole, "driver.yml", nvidia_driver_reboot=True, **driver)
    after = whole.boot_id()
    assert after != before
    versions = whole.said("nvidia-smi --query-gpu=driver_version --format=csv,noheader").split()
    assert versions == [module(whole, "version")] * 2
    assert " changed=0 " in play(whole, "driver.yml", nvidia_driver_reboot=True, **driver)
    assert whole.boot_id() == after


def test_the_mig_layout_is_back_after_a_reboot(whole: Machine) -> None:
    wanted = [{"index": 0, "layout": {"1g.5gb": 7}}, {"index": 1, "layout": {"3g.20gb": 2}}]
    play(whole, "layout.yml", nvidia_mig_layout="disabled", nvidia_mig_gpus=wanted)
    before = mig(whole)
    assert len(before) == 9
    whole.reboot()
    # It is degraded: what Debian's package has systemd load finds none of its GPUs.
    whole.ssh("systemctl is-system-running --wait", timeout=PATIENCE)
    assert whole.said("systemctl is-active gpufarm-mig.service") == "active"
    assert mig(whole) == before
    # Nomad's plugin has whole GPUs alone.
    play(whole, "layout.yml", nvidia_mig_layout="disabled")
    assert mig(whole) == []


def test_it_is_a_farm_by_itself(whole: Machine, farm: dict[str, Any]) -> None:
    before = whole.boot_id()
    play(whole, PLAYBOOKS / "site.yml", **farm)
    assert " changed=0 " in play(whole, PLAYBOOKS / "site.yml", **farm)
    assert whole.boot_id() == before


def test_jobs_prove_its_gpus(whole: Machine, farm: dict[str, Any]) -> None:
    image = jobs.python_image()
    save = whole.folder / "image.tar"
    docker("save", "--output", str(save), image)
    whole.put(save, "/var/tmp")
    whole.said(f"docker load --input /var/tmp/{save.name}", timeout=PATIENCE)
    report = whole.folder / "verify.json"
    # What the double's GPU has of memory is the job's own, of which more than a gigabyte is measured at level quick.
    asked: dict[str, Any] = {"verify_jobs": True, "verify_jobs_level": "start", "verify_jobs_image": image}
    play(whole, PLAYBOOKS / "verify.yml", **farm, **asked, verify_report=str(report))
    (node,) = json.loads(report.read_text(encoding="utf-8"))["nodes"]
    assert node["verdict"] == "ok"
    assert node["gpus_found"] == 2


def test_the_farm_is_back_after_a_reboot(whole: Machine, farm: dict[str, Any]) -> None:
    whole.reboot()
    play(whole, PLAYBOOKS / "verify.yml", **farm)


def test_secure_boot_is_told(whole: Machine) -> None:
    whole.stop()
    whole.start(secure_boot=True)
    assert whole.said("mokutil --sb-state") == "SecureBoot enabled"
    known = look(whole)
    assert known["secure_boot"] is True
    assert known["in_the_way"] == [
        "Secure Boot is on, so the kernel loads no module whose key it does not know; the one that DKMS signs with is "
        "enrolled by `mokutil --import /var/lib/dkms/mok.pub`, once they are installed, and at the console of the next "
        "boot"
    ]


def test_a_module_that_secure_boot_refuses_is_no_reason_for_a_reboot(whole: Machine, driver: dict[str, Any]) -> None:
    before = whole.boot_id()
    said = play(whole, "driver.yml", fails=True, nvidia_driver_reboot=True, **driver)
    assert "then enrol the key that DKMS signs with (`mokutil --import /var/lib/dkms/mok.pub`" in said
    assert whole.boot_id() == before


def drivers(whole: Machine) -> list[str]:
    """Return the modules that udev would have loaded for a GPU."""
    return whole.ssh(f"modprobe --use-blacklist --resolve-alias {ALIAS}").stdout.split()


def module(whole: Machine, field: str) -> str:
    """Return what the driver's module says of itself, which Debian has under a name of its own."""
    return whole.said(f"modinfo --field {field} {DRIVER_MODULES}")


def mig(whole: Machine) -> list[str]:
    """Return the MIG devices of all GPUs."""
    return [line.strip() for line in whole.said("nvidia-smi -L").splitlines() if "MIG" in line]
