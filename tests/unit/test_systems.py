"""docs/systems.md has the five systems with what does them, and names only what is there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from tests.simulator.cache import ROOT

DOCUMENT = ROOT / "docs/systems.md"
HEAD = "| System | Playbook | Roles | Commands | Run |"
LINK = re.compile(r"\]\(\.\./([^)#]+)")
CODE = re.compile(r"`([^`]+)`")
COMMAND = re.compile(
    r"ansible-playbook -i my-\S+ (?:gpufarm\.core\.(?P<name>\w+)|(?P<playbook>examples/\S+))(?: (?:-e|--limit) \S+)?"
    r"|nomad job run (?:-var (?P<variable>\w+)=\S+ )?(?P<job>\S+)|sh (?P<script>\w+\.sh) --secrets \S+ \S+"
)
# What a playbook or a task enters, by its name and by its path.
NAMED = re.compile(r"(?:role|name|import_playbook): gpufarm\.core\.(\w+)")
BESIDE = re.compile(r"import_(?:playbook|tasks): ([\w./]+\.yml)")


def rows() -> list[list[str]]:
    """Return the cells of the table."""
    _before, _head, table = DOCUMENT.read_text(encoding="utf-8").partition(HEAD)
    lines = table.strip().partition("\n\n")[0].splitlines()[1:]
    return [[cell.strip() for cell in line.strip().strip("|").split("|")] for line in lines]


ROWS = rows()
EACH = pytest.mark.parametrize("row", ROWS, ids=[row[0] for row in ROWS])


def playbooks(row: list[str]) -> list[str]:
    return LINK.findall(row[1])


def entered(playbook: Path) -> set[str]:
    """Return the roles that a playbook enters, and those that these do."""
    roles, seen, left = set(), set(), [playbook]
    while left:
        file = left.pop()
        if file in seen:
            continue
        seen.add(file)
        text = file.read_text(encoding="utf-8")
        left += [beside for name in BESIDE.findall(text) if (beside := file.parent / name).is_file()]
        for name in NAMED.findall(text):
            if (tasks := ROOT / "roles" / name / "tasks").is_dir():
                roles.add(name)
                left += tasks.glob("*.yml")
            elif (other := ROOT / "playbooks" / f"{name}.yml").is_file():
                left.append(other)
    return roles


def wanted(job: Path) -> set[str | None]:
    """Return the variables of a job that have no default."""
    variables = re.findall(r'^variable "(\w+)" \{\n(.*?)^\}', job.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    return {name for name, text in variables if "default" not in text}


def test_the_systems_are_five_and_no_cell_is_empty() -> None:
    numbers = [re.match(r"(\d)([a-z]?)\. \S", row[0]) for row in ROWS]
    assert [match and match[0][:-2] for match in numbers] == ["1.", "2.", "3.", "4.", "5a.", "5b.", "5c."]
    assert all(len(row) == 5 and all(row) for row in ROWS)
    assert DOCUMENT.read_text(encoding="utf-8").startswith("# Five systems, ")
    assert "[Five systems](docs/systems.md)" in (ROOT / "README.md").read_text(encoding="utf-8")


@EACH
def test_a_row_has_playbooks_that_are_there_and_the_roles_that_they_enter(row: list[str]) -> None:
    assert playbooks(row)
    assert all((ROOT / path).parent.name == "playbooks" for path in playbooks(row))
    roles = CODE.findall(row[2])
    assert roles and not re.sub(r"`\w+`|[,\s]", "", row[2])
    assert set(roles) <= set.union(*(entered(ROOT / path) for path in playbooks(row)))


@EACH
def test_a_row_has_the_commands_that_run_its_playbooks_and_what_they_name(row: list[str]) -> None:
    commands = CODE.findall(row[3])
    assert commands and not re.sub(r"`[^`]+`|<br>", "", row[3])
    found = [match for command in commands if (match := COMMAND.fullmatch(command))]
    assert [match[0] for match in found] == commands
    ran = {f"playbooks/{match['name']}.yml" if match["name"] else match["playbook"] for match in found} - {None}
    named = [match["job"] or (match["script"] and f"examples/wsl/{match['script']}") for match in found]
    assert all((ROOT / path).is_file() for path in named if path)
    for match in found:
        assert not match["job"] or wanted(ROOT / match["job"]) <= {match["variable"]}
    assert ran <= set(playbooks(row))
    # One may be a part of another.
    texts = "".join((ROOT / path).read_text(encoding="utf-8") for path in ran)
    parts = {path for path in playbooks(row) if f"import_playbook: {Path(path).name}\n" in texts}
    assert set(playbooks(row)) <= ran | parts


@EACH
def test_a_playbook_of_the_examples_has_hosts_in_the_inventory_that_its_command_names(row: list[str]) -> None:
    lab = yaml.safe_load((ROOT / "examples/inventories/lab.yml").read_text(encoding="utf-8"))["all"]
    names = {*lab["hosts"], *lab["children"], *(host for group in lab["children"].values() for host in group["hosts"])}
    for path in playbooks(row):
        for play in yaml.safe_load((ROOT / path).read_text(encoding="utf-8")) if path.startswith("examples/") else []:
            assert set(play["hosts"].split(":")) <= names, f"{path}: Ansible skips a play that has no hosts"


@EACH
def test_a_row_says_which_tests_have_run_it(row: list[str]) -> None:
    tests = [path for path in CODE.findall(row[4]) if "/" in path]
    assert tests
    for path in tests:
        assert (ROOT / path / "molecule.yml").is_file() or re.fullmatch(r"tests/unit/\S+/test_\w+\.py", path), path
        assert (ROOT / path).exists(), path
