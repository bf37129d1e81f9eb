"""Every default of every role equals its specification: by name, value, type and elements."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from ansible_collections.gpufarm.core.plugins.modules import (
    kubernetes_gpu_job_verify,
    nomad_gpu_job_verify,
    nvidia_gpu_acceptance,
    nvidia_gpu_benchmark,
)

ROOT = Path(__file__).resolve().parents[3]
ROLES = sorted(path.parent.parent.name for path in (ROOT / "roles").glob("*/meta/argument_specs.yml"))
TYPES = {"str": str, "path": str, "int": int, "float": float, "bool": bool, "list": list, "dict": dict, "raw": object}


def load(path: Path) -> Any:
    return yaml.safe_load(path.read_text(encoding="utf-8"))


# What is asked of a whole farm is entered by its entry points, after which its variables are named.
PREFIXES = {"farm": ("verify", "gate", "health", "accept", "report", "remove", "upgrade", "gpu_node", "gpufarm")}


def options(role: str) -> dict[str, Any]:
    """Return the variables of all entry points; take_out and put_back have those of main."""
    entries = load(ROOT / "roles" / role / "meta/argument_specs.yml")["argument_specs"].values()
    return {name: spec for entry in entries for name, spec in entry["options"].items()}


def defaults(role: str) -> dict[str, Any]:
    found: dict[str, Any] = load(ROOT / "roles" / role / "defaults/main.yml")
    return found


def test_every_public_role_has_a_specification() -> None:
    public = {path.name for path in (ROOT / "roles").iterdir() if path.is_dir() and not path.name.startswith("_")}
    assert set(ROLES) == public


def test_the_design_names_what_is_asked_of_a_farm_and_what_runs_on_it() -> None:
    text = " ".join((ROOT / "docs/design.md").read_text(encoding="utf-8").split())
    (named,) = re.findall(r"is in the role \*\*`farm`\*\*: ([^.]*)\.", text)
    assert re.findall("`([a-z_]+)`", named) == list(load(ROOT / "roles/farm/meta/argument_specs.yml")["argument_specs"])
    assert "`wandb_launch_agent`" in text


@pytest.mark.parametrize("role", ROLES)
def test_same_variables_in_the_same_order(role: str) -> None:
    assert list(defaults(role)) == [name for name, spec in options(role).items() if "default" in spec]
    required = [name for name, spec in options(role).items() if spec.get("required")]
    assert not set(required) & set(defaults(role))


@pytest.mark.parametrize("role", ROLES)
def test_same_values_and_types(role: str) -> None:
    for name, value in defaults(role).items():
        spec = options(role)[name]
        assert spec["default"] == value, name
        assert type(spec["default"]) is type(value), name
        assert isinstance(value, TYPES[spec["type"]]), name
        assert isinstance(value, bool) == (spec["type"] == "bool"), name
        if spec["type"] == "list":
            assert "elements" in spec, name
            assert all(isinstance(item, TYPES[spec["elements"]]) for item in value), name
        if "choices" in spec:
            assert set(value if spec["type"] == "list" else [value]) <= set(spec["choices"]), name


@pytest.mark.parametrize("role", ROLES)
def test_variables_carry_the_roles_name(role: str) -> None:
    assert all(name.startswith(tuple(f"{prefix}_" for prefix in PREFIXES.get(role, (role,)))) for name in options(role))


@pytest.mark.parametrize("role", ROLES)
def test_every_variable_is_used(role: str) -> None:
    text = "".join(
        path.read_text(encoding="utf-8")
        for path in (ROOT / "roles").rglob("*")
        if path.is_file()
        and path.name not in ("argument_specs.yml", "README.md")
        and path.parent.name not in ("defaults", "__pycache__")
    )
    unused = [name for name in options(role) if not re.search(rf"\b{name}\b", text)]
    assert unused == []


def test_what_is_registered_hides_no_variable_of_a_role() -> None:
    """It would for the rest of the run. A mapping without templates is there for what may never be registered."""
    variables: dict[str, str] = {}
    registered: dict[str, str] = {}
    for path in sorted((ROOT / "roles").glob("*/*/**/*.yml")):
        name = str(path.relative_to(ROOT / "roles"))
        if "/vars/" in name:
            given = (load(path) or {}).items()
            variables.update({key: name for key, value in given if not isinstance(value, dict) or "{{" in str(value)})
        elif "/tasks/" in name or "/handlers/" in name:
            told = re.findall(r"^ *register: (\w+)", path.read_text(encoding="utf-8"), re.MULTILINE)
            registered.update(dict.fromkeys(told, name))
    assert "__wandb_launch_agent_said" in registered and "__wandb_launch_agent_folders" in variables
    assert {key: (registered[key], variables[key]) for key in registered.keys() & variables.keys()} == {}


@pytest.mark.parametrize(
    ("entry", "tasks", "module", "own"),
    [
        ("verify", "verify_jobs.yml", nomad_gpu_job_verify, "driver"),
        ("kubernetes_verify", "kubernetes_verify.yml", kubernetes_gpu_job_verify, "namespace"),
    ],
)
def test_jobs_of_verify_are_those_of_the_module(entry: str, tasks: str, module: Any, own: str) -> None:
    taken = module.argument_spec()
    specs = load(ROOT / "roles/farm/meta/argument_specs.yml")["argument_specs"][entry]["options"]
    for option in ("level", "image", "memory_mib", "timeout", own):
        spec = specs[f"verify_jobs_{option}"]
        assert (spec["type"], spec["default"] or None, spec.get("choices")) == (
            taken[option]["type"],
            taken[option].get("default"),
            taken[option].get("choices"),
        )
    text = (ROOT / "roles/farm/tasks" / tasks).read_text(encoding="utf-8")
    passed = {option for option in taken if re.search(rf"^ +{option}: .*\bverify_jobs_{option}\b", text, re.MULTILINE)}
    assert passed >= {"sample", "level", "image", "memory_mib", "timeout", own}


def test_an_acceptance_takes_what_the_benchmark_takes_and_judges_as_its_module() -> None:
    module = nvidia_gpu_benchmark.argument_spec()
    spec = options("farm")["accept_options"]["options"]
    assert {name: option["type"] for name, option in spec.items()} == {
        name: option["type"] for name, option in module.items() if name not in ("level", "devices")
    }
    assert options("farm")["accept_level"]["choices"] == module["level"]["choices"]
    allowed = {
        f"accept_{field.name}": field.default for field in dataclasses.fields(nvidia_gpu_acceptance.comparing.Allowed)
    }
    assert allowed == {name: defaults("farm")[name] for name in allowed}
