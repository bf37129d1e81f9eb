# Copyright (c) 2026, gpufarm contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

import gc
import inspect
import json
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import yaml
from ansible.errors import AnsibleFilterError
from ansible_collections.gpufarm.core.plugins.filter import farm_report
from ansible_collections.gpufarm.core.tests.unit.plugins.plugin_utils import report_helper as helper

apply = farm_report.FilterModule().filters()["farm_report"]


class Lazy(Mapping[str, Any]):
    """A mapping that is no dict, as Ansible's variables of a host are."""

    def __init__(self, content: Mapping[str, Any]) -> None:
        self._content = content

    def __getitem__(self, key: str) -> Any:
        return self._content[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._content)

    def __len__(self) -> int:
        return len(self._content)


def test_document_page_and_history() -> None:
    farm = helper.farm(2, 2)
    answers = (Lazy(entry) for entry in farm["answers"])
    result = apply(
        list(answers), hosts=tuple(farm["hosts"]), made_at=helper.MADE_AT, servers=farm["servers"], title="A farm"
    )
    assert set(result) == {"json", "page", "history"}
    data = json.loads(result["json"])
    assert data["title"] == "A farm" == result["page"]["title"] and data["summary"]["gpus"] == 4
    assert json.loads(result["history"])["gpus"] == 4


def test_what_is_left_out_of_the_answers_is_shown_nowhere() -> None:
    """As is a model's name that YAML took for a number."""
    farm = helper.farm(3, 2, sick=1)
    result = apply(**farm, made_at=helper.MADE_AT, models={4090: {"price_per_hour": 1}})
    assert json.loads(result["json"]) == helper.document(farm, models={"4090": {"price_per_hour": 1}})
    told = farm["answers"][0]["health"]["nvidia_smi"]["gpus"][0]
    assert set(told) >= farm_report.UNREAD
    # A host may have such a name.
    assert farm_report.plain({"ecc": {"pcie": "DE"}}) == {"ecc": {"pcie": "DE"}}
    assert gc.isenabled()


def test_only_a_small_farm_is_indented(monkeypatch: pytest.MonkeyPatch) -> None:
    farm = helper.farm(1, 2)
    assert apply(farm["answers"], farm["hosts"], helper.MADE_AT)["json"].count("\n") > 20
    monkeypatch.setattr(farm_report, "INDENTED_GPUS", 1)
    assert apply(farm["answers"], farm["hosts"], helper.MADE_AT)["json"].count("\n") == 1


def test_text_from_outside_is_clean() -> None:
    """A NUL ends a page for some readers, other characters steer terminals, and half a character cannot be written."""
    farm = helper.farm(1, 1)
    smi = farm["answers"][0]["health"]["nvidia_smi"]
    smi["gpus"][0].update(name="H100\0\0\x1b[2J", pci_bus_id="00000000:01:00.0\0\0", uuid="GPU-1\ud800")
    servers = [{"server": "a\0", "result": {"module_stderr": "first\nlast\x07 words\n"}}]
    result = apply(
        farm["answers"],
        hosts=[*farm["hosts"], "b\0"],
        made_at=helper.MADE_AT,
        servers=servers,
        title="A\0 farm",
        currency="E\0",
        models={"H100\0": {"price_per_hour\0": 1}},
        history_path="/x\0",
    )
    data = json.loads(result["json"])
    (gpu,) = next(node for node in data["nodes"] if node["name"] == farm["hosts"][0])["gpus"]
    assert (gpu["model"], gpu["pci_bus_id"], gpu["uuid"]) == ("H100   [2J", "00000000:01:00.0", "GPU-1")
    assert data["nomad"]["failures"] == [{"server": "a", "region": "global", "reason": "last words"}]
    assert (data["title"], data["currency"], data["history"]["path"]) == ("A  farm", "E", "/x")
    assert data["cost"]["unmatched"] == ["H100"]
    assert {node["name"] for node in data["nodes"]} == {farm["hosts"][0], "b"}
    text = helper.template().render(page=result["page"])
    for part in (*result["json"].splitlines(), *text.splitlines()):
        assert part.isprintable()
        part.encode()


def test_history_of_somebody_else_is_none() -> None:
    assert apply([], hosts=[], made_at=helper.MADE_AT, history="my notes\n")["history"] is None


@pytest.mark.parametrize("made_at", ["yesterday", None])
def test_time_that_is_none_is_refused(made_at: Any) -> None:
    with pytest.raises(AnsibleFilterError) as caught:
        apply([], hosts=[], made_at=made_at)
    # Some versions of Ansible add the cause.
    assert str(caught.value).startswith(
        f"farm_report: made_at is {made_at!r}. Expected: a time in ISO 8601. Next step: correct the argument"
    )


def test_documented_options_are_those_of_the_function() -> None:
    documented = yaml.safe_load(farm_report.DOCUMENTATION)["options"]
    parameters = inspect.signature(apply).parameters
    assert list(documented) == ["_input", *list(parameters)[1:]]
    for name, option in list(documented.items())[1:]:
        default = parameters[name].default
        assert option.get("required", False) == (default is inspect.Parameter.empty), name
        if "default" in option:
            assert option["default"] == (default or option["default"]) and (default or not option["default"]), name
    returned = yaml.safe_load(farm_report.RETURN)["_value"]["contains"]
    assert set(returned) == set(apply([], hosts=[], made_at=helper.MADE_AT))
