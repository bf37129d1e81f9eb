"""What the builds are keyed by, what they are given, and what they say; nothing is built here."""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest
import yaml

from tests.simulator import cache
from tests.simulator.mirror import build
from tests.simulator.tools import BuildError


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("GPUFARM_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_a_failing_step_shows_its_last_lines_and_its_log(own_cache: Path) -> None:
    with pytest.raises(BuildError) as caught:
        build.logged("example", ["sh", "-c", "seq 100; echo broken >&2; exit 7"])
    message = str(caught.value)
    log = own_cache / "log/mirror-example.log"
    assert message.startswith("example failed (7).")
    assert message.endswith(f"The whole log: {log}")
    assert re.findall(r"^\d+$", message, re.MULTILINE) == [str(number) for number in range(72, 101)]
    assert "broken" in message
    assert log.read_text("ascii").startswith("1\n2\n")


def test_a_step_says_that_it_starts_and_how_long_it_took(capsys: pytest.CaptureFixture[str]) -> None:
    assert build.step("example", lambda: time.sleep(0.01) or 5) == 5
    assert capsys.readouterr().out == "mirror: example ...\nmirror: example: 0 s\n"


def test_every_product_has_a_key_of_its_own() -> None:
    keys = [cache.key_of(product.inputs()) for product in build.PRODUCTS]
    assert len(set(keys)) == len(keys)


@pytest.mark.parametrize("product", build.PRODUCTS, ids=lambda product: product.name)
def test_products_are_pinned(product: build.Product) -> None:
    module = (build.GO / product.folder / "go.mod").read_text("ascii")
    sums = (build.GO / product.folder / "go.sum").read_text("ascii")
    found = re.search(rf"{re.escape(product.module)} (v[0-9.]+)$", module, re.MULTILINE)
    assert found is not None
    assert f"{product.module} {found[1]} h1:" in sums


def test_versions_are_those_that_the_roles_install() -> None:
    for product in (build.NOMADS[-1], build.NVIDIA_PLUGIN, build.CONTAINER_TOOLKITS[-1]):
        role = product.name.removeprefix("nvidia-").replace("-", "_")
        defaults = yaml.safe_load((cache.ROOT / "roles" / role / "defaults/main.yml").read_text("utf-8"))
        assert product.version == defaults[f"{role}_version"]
    defaults = yaml.safe_load((cache.ROOT / "roles/kubernetes_device_plugin/defaults/main.yml").read_text("utf-8"))
    assert build.K8S_DEVICE_PLUGIN.version == defaults["kubernetes_device_plugin_version"]
    for product in build.CONTAINER_TOOLKITS:
        assert f"internal/info.version={product.version}" in product.ldflags
    for products in (build.NOMADS, build.CONTAINER_TOOLKITS):
        assert len({product.version for product in products}) == 2


@pytest.mark.parametrize("requirements", [build.TOOLCHAIN, build.CUDA], ids=lambda path: path.name)
def test_python_packages_are_pinned_by_hash(requirements: Path) -> None:
    lines = [line for line in requirements.read_text("ascii").splitlines() if not line.startswith("#")]
    assert lines
    assert [line for line in lines if not re.fullmatch(r"[a-z-]+==[0-9.]+ --hash=sha256:[0-9a-f]{64}", line)] == []


def test_without_go_its_settings_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.which", lambda _: None)
    for name in build.GO_SETTINGS:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("GOPROXY", "https://modules.example")
    assert build.host_go_settings() == {"GOPROXY": "https://modules.example"}


def test_containers_are_given_the_ca_bundle_of_this_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*build.CA_SETTINGS, *build.PROXY_SETTINGS):
        monkeypatch.delenv(name, raising=False)
    assert build.network_flags() == ["--network", "host"]
    bundle = tmp_path / "bundle.crt"
    bundle.touch()
    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "missing"))
    monkeypatch.setenv("PIP_CERT", str(bundle))
    monkeypatch.setenv("https_proxy", "http://proxy.example")
    flags = build.network_flags()
    assert f"{bundle}:/etc/gpufarm-ca.crt:ro" in flags
    # The name alone: a proxy's password must not show in a list of processes.
    assert "https_proxy" in flags
    assert not [flag for flag in flags if "proxy.example" in flag]


def test_another_architecture_is_refused_with_the_next_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.machine", lambda: "riscv64")
    with pytest.raises(BuildError, match=r"This machine is riscv64\. Expected: x86_64.*Next step"):
        build.toolchain()
