"""The map names every room of the tree once, and the files to open first are there."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "src" / "phalanx"
MAP = ROOT / "docs" / "map.md"
ROWS = re.findall(r"^\| `([\w/]+)/` \| ([^|]+) \| ([^|]+) \|$", MAP.read_text(encoding="utf-8"), flags=re.MULTILINE)
MAX_FILES = 30


def rooms() -> list[str]:
    return sorted(str(path.parent.relative_to(SOURCE)) for path in SOURCE.rglob("__init__.py") if path.parent != SOURCE)


def test_every_room_is_on_the_map_once_and_no_other():
    assert sorted(room for room, _, _ in ROWS) == rooms()


@pytest.mark.parametrize(("room", "question", "first"), ROWS, ids=[room for room, _, _ in ROWS])
def test_a_room_answers_a_question_and_has_the_files_to_open_first(room, question, first):
    named = re.findall(r"`(\w+\.py)`", first)

    assert "?" in question
    assert [name for name in named if not (SOURCE / room / name).is_file()] == []


@pytest.mark.parametrize("room", rooms())
def test_a_room_says_what_it_is_and_has_few_enough_files_to_look_through(room):
    files = list((SOURCE / room).glob("*.py"))

    assert (SOURCE / room / "__init__.py").read_text(encoding="utf-8").startswith('"""')
    assert len(files) <= MAX_FILES, f"{room} has {len(files)} files: give some of them a room of their own"


def test_what_is_looked_for_first_is_where_the_map_says():
    table = MAP.read_text(encoding="utf-8").partition("## Where is ...")[2].partition("\n## ")[0]
    named = re.findall(r"`([\w/]+\.py)`", table)

    assert len(named) >= 15
    assert [name for name in named if not (SOURCE / name).is_file()] == []
