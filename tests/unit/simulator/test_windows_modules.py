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
    task = {"name": "keep", "actions": [{"path": "wsl.exe"}]}
    assert errors("community.windows.win_scheduled_task", **task, triggers=[{"type": "boot"}]) == []
    for wrong in ({"triggers": [{"type": "never"}]}, {"triggers": [{"typ": "boot"}]}, {"logon_type": "s5u"}):
        assert errors("community.windows.win_scheduled_task", **task, **wrong)
    assert errors("community.windows.win_scheduled_task", name="keep", actions=[{"arguments": "-d Debian"}])
    assert errors("microsoft.wsl.import", name="Debian", src="C:\\a.tar")
