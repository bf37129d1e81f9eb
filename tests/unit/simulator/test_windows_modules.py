"""The doubles of modules for Windows take what their documentation lists, and no more."""

from __future__ import annotations

import pytest
from ansible.module_utils.common.arg_spec import ArgumentSpecValidator

from tests.simulator.windows import modules

pytestmark = pytest.mark.controller


def errors(module: str, **given: object) -> list[str]:
    return list(ArgumentSpecValidator(modules.options(module)).validate(given).error_messages)


@pytest.mark.parametrize("name", modules.BEHAVIOUR)
def test_every_double_knows_the_options_of_its_module(name: str) -> None:
    assert modules.options(name)
    assert any("no_such_option" in error for error in errors(name, no_such_option=1))


def test_suboptions_types_and_choices_count() -> None:
    script = {"script": "$env:USERNAME"}
    secret = {"name": "credential", "username": "alice", "password": "x"}
    assert errors("ansible.windows.win_powershell", **script, sensitive_parameters=[secret]) == []
    for wrong in ({"error_action": "never"}, {"sensitive_parameters": [{**secret, "nam": "x"}]}, {"depth": "deep"}):
        assert errors("ansible.windows.win_powershell", **script, **wrong)
    assert errors("ansible.windows.win_powershell", **script, sensitive_parameters=[{"value": "x"}])
    assert errors("microsoft.wsl.import", name="Debian", src="C:\\a.tar")
