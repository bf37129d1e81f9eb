# Copyright (c) 2026, gpufarm contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A host is handed a newer bundle whole, or keeps what it has."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml
from ansible_collections.gpufarm.core.plugins.plugin_utils import bundle
from ansible_collections.gpufarm.core.tests.unit.playbooks.playbook_helper import LOCAL, run_playbook

pytestmark = [
    pytest.mark.controller,
    pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("dpkg-query"), reason="root writes below /var/lib"),
]

TRIXIE = "debian-trixie-amd64"
# A /var/lib that has nothing but what dpkg knows of this machine.
APART = 'mkdir -p "$0/dpkg"; mount --bind /var/lib/dpkg "$0/dpkg"; mount --rbind "$0" /var/lib; exec "$@"'


def fetch(source: str, target: Path) -> None:
    shutil.copy(source, target)


class Site:
    """A bundle on the control machine, and a host that is handed it."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.bundle, self.here = folder, folder / "bundle", folder / "lib/gpufarm/bundle"
        play = {"hosts": "all", "gather_facts": False, "tasks": [{"gpufarm.core.bundle_hand_on": {
            "bundle": str(self.bundle), "platform": TRIXIE, "packages": ["driver"],
        }}]}  # fmt: skip
        (folder / "lib").mkdir()
        (folder / "play.yml").write_text(yaml.safe_dump([play]))

    def collect(self, version: str) -> Path:
        """Have a bundle of this version, by which its repository is called, and tell where the package is."""
        place = f"apt/{TRIXIE}/of-{version}"
        contents = {
            f"{place}/InRelease": f"signed {version}",
            f"{place}/driver_{version}_amd64.deb": f"driver {version}",
        }
        files: dict[str, Any] = {}
        for name, text in contents.items():
            source = self.folder / hashlib.sha256(text.encode()).hexdigest()
            source.write_text(text)
            files[name] = {"sha256": source.name, "size": len(text), "from": "", "source": str(source)}
        (*_others, package) = files
        files[package]["package"] = Path(package).name
        repository = {"name": f"of-{version}", "suite": "trixie", "components": ["main"], "signed_by": ""}
        collected = {
            "files": files, "repositories": [{**repository, "of_role": False}],
            "wanted": [{"packages": ["driver"], "files": [package]}],
        }  # fmt: skip
        bundle.update(self.bundle, TRIXIE, collected, fetch)
        return self.bundle / package

    def hand_on(self, *options: str) -> tuple[str, str]:
        """How many tasks have failed and how many have changed something, and what was said."""
        under = ("unshare", "--mount", "sh", "-ec", APART, str(self.folder / "lib"))
        inventory = {"all": {"hosts": {"host": LOCAL}}}
        run = run_playbook(self.folder, inventory, str(self.folder / "play.yml"), *options, under=under)
        said = " ".join((run.stdout + run.stderr).split())
        changed, failed = re.findall(r"changed=(\d) unreachable=0 failed=(\d)", said)[0]
        return f"changed {changed}, failed {failed}", said

    def there(self) -> dict[str, str]:
        """What the host has."""
        return {
            path.relative_to(self.here).as_posix(): path.read_text() for path in self.here.rglob("*") if path.is_file()
        }


def test_a_damaged_bundle_takes_nothing_from_a_host(tmp_path: Path) -> None:
    site = Site(tmp_path)
    site.collect("570")
    assert site.hand_on()[0] == "changed 1, failed 0"
    before = site.there()
    assert set(before) == {
        "apt.conf", "apt/of-570/InRelease", "apt/of-570/driver_570_amd64.deb", "sources.list.d/of-570.sources"
    }  # fmt: skip
    package = site.collect("580")
    package.write_text("Driver 580")
    for options in ((), ("--check",)):
        counts, said = site.hand_on(*options)
        assert counts == "changed 0, failed 1" and f"{package} has the SHA-256 " in said, said
        assert site.there() == before
    package.write_text("driver 580")
    assert site.hand_on("--check")[0] == "changed 1, failed 0" and site.there() == before
    assert site.hand_on()[0] == "changed 1, failed 0"
    assert site.there() == {name.replace("570", "580"): text.replace("570", "580") for name, text in before.items()}
    assert site.hand_on()[0] == "changed 0, failed 0"
