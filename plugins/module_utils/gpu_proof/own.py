# Copyright (c) 2026, gpufarm contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What is run in a pod: its own device computes, which it knows by what nvidia-smi has listed there."""

from __future__ import annotations

import sys

from ansible_collections.gpufarm.core.plugins.module_utils.gpu_benchmark.measuring import main as measure
from ansible_collections.gpufarm.core.plugins.module_utils.gpu_proof.listing import own_device, read_listing


def main() -> int:
    device = own_device(read_listing(sys.stdin.read()))
    if device is None:
        # Another may be somebody else's.
        sys.stderr.write("nothing says which GPU is this container's own\n")
        return 2
    return measure([*sys.argv[1:], "--devices", device])
