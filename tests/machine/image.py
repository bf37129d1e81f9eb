"""The disk of a whole Debian machine: partitions, firmware's boot files, a kernel of its own, and a key to log in with.

It is made without Docker and without a registry: mmdebstrap fills a folder, mkfs.ext4 makes a file system of it.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

from tests.simulator.cache import ROOT, built, cache_dir
from tests.simulator.mirror.build import gpu_double
from tests.simulator.mirror.pki import HOST, pki
from tests.simulator.node.build import MERGED_USR, debian_mirror
from tests.simulator.tools import KEYRING, BuildError, need, run

HERE = Path(__file__).resolve().parent
GUEST = HERE / "guest"
PROFILES = ROOT / "tests/simulator/gpu/profiles"
# Where nodes have them, too.
SHARE = "usr/share/gpufarm-simulator"
# By NVIDIA's names. Debian 13's driver, 550.163.01-2, does not build for its kernel 6.12.117, whose
# pci_resize_resource() has changed; so there only what comes before the driver can be seen.
DISTRIBUTIONS = {"bookworm": "debian12", "trixie": "debian13"}
SUITE = os.environ.get("GPUFARM_MACHINE_SUITE", "bookworm")
# The driver's modules are in non-free. The headers are there because a machine that was installed to build modules has
# them; the kernel is the one that has nouveau, which the one for clouds lacks.
COMPONENTS = "main,contrib,non-free,non-free-firmware"
PACKAGES = (
    "linux-image-amd64,linux-headers-amd64,initramfs-tools,zstd,dkms,shim-signed,grub-efi-amd64-signed,mokutil,"
    "systemd,systemd-sysv,dbus,udev,kmod,procps,adduser,sudo,iproute2,pciutils,openssh-server,"
    "python3,python3-apt,ca-certificates,gpgv"
)
# Debian's modules get the name nvidia, and nouveau is kept out, where a part of the driver is there that programs take.
DRIVER_PROGRAMS = "libcuda1"
DRIVER, DRIVER_MODULES = "nvidia-open-kernel-dkms", "nvidia-current-open"
ARCHIVES = f"/usr/share/{DRIVER_MODULES}-dkms"
MODULES = """\
for folder in proc sys dev; do mount --rbind --make-rslave /$folder {root}/$folder; done
chroot {root} env -i PATH=/usr/sbin:/usr/bin:/sbin:/bin DEBIAN_FRONTEND=noninteractive sh -euc '
    apt-get update -q
    apt-get install -qy --no-install-recommends {driver} ||
        {{ tail -n 40 /var/lib/dkms/{name}/*/build/make.log; exit 1; }}
    dkms status {name} | grep -q installed
    version=$(dpkg-query --show --showformat "\\${{source:Upstream-Version}}" {driver})
    dkms mktarball {name}/$version -k "$(basename /lib/modules/*)" --binaries-only \\
        --archive /var/tmp/{name}-$version.dkms.tar.gz
'
"""
LABEL = "gpufarm-root"
SECTOR = 512
# Where partitions begin and end, in MiB: the firmware's, and the root's to the end of the disk.
ESP_BEGIN, ROOT_BEGIN, DISK_END = 1, 65, 12289
# By which firmware finds what it may boot, and where Debian's signed GRUB looks for its configuration.
ESP = {
    "EFI/BOOT/BOOTX64.EFI": "usr/lib/shim/shimx64.efi.signed",
    "EFI/BOOT/grubx64.efi": "usr/lib/grub/x86_64-efi-signed/grubx64.efi.signed",
    "EFI/BOOT/mmx64.efi": "usr/lib/shim/mmx64.efi.signed",
}
TOOLS = ("mmdebstrap", KEYRING, "/usr/sbin/mkfs.ext4", "/usr/sbin/sfdisk", "mcopy", "ssh-keygen")


def say(text: str) -> None:
    sys.stdout.write(f"machine: {text}\n")
    sys.stdout.flush()


def debian() -> Path:
    """Return the folder of a Debian with kernel, boot loader and SSH server, making it if it is missing."""
    mirror = debian_mirror()

    def build(folder: Path) -> None:
        need(*TOOLS)
        begun = time.monotonic()
        log = cache_dir() / "log" / f"machine-{SUITE}.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        options = [f"--include={PACKAGES}", f"--components={COMPONENTS}", f"--keyring={KEYRING}", "--mode=root",
                   f"--hook-dir={MERGED_USR}", "--skip=cleanup/apt/lists", "--dpkgopt=force-unsafe-io"]  # fmt: skip
        aim = [SUITE, str(folder / "root"), *([mirror] if mirror else [])]
        say(f"Debian {SUITE} by mmdebstrap ...")
        with log.open("wb") as output:
            made = subprocess.run(
                ["mmdebstrap", "--variant=minbase", *options, *aim],
                stdout=output, stderr=output, stdin=subprocess.DEVNULL, check=False,
            )  # fmt: skip
        if made.returncode:
            last = log.read_text(errors="replace").strip().splitlines()[-3:]
            raise BuildError(f"mmdebstrap {SUITE} failed: {last}. Next step: read {log}")
        say(f"Debian {SUITE} by mmdebstrap: {time.monotonic() - begun:.0f} s")

    return built("machine-debian", [PACKAGES, COMPONENTS, SUITE, str(mirror)], build) / "root"


def modules() -> Path:
    """Return the folder of Debian's driver modules for that Debian's own kernel, as DKMS has built them there.

    The machine has the same compiler, headers and kernel, and where it runs without KVM an hour goes into building them
    again. So it gets what DKMS itself makes for that: an archive, which the package's installation finds and unpacks
    where the machine has it (ARCHIVES).
    """
    root = debian()

    def build(folder: Path) -> None:
        begun = time.monotonic()
        log = cache_dir() / "log" / "machine-modules.log"
        work = folder / "root"
        run(["cp", "--archive", root, work])
        shutil.copy2("/etc/resolv.conf", work / "etc/resolv.conf")
        script = MODULES.format(root=work, driver=DRIVER, name=DRIVER_MODULES)
        say(f"{DRIVER} by DKMS ...")
        with log.open("wb") as output:
            command = ["unshare", "--mount", "sh", "-euc", script]
            made = subprocess.run(command, stdout=output, stderr=output, stdin=subprocess.DEVNULL, check=False)
        if made.returncode:
            last = log.read_text(errors="replace").strip().splitlines()[-3:]
            raise BuildError(f"{DRIVER} could not be built: {last}. Next step: read {log}")
        shutil.move(next((work / "var/tmp").glob("*.dkms.tar.gz")), folder)
        for part in ("mok.key", "mok.pub"):
            shutil.move(work / "var/lib/dkms" / part, folder)
        shutil.rmtree(work)
        say(f"{DRIVER} by DKMS: {time.monotonic() - begun:.0f} s")

    return built("machine-modules", [str(root), DRIVER, MODULES], build)


def disk() -> Path:
    """Return the folder of the machine's disk (``disk``) and of the key (``key``) with which root logs in."""
    authority, double, root = pki().ca_cert, gpu_double(), debian()

    def build(folder: Path) -> None:
        begun = time.monotonic()
        run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "gpufarm-machine", "-f", folder / "key"])
        work = folder / "root"
        # What is not changed is not copied.
        run(["cp", "--archive", "--link", root, work])
        furnish(work, authority, (folder / "key.pub").read_text(encoding="ascii"))
        equip(work, double)
        run(["chroot", work, "update-ca-certificates"], environment={"PATH": "/usr/sbin:/usr/bin:/sbin:/bin"})
        host_key = (work / "etc/ssh/ssh_host_ed25519_key.pub").read_text(encoding="ascii")
        (folder / "known_hosts").write_text(f"machine {host_key}", encoding="ascii")
        assemble(work, folder / "disk")
        shutil.rmtree(work)
        say(f"disk: {time.monotonic() - begun:.0f} s")

    own: list[Path | str] = [HERE / "image.py", GUEST, PROFILES]
    inputs = [*own, str(double), str(root), authority.read_text(encoding="ascii")]
    return built("machine-disk", inputs, build)


def put(root: Path, path: str, text: str, mode: int = 0o644) -> None:
    """Write a file of the machine's; one that is there is left alone, because it is another folder's as well."""
    place = root / path.lstrip("/")
    place.parent.mkdir(parents=True, exist_ok=True)
    place.unlink(missing_ok=True)
    place.write_text(text, encoding="utf-8")
    place.chmod(mode)


def furnish(root: Path, authority: Path, public_key: str) -> None:
    """Give the machine what an installer would have asked for: network, name, and who may log in."""
    put(root, "/etc/hostname", "machine\n")
    # User networking has the machine that runs this at 10.0.2.2, and its name server at 10.0.2.3.
    put(root, "/etc/hosts", f"127.0.0.1 localhost\n127.0.1.1 machine\n10.0.2.2 {HOST}\n")
    put(root, "/etc/resolv.conf", "nameserver 10.0.2.3\n")
    # As Debian's installer writes it where it is asked for a targeted initramfs. Without KVM one of all drivers takes
    # half an hour, for each of them is looked up by a process of its own; the first was made outside.
    put(root, "/etc/initramfs-tools/conf.d/driver-policy", "MODULES=dep\n")
    put(root, "/etc/fstab", f"LABEL={LABEL} / ext4 errors=remount-ro 0 1\n")
    put(root, "/etc/systemd/network/wired.network", (GUEST / "wired.network").read_text(encoding="ascii"))
    put(root, "/root/.ssh/authorized_keys", public_key, 0o600)
    (root / "root/.ssh").chmod(0o700)
    put(root, "/usr/local/share/ca-certificates/gpufarm-test-ca.crt", authority.read_text(encoding="ascii"))
    # Made anew by the first boot, which so is that of this machine alone.
    put(root, "/etc/machine-id", "uninitialized\n")
    wants = root / "etc/systemd/system/multi-user.target.wants"
    wants.mkdir(parents=True, exist_ok=True)
    (wants / "systemd-networkd.service").symlink_to("/usr/lib/systemd/system/systemd-networkd.service")
    # What starts by itself would change packages while a test looks at them.
    for unit in ("apt-daily.timer", "apt-daily-upgrade.timer"):
        (root / "etc/systemd/system" / unit).symlink_to("/dev/null")


def equip(root: Path, double: Path) -> None:
    """Lay the GPU double beside the machine; which GPUs are plugged in, and when, a test says."""
    share = root / SHARE
    shutil.copytree(double, share)
    shutil.copytree(PROFILES, share / "profiles")
    for script in ("gpufarm-bus", "gpufarm-module"):
        put(root, f"{SHARE}/{script}", (GUEST / script).read_text(encoding="ascii"), 0o755)
    units = "/etc/systemd/system"
    put(root, f"{units}/gpufarm-bus.service", (GUEST / "gpufarm-bus.service").read_text(encoding="ascii"))
    condition = (GUEST / "gpufarm-gpu-devices.conf").read_text(encoding="ascii")
    put(root, f"{units}/gpufarm-gpu-devices.service.d/module.conf", condition)


def assemble(root: Path, target: Path) -> None:
    """Make a disk with a partition for the firmware and one with the folder's content."""
    environment = {**os.environ, "MTOOLS_SKIP_CHECK": "1"}
    with target.open("wb") as file:
        file.truncate((DISK_END + 1) << 20)
    sectors = (1 << 20) // SECTOR
    layout = (
        f"label: gpt\nstart={ESP_BEGIN * sectors}, size={(ROOT_BEGIN - ESP_BEGIN) * sectors}, type=U\n"
        f"start={ROOT_BEGIN * sectors}, size={(DISK_END - ROOT_BEGIN) * sectors}, type=L\n"
    )
    run(["sfdisk", "--quiet", target], stdin=layout.encode())
    esp = f"{target}@@{ESP_BEGIN}M"
    run(["mformat", "-i", esp, "-T", str((ROOT_BEGIN - ESP_BEGIN) * sectors), "-F", "::"], environment=environment)
    run(["mmd", "-i", esp, "::/EFI", "::/EFI/BOOT", "::/EFI/debian"], environment=environment)
    for place, source in ESP.items():
        run(["mcopy", "-i", esp, root / source, f"::/{place}"], environment=environment)
    run(["mcopy", "-i", esp, GUEST / "grub.cfg", "::/EFI/debian/grub.cfg"], environment=environment)
    # mkfs.ext4 -d makes a file system of a folder's content, and -E offset puts it behind the first partition.
    run(["mkfs.ext4", "-q", "-F", "-L", LABEL, "-d", root, "-E", f"offset={ROOT_BEGIN << 20}", target,
         f"{(DISK_END - ROOT_BEGIN)}M"])  # fmt: skip


if __name__ == "__main__":
    say(str(disk()))
