# Copyright (c) 2026, gpufarm contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""A program out of the archive of a release."""

from __future__ import annotations

import stat
import struct
import zipfile
import zlib
from typing import IO

from ansible_collections.gpufarm.core.plugins.module_utils.release.addresses import ReleaseError
from ansible_collections.gpufarm.core.plugins.module_utils.release.downloading import ARCHIVE_LIMIT
from ansible_collections.gpufarm.core.plugins.module_utils.release.files import CHUNK, write
from ansible_collections.gpufarm.core.plugins.module_utils.text import clean


def unpack_member(archive: IO[bytes], member: str, target: IO[bytes], source: str, limit: int = ARCHIVE_LIMIT) -> None:
    """Write one member of a zip to an open file; no name in the zip becomes a path."""
    expected = f"a zip that holds the file '{member}'"
    try:
        with zipfile.ZipFile(archive) as container:
            try:
                info = container.getinfo(member)
            except KeyError:
                names = ", ".join(sorted(container.namelist())[:10]) or "nothing"
                raise ReleaseError(
                    found=f"{source} does not hold '{member}', it holds: {clean(names)}",
                    expected=expected,
                    next_step="set the option 'binary' to the name of the program in the zip",
                ) from None
            # Zips that were not made on Unix say nothing of the kind of file.
            if stat.S_IFMT(info.external_attr >> 16) not in (0, stat.S_IFREG) or info.file_size > limit:
                raise ReleaseError(
                    found=f"'{member}' in {source} is no regular file or larger than {limit} bytes",
                    expected=expected,
                    next_step="check what the server delivers at this address",
                )
            # zipfile never unpacks more than that size, and checks the CRC at the end.
            with container.open(info) as stream:
                for chunk in iter(lambda: stream.read(CHUNK), b""):
                    write(target, chunk, source)
    # What zipfile says of a file that was made to confuse it.
    except (OSError, ValueError, RuntimeError, EOFError, struct.error, zipfile.BadZipFile, zlib.error) as error:
        raise ReleaseError(
            found=f"{source} could not be unpacked ({error})",
            expected=expected,
            next_step="compare the file with the one that the publisher offers",
        ) from error
