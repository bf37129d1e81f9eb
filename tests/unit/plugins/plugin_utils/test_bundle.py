# Copyright (c) 2026, gpufarm contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The folder of a site without internet: what is brought, what is handed on, and what is refused."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from ansible_collections.gpufarm.core.plugins.filter.bundle_entry import bundle_entry
from ansible_collections.gpufarm.core.plugins.filter.bundle_refusal import bundle_refusal
from ansible_collections.gpufarm.core.plugins.module_utils.apt_bundle import BundleError
from ansible_collections.gpufarm.core.plugins.plugin_utils import bundle

# The bundle is on the control node.
pytestmark = pytest.mark.controller

TRIXIE = "debian-trixie-amd64"
DEBIAN = {"name": "debian.example_debian", "suite": "trixie", "components": ["main"], "signed_by": "", "of_role": False}
CUDA = {"name": "nvidia-cuda", "suite": "/", "components": [], "signed_by": "", "of_role": True}
INDEX = f"apt/{TRIXIE}/nvidia-cuda/InRelease"
LISTS = f"apt/{TRIXIE}/nvidia-cuda/Packages.xz"
LISTS_OF_DEBIAN = f"apt/{TRIXIE}/debian.example_debian/dists/trixie/main/binary-amd64/Packages.xz"
DRIVER = f"apt/{TRIXIE}/nvidia-cuda/driver_580_amd64.deb"
OLDER = f"apt/{TRIXIE}/nvidia-cuda/driver_570_amd64.deb"
ENGINE = f"apt/{TRIXIE}/debian.example_debian/docker-ce_5%3a27.5.1-1_amd64.deb"
KEY = f"keys/{TRIXIE}/nvidia-cuda.asc"
ZIP = "releases/nomad/1.11.3/nomad_1.11.3_linux_amd64.zip"


