#!/bin/sh
# Brings Docker as a host has it from Docker's own repository, and a container that runs there. No mirror has docker-ce:
# the distribution's package under that name conflicts with docker.io just as the real one does.
set -eu

cd "$(mktemp -d)"
apt-get update -qq
apt-get download -qq docker.io
dpkg-deb --raw-extract docker.io_*.deb tree
sed -i -e 's/^Package: .*/Package: docker-ce/' -e '/^\(Source\|Conflicts\|Breaks\|Replaces\|Provides\):/d' tree/DEBIAN/control
sed -i '/^Package: /a Conflicts: docker.io' tree/DEBIAN/control
dpkg-deb -Znone --build tree docker-ce.deb
DEBIAN_FRONTEND=noninteractive apt-get install -qq --no-install-recommends ./docker-ce.deb iptables
systemctl start docker

# shellcheck disable=SC2046 # one argument for each library
image=$(tar -ch /bin/sleep $(ldd /bin/sleep | grep -o '/[^ ]*') 2>/dev/null | docker import -)
docker run --detach --name before --network none "$image" /bin/sleep infinity
docker inspect --format '{{.Id}} {{.State.StartedAt}} {{.State.Running}}' before >/root/container-before
