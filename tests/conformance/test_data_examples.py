"""Every recipe among the examples loads, names its own command, and the small ones are built."""

from pathlib import Path

import pytest

from phalanx.data.build.preview import preview
from phalanx.data.build.recipe import load_recipe

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
RECIPES = sorted(EXAMPLES.glob("data_*.toml"))


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_loads_and_names_its_own_command(path):
    recipe = load_recipe(path)

    assert f"phalanx data build examples/{path.name}" in path.read_text()
    assert all(source.licence != "not stated" for source in recipe.sources)


def test_a_folder_takes_five_lines():
    lines = (EXAMPLES / "data_folder.toml").read_text().splitlines()

    assert len([line for line in lines if not line.startswith("#")]) == 5


def test_a_preview_of_what_cpython_carries_keeps_most_and_drops_short_texts():
    found = preview(load_recipe(EXAMPLES / "data_docs.toml"), 40)

    assert found.counts["kept"] > 20
    assert found.counts["dropped by length"] > 0
    assert {line["step"] for line in found.left_out} <= {"length", "exact_duplicates", "hidden_characters"}