class Host:
    """A host that has collected, and what was fetched from it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.fetched: list[str] = []

    def fetch(self, source: str, target: Path) -> None:
        self.fetched.append(source)
        shutil.copy(self.folder / source, target)

    def collected(self, **contents: str) -> dict[str, Any]:
        """What the module tells of these files, by the names of their constants."""
        files: dict[str, dict[str, Any]] = {}
        for constant, text in contents.items():
            name = globals()[constant]
            (self.folder / constant).write_text(text, encoding="utf-8")
            digest = hashlib.sha256(text.encode()).hexdigest()
            files[name] = {"sha256": digest, "size": len(text), "from": f"https://up.example/{constant}"}
            files[name]["source"] = constant
            files[name] |= {"package": Path(name).name} if name.endswith(".deb") else {}
        debs = [name for name in files if name.endswith(".deb")]
        return {
            "files": files,
            "repositories": [DEBIAN, CUDA],
            "wanted": [{"packages": [f"driver={Path(name).name.split('_')[1]}.*"], "files": [name]} for name in debs],
        }


@pytest.fixture
def host(tmp_path: Path) -> Host:
    (tmp_path / "host").mkdir()
    return Host(tmp_path / "host")


@pytest.fixture
def folder(tmp_path: Path, host: Host) -> Path:
    """A bundle that has been made."""
    collected = host.collected(INDEX="signed", DRIVER="driver", OLDER="older", KEY="key", ZIP="zip")
    fetched, removed = bundle.update(tmp_path / "bundle", TRIXIE, collected, host.fetch)
    assert (sorted(fetched), removed) == (sorted([INDEX, DRIVER, OLDER, KEY, ZIP]), [])
    return tmp_path / "bundle"


def change(folder: Path, **changes: Any) -> None:
    """Write other parts into the manifest, as somebody may who carries it."""
    manifest = json.loads((folder / bundle.MANIFEST).read_text("utf-8"))
    (folder / bundle.MANIFEST).write_text(json.dumps(manifest | changes), "utf-8")


def refusal(call: Any, *arguments: Any) -> str:
    with pytest.raises(BundleError) as caught:
        call(*arguments)
    text = str(caught.value)
    assert ". Expected: " in text and ". Next step: " in text
    return text


def test_the_manifest_says_what_there_is_and_where_it_comes_from(folder: Path) -> None:
    told = bundle.read(folder)["files"]
    assert told[DRIVER].pop("collected").startswith("20")
    assert told[DRIVER] == {
        "sha256": hashlib.sha256(b"driver").hexdigest(),
        "size": 6,
        "from": "https://up.example/DRIVER",
        "package": "driver_580_amd64.deb",
    }
    assert bundle_refusal(str(folder), TRIXIE) == ""


def test_what_is_whole_is_not_fetched_again_and_keeps_its_time(folder: Path, host: Host) -> None:
    before = bundle.read(folder)
    host.fetched.clear()
    collected = host.collected(INDEX="signed", DRIVER="driver", OLDER="older", KEY="key", ZIP="zip")
    # What the bundle has the host does not download.
    collected["files"][DRIVER]["source"] = ""
    assert bundle.update(folder, TRIXIE, collected, host.fetch) == ([], [])
    assert host.fetched == [] and bundle.read(folder) == before


def test_what_was_read_is_not_read_once_more(folder: Path, host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    manifest = bundle.read(folder)
    have = bundle.whole(folder, manifest, manifest["files"])
    # Another run has been there since; a size tells, and so does the manifest.
    (folder / KEY).write_text("longer")
    (folder / OLDER).write_text("oldes")
    change(folder, files={**manifest["files"], OLDER: {**manifest["files"][OLDER], "sha256": "0" * 64}})
    read: list[str] = []
    checksum_of = bundle.release.checksum_of
    monkeypatch.setattr(bundle.release, "checksum_of", lambda path: read.append(path.name) or checksum_of(path))
    collected = host.collected(INDEX="signed anew", DRIVER="driver", OLDER="older", KEY="key", ZIP="zip")
    fetched, _removed = bundle.update(folder, TRIXIE, collected, host.fetch, have=have)
    assert fetched == [INDEX, OLDER, KEY] and set(read) == {
        *(Path(name).name for name in (OLDER, KEY)), *(f".{Path(name).name}.gpufarm.part" for name in fetched)
    }  # fmt: skip


def test_what_is_damaged_is_fetched_again(folder: Path, host: Host) -> None:
    (folder / DRIVER).write_text("Driver")
    assert DRIVER not in bundle.whole(folder, bundle.read(folder), [DRIVER, OLDER])
    collected = host.collected(INDEX="signed", DRIVER="driver", OLDER="older", KEY="key", ZIP="zip")
    assert bundle.update(folder, TRIXIE, collected, host.fetch) == ([DRIVER], [])
    assert (folder / DRIVER).read_text() == "driver"


def test_what_nothing_needs_any_more_goes_and_releases_stay(folder: Path, host: Host) -> None:
    collected = host.collected(INDEX="signed anew", DRIVER="driver", KEY="key")
    assert bundle.update(folder, TRIXIE, collected, host.fetch) == ([INDEX], [OLDER])
    assert not (folder / OLDER).exists() and (folder / ZIP).exists()
    assert bundle.differences(folder, bundle.read(folder)) == []


def test_hosts_that_were_left_out_keep_theirs(folder: Path, host: Host) -> None:
    collected = {**host.collected(INDEX="signed anew", DRIVER="newer"), "repositories": [DEBIAN]}
    assert bundle.update(folder, TRIXIE, collected, host.fetch, partial=True) == ([INDEX, DRIVER], [])
    manifest = bundle.read(folder)
    assert bundle.differences(folder, manifest) == [] and (folder / DRIVER).read_text() == "newer"
    assert bundle.names_for(manifest, TRIXIE, ["driver=570.*"]) == sorted([INDEX, OLDER, KEY])
    assert len(manifest["platforms"][TRIXIE]["wanted"]) == 2
    assert manifest["platforms"][TRIXIE]["repositories"] == [DEBIAN, CUDA]


def test_what_others_keep_is_in_the_lists_beside_it(folder: Path, host: Host) -> None:
    """apt goes by the lists, and would ask for packages that only they have."""
    full = {"DRIVER": "driver", "OLDER": "older", "KEY": "key"}
    bundle.update(folder, TRIXIE, host.collected(INDEX="signed", LISTS="lists", **full), host.fetch)
    before = bundle.read(folder)
    moved = host.collected(INDEX="signed anew", LISTS="moved", DRIVER="driver")
    with pytest.raises(BundleError) as caught:
        bundle.update(folder, TRIXIE, moved, host.fetch, partial=True)
    assert str(caught.value).startswith("the lists of packages of nvidia-cuda have moved since the bundle got packages")
    assert "Next step: run playbooks/bundle.yml without --limit" in str(caught.value)
    assert bundle.read(folder) == before and (folder / LISTS).read_text() == "lists"
    # Of another repository, and where others need nothing else.
    for collected, fetched in (
        (host.collected(INDEX="signed anew", LISTS="lists", LISTS_OF_DEBIAN="new", DRIVER="driver"),
         [INDEX, LISTS_OF_DEBIAN]),
        (host.collected(INDEX="signed anew", LISTS="moved", **full), [LISTS]),
    ):  # fmt: skip
        assert bundle.update(folder, TRIXIE, collected, host.fetch, partial=True) == (fetched, [])
    # All hosts are in the run.
    bundle.update(folder, TRIXIE, host.collected(INDEX="signed", LISTS="again", DRIVER="driver"), host.fetch)


def test_hosts_of_another_platform_keep_theirs(folder: Path, host: Host) -> None:
    collected = {**host.collected(ZIP="zip"), "repositories": [], "wanted": []}
    assert bundle.update(folder, "debian-bookworm-amd64", collected, host.fetch) == ([], [])
    assert sorted(bundle.read(folder)["platforms"]) == ["debian-bookworm-amd64", TRIXIE]
    assert bundle.differences(folder, bundle.read(folder)) == []


def test_what_changes_on_its_way_leaves_what_was_there(folder: Path, host: Host) -> None:
    collected = host.collected(DRIVER="newer")
    (host.folder / "DRIVER").write_text("other")
    assert "has changed on its way" in refusal(bundle.update, folder, TRIXIE, collected, host.fetch)
    assert (folder / DRIVER).read_text() == "driver" and bundle.differences(folder, bundle.read(folder)) == []


def test_what_is_under_another_name_or_of_another_platform_is_not_asked_for(folder: Path, host: Host) -> None:
    """The module downloads nothing that the bundle has anywhere."""
    collected = host.collected(DRIVER="driver", INDEX="signed")
    other = "debian-bookworm-amd64"
    files = {name.replace(TRIXIE, other): {**file, "source": ""} for name, file in collected["files"].items()}
    host.fetched.clear()
    assert bundle.update(folder, other, {**collected, "files": files}, host.fetch) == (list(files), [])
    assert host.fetched == [] and (folder / DRIVER.replace(TRIXIE, other)).read_text() == "driver"
    assert bundle.differences(folder, bundle.read(folder)) == []


def test_what_has_gone_while_it_was_compared_is_told(folder: Path, host: Host) -> None:
    collected = host.collected(DRIVER="driver")
    collected["files"][DRIVER]["source"] = ""
    (folder / DRIVER).unlink()
    assert "has changed while it was compared" in refusal(bundle.update, folder, TRIXIE, collected, host.fetch)


def test_a_run_that_ends_early_leaves_what_was_there(folder: Path, host: Host) -> None:
    def full(source: str, target: Path) -> None:
        host.fetch(source, target)
        if source == "KEY":
            raise OSError(28, "No space left on device")

    collected = host.collected(INDEX="newer", DRIVER="newer", KEY="newer")
    with pytest.raises(OSError, match="No space left"):
        bundle.update(folder, TRIXIE, collected, full)
    assert bundle.differences(folder, bundle.read(folder)) == [] and (folder / INDEX).read_text() == "signed"


def test_a_run_mends_what_one_that_was_killed_has_left(folder: Path, host: Host) -> None:
    part = folder / "releases/nomad/.nomad.zip.gpufarm.part"
    # The folder may be one that others download into, too.
    others = [folder / ".film.part", folder / "releases/nomad/.nomad.zip.part"]
    strays = [f"apt/{TRIXIE}/nvidia-cuda/driver_590_amd64.deb", f"keys/{TRIXIE}/other.asc"]
    for path in (part, *others, *(folder / name for name in strays)):
        path.write_text("stray")
    collected = host.collected(INDEX="signed", DRIVER="driver", OLDER="older", KEY="key", ZIP="zip")
    assert bundle.update(folder, TRIXIE, collected, host.fetch) == ([], strays)
    assert not part.exists() and all(path.exists() for path in others)
    assert bundle.differences(folder, bundle.read(folder)) == []


def test_a_repository_that_no_host_could_be_given_is_told_while_it_is_collected(tmp_path: Path, host: Host) -> None:
    collected = {**host.collected(ZIP="zip"), "repositories": [{**DEBIAN, "signed_by": "/root/key.gpg"}]}
    assert "a keyring that the host has itself" in refusal(bundle.update, tmp_path / "b", TRIXIE, collected, host.fetch)
    assert not (tmp_path / "b").exists()


@pytest.mark.parametrize(
    "name",
    [
        "../x", "/dev/null/x", f"apt/{TRIXIE}/../../x", "apt/debian-bookworm-amd64/x.deb",
        "keys/debian-bookworm-amd64/x.asc", "manifest.json", ".lock", "",
    ],
)  # fmt: skip
def test_a_host_that_collects_writes_nowhere_else(tmp_path: Path, host: Host, name: str) -> None:
    collected = host.collected(KEY="key")
    collected["files"][name] = collected["files"].pop(KEY)
    assert f"has collected {name!r}" in refusal(bundle.update, tmp_path / "b", TRIXIE, collected, host.fetch)
    assert host.fetched == [] and not (tmp_path / "b").exists()


def test_a_host_is_handed_what_it_wants_and_what_vouches_for_it(folder: Path) -> None:
    manifest = bundle.read(folder)
    assert bundle.names_for(manifest, TRIXIE, ["driver=580.*"]) == sorted([INDEX, DRIVER, KEY])
    assert bundle.names_for(manifest, TRIXIE, []) == sorted([INDEX, KEY])
    assert bundle.on_node(DRIVER, TRIXIE) == "apt/nvidia-cuda/driver_580_amd64.deb"
    assert bundle.on_node(f"apt/{TRIXIE}/a/{TRIXIE}/b", TRIXIE) == f"apt/a/{TRIXIE}/b"
    assert "sources.list.d/nvidia-cuda.sources" in bundle.known(manifest, TRIXIE)


@pytest.mark.parametrize("package", ["driver", "driver=580", "driver=58*"])
def test_who_asks_by_another_version_is_handed_what_fits(folder: Path, package: str) -> None:
    """Fabric Manager goes by the driver that a node has, and who collects has another."""
    manifest = bundle.read(folder)
    found = bundle.names_for(manifest, TRIXIE, [package])
    assert DRIVER in found and (OLDER in found) is (package == "driver")
    for other in ("driver=58", "drive", "driver=590-*"):
        assert f"the bundle has not {other} for" in refusal(bundle.names_for, manifest, TRIXIE, [other])


@pytest.mark.parametrize("package", ["docker-ce", "docker-ce=5:27.5.*", "docker-ce=5:27.5.1-1"])
def test_a_version_has_its_epoch_as_apt_takes_it(folder: Path, host: Host, package: str) -> None:
    bundle.update(folder, TRIXIE, host.collected(ENGINE="engine"), host.fetch, partial=True)
    manifest = bundle.read(folder)
    assert ENGINE in bundle.names_for(manifest, TRIXIE, [package])
    for other in ("docker-ce=27.5.*", "docker-ce=5:28.*"):
        assert f"the bundle has not {other} for" in refusal(bundle.names_for, manifest, TRIXIE, [other])


def test_what_is_not_there_is_named(folder: Path) -> None:
    manifest = bundle.read(folder)
    said = refusal(bundle.names_for, manifest, TRIXIE, ["driver=580.*", "driver=590.*", "cuda-toolkit-13-0"])
    assert said.startswith(f"the bundle has not cuda-toolkit-13-0, driver=590.* for {TRIXIE}. Expected: ")
    assert "run playbooks/bundle.yml again with this inventory" in said
    said = refusal(bundle.names_for, manifest, "debian-bookworm-amd64", [])
    assert said.startswith(f"the bundle has packages for {TRIXIE}. Expected: some for debian-bookworm-amd64. ")


def test_files_that_are_missing_cut_off_or_of_others_are_named(folder: Path) -> None:
    (folder / DRIVER).write_text("driv")
    (folder / OLDER).unlink()
    (folder / "apt/strange.deb").write_text("strange")
    said = bundle_refusal(str(folder), TRIXIE)
    for part in (f"{DRIVER} has 4 bytes, not 6", f"{OLDER} is not there", "apt/strange.deb is not in the manifest"):
        assert part in said
    for number in range(9):
        (folder / f"apt/{number}.deb").touch()
    assert bundle_refusal(str(folder), TRIXIE).count(".deb") == 5 and "and 7 more" in bundle_refusal(
        str(folder), TRIXIE
    )


def test_a_damaged_file_is_named(folder: Path) -> None:
    (folder / DRIVER).write_text("Driver")
    assert bundle_refusal(str(folder), TRIXIE) == "", "sizes alone do not tell"
    said = refusal(bundle.require_whole, folder, bundle.read(folder), DRIVER)
    assert said.startswith(f"{folder / DRIVER} has the SHA-256 ") and hashlib.sha256(b"driver").hexdigest() in said
    (folder / DRIVER).unlink()
    assert f"{folder / DRIVER} is not there" in refusal(bundle.require_whole, folder, bundle.read(folder), DRIVER)


def test_what_is_no_bundle(tmp_path: Path) -> None:
    said = bundle_refusal(str(tmp_path), TRIXIE)
    assert said.startswith(f"{tmp_path}/manifest.json cannot be read (No such file or directory). Expected: a bundle")
    (tmp_path / "manifest.json").write_text("{")
    assert "is no JSON" in bundle_refusal(str(tmp_path), TRIXIE)
    for text in ("[]", '{"format": 2}'):
        (tmp_path / "manifest.json").write_text(text)
        assert "is no manifest of format 1" in bundle_refusal(str(tmp_path), TRIXIE)


# --- who carries a bundle may write its manifest -----------------------------------------------


@pytest.mark.parametrize("path", ["../evil", "/etc/passwd", "apt/../../evil"])
def test_no_path_leads_out(folder: Path, path: str) -> None:
    change(folder, files={path: {"sha256": "", "size": 0}})
    assert f"names {path}" in refusal(bundle.read, folder)


@pytest.mark.parametrize("path", ["apt.conf", "sources.list.d/evil.sources", ZIP, "apt/debian-bookworm-amd64/a.deb"])
def test_nothing_but_packages_of_its_platform_is_handed_on(folder: Path, path: str) -> None:
    """Settings of apt, or an entry that trusts what is not signed, would be read by the node's apt."""
    file = {"sha256": "", "size": 0, "from": "", "collected": ""}
    change(folder, files={path: file}, platforms={
        TRIXIE: {"repositories": [], "wanted": [{"packages": ["driver"], "files": [path]}]}
    })  # fmt: skip
    assert f"the manifest wants {path}" in refusal(bundle.names_for, bundle.read(folder), TRIXIE, ["driver"])


