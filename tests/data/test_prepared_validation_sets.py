"""Further validation sets: text of their own, in the run's own tokens, whole, and refused by name."""

import numpy as np
import pytest
import tokenizers
from made_text import made_config, made_documents, write_text
from pydantic import ValidationError

from phalanx.config import config_of
from phalanx.data import prepare_corpus, prepare_validation_sets, validation_batches
from phalanx.data.config import DataConfig, ValidationSetConfig
from phalanx.data.sources import TextConfig
from phalanx.errors import DataError
from tiny_dataset import write_tiny_dataset


@pytest.fixture
def config(tmp_path):
    return made_config(tmp_path / "text")


def with_sets(config, *sets):
    return config.model_copy(update={"validation": sets})


def one(tmp_path, name="other", documents=None, most=64):
    documents = made_documents(40, seed=9) if documents is None else documents
    return ValidationSetConfig(name=name, sources=(write_text(tmp_path / name, documents),), max_sequences=most)


def rows(held_out):
    return [row for batch in validation_batches(held_out, 8) for row in batch.input_ids.tolist()]


def test_a_set_is_the_whole_of_its_text_in_the_tokens_of_the_run(config, tmp_path):
    wanted = with_sets(config, one(tmp_path, most=10_000))
    corpus = prepare_corpus(wanted, tmp_path / "cache", seed=1)

    found = prepare_validation_sets(wanted, corpus, tmp_path / "cache")["other"]

    backend = tokenizers.Tokenizer.from_file(str(corpus.tokenizer_path))
    ids = []
    for text in made_documents(40, seed=9):
        ids += [*backend.encode(text, add_special_tokens=False).ids, corpus.eos_id]
    length = config.sequence_length
    assert rows(found) == [
        ids[start : start + length] for start in range(0, len(ids) - length, length) if start + length < len(ids)
    ]


def test_a_long_set_is_used_in_sequences_that_are_spread_evenly(config, tmp_path):
    wanted = with_sets(config, one(tmp_path, "whole", most=10_000), one(tmp_path, "few", most=5))
    corpus = prepare_corpus(wanted, tmp_path / "cache", seed=1)

    sets = prepare_validation_sets(wanted, corpus, tmp_path / "cache")

    every = rows(sets["whole"])
    assert rows(sets["few"]) == [every[number * len(every) // 5] for number in range(5)]


def test_documents_that_the_run_trains_on_too_are_counted(config, tmp_path, monkeypatch):
    mixed = [*made_documents()[:7], *made_documents(40, seed=9)]
    wanted = with_sets(config, one(tmp_path, "fresh"), one(tmp_path, "mixed", mixed))
    # nothing is held out: all seven are trained on
    wanted = wanted.model_copy(update={"validation_share": 0.0})
    corpus = prepare_corpus(wanted, tmp_path / "cache", seed=1)

    sets = prepare_validation_sets(wanted, corpus, tmp_path / "cache")

    assert sets["fresh"].user_note == ""
    assert sets["mixed"].user_note.startswith("7 of its 47 documents are trained on too")
    monkeypatch.setattr("phalanx.data.validation_sets._MAX_COMPARED", 10)
    assert "is not compared" in prepare_validation_sets(wanted, corpus, tmp_path / "cache")["fresh"].user_note


def test_documents_of_a_dataset_are_counted_with_the_line_end_that_a_build_keeps(tmp_path):
    texts = [f"the hoplite number {number} holds {number * number} shields in line\n" for number in range(40)]
    write_tiny_dataset(tmp_path / "built", {"text": texts})
    wanted = config_of(
        {"dataset": {"path": str(tmp_path / "built")}, "sequence_length": 16}, tmp_path / "run.toml", DataConfig
    )
    wanted = with_sets(wanted, one(tmp_path, "mixed", [*texts[:4], *made_documents(20, seed=9)]))
    corpus = prepare_corpus(wanted, tmp_path / "cache", seed=1)

    found = prepare_validation_sets(wanted, corpus, tmp_path / "cache")["mixed"]

    assert found.user_note.startswith("4 of its 24 documents are trained on too")


def test_a_set_is_the_same_for_every_seed_of_the_run(config, tmp_path):
    wanted = with_sets(config, one(tmp_path))
    corpus = prepare_corpus(wanted, tmp_path / "cache", seed=1)

    first = prepare_validation_sets(wanted, corpus, tmp_path / "one")["other"]
    again = prepare_validation_sets(wanted, corpus, tmp_path / "two")["other"]

    assert np.array_equal(rows(first), rows(again))


def test_a_further_set_changes_no_token_of_the_training(config, tmp_path):
    plain = prepare_corpus(config, tmp_path / "cache", seed=1)

    assert prepare_corpus(with_sets(config, one(tmp_path)), tmp_path / "cache", seed=1).digest == plain.digest


@pytest.mark.parametrize("documents", [["short"]])
def test_a_set_that_is_too_short_is_named(config, tmp_path, documents):
    wanted = with_sets(config, one(tmp_path, "tiny", documents))
    corpus = prepare_corpus(config, tmp_path / "cache", seed=1)

    with pytest.raises(DataError, match=r'data\.validation "tiny": '):
        prepare_validation_sets(wanted, corpus, tmp_path / "cache")


@pytest.mark.parametrize("name", ["validation", "Big", "", "a b", "x" * 41, "../x"])
def test_a_name_that_is_taken_or_none_is_refused(tmp_path, name):
    sets = [{"name": name, "sources": [{"kind": "python_manual"}]}]
    whole = {"sources": [{"kind": "python_manual"}], "tokenizer": {"kind": "bpe"}, "sequence_length": 16}

    with pytest.raises(ValidationError):
        DataConfig.model_validate(whole | {"validation": sets}, strict=False)


def test_two_sets_of_one_name_are_refused(tmp_path):
    two = [ValidationSetConfig(name="a", sources=(TextConfig(path=tmp_path),))] * 2

    with pytest.raises(ValidationError, match='the name "a" appears twice'):
        DataConfig(
            sources=(TextConfig(path=tmp_path),),
            tokenizer=made_config(tmp_path / "text").tokenizer,
            sequence_length=16,
            validation=tuple(two),
        )
