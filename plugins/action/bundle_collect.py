# Copyright (c) 2026, gpufarm contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""The part of the module bundle_collect that is done on the control machine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ansible.errors import AnsibleActionFail
from ansible.module_utils.parsing.convert_bool import boolean
from ansible.plugins.action import ActionBase
from ansible_collections.gpufarm.core.plugins.module_utils.apt_bundle import BundleError
from ansible_collections.gpufarm.core.plugins.plugin_utils import bundle


class ActionModule(ActionBase):  # type: ignore[misc]
    """Has the host collect, and fetches what it has collected."""

    def run(self, tmp: None = None, task_vars: dict[str, Any] | None = None) -> dict[str, Any]:
        """Return what has come and gone."""
        super().run(tmp, task_vars)
        arguments = dict(self._task.args)
        folder = Path(arguments["bundle"]).expanduser()
        host = (task_vars or {}).get("inventory_hostname", "")
        if self._task.check_mode:
            return {"changed": False, "skipped": True, "msg": "What is to be collected is not known in check mode."}
        try:
            manifest = bundle.read_or_new(folder)
            have = bundle.whole(folder, manifest, manifest["files"])
            arguments["have"] = have
            answer: dict[str, Any] = self._execute_module(
                module_name="gpufarm.core.bundle_collect", module_args=arguments, task_vars=task_vars
            )
            if answer.get("failed"):
                return answer
            collected = answer.pop("collected")
            partial = boolean(arguments.get("partial", False))
            fetched, removed = bundle.update(
                folder, arguments["platform"], collected, self.fetch, partial=partial, have=have
            )
        except BundleError as error:
            raise AnsibleActionFail(f"{host}: {error}") from error
        except OSError as error:
            raise AnsibleActionFail(
                f"{host}: the bundle {folder} cannot be written ({error}). Expected: a folder of whoever runs Ansible, "
                "with room for all packages. Next step: check gpufarm_bundle and the free space."
            ) from error
        return {
            "changed": bool(fetched or removed),
            "bundle": str(folder),
            "platform": arguments["platform"],
            "fetched": fetched,
            "removed": removed,
        }

    def fetch(self, source: str, target: Path) -> None:
        """Have a file of the host at a path of the control machine."""
        self._connection.fetch_file(source, str(target))
