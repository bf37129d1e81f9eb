"""What is built once and kept: artefacts outside the checkout, keyed by what they were built from."""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
GENERATIONS = 8


def cache_dir() -> Path:
    """Return ``$GPUFARM_CACHE``, or ``gpufarm`` under the user's XDG cache folder."""
    named = os.environ.get("GPUFARM_CACHE")
    if named:
        return Path(named)
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "gpufarm"


def key_of(inputs: Iterable[Path | str]) -> str:
    """Return a short key over texts and the names, modes and contents of files and folders."""
    digest = hashlib.sha256()
    for item in inputs:
        if isinstance(item, str):
            digest.update(f"text {item}\0".encode())
            continue
        files = sorted(p for p in item.rglob("*") if p.is_file()) if item.is_dir() else [item]
        for path in files:
            if "__pycache__" in path.parts:
                continue
            digest.update(f"file {path.relative_to(ROOT)} {path.stat().st_mode & 0o111:o}\0".encode())
            digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()[:16]


def built(name: str, inputs: Iterable[Path | str], build: Callable[[Path], None]) -> Path:
    """Return the folder of artefact ``name`` for these inputs, calling ``build(folder)`` if it is missing.

    Two callers at once build once; a build that fails leaves nothing behind. The latest generations of
    a name are kept, because a farm that runs may still use the last one.
    """
    base = cache_dir() / name
    base.mkdir(parents=True, exist_ok=True)
    final = base / key_of(inputs)
    with (base / ".lock").open("w", encoding="ascii") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if final.is_dir():
            return final
        work = Path(tempfile.mkdtemp(dir=base, prefix="building-"))
        try:
            build(work)
            work.chmod(0o755)
            work.rename(final)
        except BaseException:
            shutil.rmtree(work, ignore_errors=True)
            raise
        generations = sorted((p for p in base.iterdir() if p.is_dir()), key=lambda p: p.stat().st_mtime, reverse=True)
        for old in generations[GENERATIONS:]:
            shutil.rmtree(old, ignore_errors=True)
    return final
