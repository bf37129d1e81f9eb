#!/bin/sh
# make.sh NAME=ADDRESS...: starts machines with a kernel of their own (user-mode Linux) in this node, each with a disk that
# has what the node has. They reach each other, the node at 10.99.0.1, and what the node reaches. Prints the key with which
# root may log in.
set -eu
here=$(dirname "$0")
disks=/var/lib/docker/guests
mkdir -p "$disks"
{
    apt-get update
    apt-get install --yes --no-install-recommends user-mode-linux openssh-server iptables socat e2fsprogs libarchive13t64
    systemctl disable --now ssh
} >"$disks/install.log" 2>&1

ip link add guests type bridge
ip address add 10.99.0.1/24 dev guests
ip link set guests up
iptables -t nat -A POSTROUTING -s 10.99.0.0/24 ! -o guests -j MASQUERADE
mkdir -p /dev/net
[ -e /dev/net/tun ] || mknod /dev/net/tun c 10 200
# Docker's own name server is on the node's loopback.
systemd-run --quiet socat UDP4-RECVFROM:53,fork,bind=10.99.0.1 UDP4-SENDTO:127.0.0.11:53

own=$disks/own
mkdir -p "$own/usr/sbin" "$own/usr/lib/modules" "$own/etc/systemd/system/multi-user.target.wants" "$own/root"
cp "$here/gpufarm-guest-network" "$own/usr/sbin/"
cp "$here/gpufarm-guest-network.service" "$own/etc/systemd/system/"
ln -s ../gpufarm-guest-network.service ../ssh.service "$own/etc/systemd/system/multi-user.target.wants/"
# What waits for devices and consoles that are not there, and what would start by itself.
for unit in systemd-udev-trigger.service systemd-networkd.service systemd-networkd.socket console-getty.service \
    getty@tty1.service getty-static.service apt-daily.timer apt-daily-upgrade.timer; do
    ln -sf /dev/null "$own/etc/systemd/system/$unit"
done
for release in /usr/lib/uml/modules/*; do
    mkdir -p "$own/usr/lib/modules/${release##*/}/kernel"
    cp "$release"/modules.* "$own/usr/lib/modules/${release##*/}/"
    cp -a "$release/kernel/fs" "$release/kernel/net" "$release/kernel/lib" "$release/kernel/crypto" \
        "$own/usr/lib/modules/${release##*/}/kernel/"
done
ssh-keygen -q -t ed25519 -N '' -f "$disks/key"
mkdir -m 0700 "$own/root/.ssh"
cp "$disks/key.pub" "$own/root/.ssh/authorized_keys"
chmod 0755 "$own" "$own/usr" "$own/etc" "$own/usr/sbin/gpufarm-guest-network"
chmod 0700 "$own/root"

tar -C / --one-file-system -cf "$disks/root.tar" --exclude=./var/lib/docker --exclude='./var/cache/apt/*' \
    --exclude='./root/*' --exclude='./tmp/*' --exclude=./usr/lib/uml --exclude=./usr/bin/linux.uml --exclude=./usr/share/doc \
    --exclude=./etc/hostname --exclude=./etc/hosts --exclude=./etc/resolv.conf --exclude=./etc/machine-id .
tar -C "$own" -rf "$disks/root.tar" .
truncate --size=4G "$disks/disk"
mkfs.ext4 -q -d "$disks/root.tar" "$disks/disk"
rm "$disks/root.tar"

cp "$here/gpufarm-guest@.service" /etc/systemd/system/
systemctl daemon-reload
for guest in "$@"; do
    cp --sparse=always "$disks/disk" "$disks/${guest%%=*}.disk"
    echo "ADDRESS=${guest#*=}" >"$disks/${guest%%=*}.env"
    systemctl start "gpufarm-guest@${guest%%=*}"
done
rm "$disks/disk"
cat "$disks/key"
