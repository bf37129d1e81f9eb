"""Images of minimal Debian machines with systemd, made by mmdebstrap, without an image registry."""

from __future__ import annotations

import fcntl
import re
import subprocess
import sys
import time
from pathlib import Path

from tests.simulator.cache import cache_dir, key_of
from tests.simulator.docker import DockerError, docker, docker_binary, exists
from tests.simulator.tools import KEYRING, need

SUITES = ("trixie", "bookworm")
PACKAGES = (
    "usr-is-merged,systemd,systemd-sysv,dbus,udev,kmod,procps,adduser,sudo,iproute2,pciutils,"
    "python3,python3-apt,python3-venv,ca-certificates,gpgv"
)
# As debian-installer does it; otherwise a package with all of Perl behind it does.
MERGED_USR = "/usr/share/mmdebstrap/hooks/merged-usr"


def debian_mirror() -> str | None:
    """Return the Debian mirror of this machine's own apt sources, or None for mmdebstrap's default."""
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
    with (cache_dir() / f".mmdebstrap-{suite}.lock").open("w", encoding="ascii") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not exists("image", image):
            begun = time.monotonic()
            sys.stdout.write(f"node: Debian {suite} by mmdebstrap ...\n")
            sys.stdout.flush()
            _mmdebstrap(suite, mirror, image)
            sys.stdout.write(f"node: Debian {suite} by mmdebstrap: {time.monotonic() - begun:.0f} s\n")
    return image


def _mmdebstrap(suite: str, mirror: str | None, image: str) -> None:
    need("mmdebstrap", KEYRING)
    log = cache_dir() / f"mmdebstrap-{suite}.log"
    # A machine that was installed has read its package lists.
    options = [f"--include={PACKAGES}", f"--keyring={KEYRING}", f"--hook-dir={MERGED_USR}", "--skip=cleanup/apt/lists"]
    command = ["mmdebstrap", "--variant=minbase", *options, suite, "-", *([mirror] if mirror else [])]
    with log.open("wb") as output, subprocess.Popen(command, stdout=subprocess.PIPE, stderr=output) as made:
        # What is not whole gets no name.
        imported = subprocess.run([docker_binary(), "import", "-"], stdin=made.stdout, capture_output=True, check=False)
    if made.returncode:
        last = log.read_text(errors="replace").strip().splitlines()[-3:]
        raise DockerError(f"mmdebstrap {suite} failed: {last}. Next step: read {log}")
    if imported.returncode:
        raise DockerError(f"docker import of {suite} failed: {imported.stderr.decode(errors='replace').strip()}")
    docker("tag", imported.stdout.decode().strip(), image)
