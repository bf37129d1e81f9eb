"""Command-line tools of this machine that the simulator is made with."""

from __future__ import annotations

import os
import shutil
import subprocess
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

# By which Debian signs what it publishes; Ubuntu has it in a package.
KEYRING = "/usr/share/keyrings/debian-archive-keyring.gpg"
# The Debian package that holds each tool; a file that is no program goes by its path.
PACKAGES = {
    "/usr/include/stdio.h": "libc6-dev",
    "/usr/include/yaml.h": "libyaml-dev",
    "/usr/sbin/mkfs.ext4": "e2fsprogs",
    "/usr/sbin/sfdisk": "fdisk",
    "/usr/sbin/sshd": "openssh-server",
    "/usr/share/OVMF/OVMF_CODE_4M.fd": "ovmf",
    KEYRING: "debian-archive-keyring",
    "apt-ftparchive": "apt-utils",
    "dockerd": "docker.io",
    "dpkg-deb": "dpkg",
    "gcc": "gcc",
    "gpg": "gnupg",
    "gpgconf": "gnupg",
    "gpgv": "gpgv",
    "make": "make",
    "mcopy": "mtools",
    "mmdebstrap": "mmdebstrap",
    "openssl": "openssl",
    "promtool": "prometheus",
    "qemu-img": "qemu-utils",
    "qemu-system-x86_64": "qemu-system-x86",
    "ssh": "openssh-client",
    "ssh-keygen": "openssh-client",
    "unshare": "util-linux",
}
# What unit tests run or build with; without one of them they skip.
FOR_TESTS = (
    "/usr/include/stdio.h",
    "/usr/include/yaml.h",
    "/usr/sbin/sshd",
    "gcc",
    "gpg",
    "gpgconf",
    "gpgv",
    "make",
    "openssl",
    "promtool",
    "ssh",
    "unshare",
)
ONE_AT_A_TIME = threading.Lock()


class BuildError(RuntimeError):
    """A step of the simulator failed; the message holds what was found and the next step."""


def need(*tools: str) -> None:
    """Make sure that the tools are there, installing their packages where apt and root are at hand."""
    # Steps run side by side, and apt takes one caller at a time.
    with ONE_AT_A_TIME:
        missing = [tool for tool in tools if not (Path(tool).exists() if "/" in tool else shutil.which(tool))]
        if missing:
            _install(missing)


def _install(missing: list[str]) -> None:
    packages = sorted({PACKAGES[tool] for tool in missing})
    if not shutil.which("apt-get") or os.geteuid() != 0:
        raise BuildError(
            f"{', '.join(missing)} not found. Expected: on PATH. "
            f"Next step: install {', '.join(packages)} (the names of Debian's and Ubuntu's packages)."
        )
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    # A machine that has just started is often busy with its own upgrades, which hold apt's lock.
    apt = ["apt-get", "-o", "DPkg::Lock::Timeout=600"]
    for command in ([*apt, "update", "-q"], [*apt, "install", "-qy", "--no-install-recommends", *packages]):
        result = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
        if result.returncode:
            raise BuildError(f"`{' '.join(command)}` failed: {(result.stderr or result.stdout).strip()[-800:]}")


def run(
    command: Sequence[str | Path],
    *,
    cwd: Path | None = None,
    stdin: bytes | None = None,
    environment: Mapping[str, str] | None = None,
) -> bytes:
    """Run a tool and return what it printed; a failure raises BuildError with its own words."""
    words = [str(word) for word in command]
    result = subprocess.run(words, cwd=cwd, input=stdin, env=environment, capture_output=True, check=False)
    if result.returncode:
        said = (result.stderr or result.stdout).decode(errors="replace").strip()
        raise BuildError(f"`{' '.join(words)}` ended with {result.returncode}: {said[-1500:]}")
    return result.stdout


if __name__ == "__main__":
    try:
        need(*FOR_TESTS)
    except BuildError as error:
        raise SystemExit(str(error)) from error
