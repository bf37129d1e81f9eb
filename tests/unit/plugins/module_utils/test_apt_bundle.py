"""What apt says of repositories and downloads, as apt 3.0.4 of Debian 13 has said it."""

from __future__ import annotations

import pytest
from ansible_collections.gpufarm.core.plugins.module_utils import apt_bundle
from ansible_collections.gpufarm.core.plugins.module_utils.apt_bundle import BundleError, Download, Index

LISTS = "/var/lib/gpufarm/collect/lists/"
TARGETS = f"""\
MetaKey: main/binary-amd64/Packages
ShortDesc: Packages
Description: http://debian.example/debian trixie/main amd64 Packages
URI: http://debian.example/debian/dists/trixie/main/binary-amd64/Packages
Filename: {LISTS}debian.example_debian_dists_trixie_main_binary-amd64_Packages.xz
Optional: no
KeepCompressed: yes
Codename: trixie
Label: Debian
Origin: Debian
Suite: stable
Trusted: yes
Version: 13.8
Architecture: amd64
Base-URI: http://debian.example/debian/dists/trixie/
By-Hash: yes
Component: main
Created-By: Packages
Identifier: Packages
Sourcesentry: /var/lib/gpufarm/collect/sources.list.d/host-sources.list:1
Release: trixie
Repo-URI: http://debian.example/debian/
Site: http://debian.example/debian
Target-Of: deb

MetaKey: main/i18n/Translation-en
Filename: {LISTS}debian.example_debian_dists_trixie_main_i18n_Translation-en
Base-URI: http://debian.example/debian/dists/trixie/
Repo-URI: http://debian.example/debian/
Created-By: Translations

MetaKey: Packages
Filename: {LISTS}mirror.gpufarm.test_cuda_repos_debian13_x86%5f64_Packages
Base-URI: https://mirror.gpufarm.test/cuda/repos/debian13/x86_64/
Repo-URI: https://mirror.gpufarm.test/cuda/repos/debian13/x86_64/
Created-By: Packages
Signed-By: /var/lib/gpufarm/collect/keys/nvidia-cuda.asc
"""


def test_indices() -> None:
    debian, flat = apt_bundle.parse_indices(TARGETS)
    assert (debian.folder, debian.suite, debian.extension, debian.component) == (
        "dists/trixie", "trixie", ".xz", "main"
    )  # fmt: skip
    assert debian.signed == f"{LISTS}debian.example_debian_dists_trixie_"
    assert (flat.folder, flat.suite, flat.extension, flat.component) == ("", "/", "", "")
    assert flat.signed == f"{LISTS}mirror.gpufarm.test_cuda_repos_debian13_x86%5f64_"
    assert debian.entry == "/var/lib/gpufarm/collect/sources.list.d/host-sources.list:1"


@pytest.mark.parametrize(
    ("below", "suite"), [("stable/deb/amd64/", "stable/deb/amd64/"), ("dists/a/updates/", "a/updates")]
)
def test_suites_with_a_path(below: str, suite: str) -> None:
    assert Index("x_Packages", "Packages", f"http://h/r/{below}", "http://h/r/", "", "").suite == suite


STANZAS = """\
# comment

# Signed-By: /none
Types: deb
URIs: http://debian.example/debian
Signed-By: /usr/share/keyrings/debian-archive-keyring.gpg

Types: deb
Signed-By:
 -----BEGIN PGP PUBLIC KEY BLOCK-----
 .
 mDME
Suites: x

Types: deb

Types: deb
Signed-By:
 /usr/share/keyrings/a.gpg
"""
LINES = """
# x
deb [arch=amd64 signed-by=/usr/share/keyrings/a.gpg] http://debian.example/debian bullseye main
deb [signed-by=/usr/share/keyrings/b.gpg arch=amd64] http://debian.example/debian bullseye main
deb http://debian.example/debian bullseye main
"""


def test_keyrings() -> None:
    """As apt counts stanzas and lines."""
    stanzas = [apt_bundle.keyring_of(STANZAS, number, False) for number in (1, 2, 3, 4)]
    key = "-----BEGIN PGP PUBLIC KEY BLOCK----- . mDME"
    assert stanzas == ["/usr/share/keyrings/debian-archive-keyring.gpg", key, "", "/usr/share/keyrings/a.gpg"]
    lines = [apt_bundle.keyring_of(LINES, number, True) for number in (3, 4, 5)]
    assert lines == ["/usr/share/keyrings/a.gpg", "/usr/share/keyrings/b.gpg", ""]


def test_downloads() -> None:
    digest = "53ae1a99f15113f0a0d2226808ec0d24ee31b3b87b87ab8ec35be09a1a2ee13b"
    url = "http://debian.example/debian/pool/main/d/docker.io/docker.io_26.1.5%2bdfsg1-9_amd64.deb"
    said = f"'{url}' docker.io_26.1.5+dfsg1-9_amd64.deb 23036836 SHA256:{digest}\n"
    assert apt_bundle.parse_downloads(f"Reading package lists...\n{said}") == [
        Download(url, "docker.io_26.1.5+dfsg1-9_amd64.deb", 23036836, digest)
    ]
    assert apt_bundle.path_below(url, "http://debian.example/debian/") == (
        "pool/main/d/docker.io/docker.io_26.1.5+dfsg1-9_amd64.deb"
    )


def test_signed() -> None:
    text = f"""\
-----BEGIN PGP SIGNED MESSAGE-----
Hash: SHA512

Suite: stable
MD5Sum:
 0ed6d4c8891eb86358b94bb35d9e4da4  1484322 main/binary-amd64/Packages
SHA256:
 {"a" * 64} 56634892 main/binary-amd64/Packages
 {"b" * 64}        9 ./Packages.gz
Other: {"c" * 64} 1 no
-----BEGIN PGP SIGNATURE-----
"""
    assert apt_bundle.parse_signed(text) == {"main/binary-amd64/Packages": "a" * 64, "Packages.gz": "b" * 64}
    assert apt_bundle.parse_signed("Suite: stable\n") == {}


@pytest.mark.parametrize("path", ["../evil.deb", "pool/../../evil.deb", "%2e%2e/evil.deb"])
def test_no_file_is_outside_of_its_repository(path: str) -> None:
    with pytest.raises(BundleError, match="Expected: files below"):
        apt_bundle.path_below(f"http://h/r/{path}", "http://h/r/")
    with pytest.raises(BundleError):
        apt_bundle.path_below("http://elsewhere/evil.deb", "http://h/r/")


def test_no_login_is_told_with_it() -> None:
    with pytest.raises(BundleError) as caught:
        apt_bundle.path_below("https://robot:s3cret@h/r/../evil.deb", "https://robot:s3cret@h/r/")
    assert "s3cret" not in str(caught.value) and "https://h/r/" in str(caught.value)


def test_paths_as_flat_repositories_have_them() -> None:
    assert apt_bundle.path_below("http://h/r/./a.deb", "http://h/r/") == "a.deb"
    assert apt_bundle.path_below("http://h/r//pool//a.deb", "http://h/r/") == "pool/a.deb"


@pytest.mark.parametrize(
    ("url", "name"),
    [
        ("http://debian.example/debian/", "debian.example_debian"),
        ("https://robot:s3cret@mirror.example.com:8443/ubuntu", "mirror.example.com_8443_ubuntu"),
        ("file:/srv/mirror/", "file_srv_mirror"),
    ],
)
def test_folders_of_repositories(url: str, name: str) -> None:
    assert apt_bundle.folder_name(url) == name
