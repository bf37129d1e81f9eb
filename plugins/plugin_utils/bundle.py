# Copyright (c) 2026, gpufarm contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""The bundle of a site without internet: a folder on the control machine, and the manifest of what is in it."""

from __future__ import annotations

import contextlib
import fcntl
import fnmatch
import json
import re
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypedDict, cast

from ansible_collections.gpufarm.core.plugins.module_utils import release
from ansible_collections.gpufarm.core.plugins.module_utils.apt_bundle import ON_NODE, BundleError, is_inside
from ansible_collections.gpufarm.core.plugins.module_utils.text import first_of

FORMAT = 1
MANIFEST = "manifest.json"
# How files end that are not whole yet; .part alone is what others call theirs.
STAGED = ".gpufarm.part"
# What a repository has signed is new without any list of its packages being so.
SIGNED = ("/InRelease", "/Release", "/Release.gpg")
# A repository's name is a folder and a file of the node; suites and components may have a path that stays inside.
NAME = re.compile(r"[A-Za-z0-9_+~][A-Za-z0-9._+~:-]*")
WORD = re.compile(r"(?!(?:.*/)?[.][.](?:/|$))[A-Za-z0-9_+~/][A-Za-z0-9._+~:/-]*")
KEYRING = re.compile(r"/(?:usr/share/keyrings|etc/apt/(?:keyrings|trusted[.]gpg[.]d))/[A-Za-z0-9_+~-][A-Za-z0-9._+~-]*")
AGAIN = "run playbooks/bundle.yml again with this inventory, where there is internet"


# A file of the bundle: where it was collected, without a login, and when. A package is name_version_architecture.deb.
File = TypedDict("File", {"sha256": str, "size": int, "from": str, "collected": str, "package": str}, total=False)


class Wanted(TypedDict):
    """Packages, as a role asks for them, and the files that a host needs for them that has nothing."""

    packages: list[str]
    files: list[str]


class Repository(TypedDict):
    """How apt has to know a repository, or one suite of it."""

    name: str
    suite: str
    components: list[str]
    signed_by: str
    of_role: bool


class Platform(TypedDict):
    """What the bundle has for one distribution, release and architecture."""

    repositories: list[Repository]
    wanted: list[Wanted]


class Manifest(TypedDict):
    """What is in the bundle; files by their paths, platforms by their names."""

    format: int
    files: dict[str, File]
    platforms: dict[str, Platform]


def read(folder: Path) -> Manifest:
    """The manifest of a bundle."""
    path = folder / MANIFEST
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise BundleError(
            f"{path} cannot be read ({error.strerror})", "a bundle, which playbooks/bundle.yml makes",
            "correct gpufarm_bundle, or make the bundle and carry the whole folder here",
        ) from error  # fmt: skip
    except ValueError as error:
        raise BundleError(f"{path} is no JSON ({error})", "a manifest as it was written", AGAIN) from error
    if not isinstance(found, dict) or found.get("format") != FORMAT:
        raise BundleError(
            f"{path} is no manifest of format {FORMAT}", "a bundle of this version of the collection", AGAIN
        )
    strange = [name for name in found["files"] if not is_inside(name)]
    if strange:
        raise BundleError(f"{path} names {strange[0]}", "paths below its folder", AGAIN)
    return cast(Manifest, found)


def read_or_new(folder: Path) -> Manifest:
    """The manifest of a bundle that may have to be made."""
    return read(folder) if (folder / MANIFEST).exists() else Manifest(format=FORMAT, files={}, platforms={})


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Whoever writes to a bundle does so alone."""
    release.make_folder(folder)
    with (folder / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def whole(folder: Path, manifest: Manifest, names: Iterable[str]) -> dict[str, str]:
    """The checksums of those of the files that are there as the manifest has them."""
    files = manifest["files"]
    return {
        name: files[name]["sha256"] for name in names if release.checksum_of(folder / name) == files[name]["sha256"]
    }


def require_whole(folder: Path, manifest: Manifest, name: str) -> None:
    """Refuse a file that is not as the manifest has it."""
    found = release.checksum_of(folder / name)
    wanted = manifest["files"][name]["sha256"]
    if found != wanted:
        raise BundleError(
            f"{folder / name} {'is not there' if found is None else f'has the SHA-256 {found}'}",
            f"{wanted}, which the manifest of the bundle has", AGAIN,
        )  # fmt: skip


def differences(folder: Path, manifest: Manifest) -> list[str]:
    """What is not as the manifest has it, by names and sizes alone, which is a moment's work for a large bundle."""
    found = {path.relative_to(folder).as_posix(): path.stat().st_size for path in folder.rglob("*") if path.is_file()}
    found = {name: size for name, size in found.items() if name != MANIFEST and not name.endswith((".lock", ".part"))}
    files = manifest["files"]
    return [
        *(f"{name} is not there" for name in sorted(set(files) - set(found))),
        *(f"{name} has {found[name]} bytes, not {files[name]['size']}" for name in sorted(set(files) & set(found))
          if found[name] != files[name]["size"]),
        *(f"{name} is not in the manifest" for name in sorted(set(found) - set(files))),
    ]  # fmt: skip


