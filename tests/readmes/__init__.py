"""READMEs of roles: what a role does, one example, and its variables, all of it from where it is kept already."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2
import yaml
from antsibull_docs_parser import dom
from antsibull_docs_parser.parser import Context, parse

from tests.simulator.cache import ROOT

HERE = Path(__file__).resolve().parent


@dataclass(frozen=True)
class Variable:
    """One row of a table of variables."""

    name: str
    type: str
    default: str
    text: str


@dataclass(frozen=True)
class Pain:
    """What people suffered from elsewhere, and how a role answers it."""

    issue: str
    pain: str
    does: str
    how: str
    shown: str


def pains() -> dict[str, list[Pain]]:
    """Return them by role."""
    read = yaml.safe_load((HERE / "pains.yml").read_text(encoding="utf-8"))
    return {role: [Pain(**each) for each in listed] for role, listed in read.items()}


def roles() -> list[str]:
    """Return the names of the roles that somebody uses."""
    return sorted(path.parent.parent.name for path in (ROOT / "roles").glob("*/meta/argument_specs.yml"))


def path(role: str) -> Path:
    """Return where a role's README is."""
    return ROOT / "roles" / role / "README.md"


def example(role: str) -> Path:
    """Return where a role's example is."""
    return ROOT / "examples" / "playbooks" / f"{role}.yml"


def text(role: str) -> str:
    """Return the README of a role."""
    specification = yaml.safe_load((ROOT / "roles" / role / "meta/argument_specs.yml").read_text(encoding="utf-8"))
    metadata = yaml.safe_load((ROOT / "roles" / role / "meta/main.yml").read_text(encoding="utf-8"))
    environment = jinja2.Environment(trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined)
    template = environment.from_string((HERE / "role.md.j2").read_text(encoding="utf-8"))
    return template.render(
        role=role,
        short_description=metadata["galaxy_info"]["description"],
        entries=[
            {
                "name": name,
                "short_description": markdown(entry["short_description"]),
                "description": [markdown(paragraph) for paragraph in entry["description"]],
                "variables": list(variables(entry["options"])),
            }
            for name, entry in specification["argument_specs"].items()
        ],
        pains=pains().get(role, []),
        example=example(role).read_text(encoding="utf-8").removeprefix("---\n").strip(),
    )


def variables(options: dict[str, Any], above: str = "") -> Iterator[Variable]:
    """Yield a row for each variable, and after it those of what it holds."""
    for name, option in options.items():
        described = option["description"]
        choices = f" One of {', '.join(f'V({choice})' for choice in option['choices'])}." if "choices" in option else ""
        yield Variable(
            name=f"{above}{name}",
            type=f"list of {option['elements']}" if option["type"] == "list" else option["type"],
            default="required" if option.get("required") else code(option.get("default")),
            text=cell(" ".join([described] if isinstance(described, str) else described) + choices),
        )
        yield from variables(option.get("options", {}), f"{above}{name}{'[]' if option['type'] == 'list' else ''}.")


def code(value: Any) -> str:
    """Return a default as one writes it in YAML; nothing for none."""
    if value is None or value == "":
        return ""
    return f"`{value if isinstance(value, str) else json.dumps(value)}`"


def cell(described: str) -> str:
    """Return Ansible's markup as Markdown in a cell of a table."""
    return markdown(described).replace("|", r"\|")


def markdown(described: str) -> str:
    """Return Ansible's markup as Markdown that can be read as it is, too."""
    (paragraph,) = parse(described.strip(), Context())
    return "".join(_part(part) for part in paragraph)


def _part(part: dom.AnyPart) -> str:
    match part:
        case dom.TextPart():
            return part.text
        case dom.LinkPart():
            return f"[{part.text}]({part.url})"
        case dom.URLPart():
            return f"<{part.url}>"
        case dom.ModulePart():
            shown = part.fqcn
        case dom.PluginPart():
            shown = part.plugin.fqcn
        case dom.OptionNamePart():
            shown = part.name if part.value is None else f"{part.name}={part.value}"
        case dom.OptionValuePart():
            shown = part.value
        case dom.CodePart():
            shown = part.text
        case _:
            raise ValueError(
                f"found {part!r} in a specification. Expected: markup that tests/readmes knows. Next step: add it there"
            )
    return f"`{shown}`"
