# Copyright (c) 2026, gpufarm contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Has one of a thousand runs of Ansible do once what each would do again; it changes when work is done, not which.

A module that one run has packed is there for the next, as it is for the next task of the same run; so is the code
into which a template was compiled. Plugins of templates, which each process of a task would load for itself, are
loaded by its parent. What Ansible does without a module, and what it skips, needs no process of its own. Nobody looks
for garbage in a run that ends soon.
"""

from __future__ import annotations

import gc
import hashlib
import importlib
import marshal
import os
import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from types import CodeType
from typing import Any

import jinja2
from ansible import constants
from ansible._internal import _task as tasks
from ansible._internal._templating import _jinja_bits as templating
from ansible.executor.process import worker
from ansible.playbook.task import Task
from ansible.plugins.callback import CallbackBase
from ansible.plugins.loader import filter_loader, test_loader
from ansible.release import __version__

CACHE = Path(__file__).resolve().parents[3] / ".cache"
PACKED = CACHE / "packed"
COMPILED = CACHE / "templates"
COLLECTION = "ansible_collections.gpufarm.core.plugins"
OLD_S = 24 * 3600


def packed_from() -> Iterator[str]:
    """Yield what decides of a packed module: Ansible, the collections that come with it, and each file of ours."""
    yield f"{__version__} {sys.version} {sys.prefix}"
    for folder in ("modules", "module_utils"):
        for path in importlib.import_module(f"{COLLECTION}.{folder}").__path__:
            for file in sorted(Path(path).resolve().rglob("*.py")):
                state = file.stat()
                yield f"{file} {state.st_size} {state.st_mtime_ns} {state.st_ino}"


def folder() -> Path:
    """Return where packed modules are kept as long as nothing of theirs changes, and forget older ones."""
    kept = PACKED / hashlib.sha256("\n".join(packed_from()).encode()).hexdigest()[:16]
    kept.mkdir(parents=True, exist_ok=True)
    for other in PACKED.iterdir():
        if other != kept and other.stat().st_mtime < time.time() - OLD_S:
            shutil.rmtree(other, ignore_errors=True)
    return kept


class Compiled:
    """Keeps the code of templates and expressions: a process of one task compiles what all others have compiled too.

    What decides of the code is in the name of its file. A template that cannot be compiled is compiled again each time.
    """

    def __init__(self) -> None:
        versions = f"{__version__} {jinja2.__version__} {sys.version}"
        self._folder = COMPILED / hashlib.sha256(versions.encode()).hexdigest()[:16]
        self._folder.mkdir(parents=True, exist_ok=True)
        self._known: dict[str, CodeType] = {}
        self._expression = ""

    def share(self, environment: Any) -> None:
        """Have the class of Ansible's templates ask here first."""
        compile_template, compile_expression = environment.compile, environment.compile_expression

        def template(of: Any, source: Any, name: Any = None, filename: Any = None, *more: Any, **options: Any) -> Any:
            expression, self._expression = self._expression, ""
            if not isinstance(source, str):
                key = expression
            else:
                key = "" if name or filename or more or options else self._key(of, source, "template")
            code = self._get(key)
            if code is None:
                code = compile_template(of, source, name, filename, *more, **options)
                self._keep(key, code)
            return code

        def expression(of: Any, source: str, undefined_to_none: bool = True) -> Any:
            key = self._key(of, source, "expression")
            code = self._get(key)
            if code is not None:
                whole = of.template_class.from_code(of, code, of.make_globals(None), None)
                return jinja2.environment.TemplateExpression(whole, undefined_to_none)
            self._expression = key
            try:
                return compile_expression(of, source, undefined_to_none)
            finally:
                self._expression = ""

        environment.compile, environment.compile_expression = template, expression

    def _key(self, environment: Any, source: str, kind: str) -> str:
        context = templating._TemplateCompileContext.current(optional=True)
        syntax = [getattr(environment, name) for name in templating._TEMPLATE_OVERRIDE_FIELD_NAMES]
        said = (kind, str(source), bool(context and context.escape_backslashes), syntax)
        return hashlib.sha256(repr(said).encode()).hexdigest()

    def _get(self, key: str) -> CodeType | None:
        if key and key not in self._known:
            with suppress(OSError):
                self._known[key] = marshal.loads((self._folder / key).read_bytes())  # noqa: S302 - we have written it
        return self._known.get(key)

    def _keep(self, key: str, code: CodeType) -> None:
        if not key:
            return
        self._known[key] = code
        mine = self._folder / f"{key}.{os.getpid()}"
        with suppress(OSError):
            mine.write_bytes(marshal.dumps(code))
            mine.rename(self._folder / key)


