"""Python keeps what it compiles of the archives that Ansible sends, most of which are the same in each task.

It is a fifth of what a task costs here, and changes nothing else: what is not kept yet is compiled as ever.
"""

from __future__ import annotations

import marshal
import os
import sys
import zipimport

TYPE_CHECKING = False  # types would be imported by each Python that starts
if TYPE_CHECKING:
    from types import CodeType

# contextlib and pathlib would be imported in every task, and hashlib in those that a spare runs.
# ruff: noqa: PLC0415, PTH104, PTH123


def keep(folder: str) -> None:
    """Have the code of archives kept in a folder, which is there."""
    compile_source = zipimport._compile_source  # type: ignore[attr-defined]

    def compiled(path: str, source: bytes) -> CodeType:
        import hashlib

        which = f"{sys.implementation.cache_tag} {path.rpartition('.zip/')[2]} ".encode()
        kept = f"{folder}/{hashlib.sha256(which + source).hexdigest()}"
        code: CodeType
        try:
            # marshal.load would read each of its texts by itself.
            with open(kept, "rb", 0) as file:
                code = marshal.loads(file.read())  # noqa: S302 - root has written it
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