def require(folder: Path, platform: str) -> Manifest:
    """The manifest of a bundle that is whole, as far as a moment's look tells, and has hosts of this platform."""
    manifest = read(folder)
    found = differences(folder, manifest)
    if found:
        raise BundleError(
            f"the bundle {folder} is not as its manifest has it: {first_of(found, 5)}",
            "what was collected, and nothing of others",
            f"carry the folder here once more; where it is so at its source, {AGAIN}",
        )
    platform_of(manifest, platform)
    return manifest


# --- what a host is handed ------------------------------------------------------------------


def platform_of(manifest: Manifest, platform: str) -> Platform:
    """What there is for hosts of a platform."""
    if platform not in manifest["platforms"]:
        raise BundleError(
            f"the bundle has packages for {', '.join(sorted(manifest['platforms'])) or 'no hosts'}",
            f"some for {platform}", AGAIN,
        )  # fmt: skip
    return manifest["platforms"][platform]


def places_of(platform: str) -> tuple[str, str]:
    """How the paths of a platform's files begin."""
    return f"apt/{platform}/", f"keys/{platform}/"


def names_for(manifest: Manifest, platform: str, packages: Iterable[str]) -> list[str]:
    """The files that a host of a platform may need for these packages: what apt reads, and the packages."""
    wanted = platform_of(manifest, platform)["wanted"]
    by_package = {
        package: [each for each in wanted if package in each["packages"]]
        or [each for each in wanted if brings(each, package, manifest)]
        for package in packages
    }
    missing = sorted(package for package, found in by_package.items() if not found)
    if missing:
        raise BundleError(
            f"the bundle has not {', '.join(missing)} for {platform}", "all that the roles of this host install", AGAIN
        )
    found = {name for those in by_package.values() for each in those for name in each["files"]}
    apart = places_of(platform)
    strange = sorted(name for name in found if not name.startswith(apart) or name not in manifest["files"])
    if strange:
        raise BundleError(f"the manifest wants {strange[0]} for {platform}", "files of that platform", AGAIN)
    found |= {name for name, file in manifest["files"].items() if name.startswith(apart) and "package" not in file}
    return sorted(found)


def brings(wanted: Wanted, package: str, manifest: Manifest) -> bool:
    """Whether there is a package for those who ask for it by another version, as by that of a driver they have."""
    name, _equals, version = package.partition("=")
    # In the name of a file apt escapes the colon of an epoch.
    files = [manifest["files"].get(path, {}).get("package", "").replace("%3a", ":") for path in wanted["files"]]
    return any(fnmatch.fnmatchcase(file, f"{name}_{version or '*'}_*") for file in files)


def on_node(name: str, platform: str) -> str:
    """Where a host has a file of the bundle, below its own folder."""
    return name.replace(f"/{platform}/", "/", 1)


def entry(repository: Repository, platform: str) -> str:
    """What apt reads of a repository of the bundle.

    Its signature is verified as ever. That it is still in date is not asked for: it was when it was collected, and a
    site without internet has no newer one. What a manifest says is no more than a word each, and no key of its own.
    Of other architectures, which a host may know as well, there are no lists.
    """
    words = [repository["suite"], *repository["components"]]
    keyring = repository["signed_by"]
    named = NAME.fullmatch(repository["name"]) and all(map(WORD.fullmatch, words))
    if not named or (keyring and not KEYRING.fullmatch(keyring)):
        raise BundleError(
            f"the manifest has a repository {' '.join([repository['name'], *words, keyring])!r}",
            "names, and a keyring that the host has itself, below /usr/share/keyrings or /etc/apt", AGAIN,
        )  # fmt: skip
    lines = {
        "Types": "deb",
        "URIs": f"file:{ON_NODE}/apt/{repository['name']}/",
        "Suites": repository["suite"],
        "Architectures": " ".join(re.findall("-(amd64|arm64)(?:-wsl)?$", platform)),
        "Components": " ".join(repository["components"]),
        "Signed-By": repository["signed_by"],
        "Check-Valid-Until": "no",
        "By-Hash": "no",
        "Languages": "none",
        "Targets": "Packages",
    }
    return "# Ansible managed\n" + "".join(f"{name}: {value}\n" for name, value in lines.items() if value)


