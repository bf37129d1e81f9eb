"""``make mutants``: changes single places of plugins/ and tells which changes no unit test notices.

All unit tests run once, and what each of them meets is recorded. Then a sample of all changes, drawn with a seed, is
tried one by one, each in a copy of the checkout, with the tests that meet it. A change by which a test fails, or never
ends, is noticed.
"""

from __future__ import annotations

import argparse
import ast
import copy
import itertools
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import Queue

from tests import meets

ROOT = Path(__file__).resolve().parents[1]
DOCUMENTATION = {"DOCUMENTATION", "EXAMPLES", "RETURN"}
COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.In: ast.NotIn, ast.NotIn: ast.In, ast.Is: ast.IsNot, ast.IsNot: ast.Is,
}  # fmt: skip
OPERATORS: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult, ast.Mod: ast.Mult,
    ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd,
}  # fmt: skip
# No unit tests of one change take this long where nothing hangs.
TOO_LONG_S = 1800


@dataclass(frozen=True)
class Mutant:
    """One change: the text between two places of a file becomes another."""

    path: str
    line: int
    begin: int
    end: int
    text: str
    kind: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.kind}: {' '.join(self.text.split())[:100]}"


class Sites(ast.NodeVisitor):
    """Collects every change of a file."""

    def __init__(self, path: str, source: str) -> None:
        self.path = path
        self.found: list[Mutant] = []
        lines = source.encode().splitlines(keepends=True)
        self.starts = [sum(map(len, lines[:index])) for index in range(len(lines) + 1)]

    def add(self, node: ast.expr | ast.stmt, replacement: ast.AST | str, kind: str) -> None:
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        text = replacement if isinstance(replacement, str) else ast.unparse(replacement)
        if isinstance(node, ast.expr):
            text = f"({text})"
        begin = self.starts[node.lineno - 1] + node.col_offset
        end = self.starts[node.end_lineno - 1] + node.end_col_offset
        self.found.append(Mutant(self.path, node.lineno, begin, end, text, kind))

    def changed(self, node: ast.expr | ast.stmt, kind: str, **fields: object) -> None:
        other = copy.copy(node)
        for name, value in fields.items():
            setattr(other, name, value)
        self.add(node, other, kind)

    def visit_Compare(self, node: ast.Compare) -> None:
        for index, operator in enumerate(node.ops):
            ops = [*node.ops[:index], COMPARISONS[type(operator)](), *node.ops[index + 1 :]]
            self.changed(node, "comparison", ops=ops)
        self.generic_visit(node)

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        self.changed(node, "and/or", op=ast.Or() if isinstance(node.op, ast.And) else ast.And())
        for index in range(len(node.values)):
            rest = node.values[:index] + node.values[index + 1 :]
            self.add(node, rest[0] if len(rest) == 1 else ast.BoolOp(node.op, rest), "operand left out")
        self.generic_visit(node)

    def visit_BinOp(self, node: ast.BinOp) -> None:
        if type(node.op) in OPERATORS and not isinstance(node.left, ast.JoinedStr):
            self.changed(node, "operator", op=OPERATORS[type(node.op)]())
        self.generic_visit(node)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> None:
        if isinstance(node.op, ast.Not | ast.USub):
            self.add(node, node.operand, "sign or not left out")
        self.generic_visit(node)

    def visit_IfExp(self, node: ast.IfExp) -> None:
        self.changed(node, "other branch", body=node.orelse, orelse=node.body)
        self.generic_visit(node)

    def visit_If(self, node: ast.If) -> None:
        self.add(node.test, ast.UnaryOp(ast.Not(), node.test), "condition turned")
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        # What a record is made of is for mypy.
        if not (isinstance(node.func, ast.Name) and node.func.id == "TypedDict"):
            self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        value = node.value
        if isinstance(value, bool):
            self.add(node, repr(not value), "constant")
        elif isinstance(value, int | float):
            self.add(node, repr(value + 1), "constant")
        elif isinstance(value, str):
            self.add(node, repr("XX"), "text")

    def visit_Return(self, node: ast.Return) -> None:
        if node.value is not None and not (isinstance(node.value, ast.Constant) and node.value.value is None):
            self.add(node, "return None", "return value")
        self.generic_visit(node)

    def visit_Expr(self, node: ast.Expr) -> None:
        if isinstance(node.value, ast.Constant):
            return
        self.add(node, "pass", "statement left out")
        self.generic_visit(node)

    def visit_Raise(self, node: ast.Raise) -> None:
        self.add(node, "pass", "statement left out")
        self.generic_visit(node)

    def visit_Continue(self, node: ast.Continue) -> None:
        self.add(node, "break", "statement")

    def visit_Break(self, node: ast.Break) -> None:
        self.add(node, "continue", "statement")

    def visit_Assign(self, node: ast.Assign) -> None:
        if not any(isinstance(target, ast.Name) and target.id in DOCUMENTATION for target in node.targets):
            self.visit(node.value)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self.visit(node.value)

    def visit_arguments(self, node: ast.arguments) -> None:
        for default in [*node.defaults, *node.kw_defaults]:
            if default is not None:
                self.visit(default)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        self.visit(node.args)
        for statement in node.body:
            self.visit(statement)

    def visit_JoinedStr(self, node: ast.JoinedStr) -> None:
        # Places inside are not told before Python 3.12; the whole text is one place.
        self.changed(node, "text", values=[ast.Constant("XX")])


