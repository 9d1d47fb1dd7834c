"""The gateway is small enough to be read in an evening."""

import ast
from pathlib import Path

import phalanx.serve.gateway

MAX_LINES = 1500


def count_code_lines(text: str) -> int:
    """Lines without empty ones, comments and docstrings."""
    texts: set[int] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            texts.update(range(node.lineno, node.end_lineno + 1))
    lines = enumerate(text.splitlines(), 1)
    return sum(1 for number, line in lines if line.strip()[:1] not in ("", "#") and number not in texts)


def test_the_gateway_has_fewer_lines_of_code_than_its_page_says():
    folder = Path(phalanx.serve.gateway.__file__).parent
    page = (Path(__file__).parents[2] / "docs" / "serving_keys.md").read_text(encoding="utf-8")

    assert sum(count_code_lines(path.read_text(encoding="utf-8")) for path in folder.glob("*.py")) < MAX_LINES
    assert f"fewer than {MAX_LINES:,} lines of code" in page
