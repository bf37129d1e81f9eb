# Copyright (c) 2026, gpufarm contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""Downloads that are verified before they are used.

The functions that decide (names, checksum lists, what gpgv said, receipts) are pure; the few
that touch the network or the disk do one thing each and raise C(ReleaseError).
"""

from __future__ import annotations

from ansible_collections.gpufarm.core.plugins.module_utils.release.addresses import (
    ReleaseError,
    check_address,
    shown,
    take_addresses,
    without_login,
)
from ansible_collections.gpufarm.core.plugins.module_utils.release.checksums import (
    checksum_of,
    listed_sum,
    normalize_checksum,
    parse_sums,
    sha256,
)
from ansible_collections.gpufarm.core.plugins.module_utils.release.downloading import Network, download, download_small
from ansible_collections.gpufarm.core.plugins.module_utils.release.files import make_folder
from ansible_collections.gpufarm.core.plugins.module_utils.release.names import (
    ReleaseFiles,
    architecture_of,
    check_name,
    release_files,
)
from ansible_collections.gpufarm.core.plugins.module_utils.release.receipts import (
    Receipt,
    Wanted,
    read_receipt,
    reasons_to_install,
)
from ansible_collections.gpufarm.core.plugins.module_utils.release.signature import (
    judge_signature,
    parse_gpgv_status,
    pinned_fingerprints,
    run_gpgv,
)
from ansible_collections.gpufarm.core.plugins.module_utils.release.unpacking import unpack_member
