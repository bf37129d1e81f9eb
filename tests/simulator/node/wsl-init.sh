#!/bin/sh
# What WSL's init does before it hands over to systemd, besides Windows' driver: a kernel that says what it is, unless
# $GPUFARM_WSL_KERNEL is the name of one that the user has built, and what /etc/wsl.conf says of [network] and [boot].
# Run by gpufarm-node-init, which starts no systemd where there is no /run/gpufarm-wsl-systemd.
set -eu

# As Debian's and Ubuntu's images for WSL bring it.
[ -e /etc/wsl.conf ] || printf '[boot]\nsystemd=true\n' >/etc/wsl.conf

# The first of a key counts, and a line that cannot be read ends it all (src/shared/configfile/configfile.cpp).
setting() {
    awk -v section="[$1]" -v key="$2" '
        { line = $0; sub(/#.*/, "", line); gsub(/[ \t\r"]/, "", line) }
        line == "" { next }
        line ~ /^\[[A-Za-z][A-Za-z0-9]*\]$/ { now = tolower(line); next }
        line !~ /^[A-Za-z][A-Za-z0-9]*=/ { exit }
        now == section && tolower(substr(line, 1, length(key) + 1)) == key "=" { print substr(line, length(key) + 2); exit }
    ' /etc/wsl.conf
}
name=$(setting network hostname)
if [ -n "$name" ]; then
    echo "$name" >/etc/hostname
    hostname "$name"
fi
case $(setting boot systemd) in
[Tt][Rr][Uu][Ee]) touch /run/gpufarm-wsl-systemd ;;
esac
release=${GPUFARM_WSL_KERNEL:-6.6.87.2-microsoft-standard-WSL2}

echo "$release" >/etc/gpufarm-simulator/kernel-release
printf 'Linux version %s (root@builder) (gcc) #1 SMP PREEMPT_DYNAMIC\n' "$release" \
    >/etc/gpufarm-simulator/kernel-version
mount --bind /etc/gpufarm-simulator/kernel-release /proc/sys/kernel/osrelease
mount --bind /etc/gpufarm-simulator/kernel-version /proc/version
echo /usr/local/lib/gpufarm-simulator/wsl-uname.so >/etc/ld.so.preload
