"""A vocabulary is made of a bounded number of clean texts, and its directory appears whole or not at all."""

import json
import os

import pytest

from phalanx.data.sources import Document
from phalanx.data.tokenizers import recipe as recipe_module
from phalanx.data.tokenizers.recipe import TokenizerRecipe, _SourceTexts, make_tokenizer
from phalanx.data.tokenizers.training import train_tokenizer
from phalanx.errors import DataError


class Texts:
    def __init__(self, *texts):
        self._texts = texts

    def documents(self):
        return iter([Document(f"n{number}", text) for number, text in enumerate(self._texts)])


def recipe_over(path, **more):
    section = {"sources": [{"kind": "text", "path": str(path)}], "tokenizer": {"kind": "bpe", "vocab_size": 260}}
    return TokenizerRecipe.model_validate_json(json.dumps(section | more))


def test_texts_have_one_form_of_line_ends_and_empty_ones_do_not_count():
    texts = _SourceTexts([Texts(" a\r\nb\r", "  ", "c"), Texts("d", "e")], max_documents=3)

    assert list(texts.read_texts()) == ["a\nb", "c", "d"]
    assert (texts.documents, texts.size_bytes) == (3, 5)


def test_a_lone_surrogate_is_refused_with_the_documents_name():
    with pytest.raises(DataError, match="n1: holds a lone surrogate"):
        list(_SourceTexts([Texts("a", "\ud800")], None).read_texts())


def test_a_vocabulary_has_its_recipe_and_counts_beside_it_and_is_never_written_over(tmp_path):
    (tmp_path / "texts.txt").write_text("the quick brown fox jumps over the lazy dog " * 50)
    recipe = recipe_over(tmp_path / "texts.txt")

    record = make_tokenizer(recipe, tmp_path / "out")

    assert sorted(os.listdir(tmp_path / "out")) == [
        "recipe.toml", "tokenizer.json", "tokenizer_config.json", "training.json",
    ]  # fmt: skip
    assert json.loads((tmp_path / "out" / "training.json").read_text()) == record
    assert record["documents"] == 1 and record["kind"] == "bpe"
    with pytest.raises(DataError, match="already exists"):
        make_tokenizer(recipe, tmp_path / "out")


def test_a_disk_that_fills_up_leaves_no_half_made_directory(tmp_path, monkeypatch):
    (tmp_path / "texts.txt").write_text("the quick brown fox jumps over the lazy dog " * 50)

    def fail(value):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(recipe_module, "_dump_json", fail)
    with pytest.raises(DataError, match="No space left"):
        make_tokenizer(recipe_over(tmp_path / "texts.txt"), tmp_path / "out")

    assert os.listdir(tmp_path) == ["texts.txt"]


def test_a_file_that_changes_while_it_is_read_makes_no_vocabulary(tmp_path, monkeypatch):
    path = tmp_path / "texts.txt"
    path.write_text("the quick brown fox jumps over the lazy dog " * 50)

    def train_and_grow(texts, config):
        tokenizer = train_tokenizer(texts, config)
        path.write_text("another text")
        return tokenizer

    monkeypatch.setattr(recipe_module, "train_tokenizer", train_and_grow)
    with pytest.raises(DataError, match="changed while it was read; run again"):
        make_tokenizer(recipe_over(path), tmp_path / "out")

    assert os.listdir(tmp_path) == ["texts.txt"]


def test_sources_without_a_text_are_named(tmp_path):
    (tmp_path / "empty.txt").write_text(" \n")

    with pytest.raises(DataError, match="holds no text"):
        make_tokenizer(recipe_over(tmp_path / "empty.txt"), tmp_path / "out")
