"""Each value of `guard.shadow` has its line, and no code asks for a value by its name."""

import ast
from pathlib import Path
from typing import get_args

import pytest

from phalanx.pipeline import UPKEEPS, GuardConfig
from phalanx.pipeline.config import Shadow

SOURCE = Path(__file__).resolve().parents[2] / "src" / "phalanx"


def test_every_value_that_a_run_file_may_have_is_in_the_table():
    assert tuple(UPKEEPS) == get_args(Shadow)


@pytest.mark.parametrize(
    ("shadow", "true"),
    [
        ("gradient", {"sends_gradient", "screens_gradients"}),
        ("lockstep", set()),
        ("adapters", {"sends_gradient", "screens_gradients"}),
    ],
)
def test_what_the_guard_asks_for_follows_from_the_line(shadow, true):
    guard = GuardConfig(shadow=shadow)

    assert {name for name in ("sends_gradient", "screens_gradients") if getattr(guard, name)} == true


def test_no_file_compares_the_upkeep_with_a_name():
    found = [
        f"{path.relative_to(SOURCE)}:{node.lineno}"
        for path in sorted(SOURCE.rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Compare) and isinstance(node.left, ast.Attribute) and node.left.attr == "shadow"
        if any(isinstance(part, ast.Constant) and part.value in UPKEEPS for part in ast.walk(node))
    ]

    assert not found, f"ask a property of GuardConfig, so that a further upkeep is one line: {found}"
