#!/bin/sh
# setup.sh [--remove] [SERVER...] [-- OPTION...]: makes the WSL distribution in which it runs a node of the GPU farm with
# these Nomad servers, by an Ansible of its own; run again, it brings the node up to date. --remove takes it back. What
# follows -- goes to ansible-playbook.
#
# GPUFARM_HOME         where Ansible and the collections are (~/.local/share/gpufarm)
# GPUFARM_INVENTORY    where the inventory is (~/gpufarm)
# GPUFARM_COLLECTIONS  what is installed: names for Galaxy, paths or URLs of tarballs; empty for what is there already
set -eu

die() {
    echo "setup.sh: $1. Expected: $2. Next step: $3." >&2
    exit 1
}

# Its own input may be the script that sh still reads.
answer() {
    printf '%s ' "$1" >/dev/tty && IFS= read -r reply </dev/tty
}

# Write what comes on standard input to a file, but over another text only where somebody says so.
have_file() {
    cat >"$1.new"
    if [ -e "$1" ] && ! cmp -s "$1" "$1.new"; then
        reply=no
        { answer "$1 is another one. Replace it (yes or no)?"; } 2>/dev/null || true
        if [ "$reply" != yes ]; then
            rm "$1.new"
            echo "setup.sh: $1 stays as it is"
            return
        fi
    fi
    mv "$1.new" "$1"
}

have_ansible() {
    python3 -c 'import ensurepip, venv' 2>/dev/null || {
        echo "setup.sh: installing python3-venv"
        root=
        [ "$(id -u)" = 0 ] || root=sudo
        $root apt-get update -q
        $root env DEBIAN_FRONTEND=noninteractive apt-get install -qy python3-venv
    }
    python3 -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
        die "$(python3 --version) is too old" "Python 3.11 or newer" "take Debian 12 or Ubuntu 24.04, or newer"
    mkdir -p "$home"
    [ -x "$home/venv/bin/pip" ] || python3 -m venv --clear "$home/venv"
    "$home/venv/bin/pip" install --quiet --disable-pip-version-check 'ansible-core>=2.19.3,<2.22'
    # shellcheck disable=SC2086 # a list
    [ -z "$collections" ] ||
        "$home/venv/bin/ansible-galaxy" collection install --upgrade -p "$home/collections" $collections
}

have_inventory() {
    mkdir -p "$inventory"
    if [ $# = 0 ] && [ ! -e "$inventory/servers.yml" ]; then
        { answer "Addresses of the farm's Nomad servers, with a blank between two:"; } 2>/dev/null ||
            die "no server was named, and nobody can be asked" "the address of a Nomad server" "setup.sh 192.0.2.10"
        # shellcheck disable=SC2086 # a list
        set -- $reply
        [ $# -gt 0 ] || die "no server was named" "the address of a Nomad server" "run it again"
    fi
    for server; do
        case $server in
        -* | *[!A-Za-z0-9.:_-]*) die "$server is no address" "a name or an IP address" "correct it" ;;
        esac
    done
    [ $# = 0 ] || have_file "$inventory/servers.yml" <<END
# The Nomad servers that this machine joins; others run them.
all:
  vars:
    nomad_client_servers: [$(printf '"%s", ' "$@" | sed 's/, $//')]
END
    have_file "$inventory/windows.wsl.yml" <<END
# This Windows machine, and the distribution in which Ansible runs.
plugin: gpufarm.core.wsl
windows_hosts:
  - name: this-pc
    connection: local
    distribution_user: root
filters:
  - include: wsl_distribution == "$WSL_DISTRO_NAME"
  - exclude: true
groups:
  gpu_nodes: wsl_version == 2 and wsl_running
END
}

main() {
    home=${GPUFARM_HOME:-${XDG_DATA_HOME:-$HOME/.local/share}/gpufarm}
    inventory=${GPUFARM_INVENTORY:-$HOME/gpufarm}
    collections=${GPUFARM_COLLECTIONS-gpufarm.core ansible.windows community.windows}
    playbook=wsl
    export ANSIBLE_COLLECTIONS_PATH="$home/collections"
    if [ "${1-}" = --remove ]; then
        playbook=remove
        shift
    fi
    [ -n "${WSL_DISTRO_NAME:-}" ] ||
        die "this is no terminal of a WSL distribution, for WSL_DISTRO_NAME is not set" \
            "one, and its own user, not sudo" "run \`wsl --install -d Debian\` in Windows, and this in the distribution"
    servers=
    while [ $# -gt 0 ] && [ "$1" != -- ]; do
        servers="$servers $1"
        shift
    done
    [ $# = 0 ] || shift

    if [ $playbook = wsl ]; then
        have_ansible
        # shellcheck disable=SC2086 # a list
        have_inventory $servers
    elif [ ! -e "$home/collections/ansible_collections/gpufarm/core/playbooks/remove.yml" ]; then
        die "there is no playbook remove in $home/collections" "a collection that this script has installed" \
            "run it without --remove first"
    fi
    set -- "$home/venv/bin/ansible-playbook" -i "$inventory" "gpufarm.core.$playbook" "$@"
    echo "setup.sh: ANSIBLE_COLLECTIONS_PATH=$ANSIBLE_COLLECTIONS_PATH $*"
    exec "$@" </dev/null
}

main "$@"
