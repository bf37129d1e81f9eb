#!/bin/sh
# See usage. ~/gpufarm is an inventory: Ansible reads all of its files but those whose name ends in ~.
set -eu

usage() {
    cat <<'END'
setup.sh [--secrets FOLDER] [SERVER...] [-- OPTION...]
    makes the WSL distribution in which it runs a node of the GPU farm with these Nomad servers, by an Ansible of its own;
    run again, it brings the node up to date
setup.sh --remove [-- OPTION...]
    takes it back

A SERVER is a name or an address, [2001:db8::1]:4647 with a port; what follows -- goes to ansible-playbook. The FOLDER is what
the farm's owner has made for this machine: nomad-ca.pem, REGION-client-nomad.pem, REGION-client-nomad-key.pem, and with ACLs
nomad-farm-token.txt. A farm that is open to everybody has none.

GPUFARM_HOME         where Ansible and the collections are (~/.local/share/gpufarm)
GPUFARM_INVENTORY    where the inventory is (~/gpufarm)
GPUFARM_COLLECTIONS  what is installed: names for Galaxy, paths or URLs of tarballs; empty for what is there already
END
}

die() {
    echo "setup.sh: $1. Expected: $2. Next step: $3." >&2
    exit 1
}

# Its own input may be the script that sh still reads.
answer() {
    printf '%s ' "$1" >/dev/tty && IFS= read -r reply </dev/tty
}

check_server() {
    case $1 in
    -* | *[!][A-Za-z0-9.:_-]*) die "$1 is no address" "a name or an IP address" "correct it" ;;
    \[*\]:4646) ;;
    *:*:*) return ;;
    *:4646) ;;
    *) return ;;
    esac
    die "$1 has the port of Nomad's HTTP API" "that of a server's RPC, 4647" "leave the port out"
}

# Write what comes on standard input to a file, but over another text only where somebody says so.
have_file() {
    cat >"$1.new~"
    if [ -e "$1" ] && ! cmp -s "$1" "$1.new~"; then
        reply=no
        { answer "$1 is another one. Replace it (yes or no)?"; } 2>/dev/null || true
        case $reply in
        [Yy] | [Yy]es | YES | [Jj] | [Jj]a) cp -p "$1" "$1.$(date +%Y-%m-%dT%H%M%S)~" ;;
        *)
            rm "$1.new~"
            return 1
            ;;
        esac
    fi
    mv "$1.new~" "$1"
}

# Its packages come through the same proxy; a password in its address is for no list of processes.
as_root() {
    if [ "$(id -u)" = 0 ]; then
        "$@"
    elif [ -n "${http_proxy-}${https_proxy-}" ]; then
        sudo --preserve-env=http_proxy,https_proxy,no_proxy "$@"
    else
        sudo "$@"
    fi
}

have_ansible() {
    way="set http_proxy and https_proxy if a proxy leads to the Internet, and run it again"
    python3 -c 'import ensurepip, venv' 2>/dev/null || {
        echo "setup.sh: installing python3-venv"
        as_root apt-get update -q || die "apt-get update has failed" "the distribution's packages" "$way"
        as_root env DEBIAN_FRONTEND=noninteractive apt-get -o DPkg::Lock::Timeout=600 install -qy python3-venv ||
            die "apt-get has failed" "the package python3-venv" "$way"
    }
    python3 -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
        die "$(python3 --version) is too old" "Python 3.11 or newer" "take Debian 12 or Ubuntu 24.04, or newer"
    mkdir -p "$home"
    # After an upgrade of the distribution its Python is another one.
    "$python" -m pip --version >/dev/null 2>&1 || python3 -m venv --clear "$home/venv"
    "$python" -m pip install --quiet --disable-pip-version-check 'ansible-core>=2.19.3,<2.22' ||
        die "pip cannot install ansible-core" "a way to PyPI" "$way"
    [ -n "$collections" ] || return 0
    # shellcheck disable=SC2086 # a list
    "$home/venv/bin/ansible-galaxy" collection install --upgrade -p "$home/collections" $collections && return
    # What it would be is as good as what is there, if nobody has named it.
    [ -z "${GPUFARM_COLLECTIONS-}" ] && [ -e "$core/playbooks/wsl.yml" ] ||
        die "ansible-galaxy cannot install $collections" "a way to them" "$way, or name tarballs in GPUFARM_COLLECTIONS"
    echo "setup.sh: the collections stay as they are, for Galaxy does not answer" >&2
}

