"""A real sshd that plays OpenSSH for Windows: each session's command goes to the doubled shell of one machine."""

from __future__ import annotations

import os
import shlex
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

from tests.simulator.tools import need, run
from tests.simulator.windows.host import ROOT, Windows

SSHD = "/usr/sbin/sshd"
# Seconds for what a machine does whose cores are all busy with something else.
PATIENCE = 600
CONFIGURATION = """\
Port {port}
ListenAddress 127.0.0.1
HostKey {folder}/host_key
PidFile {folder}/sshd.pid
AuthorizedKeysFile {folder}/key.pub
PasswordAuthentication no
KbdInteractiveAuthentication no
UsePAM no
StrictModes no
PermitRootLogin prohibit-password
MaxStartups 200
ForceCommand cd {root} && exec {python} -m tests.simulator.windows.openssh {windows}
"""
# Windows' users are none of this machine's, and all of them may write the machine's folder.
WITH_USERS = 'mount --bind "$1" /etc/passwd; shift; exec "$@"'


class Sshd:
    """An sshd on a port of its own, with a key that is let in."""

    def __init__(self, windows: Windows, users: Sequence[str] = ()) -> None:
        need(SSHD)
        self.folder = windows.folder / "ssh"
        self.folder.mkdir()
        for key in ("host_key", "key"):
            run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "", "-f", self.folder / key])
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        text = CONFIGURATION.format(
            port=self.port, folder=self.folder, root=shlex.quote(str(ROOT)), python=sys.executable,
            windows=shlex.quote(str(windows.folder)),
        )  # fmt: skip
        (self.folder / "config").write_text(text, encoding="utf-8")
        command = [SSHD, "-D", "-e", "-f", str(self.folder / "config")]
        if users:
            passwd = self.folder / "passwd"
            lines = [f"{user}:*:0:0::{self.folder}:/bin/sh\n" for user in users]
            passwd.write_text(Path("/etc/passwd").read_text(encoding="utf-8") + "".join(lines), encoding="utf-8")
            command = ["unshare", "--mount", "/bin/sh", "-ec", WITH_USERS, "sh", str(passwd), *command]
        if os.geteuid() == 0:
            Path("/run/sshd").mkdir(exist_ok=True)
        self.log = (self.folder / "log").open("wb")
        self.process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=self.log, stderr=self.log)

    def __enter__(self) -> Sshd:
        deadline = time.monotonic() + PATIENCE
        while time.monotonic() < deadline and self.process.poll() is None:
            try:
                socket.create_connection(("127.0.0.1", self.port), timeout=1).close()
            except OSError:
                time.sleep(0.05)
            else:
                return self
        raise RuntimeError(f"sshd does not listen: {(self.folder / 'log').read_text(encoding='utf-8')}")

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.process.terminate()
        self.process.wait()
        self.log.close()

    def client_configuration(self, *names: str) -> str:
        """Return lines of ssh_config by which these names lead here."""
        return (
            f"Host {' '.join(names)}\n  HostName 127.0.0.1\n  Port {self.port}\n  IdentityFile {self.folder}/key\n"
            f"  IdentitiesOnly yes\n  StrictHostKeyChecking no\n  UserKnownHostsFile {self.folder}/known_hosts\n"
            "  LogLevel ERROR\n"
        )


def can_have_users() -> bool:
    """Tell whether this machine lets us give sshd users of its own."""
    command = ["unshare", "--mount", "mount", "--bind", "/etc/passwd", "/etc/passwd"]
    return bool(shutil.which("unshare")) and subprocess.run(command, capture_output=True, check=False).returncode == 0
