"""Canaries of a recipe are planted, counted and named; without the section there is none."""

import json

import pytest

from phalanx.data import DataConfig, prepare_corpus
from phalanx.data.build.recipe import load_recipe
from phalanx.data.build.run import build_recipe
from phalanx.data.dataset_corpus import recipe_weights
from phalanx.data.phases import DatasetConfig, DatasetTokenizerConfig
from phalanx.data.shards import open_dataset
from phalanx.data.sources import CanaryConfig, CanarySettings, candidate_canaries, open_source, planted_canaries
from phalanx.errors import ConfigError

RECIPE = """
sources = [{{ kind = "text", path = "{texts}"{more} }}]
tokenizer = {{ kind = "bpe", vocab_size = 320 }}
output = {{ validation_share = 0.1 }}
"""
SECTION = "[canaries]\ncount = 3\ncopies = 5\n"


@pytest.fixture
def recipe_of(tmp_path):
    texts = tmp_path / "texts"
    texts.mkdir()
    for number in range(30):
        (texts / f"{number}.txt").write_text(f"Page {number} tells of gulls on rail {number * 7} and of ships.\n" * 4)

    def load(section="", more=""):
        path = tmp_path / "recipe.toml"
        path.write_text(RECIPE.format(texts=texts, more=more) + section)
        return load_recipe(path)

    return load


def test_the_account_counts_and_names_every_planted_document(recipe_of, tmp_path):
    result = build_recipe(recipe_of(SECTION), tmp_path / "out")

    planted = next(source for source in result.report["sources"] if source["name"] == "canaries")
    assert planted["read"]["documents"] == planted["kept"]["documents"] == 15
    assert planted["dropped"] == {}
    dataset = open_dataset(tmp_path / "out")
    names = [
        entry.name
        for group, splits in dataset.groups.items()
        for split in splits
        for entry in dataset.document_entries(group, split)
        if entry.name.startswith("canary-")
    ]
    assert len(set(names)) == 15
    assert 'kind = "canaries"' in (tmp_path / "out" / "recipe.toml").read_text()


def test_a_dataset_without_the_section_has_no_canary(recipe_of, tmp_path):
    result = build_recipe(recipe_of(), tmp_path / "out")

    assert [source["name"] for source in result.report["sources"]] == ["text"]
    assert "The reference phrase" not in json.dumps(result.report)


def test_the_recipe_of_a_dataset_plants_the_same_ones_once(recipe_of, tmp_path):
    first = build_recipe(recipe_of(SECTION), tmp_path / "first")
    again = build_recipe(load_recipe(tmp_path / "first" / "recipe.toml"), tmp_path / "again")

    assert again.report["sources"][1]["kept"] == first.report["sources"][1]["kept"]
    assert load_recipe(tmp_path / "first" / "recipe.toml").source_names == ("text", "canaries")


def test_a_run_learns_of_the_canaries_by_the_signed_recipe(recipe_of, tmp_path):
    build_recipe(recipe_of(SECTION), tmp_path / "out")
    dataset = DatasetConfig(path=tmp_path / "out", signer=open_dataset(tmp_path / "out").signer)
    config = DataConfig(dataset=dataset, tokenizer=DatasetTokenizerConfig(), sequence_length=16)

    assert prepare_corpus(config, tmp_path / "cache", 0).canaries == CanarySettings(count=3, copies=5)


def test_canaries_take_the_weight_of_the_group_that_they_are_in(recipe_of):
    recipe = recipe_of(SECTION, more=", weight = 2.0, group = 'web'")

    assert recipe.group_of(1) == "web"
    plain = 'sources = [{ kind = "text", group = "web", weight = 2.0 }, { kind = "canaries", group = "web" }]'
    assert recipe_weights(plain) == {"web": 2.0}


@pytest.mark.parametrize("section", ["[canaries]\ncopies = 0\n", "[canaries]\ncopys = 2\n", "canaries = 3\n"])
def test_a_wrong_section_is_refused(recipe_of, section):
    with pytest.raises(ConfigError):
        recipe_of(section) if section.startswith("[") else recipe_of("", more="}]\n" + section + "other = [{ a = 1")


def test_texts_are_a_function_of_the_settings_and_candidates_are_never_planted():
    settings = CanarySettings(count=20, copies=2, seed=4)

    assert planted_canaries(settings) == planted_canaries(settings)
    assert planted_canaries(settings) != planted_canaries(CanarySettings(count=20, copies=2, seed=5))
    assert not set(planted_canaries(settings)) & set(candidate_canaries(settings, 200))
    assert len(set(planted_canaries(settings))) == 20


def test_no_two_documents_are_equal_and_a_prefix_has_all_canaries_alike():
    source = open_source(CanaryConfig(count=4, copies=3))
    texts = [document.text for document in source.documents()]

    assert len(set(texts)) == 12
    assert [sum(canary in text for text in texts[:8]) for canary in planted_canaries(CanarySettings(count=4))] == [
        2
    ] * 4
    assert source.fingerprint() != open_source(CanaryConfig(count=4, copies=4)).fingerprint()