def mutants() -> list[Mutant]:
    """Return every change of plugins/; some are no Python any more."""
    found: list[Mutant] = []
    for path in sorted((ROOT / "plugins").rglob("*.py")):
        if path.parent.name != "doc_fragments":
            source = path.read_text(encoding="utf-8")
            sites = Sites(str(path.relative_to(ROOT)), source)
            sites.visit(ast.parse(source))
            found += sites.found
    return found


def is_python(mutant: Mutant) -> bool:
    """Tell whether the changed file can be compiled."""
    try:
        compile(applied(mutant, (ROOT / mutant.path).read_text(encoding="utf-8")), mutant.path, "exec")
    except SyntaxError:
        return False
    return True


def applied(mutant: Mutant, source: str) -> str:
    """Return a file's text with the change."""
    raw = source.encode()
    return (raw[: mutant.begin] + mutant.text.encode() + raw[mutant.end :]).decode()


def checkout(folder: Path) -> Path:
    """Return a copy of the checkout in which changes are made."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        check=True,
        capture_output=True,
    ).stdout.decode()
    for name in filter(None, listed.split("\0")):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / name)
    link = folder / ".collections/ansible_collections/gpufarm/core"
    link.parent.mkdir(parents=True)
    link.symlink_to("../../..")
    return folder


def survives(mutant: Mutant, folder: Path, tests: list[str]) -> bool:
    """Tell whether none of the tests notices a change."""
    path = folder / mutant.path
    original = path.read_text(encoding="utf-8")
    chosen = folder / ".chosen"
    chosen.write_text("\n".join(tests), encoding="utf-8")
    files = dict.fromkeys(test.partition("::")[0] for test in tests)
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-p", "no:xdist"]
    plain = {"PYTHONDONTWRITEBYTECODE": "1", "GPUFARM_PLAIN": "1"}
    environment = {**os.environ, **plain, "GPUFARM_CHOSEN": str(chosen)}
    path.write_text(applied(mutant, original), encoding="utf-8")
    try:
        code = subprocess.run(
            [*command, "-p", "tests.meets", *files],
            cwd=folder,
            env=environment,
            capture_output=True,
            check=False,
            timeout=TOO_LONG_S,
        ).returncode
    except subprocess.TimeoutExpired:
        return False
    finally:
        path.write_text(original, encoding="utf-8")
    # A change can end pytest itself, by a signal or an error that is no Exception.
    if code in (4, 5):
        raise RuntimeError(f"{mutant}: pytest ended with {code}, it had no tests. Next step: run {' '.join(command)}")
    return code == 0


def main() -> int:
    parser = argparse.ArgumentParser(prog="make mutants", description=__doc__)
    parser.add_argument("--sample", type=int, default=100)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", default="", help="a part of the paths to change")
    parser.add_argument("--records", type=Path, help="a folder that keeps what each test meets for the next run")
    parser.add_argument("--processes", type=int, default=os.cpu_count())
    arguments = parser.parse_args()
    every = [mutant for mutant in mutants() if arguments.only in mutant.path]
    random.Random(arguments.seed).shuffle(every)  # noqa: S311 # no secret
    chosen = list(itertools.islice(filter(is_python, every), arguments.sample))
    sys.stdout.write(f"{len(every)} changes are possible, {len(chosen)} are tried (seed {arguments.seed})\n")
    begun = time.monotonic()
    alive: list[Mutant] = []
    if arguments.records and arguments.records.is_dir():
        meetings = meets.Meetings.read(arguments.records)
    else:
        meetings = meets.Meetings.recorded(arguments.records or Path(tempfile.mkdtemp(prefix="meets-")))
        sys.stdout.write(f"the unit tests ran once, {time.monotonic() - begun:.0f} s\n")
    with tempfile.TemporaryDirectory(prefix="mutants-") as name, ThreadPoolExecutor(arguments.processes) as pool:
        folders: Queue[Path] = Queue()
        for index in range(arguments.processes):
            folders.put(checkout(Path(name) / str(index)))

        def attempt(mutant: Mutant) -> tuple[Mutant, bool]:
            folder = folders.get()
            try:
                tests = meetings.of(mutant.path, mutant.line)
                return mutant, not tests or survives(mutant, folder, tests)
            finally:
                folders.put(folder)

        for number, (mutant, alive_still) in enumerate(pool.map(attempt, chosen), 1):
            if alive_still:
                alive.append(mutant)
                sys.stdout.write(f"{number:4} unnoticed  {mutant}\n")
            elif number % 10 == 0:
                sys.stdout.write(f"{number:4} tried, {time.monotonic() - begun:.0f} s\n")
            sys.stdout.flush()
    sys.stdout.write(f"{len(chosen) - len(alive)} passed, {len(alive)} failed\n")
    return 1 if alive else 0


if __name__ == "__main__":
    sys.exit(main())
