"""The ecosystem's own gates, on what is published: Galaxy's importer, and ansible-test's sanity of both generations."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from tests.simulator.cache import ROOT, cache_dir

SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

# ansible-test would download this script; what it does is in Python itself and in the package index.
GET_PIP = """
import subprocess, sys
subprocess.check_call([sys.executable, "-m", "ensurepip"])
packages = [argument for argument in sys.argv[1:] if argument not in ("--no-setuptools", "--no-wheel")]
sys.exit(subprocess.call([sys.executable, "-m", "pip", "install", *packages]))
"""


@pytest.fixture(scope="module")
def archive(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the built collection."""
    folder = tmp_path_factory.mktemp("archive")
    galaxy = Path(sys.executable).with_name("ansible-galaxy")
    subprocess.run(
        [galaxy, "collection", "build", ROOT, "--output-path", folder], check=True, capture_output=True, text=True
    )
    (built,) = folder.glob("gpufarm-core-*.tar.gz")
    return built


def test_galaxy_importer(archive: Path) -> None:
    # `make lint` runs ansible-lint; the importer gives it two minutes, which a busy machine does not keep.
    configuration = archive.with_name("galaxy-importer.cfg")
    configuration.write_text("[galaxy-importer]\nRUN_ANSIBLE_LINT = False\n", encoding="utf-8")
    path = f"{Path(sys.executable).parent}:{SYSTEM_PATH}"
    result = subprocess.run(
        [sys.executable, "-m", "galaxy_importer.main", archive.name], cwd=archive.parent, text=True, check=False,
        capture_output=True, env={**os.environ, "PATH": path, "GALAXY_IMPORTER_CONFIG": str(configuration)},
    )  # fmt: skip
    said = result.stdout + result.stderr
    assert result.returncode == 0, said
    assert "Importer processing completed successfully" in said, said
    assert "ERROR" not in said, said
    # It tells of every line in tests/sanity, each of which has its reason there.
    assert [line for line in said.splitlines() if "WARNING" in line and "Ignore files skip" not in line] == [], said


# Sanity tests that run Ansible's own code on ours.
OF_ANSIBLE = ["ansible-doc", "import", "runtime-metadata", "validate-modules"]


def ansible_tests() -> list[Path]:
    """Return ansible-test of this environment and of the other generation's, which `make test` has made."""
    return [Path(sys.executable).with_name("ansible-test"), *sorted(ROOT.glob(".venv-*/bin/ansible-test"))]


def test_both_generations_are_here() -> None:
    if len(ansible_tests()) < 2:
        pytest.skip("no second Python interpreter here: ansible-test's sanity runs with one generation of ansible-core")


@pytest.mark.parametrize("generation", range(2))
def test_sanity(archive: Path, tmp_path: Path, generation: int) -> None:
    if generation >= len(ansible_tests()):
        pytest.skip("no second Python interpreter here: ansible-test's sanity runs with one generation of ansible-core")
    ansible_test = ansible_tests()[generation]
    content = tmp_path / "ansible_collections/gpufarm/core"
    content.mkdir(parents=True)
    subprocess.run(["tar", "-xzf", archive, "-C", content], check=True)
    # All others go by the same rules in both, so the newer generation's are enough.
    only = [] if ansible_test == max(ansible_tests(), key=generation_of) else OF_ANSIBLE
    chosen = [word for name in only for word in ("--test", name)]
    result = subprocess.run(
        [ansible_test, "sanity", "--requirements", "--color", "no", *chosen], cwd=content,
        env=environment(ansible_test), text=True, check=False, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )  # fmt: skip
    complaints = [line for line in result.stdout.splitlines() if line.startswith(("ERROR", "FATAL"))]
    assert result.returncode == 0, "\n".join(complaints) or result.stdout[-8000:]
    for name in only or ("validate-modules", "pylint"):
        assert f'Running sanity test "{name}"' in result.stdout, result.stdout


