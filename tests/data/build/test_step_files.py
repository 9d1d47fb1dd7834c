"""What a step reads beside the documents decides as well: a list of words that has changed makes kept work void."""

import pytest

from phalanx.data.build.passes import make_steps, pass_settings, plan_passes
from phalanx.data.build.recipe import load_recipe
from phalanx.data.build.run import build_recipe
from phalanx.data.build.steps import step_settings
from phalanx.data.shards import open_dataset
from phalanx.errors import DataError, InputError

RECIPE = """
tokenizer = {{ kind = "bpe", vocab_size = 270 }}
[[sources]]
kind = "text"
path = "{home}/texts"
delimiter = "\\n\\n"
[[steps]]
kind = "bad_words"
files = ["{home}/words.txt"]
min_hits = 1
max_share = 0.0
[output]
validation_share = 0.0
"""


@pytest.fixture
def recipe(tmp_path):
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts/a.txt").write_text("\n\n".join(f"document {number} is about swamps" for number in range(9)))
    (tmp_path / "words.txt").write_text("glimmer\n")
    path = tmp_path / "recipe.toml"
    path.write_text(RECIPE.format(home=tmp_path))
    return load_recipe(path, ())


def settings(recipe):
    return [pass_settings(recipe, one) for one in plan_passes(make_steps(recipe))]


def test_another_list_of_the_same_name_makes_kept_pieces_void(recipe, tmp_path):
    before = settings(recipe)
    same = settings(recipe)
    (tmp_path / "words.txt").write_text("swamps\n")

    assert same == before
    assert settings(recipe) != before


def test_a_dataset_of_another_list_is_not_taken_for_this_one(recipe, tmp_path):
    build_recipe(recipe, tmp_path / "out")
    assert len(open_dataset(tmp_path / "out").document_starts("text", "train")) == 10
    (tmp_path / "words.txt").write_text("swamps\n")

    with pytest.raises(InputError, match="other files"):
        build_recipe(recipe, tmp_path / "out")


def test_a_list_that_is_gone_is_named(recipe, tmp_path):
    (tmp_path / "words.txt").unlink()

    with pytest.raises(DataError, match=r"words\.txt: a step names it"):
        step_settings(recipe.steps[0])
