"""A Windows machine with WSL, as far as this collection calls it: programs that behave as docs/wsl.md says.

Where a behaviour is known, a comment names its source: a file of microsoft/WSL (tag 2.9.4), or an issue. What is only
assumed is listed in docs/wsl.md under "Assumed".
"""

import sys
from pathlib import Path

# What asks a Windows machine, pypsrp and paramiko. Each run of Ansible would read it for a quarter of its start.
PACKAGES = Path(sys.prefix) / "windows"
