# Copyright (c) 2026, gpufarm contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""The part of the module bundle_hand_on that is done on the control machine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ansible.errors import AnsibleActionFail
from ansible.plugins.action import ActionBase
from ansible_collections.gpufarm.core.plugins.module_utils.apt_bundle import BundleError
from ansible_collections.gpufarm.core.plugins.plugin_utils import bundle

# So much lies twice on a host, in a folder of the user that Ansible logs in as.
AT_A_TIME_BYTES = 256 * 1024 * 1024


class ActionModule(ActionBase):  # type: ignore[misc]
    """Asks the host what it lacks, and copies that."""

    def run(self, tmp: None = None, task_vars: dict[str, Any] | None = None) -> dict[str, Any]:
        """Return what was copied."""
        super().run(tmp, task_vars)
        arguments = dict(self._task.args)
        folder, platform = Path(arguments["bundle"]).expanduser(), arguments["platform"]
        try:
            manifest = bundle.require(folder, platform)
            names = bundle.names_for(manifest, platform, arguments["packages"])
            by_path = {bundle.on_node(name, platform): name for name in names}
            files = [
                {"path": path, "sha256": file["sha256"], "package": file.get("package")}
                for path, name in by_path.items()
                for file in [manifest["files"][name]]
            ]
            texts = bundle.texts(manifest, platform)
            known = bundle.known(manifest, platform)
            asked = arguments | {"files": files, "texts": texts, "known": known}
            answer = self.ask(asked, task_vars, change=False)
            if answer.get("failed"):
                return answer
            missing = answer["missing"]
            # All are looked at before one is handed on, and before what there is of an older bundle goes.
            for path in missing:
                bundle.require_whole(folder, manifest, by_path[path])
            if not self._task.check_mode:
                answer = self.ask(asked, task_vars)
                if answer.get("failed"):
                    return answer
                for part in bundle.parts(
                    missing, lambda path: manifest["files"][by_path[path]]["size"], AT_A_TIME_BYTES
                ):
                    put = self.put([each for each in files if each["path"] in part], folder, by_path)
                    answer = self.ask(arguments | {"files": put}, task_vars)
                    if answer.get("failed"):
                        return answer
        except BundleError as error:
            raise AnsibleActionFail(f"{(task_vars or {}).get('inventory_hostname', '')}: {error}") from error
        return {"changed": answer["changed"], "handed": [by_path[path] for path in missing]}

    def ask(
        self, arguments: dict[str, Any], task_vars: dict[str, Any] | None, *, change: bool = True
    ) -> dict[str, Any]:
        """Return the answer of the host, which is to change nothing in check mode, or unless it is told to."""
        check_mode = self._task.check_mode
        self._task.check_mode = check_mode or not change
        try:
            answer: dict[str, Any] = self._execute_module(
                module_name="gpufarm.core.bundle_hand_on", module_args=arguments, task_vars=task_vars
            )
        finally:
            self._task.check_mode = check_mode
        return answer

    def put(self, files: list[dict[str, Any]], folder: Path, names: dict[str, str]) -> list[dict[str, Any]]:
        """Have copies on the host, and tell where."""
        if self._connection._shell.tmpdir is None:
            self._make_tmp_path()
        staged = []
        for number, each in enumerate(files):
            remote = self._connection._shell.join_path(self._connection._shell.tmpdir, f"bundle-{number}")
            self._connection.put_file(str(folder / names[each["path"]]), remote)
            staged.append(each | {"staged": remote})
        return staged