# apt with it takes from the bundle alone, and remembers what it has read there apart from all else. What is only
# recommended is collected where a role installs it, which then says so.
APT_CONF = f"""\
# Ansible managed
Dir::Etc::sourcelist "/dev/null";
Dir::Etc::sourceparts "{ON_NODE}/sources.list.d";
Dir::State::lists "{ON_NODE}/lists";
Dir::Cache "{ON_NODE}/cache";
APT::Install-Recommends "false";
"""


def texts(manifest: Manifest, platform: str) -> dict[str, str]:
    """The settings of apt for the bundle, and its entries, by paths in the host's folder."""
    entries: dict[str, str] = {}
    for repository in platform_of(manifest, platform)["repositories"]:
        # Those of roles they have themselves, when they have the key.
        if repository["of_role"]:
            continue
        path = f"sources.list.d/{repository['name']}.sources"
        entries[path] = "\n".join([*([entries[path]] if path in entries else []), entry(repository, platform)])
    return {"apt.conf": APT_CONF, **entries}


def known(manifest: Manifest, platform: str) -> list[str]:
    """All that hosts of a platform may have, by paths in their folder."""
    apart = places_of(platform)
    entries = [
        f"sources.list.d/{repository['name']}.sources" for repository in platform_of(manifest, platform)["repositories"]
    ]
    return [*(on_node(name, platform) for name in manifest["files"] if name.startswith(apart)), *entries]


def parts(names: Iterable[str], size: Callable[[str], int], most: int) -> Iterator[list[str]]:
    """The names in lists of files that are not more than C(most) bytes together, where one alone is not."""
    part: list[str] = []
    for name in names:
        if part and sum(map(size, [*part, name])) > most:
            yield part
            part = []
        part.append(name)
    if part:
        yield part


# --- what is collected ----------------------------------------------------------------------


def update(
    folder: Path,
    platform: str,
    collected: dict[str, Any],
    fetch: Callable[[str, Path], None],
    *,
    partial: bool = False,
    have: Mapping[str, str] = MappingProxyType({}),
) -> tuple[list[str], list[str]]:
    """Have what a host has collected for its platform in place of what there was; the names of what came and went.

    Where that is C(partial), what there was for other hosts stays beside it, and it is refused where they could not
    install that any more. What C(whole) has told before is not read once more, but where another run has changed it
    since.
    """
    # What no host could be given is told where it can be mended.
    for repository in collected["repositories"]:
        entry(repository, platform)
    # The control machine trusts no host with its own files, or with those of other platforms.
    places = (*places_of(platform), "releases/")
    strange = [name for name in collected["files"] if not (is_inside(name) and name.startswith(places))]
    if strange:
        raise BundleError(
            f"the host has collected {strange[0]!r}", f"files below {', '.join(places)}",
            "find out who has changed what the collection runs on this host, and collect with another one",
        )  # fmt: skip
    with locked(folder):
        manifest = read_or_new(folder)
        before = manifest["platforms"].get(platform) if partial else None
        if before:
            require_same_lists(manifest, before, collected)
        # Of runs that were killed, whose room this one may need.
        for path in folder.rglob(f".*{STAGED}"):
            path.unlink()
        known_whole = {name for name, digest in have.items() if is_still(folder, manifest, name, digest)}
        fetched = [
            name
            for name, file in collected["files"].items()
            if (have[name] if name in known_whole else release.checksum_of(folder / name)) != file["sha256"]
        ]
        try:
            for name in fetched:
                stage(folder, name, collected["files"][name], manifest, fetch)
            # Until here a run that ends leaves the bundle as it was.
            for name in fetched:
                staged_for(folder / name).replace(folder / name)
        finally:
            for name in fetched:
                staged_for(folder / name).unlink(missing_ok=True)
        now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        for name, file in collected["files"].items():
            known: File = manifest["files"].get(name, {})
            told = {key: value for key, value in file.items() if key != "source"}
            told["collected"] = now if name in fetched else known.get("collected", now)
            manifest["files"][name] = cast(File, told)
        manifest["platforms"][platform] = together(before, collected)
        mine = places_of(platform)
        gone = [name for name in manifest["files"] if name.startswith(mine) and name not in collected["files"]]
        for name in gone if not partial else []:
            del manifest["files"][name]
        # First what is in the bundle, so that a run which ends here leaves what it can tell, and the next one mends.
        write(folder, manifest)
        removed = [
            name
            for path in sorted(path for place in mine for path in (folder / place).rglob("*") if path.is_file())
            for name in [path.relative_to(folder).as_posix()]
            if name not in manifest["files"]
        ]
        for name in removed:
            (folder / name).unlink()
    return fetched, removed


