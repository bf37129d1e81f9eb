"""A whole machine in QEMU: started, asked by SSH, switched off."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.machine.image import disk, say
from tests.simulator.tools import BuildError, need, run

TOOLS = ("qemu-system-x86_64", "qemu-img", "/usr/share/OVMF/OVMF_CODE_4M.fd", "ssh")
FIRMWARE = Path("/usr/share/OVMF")
# With Microsoft's keys, by which Debian's boot loader is signed, Secure Boot is on; without any it is off.
VARIABLES = {False: "OVMF_VARS_4M.fd", True: "OVMF_VARS_4M.ms.fd"}
CODE = {False: "OVMF_CODE_4M.fd", True: "OVMF_CODE_4M.secboot.fd"}
# In the order in which they are tried. KVM starts on some machines and goes no further there.
ACCELERATORS = {
    "kvm": ["-accel", "kvm", "-cpu", "host"],
    "tcg": ["-accel", "tcg,thread=multi,tb-size=1024", "-cpu", "max"],
}
# Seconds: with KVM a boot takes a few, or does not end; without it takes minutes where others work, too.
KVM_PATIENCE = 60
PATIENCE = 1800
MEMORY = 4096
# Without KVM a second one costs more than it does: what a package's installation does is one process after the other.
PROCESSORS = 1


@dataclass
class Machine:
    """One machine: where its disk, key and console are, and the process that it runs in."""

    folder: Path
    image: Path
    port: int
    accelerator: str = ""
    process: subprocess.Popen[bytes] | None = None

    @property
    def console(self) -> Path:
        return self.folder / "console.log"

    def ssh_options(self) -> list[str]:
        """Return what ssh needs, which knows the machine by its host key."""
        return [
            "-o", f"IdentityFile={self.image / 'key'}", "-o", "IdentitiesOnly=yes", "-o", "BatchMode=yes",
            "-o", f"UserKnownHostsFile={self.image / 'known_hosts'}", "-o", "HostKeyAlias=machine",
            "-o", "StrictHostKeyChecking=yes", "-o", "ConnectTimeout=60", "-F", "none",
        ]  # fmt: skip

    def ssh(self, command: str, *, timeout: float = 600) -> subprocess.CompletedProcess[str]:
        """Run a command as root; one that does not end in time has failed."""
        words = ["ssh", *self.ssh_options(), "-p", str(self.port), "root@127.0.0.1", command]
        try:
            return subprocess.run(
                words, capture_output=True, text=True, timeout=timeout, stdin=subprocess.DEVNULL, check=False
            )
        except subprocess.TimeoutExpired:
            return subprocess.CompletedProcess(words, 124, "", f"no end after {timeout} s")

    def said(self, command: str, *, timeout: float = 600) -> str:
        """Run a command as root and return what it printed; a failure raises BuildError with its words."""
        result = self.ssh(command, timeout=timeout)
        if result.returncode:
            raise BuildError(f"machine: `{command}` ended with {result.returncode}: {result.stderr.strip()[-800:]}")
        return result.stdout.strip()

    def put(self, source: Path, folder: str) -> None:
        """Copy a file into a folder, which is made."""
        self.said(f"mkdir -p {folder}")
        run(["scp", "-q", *self.ssh_options(), "-P", str(self.port), str(source), f"root@127.0.0.1:{folder}/"])

    def start(self, *, secure_boot: bool = False) -> None:
        """Switch the machine on and wait until it has booted."""
        # The firmware's variables, with which Secure Boot goes on and off, are not the disk's.
        variables = self.folder / "variables.fd"
        shutil.copyfile(FIRMWARE / VARIABLES[secure_boot], variables)
        tried = [self.accelerator] if self.accelerator else [n for n in ACCELERATORS if n != "kvm" or kvm_is_there()]
        for accelerator in tried:
            begun = time.monotonic()
            self._start(ACCELERATORS[accelerator], variables, secure_boot=secure_boot)
            if self._boots(PATIENCE if accelerator == tried[-1] else KVM_PATIENCE):
                self.accelerator = accelerator
                say(f"booted with {accelerator}: {time.monotonic() - begun:.0f} s")
                return
            self.kill()
            say(f"no boot with {accelerator} after {time.monotonic() - begun:.0f} s")
        last = self.console.read_text(errors="replace").strip().splitlines()[-5:]
        raise BuildError(f"The machine did not boot within {PATIENCE} s: {last}. Next step: read {self.console}")

    def _start(self, accelerator: list[str], variables: Path, *, secure_boot: bool) -> None:
        # With Secure Boot only the firmware itself may write its variables.
        guarded = ["-global", "driver=cfi.pflash01,property=secure,value=on", "-global", "ICH9-LPC.disable_s3=1"]
        command = [
            "qemu-system-x86_64", "-machine", f"q35,smm={'on' if secure_boot else 'off'}", *accelerator,
            "-smp", str(PROCESSORS), "-m", str(MEMORY), "-display", "none", "-vga", "none", "-monitor", "none",
            "-serial", f"file:{self.console}", *(guarded if secure_boot else []),
            "-drive", f"if=pflash,format=raw,readonly=on,file={FIRMWARE / CODE[secure_boot]}",
            "-drive", f"if=pflash,format=raw,file={variables}",
            "-drive", f"if=virtio,format=qcow2,cache=unsafe,file={self.folder / 'disk.qcow2'}",
            "-device", "virtio-rng-pci", "-netdev", f"user,id=net,hostfwd=tcp:127.0.0.1:{self.port}-:22",
            "-device", "virtio-net-pci,netdev=net,romfile=",
        ]  # fmt: skip
        self.console.write_bytes(b"")
        with (self.folder / "qemu.log").open("ab") as output:
            self.process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=output)

    def _boots(self, patience: float) -> bool:
        deadline = time.monotonic() + patience
        while time.monotonic() < deadline and self.process is not None and self.process.poll() is None:
            if self.ssh("true", timeout=60).returncode == 0:
                return True
            time.sleep(2)
        return False

    def boot_id(self) -> str:
        return self.said("cat /proc/sys/kernel/random/boot_id")

    def reboot(self) -> None:
        """Boot the machine anew and wait for it."""
        before = self.boot_id()
        self.ssh("systemctl reboot")
        deadline = time.monotonic() + PATIENCE
        while time.monotonic() < deadline:
            now = self.ssh("cat /proc/sys/kernel/random/boot_id", timeout=60)
            if now.returncode == 0 and now.stdout.strip() != before:
                return
            time.sleep(2)
        raise BuildError(f"The machine did not come back within {PATIENCE} s. Next step: read {self.console}")

    def stop(self) -> None:
        """Switch the machine off as its button does."""
        self.ssh("systemctl poweroff")
        try:
            assert self.process is not None
            self.process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            self.kill()

    def kill(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()

    def inventory(self) -> Path:
        """Write Ansible's inventory of this machine alone, a farm by itself, and return its path."""
        options = " ".join(self.ssh_options())
        path = self.folder / "hosts.yml"
        path.write_text(
            "all:\n  hosts:\n    machine:\n      ansible_host: 127.0.0.1\n"
            f"      ansible_port: {self.port}\n      ansible_user: root\n      ansible_ssh_common_args: {options}\n"
            "  children:\n    nomad_servers: {hosts: {machine: }}\n    gpu_nodes: {hosts: {machine: }}\n",
            encoding="utf-8",
        )
        return path


def kvm_is_there() -> bool:
    """Tell whether this user may use KVM; whether it works, only a boot shows."""
    return os.access("/dev/kvm", os.R_OK | os.W_OK)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def machine(folder: Path) -> Iterator[Machine]:
    """Give a machine that has booted from a fresh disk, and switch it off in the end."""
    need(*TOOLS)
    image = disk()
    one = Machine(folder, image, free_port())
    run(["qemu-img", "create", "-q", "-f", "qcow2", "-F", "raw", "-b", image / "disk", folder / "disk.qcow2"])
    try:
        one.start()
        yield one
    finally:
        one.kill()
