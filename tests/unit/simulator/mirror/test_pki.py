"""The test authority and the signing keys."""

from __future__ import annotations

import stat
import subprocess
from pathlib import Path

import pytest

from tests.simulator.mirror import pki as pki_module
from tests.simulator.mirror.pki import Pki, Signer, gnupg_home, gpg, pki
from tests.simulator.tools import BuildError, need, run


def test_private_keys_are_readable_by_their_owner_alone(keys: Pki) -> None:
    private = [keys.ca_key, keys.server_key, keys.private_key("releases"), keys.private_key("packages")]
    assert {stat.S_IMODE(path.stat().st_mode) for path in private} == {0o600}


def test_certificate_holds_under_strict_verification(keys: Pki) -> None:
    # Python 3.13 verifies with X509_STRICT by default.
    for name in (
        ["-verify_hostname", "mirror.gpufarm.test"],
        ["-verify_hostname", "localhost"],
        ["-verify_ip", "127.0.0.1"],
    ):
        run(
            [
                "openssl",
                "verify",
                "-x509_strict",
                "-purpose",
                "sslserver",
                *name,
                "-CAfile",
                keys.ca_cert,
                keys.server_cert,
            ]
        )


def test_authority_cannot_vouch_for_other_names(keys: Pki, tmp_path: Path) -> None:
    extensions, request, certificate = (tmp_path / name for name in ("ext", "csr", "crt"))
    extensions.write_text("subjectAltName = DNS:example.org\n", encoding="ascii")
    run(["openssl", "req", "-new", "-key", keys.server_key, "-subj", "/CN=example.org", "-out", request])
    run(["openssl", "x509", "-req", "-in", request, "-CA", keys.ca_cert, "-CAkey", keys.ca_key, "-set_serial", "1",
         "-days", "1", "-extfile", extensions, "-out", certificate])  # fmt: skip
    refused = subprocess.run(
        ["openssl", "verify", "-CAfile", keys.ca_cert, certificate], capture_output=True, text=True, check=False
    )
    assert refused.returncode != 0
    assert "permitted subtree violation" in refused.stdout + refused.stderr


def test_second_call_changes_nothing(keys: Pki) -> None:
    before = {path.name: path.read_bytes() for path in keys.folder.iterdir()}
    assert pki(keys.folder) == keys
    assert {path.name: path.read_bytes() for path in keys.folder.iterdir()} == before


def test_certificate_that_expires_soon_is_renewed_under_the_same_authority(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pki_module, "SERVER_DAYS", 29)
    first = pki(tmp_path)
    authority, certificate = first.ca_cert.read_bytes(), first.server_cert.read_bytes()
    monkeypatch.undo()
    second = pki(tmp_path)
    assert second == first
    assert second.ca_cert.read_bytes() == authority
    assert second.server_cert.read_bytes() != certificate
    run(["openssl", "x509", "-in", second.server_cert, "-noout", "-checkend", str(300 * 24 * 3600)])


@pytest.mark.parametrize("name", ["releases", "packages"])
def test_public_key_has_the_fingerprint_that_roles_pin(keys: Pki, name: str) -> None:
    with gnupg_home() as home:
        listed = gpg(home, "--with-colons", "--show-keys", keys.folder / f"{name}.asc").decode()
    assert f":{keys.fingerprint(name)}:" in listed
    assert "sec:" not in listed


def test_the_two_keys_differ(keys: Pki) -> None:
    assert keys.releases_fingerprint != keys.packages_fingerprint


def test_signer_leaves_no_home_behind(signing: Signer) -> None:
    assert stat.S_IMODE(signing.home.stat().st_mode) == 0o700
    with gnupg_home() as home:
        pass
    assert not home.exists()


def test_a_missing_tool_is_named_with_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.which", lambda _: None)
    with pytest.raises(BuildError, match=r"apt-ftparchive not found.*install apt-utils"):
        need("apt-ftparchive")


def test_a_failing_tool_is_quoted() -> None:
    with pytest.raises(BuildError, match=r"`sh -c echo no such thing >&2; exit 3` ended with 3: no such thing"):
        run(["sh", "-c", "echo no such thing >&2; exit 3"])