@pytest.mark.parametrize(
    "changes",
    [
        {"suite": "trixie\nTrusted: yes"},
        {"components": ["main", "x\nTrusted: yes"]},
        {"name": "debian [trusted=yes]"},
        {"name": "../elsewhere"},
        {"name": "/etc/cron.d/evil"},
        {"name": "debian/../../../../../etc/apt/sources.list.d/evil"},
        {"suite": "trixie/../../../elsewhere"},
        {"suite": "../elsewhere"},
        {"components": ["main/.."]},
        {"signed_by": "/var/lib/gpufarm/bundle/keys/evil.asc"},
        {"signed_by": "/usr/share/keyrings/../../../var/lib/gpufarm/bundle/keys/evil.asc"},
        {"signed_by": "-----BEGIN PGP PUBLIC KEY BLOCK-----"},
    ],
)
def test_no_entry_trusts_more_than_the_host_does(folder: Path, changes: dict[str, Any]) -> None:
    change(folder, platforms={TRIXIE: {"repositories": [{**DEBIAN, **changes}], "wanted": []}})
    assert "the manifest has a repository" in refusal(bundle.texts, bundle.read(folder), TRIXIE)


@pytest.mark.parametrize("suite", ["/", "stable/deb/amd64/", "trixie/updates", "a..b"])
def test_suites_may_have_a_path(suite: str) -> None:
    assert f"Suites: {suite}\n" in bundle.entry({**DEBIAN, "suite": suite}, TRIXIE)  # type: ignore[typeddict-item]


