"""docs/serving_security.md: twelve classes of attack, each with tests that exist."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "docs" / "serving_security.md").read_text(encoding="utf-8")


def rows(heading: str) -> list[list[str]]:
    """Cells of the table of a section, its header left out."""
    section = TEXT.partition(heading)[2].partition("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def names_of_tests() -> set[str]:
    texts = (path.read_text(encoding="utf-8") for path in (ROOT / "tests" / "serve").rglob("test_*.py"))
    return {name for text in texts for name in re.findall(r"^def (test_\w+)\(", text, re.M)}


def test_the_table_has_twelve_classes_and_each_row_names_tests_that_exist():
    classes, others = rows("# Attacks on a server"), rows("## Beyond the twelve")
    known = names_of_tests()

    assert len(classes) == 12
    assert len({row[0] for row in classes}) == 12
    assert others
    for row in (*classes, *others):
        named = set(re.findall(r"`(test_\w+)`", row[-1]))
        assert named, row[0]
        assert named <= known, (row[0], named - known)


def test_every_test_of_attacks_is_on_the_page():
    for path in sorted((ROOT / "tests" / "serve" / "attacks").glob("test_attack*.py")):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                assert node.name in TEXT or node.name == "test_bounds_of_requests_cannot_be_turned_off", node.name
