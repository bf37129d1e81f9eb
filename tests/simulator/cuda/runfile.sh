#!/bin/sh
# Copyright (c) 2026, gpufarm contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
#
# NVIDIA's runfile of CUDA as far as the collection calls it. Options are those of NVIDIA's installation guide for CUDA 13.0
# (Runfile Installation, Advanced Options); what the guide does not name is refused. Of the toolkit it has what a toolkit is
# verified by, and no driver. Tests write another version into it.
set -eu
version=13.0.2
short=${version%.*}

fail() {
    echo " $*" >&2
    exit 1
}

silent='' toolkit='' path=/usr/local/cuda-$short override='' temporary=/tmp
for option in "$@"; do
    case $option in
        --silent) silent=yes ;;
        --toolkit) toolkit=yes ;;
        --toolkitpath=/*) path=${option#*=} ;;
        --override) override=yes ;;
        --tmpdir=/*) temporary=${option#*=} ;;
        --no-man-page | --no-opengl-libs | --no-drm | --defaultroot=/*) ;;
        --driver | --run-nvidia-xconfig | --kernel-source-path=* | --kernel-module-build-directory=* | -m=*)
            fail "$option: this double has no driver" ;;
        *) fail "Unrecognized option: $option" ;;
    esac
done
[ -n "$silent" ] || fail "the EULA has to be accepted at a terminal"
[ -n "$toolkit" ] || fail "nothing to do without --toolkit: this double has no driver"
unpacked=$(mktemp --directory "$temporary/selfgz.XXXXXX") || fail "Cannot create target directory $temporary/selfgz"
trap 'rm -rf -- "$unpacked"' EXIT
# The compiler of today's distributions is newer than those that the check knows.
[ -n "$override" ] || fail "Failed to verify gcc version. See log at /var/log/cuda-installer.log for details."

mkdir -p "$unpacked/bin" "$unpacked/targets/x86_64-linux/lib"
ln -s targets/x86_64-linux/lib "$unpacked/lib64"
cat >"$unpacked/version.json" <<END
{
   "cuda" : {
      "name" : "CUDA SDK",
      "version" : "$version"
   }
}
END
cat >"$unpacked/bin/nvcc" <<END
#!/bin/sh
[ "\$*" = --version ] || { echo "nvcc fatal   : this double compiles nothing" >&2; exit 1; }
echo "nvcc: NVIDIA (R) Cuda compiler driver"
echo "Cuda compilation tools, release $short, V$version"
END
chmod 0755 "$unpacked/bin/nvcc"
# Over what is there: a file that this version does not have stays.
mkdir -p "$path"
cp -R "$unpacked/." "$path/"
ln -sfn "$path/" "$(dirname "$path")/cuda"
cat <<END
===========
= Summary =
===========

Driver:   Not Selected
Toolkit:  Installed in $path/
END
