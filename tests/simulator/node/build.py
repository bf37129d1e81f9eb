"""Images of minimal Debian machines with systemd, made by debootstrap, without an image registry."""

from __future__ import annotations

import fcntl
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.simulator.cache import cache_dir, key_of
from tests.simulator.docker import DockerError, docker_binary, exists
from tests.simulator.tools import need

SUITES = ("trixie", "bookworm")
PACKAGES = (
    "systemd,systemd-sysv,dbus,udev,kmod,procps,sudo,iproute2,pciutils,"
    "python3,python3-apt,python3-venv,ca-certificates,gpgv"
)


def debian_mirror() -> str | None:
    """Return the Debian mirror of this machine's own apt sources, or None for debootstrap's default."""
    if "ID=debian" not in Path("/etc/os-release").read_text(encoding="utf-8").split("\n"):
        return None
    sources = [Path("/etc/apt/sources.list"), *sorted(Path("/etc/apt/sources.list.d").glob("*"))]
    for source in sources:
        if source.is_file():
            text = source.read_text(encoding="utf-8", errors="replace")
            found = re.search(r"^(?:URIs:\s*|deb\s+(?:\[[^]]*\]\s*)?)(\S+/debian/?)(?:\s|$)", text, re.MULTILINE)
            if found:
                return found.group(1)
    return None


def base(suite: str) -> str:
    """Return the name of an image with a minimal ``suite`` and systemd, building it if it is missing."""
    mirror = debian_mirror()
    image = f"gpufarm-base:{suite}-{key_of([PACKAGES, str(mirror)])}"
    cache_dir().mkdir(parents=True, exist_ok=True)
    with (cache_dir() / f".debootstrap-{suite}.lock").open("w", encoding="ascii") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not exists("image", image):
            begun = time.monotonic()
            sys.stdout.write(f"node: Debian {suite} by debootstrap ...\n")
            sys.stdout.flush()
            _debootstrap(suite, mirror, image)
            sys.stdout.write(f"node: Debian {suite} by debootstrap: {time.monotonic() - begun:.0f} s\n")
    return image


def _debootstrap(suite: str, mirror: str | None, image: str) -> None:
    need("debootstrap")
    log = cache_dir() / f"debootstrap-{suite}.log"
    with tempfile.TemporaryDirectory(dir=cache_dir(), prefix=f"{suite}-") as folder:
        command = ["debootstrap", "--variant=minbase", f"--include={PACKAGES}", suite, folder]
        with log.open("wb") as output:
            result = subprocess.run(
                [*command, *([mirror] if mirror else [])], stdout=output, stderr=output, check=False
            )
        if result.returncode:
            last = log.read_text(errors="replace").strip().splitlines()[-1:]
            raise DockerError(f"debootstrap {suite} failed: {last}. Next step: read {log}")
        shutil.rmtree(Path(folder, "var/cache/apt/archives"), ignore_errors=True)
        archive = subprocess.Popen(["tar", "-C", folder, "-c", "."], stdout=subprocess.PIPE)
        subprocess.run([docker_binary(), "import", "-", image], stdin=archive.stdout, check=True, capture_output=True)
        if archive.wait():
            raise DockerError(f"tar of {folder} failed. Next step: check free space under {cache_dir()}")
