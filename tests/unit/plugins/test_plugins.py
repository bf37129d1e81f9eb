"""What holds for every file of plugins: records that nobody changes on their way, modules that are programs."""

from __future__ import annotations

import ast
import dataclasses
import importlib
import inspect
import json
import re
import runpy
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml
from ansible.module_utils.testing import patch_module_args
from ansible_collections.gpufarm.core.plugins import doc_fragments
from ansible_collections.gpufarm.core.tests.unit.plugins.module_utils.recorded import assert_recorded

PLUGINS = Path(__file__).resolve().parents[3] / "plugins"
# These collect answers.
COLLECT = {"Answers", "NodeVerdict", "_Child", "_Gathering", "_Seen", "_Watched"}


# What may wait for ever, and the argument by which it does not.
WAITS = {
    r"subprocess\.(run|call|check_call|check_output|Popen)": "timeout",
    r".*\.communicate": "timeout",
    r"(.*\.)?process\.wait": 0,
    r"(.*\.)?(open_url|fetch_url|urlopen)|.*opener\.open": "timeout",
    r"socket\.create_connection": 1,
    r"socket\.socket|.*\.run_command|os\.(system|popen)": None,
}
# By file and function, what ends it all the same.
ENDED_OTHERWISE = {
    "connection/wsl.py _escalate process.wait": "it was killed",
    "connection/wsl.py exec_command process.wait": "it has printed its last",
    "connection/wsl.py fetch_file process.communicate": "a file takes as long as it takes",
    "connection/wsl.py put_file process.communicate": "a file takes as long as it takes",
    "connection/wsl_windows.py exec_command process.communicate": "a command takes as long as it takes",
    "connection/wsl_windows.py fetch_file process.wait": "it has printed its last",
    "connection/wsl_windows.py put_file process.communicate": "a file takes as long as it takes",
    "module_utils/commands.py start subprocess.Popen": "run_commands and lines_of end it in time",
    "module_utils/container_engines/cri.py call socket.socket": "each step of the call sets what is left of its time",
    "module_utils/nomad/client.py is_own socket.socket": "it only takes an address, and asks nobody",
    "modules/bundle_collect.py as_signed self.module.run_command": "it unpacks a file of this host",
    "modules/bundle_collect.py prefer self.module.run_command": "it unpacks a file of this host",
    "modules/bundle_collect.py run self.module.run_command": "apt leaves a server that is silent by itself",
    "modules/bundle_hand_on.py installed module.run_command": "dpkg-query reads a file of this host, and takes no lock",
    "plugin_utils/interop.py _started subprocess.Popen": "running ends it with its user; answered reads it in time",
}


def modules() -> list[ModuleType]:
    name = "ansible_collections.gpufarm.core.plugins"
    folders = ("module_utils", "modules", "plugin_utils")
    paths = [path for folder in folders for path in sorted((PLUGINS / folder).rglob("[!_]*.py"))]
    return [
        importlib.import_module(".".join([name, *path.relative_to(PLUGINS).with_suffix("").parts])) for path in paths
    ]


def calls(node: ast.AST, function: str = "") -> Iterator[tuple[str, ast.Call]]:
    """Yield each call with the function that it is in."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Call):
            yield function, child
        yield from calls(child, child.name if isinstance(child, ast.FunctionDef) else function)


def waits_for_ever(call: ast.Call) -> bool:
    """Tell whether a call is one of what may, without the argument by which it does not."""
    for pattern, argument in WAITS.items():
        if re.fullmatch(pattern, ast.unparse(call.func)):
            given = {word.arg for word in call.keywords}
            if isinstance(argument, int):
                return len(call.args) <= argument and "timeout" not in given
            return argument not in given
    return False


def test_nothing_waits_for_ever() -> None:
    found = {
        f"{path.relative_to(PLUGINS)} {function} {ast.unparse(call.func)}"
        for path in PLUGINS.rglob("*.py")
        for function, call in calls(ast.parse(path.read_text(encoding="utf-8")))
        if waits_for_ever(call)
    }
    assert found == set(ENDED_OTHERWISE)


def test_records_are_frozen() -> None:
    records: dict[str, Any] = {
        value.__name__: value
        for module in modules()
        for value in vars(module).values()
        if dataclasses.is_dataclass(value) and isinstance(value, type)
    }
    assert len(records) > 20
    assert {name for name, record in records.items() if not record.__dataclass_params__.frozen} == COLLECT


def test_a_filter_has_the_name_of_its_file() -> None:
    """By which Ansible finds it, and its documentation."""
    names = [path.stem for path in sorted((PLUGINS / "filter").glob("*.py"))]
    for name in names:
        module = importlib.import_module(f"ansible_collections.gpufarm.core.plugins.filter.{name}")
        assert module.FilterModule().filters() == {name: getattr(module, name)}
    assert names


def test_numbers_as_recorded() -> None:
    """Every limit, wait and default: one that changes is meant to."""
    numbers: dict[str, Any] = {}
    for module in modules():
        name = module.__name__.partition(".plugins.")[2]
        own = set(re.findall(r"^(\w+)\b", inspect.getsource(module), re.MULTILINE))
        for key, value in vars(module).items():
            if key in own and is_number(value):
                numbers[f"{name}.{key}"] = value
            elif dataclasses.is_dataclass(value) and getattr(value, "__module__", "") == module.__name__:
                for field in dataclasses.fields(value):
                    if is_number(field.default) or isinstance(field.default, str):
                        numbers[f"{name}.{key}.{field.name}"] = field.default
    assert_recorded("numbers", dict(sorted(numbers.items())))


def test_tables_as_recorded() -> None:
    """Every catalogue, pattern and text that has a name: an Xid's action that changes is meant to."""
    tables: dict[str, Any] = {}
    for module in modules():
        own = set(re.findall(r"^(\w+)\b", inspect.getsource(module), re.MULTILINE)) - SAID
        for key, value in vars(module).items():
            known = plain(value) if key in own and not is_number(value) else None
            if known is not None:
                tables[f"{module.__name__.partition('.plugins.')[2]}.{key}"] = known
    assert_recorded("tables", dict(sorted(tables.items())))