def generation_of(ansible_test: Path) -> int:
    """Return the minor version of the Python that runs it."""
    said = subprocess.run(
        [ansible_test.with_name("python"), "-c", "import sys; print(sys.version_info.minor)"],
        check=True, capture_output=True, text=True,
    )  # fmt: skip
    return int(said.stdout)


def environment(ansible_test: Path) -> dict[str, str]:
    """Return an environment with a home of its own, where ansible-test keeps what it installs."""
    home = cache_dir() / "ansible-test"
    bootstraps = home / ".ansible/test/cache"
    bootstraps.mkdir(parents=True, exist_ok=True)
    (requirements,) = ansible_test.parent.parent.glob(
        "lib/python*/site-packages/ansible_test/_internal/python_requirements.py"
    )
    for version in re.findall(r"pip='([0-9.]+)'", requirements.read_text(encoding="utf-8")):
        (bootstraps / f"get_pip_{version.replace('.', '_')}.py").write_text(GET_PIP, encoding="utf-8")
    pip_configuration(home / ".config/pip/pip.conf")
    return {"HOME": str(home), "PATH": f"{ansible_test.parent}:{interpreters(home / 'interpreters')}:{SYSTEM_PATH}"}


def pip_configuration(path: Path) -> None:
    """Write what pip is told here by files and by its environment, which ansible-test does not hand on."""
    listed = subprocess.run(
        [sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True, check=True
    ).stdout
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch(mode=0o600)
    values = dict(line.split("=", 1) for line in listed.splitlines() if "=" in line)
    lines = [f"{key.rsplit('.', 1)[-1]} = {shlex.split(value)[0]}" for key, value in values.items() if value != "''"]
    path.write_text("[global]\n" + "".join(f"{line}\n" for line in dict.fromkeys(lines)), encoding="utf-8")


def interpreters(folder: Path) -> Path:
    """Return a folder with interpreters of this machine: those with which modules break first, and the newest.

    ansible-test makes environments for each that it finds; what runs on all of these runs on those in between.
    """
    folder.mkdir(parents=True, exist_ok=True)
    found: dict[int, Path] = {}
    for minor in range(8, 15):
        name = f"python3.{minor}"
        # pyenv's stand-ins for others are on PATH and do not work.
        for candidate in [Path("/usr/bin") / name, Path("/usr/local/bin") / name,
                          *sorted(Path.home().glob(f".pyenv/versions/3.{minor}.*/bin/{name}"))]:  # fmt: skip
            if candidate.exists():
                found.setdefault(minor, candidate)
    for minor in {*sorted(found)[:2], max(found), sys.version_info.minor} & set(found):
        # The other generation may be looking for its own meanwhile.
        with suppress(FileExistsError):
            (folder / f"python3.{minor}").symlink_to(found[minor])
    return folder


def test_documentation_site_builds(tmp_path: Path) -> None:
    site = tmp_path / "site"
    site.mkdir(mode=0o700)
    tools = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}:{SYSTEM_PATH}",
        "ANSIBLE_COLLECTIONS_PATH": str(ROOT / ".collections"),
    }
    subprocess.run(
        ["antsibull-docs", "sphinx-init", "--use-current", "--squash-hierarchy", "--fail-on-error", "--dest-dir", site,
         "gpufarm.core"], env=tools, check=True, capture_output=True,
    )  # fmt: skip
    with (site / "conf.py").open("a", encoding="utf-8") as configuration:
        # Links to Ansible's own pages need its inventory, which is only downloaded where the site is made.
        configuration.write('intersphinx_mapping = {}\nnitpicky = False\nsuppress_warnings = ["ref.ref"]\n')
    result = subprocess.run(["bash", "build.sh"], cwd=site, env=tools, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    start = (site / "build/html/docsite/start.html").read_text(encoding="utf-8")
    assert "nvidia_smi_facts_module.html" in start
    assert (site / "build/html/gpu_health_role.html").exists()
