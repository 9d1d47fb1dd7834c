"""A local model's figures: against transformers alone, at every batch size and order, in windows, with stops."""

import math
import random

import pytest
import torch

from phalanx.errors import DataError, ModelError
from phalanx.evaluate.scorer import EndingRow, LocalScorer, WritingRule, rolling_rows
from phalanx.serve import TextModel
from tiny_edge_models import write_model

TEXTS = ["the owner keeps the keys", "a", "don't tell anyone about 3.14 " * 30, "naïve keys", "the pipeline " * 9]
PAIRS = [("the owner", " keeps the keys"), ("", "the"), ("a b c", " d"), ("tell " * 60, "anyone"), ("the", "re")]


@pytest.fixture(scope="module", params=["llama", "gpt2"])
def model(request, tmp_path_factory):
    return TextModel(write_model(tmp_path_factory.mktemp("models") / "m", request.param))


def nats_by_hand(model, ids, prefix):
    with torch.no_grad():
        logits = model.module(torch.tensor([[prefix, *ids]])).logits[0, :-1].log_softmax(-1)
    return -float(logits.gather(1, torch.tensor(ids)[:, None]).sum())


def test_documents_equal_a_calculation_by_hand(model):
    scorer = LocalScorer(model)
    short = [text for text in TEXTS if len(scorer.encode_text(text)) <= scorer.window]

    scores = scorer.score_documents(short)

    for text, score in zip(short, scores, strict=True):
        ids = scorer.encode_text(text)
        assert score.nats == pytest.approx(nats_by_hand(model, ids, scorer.prefix), rel=1e-5)
        assert (score.num_tokens, score.num_bytes) == (len(ids), len(text.encode()))


@pytest.mark.parametrize("window", [None, 40, 9])
def test_neither_batch_nor_order_changes_a_figure(model, window):
    plain = LocalScorer(model, batch=1, window=window)
    nats, endings = plain.score_documents(TEXTS), plain.score_endings(PAIRS)
    prompts = [text for text in TEXTS if len(plain.encode_text(text)) + 3 < plain.window]
    written = plain.write_texts(prompts, WritingRule(max_new_tokens=3, temperature=0.9, seed=3))

    for batch in (3, 8):
        scorer = LocalScorer(model, batch=batch, window=window)
        order = list(range(len(TEXTS)))
        random.Random(batch).shuffle(order)
        shuffled = scorer.score_documents([TEXTS[place] for place in order])
        for place, score in zip(order, shuffled, strict=True):
            assert score.nats == pytest.approx(nats[place].nats, rel=1e-6)
            assert score.num_tokens == nats[place].num_tokens
        for one, other in zip(scorer.score_endings(PAIRS[::-1])[::-1], endings, strict=True):
            assert one.log_prob == pytest.approx(other.log_prob, rel=1e-5, abs=1e-5)
            assert (one.is_greedy, one.is_cut) == (other.is_greedy, other.is_cut)
        again = scorer.write_texts(prompts[::-1], WritingRule(max_new_tokens=3, temperature=0.9, seed=3))
        assert again[::-1] == written


def test_every_token_is_predicted_once_whatever_the_window():
    ids = list(range(100, 223))
    for window in (1, 2, 7, 122, 123, 124, 500):
        rows = list(rolling_rows(ids, 5, window))
        assert [token for row in rows for token in row.ending] == ids
        assert all(len(row.context) + len(row.ending) <= window + 1 for row in rows)
        whole = [5, *ids]
        begin = 0
        for row in rows:
            begin += len(row.ending)
            assert (*row.context, *row.ending) == tuple(
                whole[begin + 1 - len(row.context) - len(row.ending) : begin + 1]
            )


def test_a_smaller_window_makes_a_document_less_likely_and_counts_every_token(model):
    text = "the owner of the pipeline keeps the keys " * 20
    wide, narrow = (LocalScorer(model, window=window).score_documents([text])[0] for window in (200, 9))

    assert wide.num_tokens == narrow.num_tokens
    assert wide.num_bytes == narrow.num_bytes
    assert not math.isclose(wide.nats, narrow.nats, rel_tol=1e-3)


def test_a_token_over_the_border_belongs_to_the_ending(model):
    scorer = LocalScorer(model)
    for context, ending in (("the", "re"), ("don", "'t"), ("a ", " b"), ("na", "ïve")):
        row = scorer.encode_pair(context, ending)
        whole = scorer.encode_text(context + ending)
        assert [*row.context, *row.ending][-len(whole) :] == whole


def test_a_cut_context_is_told_and_an_ending_is_never_cut(model):
    scorer = LocalScorer(model, window=12)

    assert [score.is_cut for score in scorer.score_endings([("the owner " * 20, "keys"), ("a", " b")])] == [True, False]
    with pytest.raises(DataError, match="the window takes 12"):
        scorer.score_endings([("a", "the owner of the pipeline 1234 " * 5)])


def test_greedy_is_what_the_model_would_write(model):
    scorer = LocalScorer(model)
    ids = [scorer.prefix, *scorer.encode_text("the owner")]
    with torch.no_grad():
        likeliest = int(model.module(torch.tensor([ids])).logits[0, -1].argmax())
    rows = [EndingRow(tuple(ids), (likeliest,)), EndingRow(tuple(ids), ((likeliest + 1) % 200,))]

    assert [score.is_greedy for score in scorer.score_rows(rows)] == [True, False]


def test_a_text_ends_before_a_stop(model):
    scorer = LocalScorer(model)
    long = scorer.write_texts(["the owner"], WritingRule(max_new_tokens=30, temperature=1.0, seed=1))[0]
    stop = long[len(long) // 2 : len(long) // 2 + 2]
    short = scorer.write_texts(["the owner"], WritingRule(max_new_tokens=30, temperature=1.0, seed=1, stops=(stop,)))[0]

    assert short == long.split(stop)[0]


def test_seeds_and_greedy_agree_with_the_model(model):
    scorer = LocalScorer(model)
    one, other = (
        scorer.write_texts(["the owner"], WritingRule(max_new_tokens=20, temperature=1.0, seed=seed))[0]
        for seed in (1, 2)
    )

    assert one != other


def test_weights_that_are_no_numbers_are_refused(model):
    scorer = LocalScorer(model)
    head = model.module.get_output_embeddings().weight
    kept = head.data.clone()
    head.data.fill_(math.nan)
    try:
        with pytest.raises(ModelError, match="no finite number"):
            scorer.score_documents(["the"])
        with pytest.raises(ModelError, match="no finite number"):
            scorer.write_texts(["the"], WritingRule(max_new_tokens=2))
    finally:
        head.data.copy_(kept)


def test_a_special_token_in_a_text_is_text(model):
    scorer = LocalScorer(model)

    assert len(scorer.encode_text("<|im_end|>")) > 1
