"""Batches: shifted labels, no loss over a border, the same after a resume."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from made_text import made_config, made_documents

from phalanx.data import (
    IGNORE,
    Batch,
    BatchLoader,
    SequenceLayout,
    open_corpus,
    prepare_corpus,
    unigram_perplexity,
    validation_batches,
)
from phalanx.data.shards import open_dataset
from phalanx.errors import CheckpointError, ConfigError, DataError
from phalanx.objectives import OBJECTIVES


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return tmp_path_factory.mktemp("batches")


@pytest.fixture(scope="module")
def corpus(place):
    config = made_config(place / "text", made_documents(words=12), max_validation_sequences=4)
    return prepare_corpus(config, place / "cache", seed=1)


def stream_of(corpus, split):
    return torch.from_numpy(open_dataset(corpus.directory).tokens("text", split)[:].astype(np.int64))


def test_labels_are_the_next_tokens_but_not_over_a_border(corpus):
    stream = stream_of(corpus, "train")

    batch = corpus.train_batch(range(corpus.num_train_sequences))

    inputs, labels = batch.input_ids.flatten(), batch.labels.flatten()
    assert batch.input_ids.dtype == batch.labels.dtype == torch.int64
    assert torch.equal(inputs, stream[: len(inputs)])
    after = stream[1 : len(inputs) + 1]
    is_end = inputs == corpus.eos_id
    assert is_end.sum() > 10
    assert torch.equal(labels[~is_end], after[~is_end])
    assert (labels[is_end] == IGNORE).all()
    assert (labels == corpus.eos_id).sum() >= is_end.sum() - 1
    assert OBJECTIVES["causal_lm"].count_targets(batch.labels) == int((~is_end).sum())


def test_validation_sequences_are_few_and_spread_evenly(corpus):
    stream, length = stream_of(corpus, "validation"), 16
    have = corpus.manifest.validation.sequences
    assert have > 8

    batches = list(validation_batches(corpus, 3))

    assert [len(batch.indices) for batch in batches] == [3, 1]
    rows = torch.cat([batch.input_ids for batch in batches])
    starts = [index * have // 4 * length for index in range(4)]
    assert torch.equal(rows, torch.stack([stream[at : at + length] for at in starts]))


def test_microbatches_are_the_rows_in_order(corpus):
    batch = corpus.train_batch([3, 1, 2, 0, 5, 4])

    parts = batch.split_microbatches(3)

    assert [part.indices for part in parts] == [(3, 1), (2, 0), (5, 4)]
    assert torch.equal(torch.cat([part.input_ids for part in parts]), batch.input_ids)
    assert torch.equal(torch.cat([part.labels for part in parts]), batch.labels)
    assert all(part.input_ids.is_contiguous() for part in parts)


@pytest.mark.parametrize("count", [0, -1, 4, 7])
def test_rows_that_cannot_be_shared_equally_are_refused(corpus, count):
    with pytest.raises(ConfigError, match=r"multiple of train\.microbatches"):
        corpus.train_batch(range(6)).split_microbatches(count)


def test_a_sequence_that_does_not_exist_is_refused(corpus):
    for index in (-1, corpus.num_train_sequences):
        with pytest.raises(DataError, match=f"sequence {index} is out of range"):
            corpus.train_batch([index])
    with pytest.raises(DataError, match="this split has 0 to 3"):
        corpus.validation_batch([4])


def equal(left: Batch, right: Batch) -> bool:
    same = torch.equal(left.input_ids, right.input_ids) and torch.equal(left.labels, right.labels)
    return same and left.indices == right.indices


@settings(deadline=None, max_examples=6)
@given(seed=st.integers(0, 99), size=st.integers(1, 200), before=st.integers(0, 6), other=st.integers(1, 50))
def test_a_resumed_run_sees_the_batches_that_it_would_have_seen(corpus, seed, size, before, other):
    whole = BatchLoader(corpus, size, seed)
    for _ in range(before):
        whole.next_batch()
    resumed = BatchLoader(corpus, size, seed)
    for _ in range(other):
        resumed.next_batch()

    resumed.load_position(whole.position_state())

    assert all(equal(whole.next_batch(), resumed.next_batch()) for _ in range(3))


def test_another_batch_size_goes_on_with_the_next_sample(corpus):
    size = corpus.num_train_sequences
    first, second = BatchLoader(corpus, 3, 0), BatchLoader(corpus, size - 9, 0)
    seen = [index for _ in range(3) for index in first.next_batch().indices]

    second.load_position(first.position_state())

    assert sorted([*seen, *second.next_batch().indices]) == list(range(size))


def test_a_state_of_another_run_is_refused(corpus, place):
    loader = BatchLoader(corpus, 2, seed=1)
    good = loader.position_state()
    other = prepare_corpus(made_config(place / "other", made_documents(seed=5)), place / "cache", seed=1)

    for state, said in [
        (BatchLoader(corpus, 2, seed=2).position_state(), "seed is 2, but this run has 1"),
        (BatchLoader(other, 2, seed=1).position_state(), "resume with the data"),
        (good | {"corpus": 1}, "corpus is 1"),
        (good | {"corpus_digest": good["corpus_digest"][:-1] + "x"}, "belongs to the corpus"),
        (good | {"num_samples": -1}, "num_samples is -1"),
        (good | {"num_samples": True}, "num_samples is True"),
        (good | {"num_samples": 1.5}, "num_samples is 1.5"),
        (good | {"more": 1}, "found keys"),
        ({}, "found keys"),
    ]:
        with pytest.raises(CheckpointError, match=said):
            loader.load_position(state)
    assert loader.position_state() == good


def test_a_state_has_the_whole_digest_and_one_from_before_is_read_without_it(corpus):
    before, loader = BatchLoader(corpus, 2, seed=1), BatchLoader(corpus, 2, seed=1)
    before.next_batch()
    state = before.position_state()

    loader.load_position({name: value for name, value in state.items() if name != "corpus_digest"})

    assert state["corpus_digest"] == corpus.digest
    assert loader.position_state() == state


def test_a_batch_needs_a_row(corpus):
    with pytest.raises(ConfigError, match="expected at least 1"):
        BatchLoader(corpus, 0, 0)
    with pytest.raises(ConfigError, match="expected at least 1"):
        next(validation_batches(corpus, 0))


def test_the_unigram_model_agrees_with_counting_by_hand(corpus):
    stream = stream_of(corpus, "train").tolist()
    labels = torch.cat([batch.labels for batch in validation_batches(corpus, 2)]).flatten().tolist()
    labels = [label for label in labels if label != IGNORE]
    total = len(stream) + corpus.vocab_size

    by_hand = math.exp(-sum(math.log((stream.count(label) + 1) / total) for label in labels) / len(labels))

    assert unigram_perplexity(corpus) == pytest.approx(by_hand, rel=1e-12)
    assert 1 < unigram_perplexity(corpus) < corpus.vocab_size


def test_without_a_held_out_share_there_is_nothing_to_validate_on(place):
    config = made_config(place / "none", validation_share=0.0)
    corpus = prepare_corpus(config, place / "cache", seed=1)

    assert corpus.num_validation_sequences == 0
    with pytest.raises(DataError, match=r"set data\.validation_share above 0"):
        unigram_perplexity(corpus)


def test_a_prepared_corpus_opens_by_its_directory(corpus):
    again = open_corpus(corpus.tokenizer_path.parent, SequenceLayout(16, max_validation_sequences=2))

    assert again.digest == corpus.digest
    assert again.num_validation_sequences == 2