# Actions that are no module, and neither wait nor change what is outside of Ansible.
IN_ANSIBLE = frozenset(
    f"ansible.builtin.{name}"
    for name in ("assert", "debug", "fail", "include_role", "include_tasks", "set_fact", "validate_argument_spec")
)


class Begins(BaseException):
    """A task is not skipped, and is one of those for which a process begins."""


class Kept:
    """Keeps what a task says until it is known that it is all, for who would have been told."""

    def __init__(self) -> None:
        self._said: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []

    def __getattr__(self, name: str) -> Any:
        return lambda *values, **options: self._said.append((name, values, options))

    def tell(self, whom: Any) -> None:
        for name, values, options in self._said:
            getattr(whom, name)(*values, **options)


def without_processes(process: Any, task_class: Any) -> None:
    """Have tasks of Ansible itself, and those that are skipped, done by who would begin a process for each.

    Such a process changes its own copies of the task and of the variables, so these are copied; its answer takes the
    same way. Whether a task is skipped is known before the rest of it is looked at. The other generation's processes
    are others, and begin.
    """
    begin, validate = process.start, task_class.post_validate
    skipping = False

    def post_validate(of: Any, templar: Any) -> None:
        if skipping:
            raise Begins
        validate(of, templar)

    def answered(of: Any, whom: Any) -> bool:
        nonlocal skipping
        own = of._task.copy(exclude_parent=True)
        own._parent = of._task._parent
        skipping = whom is not of._final_q
        try:
            with tasks.TaskContext(own):
                answer = worker.TaskExecutor(
                    of._host, own, dict(of._task_vars), of._play_context, of._loader, of._shared_loader_obj, whom,
                    of._variable_manager,
                ).run()  # fmt: skip
        except Begins:
            return False
        finally:
            skipping = False
        whom.send_task_result(
            worker._RawTaskResult(host=of._host, task=own, return_data=answer, task_fields=own.dump_attrs())
        )
        return True

    def start(of: Any) -> None:
        task = of._task
        if task.resolved_action in IN_ANSIBLE and not (task.timeout or task.until):
            answered(of, of._final_q)
            return
        said = Kept()
        if answered(of, said):
            said.tell(of._final_q)
        else:
            begin(of)

    process.start, task_class.post_validate = start, post_validate


class CallbackModule(CallbackBase):  # type: ignore[misc]
    CALLBACK_VERSION = 2.0
    CALLBACK_TYPE = "aggregate"
    CALLBACK_NAME = "quick"

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        gc.disable()
        gc.freeze()
        self.read_plugins()
        Compiled().share(templating.AnsibleEnvironment)
        if hasattr(worker, "_RawTaskResult"):
            without_processes(worker.WorkerProcess, Task)
        of_this_run = Path(constants.DEFAULT_LOCAL_TMP) / "ansiballz_cache"
        if not of_this_run.exists():
            of_this_run.symlink_to(folder())

    @staticmethod
    def read_plugins() -> None:
        """Have the plugins of templates read; one of a collection has all of it read."""
        for name in ("ansible.builtin.default", "gpufarm.core.has_path", "community.crypto.x509_certificate_info"):
            with suppress(KeyError):
                filter_loader.get(name)
        test_loader.get("ansible.builtin.defined")