# What the farm's owner gives is tried before it takes the place of what is there.
stage_secrets() {
    for name in nomad-ca.pem '*-client-nomad.pem' '*-client-nomad-key.pem'; do
        # shellcheck disable=SC2086 # a pattern
        set -- "$1" "$1"/$name
        [ $# = 2 ] && [ -f "$2" ] || die "$1 has not one file $name" \
            "what the farm's owner has made for this machine, nomad-ca.pem, REGION-client-nomad.pem and its key" \
            "have it made as docs/wsl.md of the collection says, and name the folder"
    done
    (
        umask 077
        mkdir -p "$secrets.new"
        cp "$1"/nomad-ca.pem "$1"/*-client-nomad.pem "$1"/*-client-nomad-key.pem "$secrets.new"
        [ ! -f "$1/nomad-farm-token.txt" ] || cp "$1/nomad-farm-token.txt" "$secrets.new"
    )
}

# It lies where the playbooks look for secrets with this inventory.
have_secrets() {
    [ -d "$secrets.new" ] || return 0
    (umask 077 && mkdir -p "$secrets")
    rm -f "$secrets"/*-client-nomad.pem "$secrets"/*-client-nomad-key.pem "$secrets/nomad-farm-token.txt"
    mv -f "$secrets.new"/* "$secrets"
    rmdir "$secrets.new"
}

# One that answers will do, for a farm works while others of its servers do not. Ends with 1 where none does, and with 3
# where one that does and what we have for it do not fit.
try_servers() {
    "$python" - "$region" "$asked" "${given:-$secrets}" "$@" <<'END'
import re, socket, ssl, sys

region, secrets, named, *servers = sys.argv[1:]
# Of Nomad's RPC: what follows this byte is TLS. A server without it closes the connection.
TLS = b"\x04"
# Of no kind of Nomad's RPC: a server that has let us in closes the connection.
NOTHING = b"\xff"


def refuse(found, expected, step):
    print(f"setup.sh: {found}. Expected: {expected}. Next step: {step}.", file=sys.stderr)
    sys.exit(3)


def speaks_tls(host, port):
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    with socket.create_connection((host, port), 10) as plain:
        plain.sendall(TLS)
        try:
            with context.wrap_socket(plain):
                return True
        except TimeoutError:
            raise
        except OSError:
            return False


def lets_in(host, port):
    context = ssl.create_default_context(cafile=f"{secrets}/nomad-ca.pem")
    client = f"{secrets}/{region}-client-nomad"
    context.load_cert_chain(f"{client}.pem", f"{client}-key.pem")
    with socket.create_connection((host, port), 10) as plain:
        plain.sendall(TLS)
        with context.wrap_socket(plain, server_hostname=f"server.{region}.nomad") as connection:
            connection.sendall(NOTHING)
            connection.recv(1)


reached = False
for server in servers:
    found = re.fullmatch(r"\[(.+)\](?::(\d+))?|([^:]+)(?::(\d+))?|(.+)", server)
    host, port = found[1] or found[3] or found[5], int(found[2] or found[4] or 4647)
    try:
        tls = speaks_tls(host, port)
    except (OSError, OverflowError, UnicodeError) as error:
        print(f"setup.sh: {host} does not answer on port {port} ({error})", file=sys.stderr)
        continue
    reached = True
    if tls and not region:
        refuse(f"{host} wants a certificate", "the folder that the farm's owner has made for this machine",
               "name it with --secrets; docs/wsl.md of the collection says how one is made")
    if region and not tls:
        refuse(f"{host} knows no TLS, and {named} has certificates", "a server of the farm that they are for",
               f"correct the address, or go without {named} if the farm is open to everybody")
    try:
        if tls:
            lets_in(host, port)
    except OSError as error:
        refuse(f"{host} and the certificates of {named} do not fit ({error})",
               f"those of one farm, not yet ended, and of the server's region, which is to be {region}",
               "have the farm's owner make them again, and name their folder with --secrets")
sys.exit(not reached)
END
}

have_inventory() {
    mkdir -p "$inventory"
    if [ $# = 0 ] && [ ! -e "$inventory/servers.yml" ]; then
        { answer "Addresses of the farm's Nomad servers, with a blank between two:"; } 2>/dev/null ||
            die "no server was named, and nobody can be asked" "the address of a Nomad server" "setup.sh 192.0.2.10"
        # shellcheck disable=SC2086 # a list
        set -- $reply
        [ $# -gt 0 ] || die "no server was named" "the address of a Nomad server" "run it again, and type one"
        for server; do
            check_server "$server"
        done
    fi
    region=
    asked=$secrets
    [ ! -d "$secrets.new" ] || asked=$secrets.new
    for name in "$asked"/*-client-nomad.pem; do
        [ ! -f "$name" ] || region=$(basename "$name" -client-nomad.pem)
    done
    if [ $# -gt 0 ]; then
        tried=0
        try_servers "$@" || tried=$?
        [ $tried = 0 ] || rm -rf "$secrets.new"
        [ $tried != 3 ] || exit 1
        [ $tried = 0 ] || die "none of the servers answers" "a connection to port 4647 of a Nomad server" \
            "correct the address, or have firewalls let it through; nothing was installed for Nomad"
    fi
    if [ -n "$region" ]; then
        security="nomad_region: \"$region\"
    nomad_tls: files
    nomad_tls_ca_file: \"$secrets/nomad-ca.pem\"
    nomad_tls_cert_file: \"$secrets/$region-client-nomad.pem\"
    nomad_tls_key_file: \"$secrets/$region-client-nomad-key.pem\""
        [ -f "$asked/nomad-farm-token.txt" ] || security="$security
    nomad_acl_enabled: false"
    else
        security="nomad_tls: \"off\"
    nomad_acl_enabled: false"
    fi
    # Newer ones of the same farm fit whatever servers.yml has.
    ! cmp -s "$asked/nomad-ca.pem" "$secrets/nomad-ca.pem" || have_secrets
    [ $# = 0 ] || have_file "$inventory/servers.yml" <<END || {
# The Nomad servers that this machine joins; others run them.
all:
  vars:
    nomad_client_servers: [$(printf '"%s", ' "$@" | sed 's/, $//')]
    $security
END
        rm -rf "$secrets.new"
        die "$inventory/servers.yml names other servers than $*, and nobody has said yes" "the same ones, or a yes" \
            "leave out servers and --secrets, change the file, or answer at a terminal"
    }
    have_secrets
    name=$(uname -n | tr '[:upper:]' '[:lower:]' | sed 's/\..*//; s/[^a-z0-9]/-/g; s/^-*//; s/-*$//')
    have_file "$inventory/windows.wsl.yml" <<END || echo "setup.sh: $inventory/windows.wsl.yml stays as it is"
# This Windows machine, and the distribution in which Ansible runs.
plugin: gpufarm.core.wsl
windows_hosts:
  - name: ${name:-pc}
    connection: local
    list_addresses: true
    distribution_user: root
filters:
  - include: wsl_distribution == "$WSL_DISTRO_NAME"
  - exclude: true
groups:
  gpu_nodes: wsl_version == 2 and wsl_running
END
}

# This distribution and its Windows machine, as the inventory calls them, for others may be in it.
ours() {
    "$home/venv/bin/ansible-inventory" -i "$inventory" --list | "$python" -c '
import json, os, sys

# What others have said is marked as no template.
plain = lambda found: found.get("__ansible_unsafe", found)
hosts = json.load(sys.stdin, object_hook=plain)["_meta"]["hostvars"]
for name, known in hosts.items():
    windows = known.get("wsl_host")
    if known.get("wsl_distribution") == os.environ["WSL_DISTRO_NAME"]:
        if hosts.get(windows, {}).get("wsl_connection") == "local":
            print(windows, name, sep=",")
            break
'
}

main() {
    home=${GPUFARM_HOME:-${XDG_DATA_HOME:-$HOME/.local/share}/gpufarm}
    inventory=${GPUFARM_INVENTORY:-$HOME/gpufarm}
    case $inventory in /*) ;; *) inventory=$PWD/$inventory ;; esac
    secrets=${inventory%/}-secrets
    collections=${GPUFARM_COLLECTIONS-gpufarm.core ansible.windows community.windows}
    core=$home/collections/ansible_collections/gpufarm/core
    python=$home/venv/bin/python3
    playbook=wsl
    export ANSIBLE_COLLECTIONS_PATH="$home/collections"
    servers=
    given=
    systemd=
    while [ $# -gt 0 ] && [ "$1" != -- ]; do
        case $1 in
        -h | --help)
            usage
            exit
            ;;
        --remove) playbook=remove ;;
        --secrets)
            [ -n "${2:-}" ] || die "--secrets came without a folder" "setup.sh --secrets FOLDER SERVER" "name it"
            given=$2
            shift
            ;;
        *)
            check_server "$1"
            servers="$servers $1"
            ;;
        esac
        shift
    done
    [ $# = 0 ] || shift
    [ $playbook = wsl ] || [ -z "$servers$given" ] ||
        die "--remove came with${servers:- --secrets}" "nothing with it" "leave out the one or the other"
    [ -z "$given" ] || [ -n "$servers" ] ||
        die "--secrets came without a server" "setup.sh --secrets FOLDER SERVER" "name the servers that they are for"
    [ -n "${WSL_DISTRO_NAME:-}" ] ||
        die "this is no terminal of a WSL distribution, for WSL_DISTRO_NAME is not set" \
            "one, and its own user, not sudo" "run \`wsl --install -d Debian\` in Windows, and this in the distribution"
    # Ansible wants UTF-8, and a new distribution may not have made the locale that it names.
    [ "$(locale charmap 2>/dev/null)" = UTF-8 ] || export LC_ALL=C.UTF-8

    if [ $playbook = wsl ]; then
        rm -rf "$secrets.new"
        [ -z "$given" ] || [ "$given" -ef "$secrets" ] || stage_secrets "$given"
        have_ansible
        # shellcheck disable=SC2086 # a list
        have_inventory $servers
        limit=
        # The playbook writes /etc/wsl.conf, and leaves the end of this distribution to its user.
        [ -d /run/systemd/system ] || systemd="-e wsl_terminate=true"
    else
        [ -e "$core/playbooks/remove.yml" ] ||
            die "there is no playbook remove in $home/collections" "a collection that this script has installed" \
                "run it without --remove first"
        collections=
        have_ansible
        limit=$(ours) && [ -n "$limit" ] ||
            die "$inventory does not have this distribution" "$WSL_DISTRO_NAME, and its Windows machine as local" \
                "run \`$home/venv/bin/ansible-inventory -i $inventory --graph\`, and see what it says"
    fi
    # What the user adds may be secret. Of two --limit the last counts.
    echo "setup.sh: ANSIBLE_COLLECTIONS_PATH=$ANSIBLE_COLLECTIONS_PATH $home/venv/bin/ansible-playbook -i $inventory" \
        "${limit:+--limit $limit }${systemd:+$systemd }gpufarm.core.$playbook${1+ (and $# more)}"
    # shellcheck disable=SC2086 # an option and its value
    set -- "$home/venv/bin/ansible-playbook" -i "$inventory" ${limit:+--limit "$limit"} $systemd \
        "gpufarm.core.$playbook" "$@"
    # Somebody at a terminal may be asked.
    if (: </dev/tty) 2>/dev/null; then
        exec "$@" </dev/tty
    fi
    exec "$@" </dev/null
}

main "$@"