def test_entries() -> None:
    security = {**DEBIAN, "suite": "trixie-security", "signed_by": "/usr/share/keyrings/debian-archive-keyring.gpg"}
    manifest: Any = {"platforms": {TRIXIE: {"repositories": [DEBIAN, security, CUDA], "wanted": []}}}
    texts = bundle.texts(manifest, TRIXIE)
    # Its role has the key, and writes the entry when it has.
    assert sorted(texts) == ["apt.conf", "sources.list.d/debian.example_debian.sources"]
    first, second = texts["sources.list.d/debian.example_debian.sources"].split("\n\n")
    assert (
        "URIs: file:/var/lib/gpufarm/bundle/apt/debian.example_debian/\nSuites: trixie\nArchitectures: amd64\n" in first
    )
    assert "Signed-By" not in first and "Check-Valid-Until: no" in first
    assert "Signed-By: /usr/share/keyrings/debian-archive-keyring.gpg\n" in second
    assert "rusted" not in "".join(texts.values())


@pytest.mark.parametrize(("platform", "architecture"), [(TRIXIE, "amd64"), ("ubuntu-noble-arm64-wsl", "arm64")])
def test_roles_have_their_entries_from_here(platform: str, architecture: str) -> None:
    assert bundle_entry("nvidia-cuda", platform) == (
        "# Ansible managed\nTypes: deb\nURIs: file:/var/lib/gpufarm/bundle/apt/nvidia-cuda/\nSuites: /\n"
        f"Architectures: {architecture}\nSigned-By: /etc/apt/keyrings/nvidia-cuda.asc\nCheck-Valid-Until: no\n"
        "By-Hash: no\nLanguages: none\nTargets: Packages\n"
    )


def test_parts() -> None:
    sizes = {"a": 2, "b": 2, "c": 9, "d": 1}
    assert list(bundle.parts(sizes, sizes.__getitem__, 4)) == [["a", "b"], ["c"], ["d"]]
    assert list(bundle.parts([], sizes.__getitem__, 4)) == []
