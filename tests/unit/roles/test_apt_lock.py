# Copyright (c) 2026, gpufarm contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""How long the roles wait for another apt: on a first boot unattended-upgrades and cloud-init hold dpkg's lock."""

from __future__ import annotations

from ansible_collections.gpufarm.core.tests.unit.roles import role_helper


def test_every_task_of_apts_waits_for_another_apt() -> None:
    found = 0
    for path in sorted(role_helper.ROLES.glob("*/tasks/**/*.yml")):
        name = str(path.relative_to(role_helper.ROLES))
        for task in role_helper.tasks_of(name):
            options = task.get("ansible.builtin.apt")
            if "ansible.builtin.package" in task:
                options = task.get("module_defaults", {}).get("ansible.builtin.apt", {})
            if options is not None:
                found += 1
                assert options.get("lock_timeout") == "{{ _common_apt_lock_timeout }}", f"{name}: {task['name']}"
    assert found > 12
    assert role_helper.variables("_common")["_common_apt_lock_timeout"] == 600
