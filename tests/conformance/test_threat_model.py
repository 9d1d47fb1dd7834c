"""docs/threat_model.md: every row names a test that exists; so do the promises of the README."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "threat_model.md"
DOCS = [ROOT / "README.md", ROOT / "SECURITY.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]


def rows():
    """Cells of the table, the header left out."""
    lines = [line for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def known_tests():
    texts = (path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("test_*.py"))
    return {name for text in texts for name in re.findall(r"^def (test_\w+)\(", text, re.M)}


def test_every_row_has_four_cells_and_names_a_test_or_says_that_nothing_stops_it():
    for row in rows():
        assert len(row) == 4, row
        assert "test" in row[3] or row[1] == "nothing yet", row


def test_every_test_that_the_page_names_exists():
    text = PAGE.read_text(encoding="utf-8")

    named = set(re.findall(r"`(test_\w+)`", text))

    assert named, "the page names no test"
    assert named - known_tests() == set()
    assert [path for path in re.findall(r"\btests/[\w/]+\.py\b", text) if not (ROOT / path).is_file()] == []


@pytest.mark.parametrize("path", DOCS, ids=lambda path: path.name)
def test_every_link_between_pages_leads_somewhere(path):
    targets = re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", path.read_text(encoding="utf-8"))

    missing = [t for t in targets if not t.startswith(("http://", "https://")) and not (path.parent / t).exists()]

    assert missing == []
