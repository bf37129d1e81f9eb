"""Python of a node keeps what it compiles of the archives that Ansible sends, most of which are the same in each task.

It is a fifth of what a task costs here, and changes nothing else: what is not kept yet is compiled as ever.
"""

from __future__ import annotations

import hashlib
import marshal
import os
import zipimport
from types import CodeType

FOLDER = "/var/cache/gpufarm-simulator"
# contextlib and pathlib would be imported in every task.
# ruff: noqa: PTH104, PTH123

compile_source = zipimport._compile_source  # type: ignore[attr-defined]


def compiled(path: str, source: bytes) -> CodeType:
    """Return the code of one file of an archive."""
    kept = f"{FOLDER}/{hashlib.sha256(path.rpartition('.zip/')[2].encode() + source).hexdigest()}"
    code: CodeType
    try:
        with open(kept, "rb") as file:
            code = marshal.load(file)  # noqa: S302 - root has written it
    except OSError:
        code = compile_source(path, source)
    else:
        return code
    try:
        with open(f"{kept}.{os.getpid()}", "wb") as file:
            marshal.dump(code, file)
        os.rename(f"{kept}.{os.getpid()}", kept)
    except OSError:
        pass
    return code


zipimport._compile_source = compiled  # type: ignore[attr-defined]
