"""The roles' READMEs are those that their specifications and examples make."""

from __future__ import annotations

import re

import pytest
import yaml

from tests import readmes


@pytest.mark.parametrize("role", readmes.roles())
def test_readme_is_not_stale(role: str) -> None:
    assert readmes.path(role).read_text(encoding="utf-8") == readmes.text(role), "Next step: make readmes"


@pytest.mark.parametrize("role", readmes.roles())
def test_example_uses_the_role(role: str) -> None:
    (play,) = yaml.safe_load(readmes.example(role).read_text(encoding="utf-8"))
    if "ansible.builtin.import_playbook" in play:
        assert role in ("farm", "nomad_tenancy"), "playbooks are what enters them"
        return
    included = [task.get("ansible.builtin.include_role", {}).get("name") for task in play.get("tasks", [])]
    assert f"gpufarm.core.{role}" in [*included, *(entry["role"] for entry in play.get("roles", []))]


def test_no_example_is_left_without_a_role() -> None:
    examples = (readmes.ROOT / "examples/playbooks").iterdir()
    assert sorted(path.stem for path in examples) == readmes.roles()


def test_tests_that_show_what_is_done_are_there() -> None:
    listed = readmes.pains()
    assert set(listed) <= set(readmes.roles())
    missing = []
    for each in (pain for pains in listed.values() for pain in pains):
        path, name = each.shown.split("::")
        file = readmes.ROOT / path
        if not file.is_file() or not re.search(rf"^def {name}\(", file.read_text(encoding="utf-8"), re.MULTILINE):
            missing.append(each.shown)
        assert each.does in ("P", "E", "F")
    assert missing == [], "Next step: name in tests/readmes/pains.yml the tests that show it now"


def test_what_shows_that_the_scripts_of_old_have_been_replaced_is_there() -> None:
    text = (readmes.ROOT / "docs/wsl.md").read_text(encoding="utf-8")
    (table,) = re.findall(r"^## What the scripts of old did$(.*?)^## ", text, re.MULTILINE | re.DOTALL)
    rows = [line.strip("| ").split(" | ") for line in table.splitlines() if line.startswith("| ")][1:]
    tests = "".join(
        path.read_text(encoding="utf-8")
        for folder in ("tests", "molecule") for path in (readmes.ROOT / folder).rglob("test_*.py")
    )  # fmt: skip
    missing = []
    for row in rows:
        shown = re.findall("`([^`]+)`", row[2])
        assert len(row) == 3 and shown, row
        for name in shown:
            there = (readmes.ROOT / name).exists() if "/" in name else f"def {name}(" in tests
            missing += [] if there else [name]
        # A path of what does it, where one is named.
        missing += [path for path in re.findall("`([a-z_]+/[^`]*)`", row[1]) if not (readmes.ROOT / path).exists()]
    assert missing == [], "Next step: name in docs/wsl.md what shows it now"


def test_suboptions_choices_and_defaults_are_in_the_table() -> None:
    rows = list(
        readmes.variables({
            "a": {"type": "list", "elements": "dict", "default": [], "description": ["Sets O(b=true).", "See V(x|y)."],
                  "options": {"name": {"type": "str", "required": True, "description": "A C(name)."}}},
            "c": {"type": "str", "default": "one", "choices": ["one", "two"], "description": "P(x.y.z#role) at U(https://z)."},
        })
    )  # fmt: skip
    assert rows == [
        readmes.Variable("a", "list of dict", "`[]`", r"Sets `b=true`. See `x\|y`."),
        readmes.Variable("a[].name", "str", "required", "A `name`."),
        readmes.Variable("c", "str", "`one`", "`x.y.z` at <https://z>. One of `one`, `two`."),
    ]


def test_unknown_markup_is_told() -> None:
    with pytest.raises(ValueError, match="Next step: add it there"):
        readmes.markdown("E(HOME)")
