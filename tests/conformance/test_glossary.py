"""The glossary says each term once, in order, and every class that it names is in the file that it names."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "src" / "phalanx"
GLOSSARY = ROOT / "docs" / "glossary.md"
LINES = [line for line in GLOSSARY.read_text(encoding="utf-8").splitlines() if line.startswith("| ")][1:]
ROW = re.compile(r"\| ([a-z][a-z0-9 -]*) \| ([^|]+) \| `([\w/]+\.py)` \| `(\w+)` \|")
ROWS = [found.groups() for found in map(ROW.fullmatch, LINES) if found]


def test_every_line_of_the_table_is_a_row():
    assert len(ROWS) == len(LINES) >= 40


def test_the_terms_are_in_order_and_none_is_there_twice():
    terms = [term for term, *_ in ROWS]

    assert terms == sorted(set(terms))


@pytest.mark.parametrize(("term", "meaning", "file", "name"), ROWS, ids=[term for term, *_ in ROWS])
def test_a_term_is_one_sentence_and_is_defined_in_its_file(term, meaning, file, name):
    tree = ast.parse((SOURCE / file).read_text(encoding="utf-8"))
    defined = {node.name for node in tree.body if isinstance(node, ast.ClassDef | ast.FunctionDef)}

    assert meaning[0].isupper()
    assert meaning.endswith(".")
    assert ". " not in meaning
    assert name in defined


@pytest.mark.parametrize("page", ["README.md", "docs/architecture.md", "docs/map.md"])
def test_the_pages_that_a_reader_begins_with_lead_to_the_glossary(page):
    assert "glossary.md" in (ROOT / page).read_text(encoding="utf-8")
