#!/bin/sh
# Before the kubelet: what a node of its own kernel would have, and nothing that reaches the machine's.
set -eu
ours=/run/gpufarm-kubernetes
mkdir -p "$ours/proc"

# The kubelet writes these where they are otherwise. They are the machine's, so this node alone sees files of its own there.
for setting in vm/overcommit_memory=1 vm/panic_on_oom=0 kernel/panic=10 kernel/panic_on_oops=1 \
    kernel/keys/root_maxkeys=1000000 kernel/keys/root_maxbytes=25000000; do
    name=${setting%=*}
    if [ "$(cat "/proc/sys/$name")" != "${setting#*=}" ]; then
        file=$ours/$(echo "$name" | tr / .)
        echo "${setting#*=}" >"$file"
        mount --bind "$file" "/proc/sys/$name"
    fi
done

# Those of the node's own network namespace may be written, which a container's /proc does not let.
if ! mountpoint -q /proc/sys/net; then
    mount -t proc proc "$ours/proc"
    mount --bind "$ours/proc/sys/net" /proc/sys/net
    umount "$ours/proc"
fi

[ -e /dev/kmsg ] || ln -s null /dev/kmsg
mount --make-rshared /
# The kubelet wants a cgroup of its own of every controller that is mounted, and Docker makes none of this one.
! mountpoint -q /sys/fs/cgroup/hugetlb || umount /sys/fs/cgroup/hugetlb
