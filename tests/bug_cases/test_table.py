"""The table of cases is whole, and every test it names exists."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
CASES = {
    1, 2, 3, 4, 6, 7, 9, 10, 11, 13, 14, 15, 16, 18, 20, 21, 22, 24, 27, 31, 32, 33, 35, 36, 37, 39, 40, 42, 43, 45,
    47, 48, 49, 50, 51, 52, 54, 55, 56, 57, 59, 60, 62, 64, 65, 67, 68, 69, 71, 72, 73, 74, 75, 77, 78,
}  # fmt: skip
NEEDED = {
    1, 2, 3, 4, 6, 7, 10, 11, 13, 14, 27, 31, 32, 33, 35, 36, 37, 39, 40, 42, 43, 45, 47, 48, 52, 54, 55, 59, 60, 62,
    64, 65, 71, 73, 74, 75, 78,
}  # fmt: skip
"""What can be shown on the tiny checkpoint and the echo plugin, at the least."""


def rows(heading: str) -> list[list[str]]:
    section = (Path(__file__).parent / "README.md").read_text().split(f"## {heading}\n")[1].split("\n## ")[0]
    lines = [line.strip("|").split("|") for line in section.splitlines() if re.match(r"\| \d+ \|", line)]
    return [[cell.strip() for cell in line] for line in lines]


def names_of_tests(path: Path) -> set[str]:
    return {
        node.name
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_")
    }


def test_every_case_is_listed_once() -> None:
    inside = [int(row[0]) for row in rows("In scope")]
    outside = [int(row[0]) for row in rows("Out of scope for now")]
    assert sorted([*inside, *outside]) == sorted(CASES)
    assert inside == sorted(inside) and outside == sorted(outside)
    assert set(inside) >= NEEDED


def test_every_test_named_exists_and_every_test_here_is_named() -> None:
    named: set[tuple[Path, str]] = set()
    for number, what, source, tests in rows("In scope"):
        found = re.findall(r"`([\w/.]+\.py)::(\w+)`", tests)
        assert what and source and found, f"case {number} names no test"
        assert len(found) == tests.count("`") // 2, f"case {number}: {tests}"
        named |= {(ROOT / path, name) for path, name in found}
    missing = [f"{path}::{name}" for path, name in named if not path.is_file() or name not in names_of_tests(path)]
    assert missing == []
    here = {(path, name) for path in Path(__file__).parent.glob("test_*.py") for name in names_of_tests(path)}
    assert {name for path, name in here - named if path.name != Path(__file__).name} == set()


def test_the_reasons_for_leaving_a_case_out_are_of_four_kinds() -> None:
    for number, _, why in rows("Out of scope for now"):
        assert re.match(r"images|video|several processes|a later model", why), f"case {number}: {why}"
