"""No test waits for time to pass, and none is skipped: either way a test may pass without showing anything."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parents[1]
ALLOWED = {
    "support/waiting.py: eventually": "the one poll, which ends with its condition or at its deadline",
    "support/waiting.py: eventually_blocking": "the same, where there is no event loop",
    "unit/test_common_rpc.py: test_a_server_that_is_slow_to_shake_hands_is_waited_for.pipe": "is the slow network",
    "support/demand.py: LoadedAgent._tell": "reports by the clock, as an agent does; nobody waits for it",
    "fault/test_etcd_faults.py: View._measure": "reads a gauge from time to time; nobody waits for it",
}
SKIPS = {"importorskip", "skip", "skipIf", "skipTest", "skipUnless", "SkipTest", "skipif", "xfail"}
IN_A_PROGRAM = re.compile(r"\bsleep(\((?!0\))| +[0-9])")
"""In Python's words, or the shell's."""


class Finder(ast.NodeVisitor):
    """Collects sleeps outside virtual time, and skips, with their lines."""

    def __init__(self, tree: ast.Module) -> None:
        self.sleeps: list[tuple[int, str]] = []
        self.skips: list[int] = []
        self._inside: list[str] = []
        self._virtual = any("looptime" in ast.unparse(mark) for mark in _marks(tree))
        self.visit(tree)

    def visit_Call(self, node: ast.Call) -> None:
        arguments = [*node.args, *(keyword.value for keyword in node.keywords)]
        yields = [a.value for a in arguments if isinstance(a, ast.Constant)] == [0]
        if _name(node.func) == "sleep" and (yields or (self._virtual and ast.unparse(node.func) == "asyncio.sleep")):
            for argument in arguments:
                self.visit(argument)
        else:
            self.generic_visit(node)

    def visit_Name(self, node: ast.Name) -> None:
        self._judge(node)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        self._judge(node)

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        """Under another name neither would be found."""
        names = {alias.name for alias in node.names}
        if "sleep" in names:
            self.sleeps.append((node.lineno, ".".join(self._inside)))
        if names & SKIPS:
            self.skips.append(node.lineno)

    def visit_Constant(self, node: ast.Constant) -> None:
        """Programs of a child process are strings."""
        if isinstance(node.value, str) and IN_A_PROGRAM.search(node.value):
            self.sleeps.append((node.lineno, ".".join(self._inside)))

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) -> None:
        with self._in(node):
            self.generic_visit(node)

    def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> None:
        self.visit_FunctionDef(node)

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        self.visit_FunctionDef(node)

    def _judge(self, node: ast.Name | ast.Attribute) -> None:
        if _name(node) == "sleep":
            self.sleeps.append((node.lineno, ".".join(self._inside)))
        if _name(node) in SKIPS:
            self.skips.append(node.lineno)
        self.generic_visit(node)

    @contextmanager
    def _in(self, node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) -> Iterator[None]:
        before = self._virtual
        self._virtual = before or any("looptime" in ast.unparse(mark) for mark in node.decorator_list)
        self._inside.append(node.name)
        yield
        self._inside.pop()
        self._virtual = before


def _name(node: ast.expr) -> str:
    return node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""


def _marks(tree: ast.Module) -> list[ast.expr]:
    return [
        node.value
        for node in tree.body
        if isinstance(node, ast.Assign) and any(_name(target) == "pytestmark" for target in node.targets)
    ]


def found() -> Iterator[tuple[str, Finder]]:
    """Every file of the tests but this one."""
    for path in sorted(TESTS.rglob("*.py")):
        if path != Path(__file__).resolve():
            yield str(path.relative_to(TESTS)), Finder(ast.parse(path.read_text()))


def test_no_test_sleeps() -> None:
    places = {f"{name}: {where}": line for name, finder in found() for line, where in finder.sleeps}
    assert sorted(places.keys() - ALLOWED.keys()) == [], (
        "wait for a condition with tests/support/waiting.py, or give a reason here"
    )
    assert sorted(ALLOWED.keys() - places.keys()) == [], "these no longer sleep: take them off the list"


def test_no_test_is_skipped() -> None:
    assert [f"{name}:{line}" for name, finder in found() for line in finder.skips] == []


@pytest.mark.parametrize(
    "source",
    [
        "import time\ntime.sleep(1)",
        "async def test() -> None:\n    await asyncio.sleep(delay)",
        "asyncio.to_thread(time.sleep, 1)",
        "from time import sleep as pause",
        "CHILD = 'import time; time.sleep(60)'",
        "SCRIPT = 'while true; do sleep 0.1; done'",
        "CHILD = f'import time; print({x}); time.sleep(60)'",
        "@pytest.mark.looptime\ndef test() -> None:\n    time.sleep(1)",
        "@pytest.mark.looptime\ndef test() -> None: ...\n\nasync def other() -> None:\n    await asyncio.sleep(1)",
    ],
)
def test_a_sleep_is_found(source: str) -> None:
    assert len(Finder(ast.parse(source)).sleeps) == 1


@pytest.mark.parametrize(
    "source",
    [
        "async def test() -> None:\n    await asyncio.sleep(0)",
        "@pytest.mark.looptime\nasync def test() -> None:\n    await asyncio.sleep(60)",
        "pytestmark = [pytest.mark.looptime]\nasync def test() -> None:\n    await asyncio.sleep(delay)",
    ],
)
def test_what_takes_no_time_is_no_sleep(source: str) -> None:
    assert Finder(ast.parse(source)).sleeps == []


@pytest.mark.parametrize(
    "source",
    [
        "pytest.skip('no vLLM')",
        "@pytest.mark.skipif(not HERE, reason='x')\ndef test() -> None: ...",
        "pytestmark = [pytest.mark.xfail]",
        "vllm = pytest.importorskip('vllm')",
        "from pytest import skip as leave",
        "class Test(TestCase):\n    def test(self) -> None:\n        self.skipTest('x')",
    ],
)
def test_a_skip_is_found(source: str) -> None:
    assert len(Finder(ast.parse(source)).skips) == 1
