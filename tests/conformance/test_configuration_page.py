"""docs/configuration.md has every key of the run file and the worker file, with its default."""

import re
import sys
from pathlib import Path

import pytest

from phalanx.train.runs.support import SECTIONS as ALL_SECTIONS

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts"))
from config_sections import SECTIONS, default_cell, key_tables, with_new_keys  # noqa: E402 - found beside the docs

PAGE = (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8")


def test_the_page_has_a_table_for_every_section():
    assert set(key_tables(PAGE)) == set(SECTIONS)
    # a section of the run file that this test does not know would go undocumented
    assert set(ALL_SECTIONS) <= {name.partition(".")[0] for name in SECTIONS}


@pytest.mark.parametrize("section", SECTIONS)
def test_every_key_is_on_the_page_with_its_default(section):
    model = SECTIONS[section]

    assert key_tables(PAGE)[section] == {key: default_cell(model, key) for key in model.model_fields}


def test_a_key_without_a_row_gets_one_from_its_docstring_and_no_row_is_changed():
    row = next(line for line in PAGE.splitlines() if line.startswith("| `validate_every` |"))

    assert with_new_keys(PAGE) == PAGE
    assert (
        "| `validate_every` | integer | `0` | Steps between validations; 0 validates before the first step and after "
        "the last one only. |"
    ) in with_new_keys(PAGE.replace(row + "\n", "")).splitlines()


def test_the_attacks_on_the_page_are_those_in_the_table():
    from phalanx.lab.attacks import ATTACKS

    (line,) = [line for line in PAGE.splitlines() if "phalanx.lab.attacks.ATTACKS" in line]

    assert set(re.findall(r"`([a-z0-9_]+)`", line.rpartition(":")[2])) == set(ATTACKS)