# What ansible-doc shows.
SAID = {"DOCUMENTATION", "EXAMPLES", "RETURN"}


def plain(value: Any) -> Any:
    """Return a constant as JSON has it, or None for what is none."""
    if isinstance(value, re.Pattern):
        value = [value.pattern, value.flags]
    elif isinstance(value, (set, frozenset)):
        value = sorted(map(str, value))
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    elif isinstance(value, bytes):
        value = value.decode("latin-1")
    if isinstance(value, (list, tuple)):
        return [plain(each) for each in value]
    if isinstance(value, Mapping):
        return {str(key): plain(each) for key, each in value.items()}
    return value if isinstance(value, (str, int, float)) else None


def is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) or (isinstance(value, tuple) and value != () and all(map(is_number, value)))


def test_options_are_documented_and_how_they_go_together_is_as_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    found = {module.__name__.rpartition(".")[2]: module for module in modules() if ".modules." in module.__name__}
    assert_recorded("options", {name: assert_documented(module, monkeypatch) for name, module in found.items()})


def compared(options: dict[str, Any], below: str) -> dict[str, Any]:
    """What ansible-doc tells of options, those of an option among them, as far as it says anything."""
    keys = ("type", "default", "required", "choices", "elements")
    return {
        name: {key: option[key] for key in keys if option.get(key) is not None}
        | ({"options": compared(option[below], below)} if below in option else {})
        for name, option in options.items()
    }


def assert_documented(module: Any, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Compare the documented options with those that the module takes, and return how it asks for the others."""

    class Asked(Exception):
        pass

    def ask(**given: Any) -> None:
        raise Asked(given)

    monkeypatch.setattr(module, "AnsibleModule", ask)
    with pytest.raises(Asked) as caught:
        module.main()
    given: dict[str, Any] = caught.value.args[0]
    documentation = yaml.safe_load(module.DOCUMENTATION)
    options = documentation.get("options", {})
    for slug in documentation.get("extends_documentation_fragment", ()):
        _namespace, _collection, name, *variant = slug.split(".")
        fragment = importlib.import_module(f"{doc_fragments.__name__}.{name}").ModuleDocFragment
        shared = yaml.safe_load(getattr(fragment, *(each.upper() for each in variant or ["documentation"])))
        shared = shared.get("options", {})
        options = shared | {name: {**shared.get(name, {}), **option} for name, option in options.items()}
    assert compared(given["argument_spec"], "options") == compared(options, "suboptions")
    # Neither is a secret, though their names sound like one.
    asked = given.pop("argument_spec")
    return {**given, "shown": sorted(name for name, option in asked.items() if option.get("no_log") is False)}


LOADED_WITH_FILTERS = """
import importlib, pathlib, sys, time
from ansible.plugins.loader import init_plugin_loader
init_plugin_loader([sys.argv[1]])
ours = "ansible_collections.gpufarm.core.plugins."
for path in pathlib.Path(sys.argv[1], "ansible_collections/gpufarm/core/plugins/filter").glob("*.py"):
    importlib.import_module(f"{ours}filter.{path.stem}")
print(*(name.removeprefix(ours) for name in sys.modules if name.startswith(ours) and name.count(".") > 4))
"""


@pytest.mark.controller
def test_filters_import_little_when_they_are_loaded() -> None:
    """Every task in which a template names one of them loads those before it by the alphabet."""
    collections = next(path for path in map(Path, sys.path) if (path / "ansible_collections/gpufarm/core").exists())
    command = [sys.executable, "-c", LOADED_WITH_FILTERS, str(collections)]
    loaded = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()
    filters = {name for name in loaded if name.startswith("filter.")}
    assert len(filters) == len(list((PLUGINS / "filter").glob("*.py")))
    assert set(loaded) - filters <= {"module_utils.problem", "module_utils.text", "module_utils.wsl_settings"}


@pytest.mark.parametrize("path", sorted((PLUGINS / "modules").glob("[!_]*.py")), ids=lambda path: path.stem)
def test_every_module_is_a_program(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with patch_module_args({"no_such_option": 1}), pytest.raises(SystemExit):
        runpy.run_path(str(path), run_name="__main__")
    assert json.loads(capsys.readouterr().out)["failed"]