def is_still(folder: Path, manifest: Manifest, name: str, digest: str) -> bool:
    """Whether a file that was whole with this checksum is so still, as far as a moment's look tells."""
    file = manifest["files"].get(name)
    path = folder / name
    return bool(file and file["sha256"] == digest and path.is_file() and path.stat().st_size == file["size"])


def require_same_lists(manifest: Manifest, before: Platform, collected: dict[str, Any]) -> None:
    """Refuse lists that have moved beside packages that others keep: apt would ask for files that are not there."""
    files = collected["files"]
    kept = {name for each in left_of(before, collected) for name in each["files"] if name not in files}
    moved = {
        name.split("/")[2]
        for name, file in files.items()
        if name.startswith("apt/") and "package" not in file and not name.endswith(SIGNED)
        and manifest["files"].get(name, {}).get("sha256") != file["sha256"]
    }  # fmt: skip
    apart = sorted(moved & {name.split("/")[2] for name in kept})
    if apart:
        raise BundleError(
            f"the lists of packages of {', '.join(apart)} have moved since the bundle got packages from there for "
            "hosts that are not in this run",
            "lists that have those packages; the bundle is as it was",
            "run playbooks/bundle.yml without --limit, when all hosts of the farm can be reached; take one that is "
            "gone for good out of the inventory",
        )


def left_of(before: Platform, collected: dict[str, Any]) -> list[Wanted]:
    """What there was for hosts that was not collected again."""
    asked = [each["packages"] for each in collected["wanted"]]
    return [each for each in before["wanted"] if each["packages"] not in asked]


def together(before: Platform | None, collected: dict[str, Any]) -> Platform:
    """What was collected, and of what there was before that which was not collected again."""
    wanted, repositories = list(collected["wanted"]), list(collected["repositories"])
    if before:
        named = [(each["name"], each["suite"]) for each in repositories]
        wanted += left_of(before, collected)
        repositories += [each for each in before["repositories"] if (each["name"], each["suite"]) not in named]
    return {"repositories": repositories, "wanted": wanted}


def staged_for(target: Path) -> Path:
    """Where a file is until all have come."""
    return target.with_name(f".{target.name}{STAGED}")


def stage(
    folder: Path, name: str, file: dict[str, Any], manifest: Manifest, fetch: Callable[[str, Path], None]
) -> None:
    """Have one file, whole, beside its place; what the bundle has elsewhere the host has not downloaded."""
    staged = staged_for(folder / name)
    release.make_folder(staged.parent)
    if file["source"]:
        fetch(file["source"], staged)
    else:
        same = [other for other, known in manifest["files"].items() if known["sha256"] == file["sha256"]]
        for other in list(whole(folder, manifest, same))[:1]:
            shutil.copyfile(folder / other, staged)
    if release.checksum_of(staged) != file["sha256"]:
        if not file["source"]:
            raise BundleError(f"{folder / name} has changed while it was compared", "a folder of one run", AGAIN)
        raise BundleError(f"{name} has changed on its way to the control machine", file["sha256"], "run this again")
    staged.chmod(0o644)


def write(folder: Path, manifest: Manifest) -> None:
    """Have the manifest."""
    staged = staged_for(folder / MANIFEST)
    staged.write_text(json.dumps(manifest, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    staged.chmod(0o644)
    staged.replace(folder / MANIFEST)
