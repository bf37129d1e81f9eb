#!/bin/sh
# image.sh FILE: an image of what nvidia-smi needs besides what the engine brings, as `docker save` writes one.
set -eu

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
mkdir "$work/layer"
# shellcheck disable=SC2046 # one argument for each library
tar --directory "$work/layer" --create --file "$work/layer/layer.tar" --dereference --absolute-names \
    /bin/sh /bin/sleep /sbin/ldconfig /etc/ld.so.conf \
    $(ldd /bin/sh /bin/sleep | grep -o '/[^ ]*[.]so[^ ]*' | sort -u) /lib/x86_64-linux-gnu/libdl.so.2 \
    /lib/x86_64-linux-gnu/libm.so.6 /lib/x86_64-linux-gnu/libpthread.so.0
digest=$(sha256sum "$work/layer/layer.tar" | cut -d ' ' -f 1)
cat >"$work/config.json" <<END
{"architecture": "amd64", "os": "linux", "config": {"Env": ["PATH=/usr/bin:/bin"], "Cmd": ["sleep", "infinity"]},
 "rootfs": {"type": "layers", "diff_ids": ["sha256:$digest"]}, "history": [{"created_by": "image.sh"}]}
END
cat >"$work/manifest.json" <<END
[{"Config": "config.json", "RepoTags": ["docker.io/library/gpufarm-test:1"], "Layers": ["layer/layer.tar"]}]
END
tar --directory "$work" --create --file "$1" config.json manifest.json layer/layer.tar
