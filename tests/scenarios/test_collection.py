"""The collection as its users get it: built, installed into an empty folder, and used from there."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from tests.simulator.cache import ROOT
from tests.simulator.galaxy import archive_of, galaxy

Tool = Callable[..., str]


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Tool]:
    """Return the installed collection's folder and a way to run Ansible's tools with nothing but it."""
    folder = tmp_path_factory.mktemp("collection")
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith("ANSIBLE_")},
        "ANSIBLE_COLLECTIONS_PATH": str(folder / "collections"),
        "HOME": str(folder),
        "COLUMNS": "200",
    }

    def tool(name: str, *arguments: str) -> str:
        result = subprocess.run(
            [str(Path(sys.executable).with_name(name)), *arguments],
            cwd=folder, env=environment, capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert result.returncode == 0, result.stdout + result.stderr
        return result.stdout

    tool("ansible-galaxy", "collection", "build", str(ROOT), "--output-path", str(folder))
    (archive,) = folder.glob("gpufarm-core-*.tar.gz")
    # What it depends on comes from there.
    with galaxy(archive_of("community.crypto", folder)) as server:
        environment["ANSIBLE_GALAXY_SERVER"] = server
        tool("ansible-galaxy", "collection", "install", str(archive), "-p", str(folder / "collections"))
    return folder / "collections/ansible_collections/gpufarm/core", tool


def test_only_the_product_is_in_it(installed: tuple[Path, Tool]) -> None:
    folder, _tool = installed
    assert {path.name for path in folder.iterdir()} == {
        "CHANGELOG.rst", "CODE_OF_CONDUCT.md", "CONTRIBUTING.md", "FILES.json", "LICENSE", "MAINTAINERS.md",
        "MANIFEST.json", "README.md", "SECURITY.md", "changelogs", "docs", "examples", "meta", "playbooks", "plugins",
        "roles", "tests",
    }  # fmt: skip
    assert [path.name for path in (folder / "tests").iterdir()] == ["sanity"]
    assert not list(folder.rglob("__pycache__"))


def test_texts_link_nothing_that_is_not_there(installed: tuple[Path, Tool]) -> None:
    folder, _tool = installed
    texts = sorted(folder.rglob("*.md"))
    links = [(text, link) for text in texts for link in re.findall(r"\]\(([^)#]+)", text.read_text(encoding="utf-8"))]
    assert links
    assert [f"{text}: {link}" for text, link in links if ":" not in link and not (text.parent / link).exists()] == []


def test_every_module_and_role_is_documented(installed: tuple[Path, Tool]) -> None:
    folder, tool = installed
    modules = sorted(path.stem for path in (folder / "plugins/modules").glob("*.py"))
    assert "nomad_gpu_verify" in modules
    roles = sorted(path.name for path in (folder / "roles").iterdir() if not path.name.startswith("_"))
    for kind, names in (("module", modules), ("role", roles)):
        told = tool("ansible-doc", "-t", kind, *(f"gpufarm.core.{name}" for name in names))
        headings = re.findall(r"^> (?:MODULE|ROLE:) \S*?gpufarm\.core\.(\w+)", told, re.MULTILINE)
        assert sorted(headings) == names
        if kind == "role":
            # The variables of the role farm are named after what is asked of it.
            first = {role: "verify" if role == "farm" else role for role in roles}
            assert [role for role in roles if not re.search(rf"^ +{first[role]}_\w+ ", told, re.MULTILINE)] == []


def test_playbooks_run_by_their_names(installed: tuple[Path, Tool]) -> None:
    folder, tool = installed
    inventory = str(folder / "examples/inventories/lab.yml")
    listing = tool("ansible-playbook", "-i", inventory, "gpufarm.core.site", "--list-hosts", "--list-tasks")
    assert "gaming-pc" in listing
    assert "Nomad's view of the GPUs" in listing
    listing = tool("ansible-playbook", "-i", inventory, "gpufarm.core.verify", "--list-tasks")
    assert "Require the verified device plugin" in listing


def test_examples_of_the_roles_are_playbooks(installed: tuple[Path, Tool]) -> None:
    folder, tool = installed
    inventory = str(folder / "examples/inventories/lab.yml")
    playbooks = sorted(str(path) for path in (folder / "examples/playbooks").glob("*.yml"))
    assert tool("ansible-playbook", "-i", inventory, "--syntax-check", *playbooks).count("playbook: ") == len(playbooks)


def test_oldest_ansible_core_is_the_one_that_is_tested() -> None:
    required = yaml.safe_load((ROOT / "meta/runtime.yml").read_text(encoding="utf-8"))["requires_ansible"]
    assert required == ">=2.19.0"
    assert '"ansible-core>=2.19' in (ROOT / "pyproject.toml").read_text(encoding="utf-8")
