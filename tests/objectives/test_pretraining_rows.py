"""Rows that objectives of pre-training make are those of their papers, of any row, the same of the same place."""

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from phalanx.errors import ConfigError
from phalanx.objectives import IGNORE, OBJECTIVES, Row, RowPlace, TokenTable, objective_of
from phalanx.objectives.pretraining import SpanCorruptionSettings
from phalanx.objectives.pretraining.rewriting import Draw
from phalanx.testing.tiny import TINY_TOKENS, VOCAB_SIZE
from phalanx.train.train_section import TrainConfig

EOS, MASK = 0, 1
PRE, SUF, MID = 2, 3, 4
SENTINEL, FIRST = 5, 21
PLACE = RowPlace(sample=5, seed=9)
KINDS = [kind for kind, one in OBJECTIVES.items() if one.rewriting is not None]


def choice(kind, **changes):
    text = {"kind": kind, **changes} if changes else kind
    return TrainConfig(steps=1, batch_size=8, objective=json.loads(json.dumps(text))).objective


def rows(kind, length, **changes):
    return objective_of(choice(kind, **changes)).rewriting(TINY_TOKENS, length)


def packed(*lengths, follows=True):
    """One row of documents with so many tokens each, rising from FIRST; the last one goes on behind the row."""
    tokens, number = [], FIRST
    for size in lengths:
        tokens += [*range(number, number + size), EOS]
        number += size
    tokens[-1] = number if follows else EOS
    whole = np.array(tokens, dtype=np.int64)
    labels = np.where(whole[:-1] == EOS, IGNORE, whole[1:])
    return Row(whole[:-1], labels)


def all_sizes(rate, mean, n):
    noise = min(max(round(n * rate), 1), n - 1)
    return noise, min(max(round(noise / mean), 1), noise, n - noise)


@st.composite
def any_row(draw):
    length = draw(st.integers(8, 24))
    tokens = draw(st.lists(st.integers(FIRST, VOCAB_SIZE - 1), min_size=length + 1, max_size=length + 1))
    for at in draw(st.lists(st.integers(1, length - 1), max_size=3)):
        tokens[at] = EOS
    # as packing makes it: no document is empty, and filling stands at the end alone
    whole = np.array([one for at, one in enumerate(tokens) if one != EOS or tokens[at - 1] != EOS], dtype=np.int64)
    whole = np.concatenate([whole, np.full(length + 1 - len(whole), EOS)])
    return Row(whole[:-1], np.where(whole[:-1] == EOS, IGNORE, whole[1:]))


@settings(deadline=None)
@given(any_row(), st.integers(0, 2**40), st.sampled_from(KINDS))
def test_a_row_keeps_its_shape_and_depends_on_tokens_sample_and_seed_alone(row, sample, kind):
    before = row.ids.copy(), row.labels.copy()
    rewrite = rows(kind, len(row.ids))

    made, again = (rewrite(row, RowPlace(sample=sample, seed=3)) for _ in range(2))

    assert made.ids.shape == made.labels.shape == row.ids.shape
    assert made.ids.dtype == made.labels.dtype == np.int64
    assert 0 <= made.prefix <= len(row.ids)
    assert ((made.labels == IGNORE) | ((made.labels >= 0) & (made.labels < VOCAB_SIZE))).all()
    assert np.array_equal(made.ids, again.ids) and np.array_equal(made.labels, again.labels)
    assert made.prefix == again.prefix
    assert np.array_equal(row.ids, before[0]) and np.array_equal(row.labels, before[1])


@pytest.mark.parametrize("kind", KINDS)
def test_another_sample_seed_or_use_is_another_draw(kind):
    rewrite, row = rows(kind, 24), packed(24)

    places = [
        PLACE,
        *(RowPlace(n, seed=9) for n in range(6, 12)),
        RowPlace(5, seed=8),
        RowPlace(5, seed=9, held_out=True),
    ]

    made = [rewrite(row, place) for place in places]

    assert len({(one.ids.tobytes(), one.labels.tobytes(), one.prefix) for one in made}) > 2


def test_random_numbers_are_those_that_were_written_down():
    draw = Draw("train", 9, 5, "masked")

    assert draw.draw_fractions(2).tolist() == pytest.approx([0.4549421863, 0.8666721577], abs=1e-9)


@pytest.mark.parametrize("rate", [0.15, 0.4])
def test_masked_tokens_are_chosen_and_replaced_as_bert_does(rate):
    row = packed(15, 8)

    made = rows("masked", 24, rate=rate)(row, PLACE)

    # the same, written out token by token
    draw = PLACE.random_draw("masked")
    places = [at for at, token in enumerate(row.ids) if token != EOS]
    order = draw.draw_order(len(places))
    chosen = sorted(places[at] for at in order[: max(1, round(rate * len(places)))])
    fates, others = draw.draw_fractions(len(chosen)), draw.draw_below(VOCAB_SIZE - FIRST, len(chosen))
    ids, labels = row.ids.tolist(), [IGNORE] * 24
    for number, at in enumerate(chosen):
        labels[at] = ids[at]
        if fates[number] < 0.8:
            ids[at] = MASK
        elif fates[number] < 0.9:
            ids[at] = FIRST + int(others[number])
    assert (made.ids.tolist(), made.labels.tolist(), made.prefix) == (ids, labels, 24)


def test_of_many_masked_tokens_eight_tenths_are_masks_and_one_tenth_stays():
    rewrite, shown = rows("masked", 24, rate=0.5), []
    for sample in range(300):
        row = packed(24)
        made = rewrite(row, RowPlace(sample, seed=1))
        hidden = made.labels != IGNORE
        assert hidden.sum() == 12
        assert (made.labels[hidden] == row.ids[hidden]).all() and (made.ids[~hidden] == row.ids[~hidden]).all()
        shown += [(one == MASK, one == was) for one, was in zip(made.ids[hidden], row.ids[hidden], strict=True)]
    masks, kept = np.array(shown).mean(axis=0)
    assert masks == pytest.approx(0.8, abs=0.02)
    # one replaced token of 43 is drawn as it was
    assert kept == pytest.approx(0.1 + 0.1 / 43, abs=0.02)


def test_whole_words_are_hidden_whole_and_a_word_ends_with_its_document():
    row, rewrite = packed(12, 11), rows("masked", 24, rate=0.3, whole_words=True, masked=1.0, random=0.0)
    words, begun = [], True
    for at, token in enumerate(row.ids.tolist()):
        if token == EOS:
            begun = True
            continue
        if begun or token % 3:
            words.append([])
        words[-1].append(at)
        begun = False
    assert max(map(len, words)) == 2

    for sample in range(40):
        made = rewrite(row, RowPlace(sample))
        hidden = set(np.flatnonzero(made.labels != IGNORE).tolist())
        assert all(hidden >= set(word) or not hidden & set(word) for word in words)
        assert 0 < len(hidden) <= round(0.3 * 23)
        assert (made.ids[sorted(hidden)] == MASK).all()


def test_a_row_of_ends_alone_hides_nothing():
    row = Row(np.zeros(8, dtype=np.int64), np.full(8, IGNORE))

    for kind in KINDS:
        made = rows(kind, 8)(row, PLACE)
        assert (made.labels == IGNORE).all(), kind


@settings(deadline=None)
@given(st.integers(10, 24), st.floats(0.05, 0.6), st.floats(1.0, 6.0), st.integers(0, 1000))
def test_a_corrupted_row_is_its_text_with_sentinels_and_then_the_spans(length, rate, mean, sample):
    row = packed(length)
    rewrite = rows("span_corruption", length, rate=rate, mean_span=mean)

    made = rewrite(row, RowPlace(sample))

    inputs, end = made.ids[: made.prefix - 1], made.ids[made.prefix - 1]
    targets = made.labels[made.prefix - 1 :]
    targets = targets[targets != IGNORE]
    assert end == EOS and targets[-1] == EOS
    assert (made.labels[: made.prefix - 1] == IGNORE).all()
    # each target is the next input
    assert np.array_equal(made.ids[made.prefix :][: len(targets) - 1], targets[:-1])
    spans, current = {}, None
    for token in targets[:-1].tolist():
        if token < FIRST:
            current = spans.setdefault(token, [])
        else:
            current.append(token)
    text = [one for token in inputs.tolist() for one in (spans[token] if token < FIRST else [token])]
    assert list(spans) == list(range(SENTINEL, SENTINEL + len(spans)))
    assert text == list(range(text[0], text[0] + len(text))), "the text is a part of the row, in its order"
    noise, count = all_sizes(rate, mean, len(text))
    assert (sum(map(len, spans.values())), len(spans)) == (noise, count)
    assert all(spans.values())
    # no longer text would have had room
    assert len(text) + 2 * count + 1 <= length
    longer = [n for n in range(len(text) + 1, length + 2) if n + 2 * all_sizes(rate, mean, n)[1] + 1 <= length]
    assert longer == []


def test_a_sentence_is_corrupted_as_in_the_paper():
    settings_ = SpanCorruptionSettings(kind="span_corruption", rate=0.3, mean_span=1.5)
    rewrite = objective_of(settings_).rewriting(TINY_TOKENS, 24)

    class Chosen(Draw):
        """Cuts ten tokens as figure 2 of Raffel et al. 2020 does: for inviting, last."""

        def draw_order(self, size):
            # spans of 2 and 1; between them 2 and 5
            return np.array({2: [1, 0], 6: [1, 0, 2, 3, 4, 5]}[size])

    inputs, targets = rewrite.corrupt_text(np.arange(30, 40), Chosen())

    assert inputs.tolist() == [30, 31, SENTINEL, 34, 35, 36, 37, 38, SENTINEL + 1]
    assert targets.tolist() == [SENTINEL, 32, 33, SENTINEL + 1, 39]


def test_a_prefix_ends_anywhere_in_its_row_and_loss_begins_with_the_token_behind_it():
    row, rewrite, seen = packed(24), rows("prefix_lm", 24), set()

    for sample in range(300):
        made = rewrite(row, RowPlace(sample))
        seen.add(made.prefix)
        assert np.array_equal(made.ids, row.ids)
        assert (made.labels[: made.prefix - 1] == IGNORE).all()
        assert np.array_equal(made.labels[made.prefix - 1 :], row.labels[made.prefix - 1 :])
    assert seen == set(range(1, 24))


def put_back(document):
    """A document as it was before its middle was moved."""
    if PRE not in document:
        return document
    assert document[0] == PRE
    suffix, middle = document.index(SUF), document.index(MID)
    # with the suffix first, the prefix stands before the middle
    prefix = document[1:suffix]
    return [*prefix, *document[middle + 1 :], *document[suffix + 1 : middle]]


@pytest.mark.parametrize(("spm", "rate"), [(0.0, 1.0), (1.0, 1.0), (0.5, 0.5)])
def test_each_document_gets_its_middle_back_where_it_was(spm, rate):
    row, rewrite, turned = packed(5, 9, follows=False), rows("fill_in_the_middle", 15, spm=spm, rate=rate), 0
    long = objective_of(choice("fill_in_the_middle", spm=spm, rate=rate)).rewriting(TINY_TOKENS, 64)

    for sample in range(50):
        # in a row that is long enough for the marks, nothing is cut off
        filled = Row(np.concatenate([row.ids, np.zeros(64 - 15, dtype=np.int64)]), np.full(64, IGNORE))
        made = long(filled, RowPlace(sample))
        cut = rewrite(row, RowPlace(sample))
        assert np.array_equal(cut.ids, made.ids[:15])
        tokens = made.ids.tolist()
        ends = [at for at, token in enumerate(tokens) if token == EOS][:2]
        for first, document in ((FIRST, tokens[: ends[0]]), (FIRST + 5, tokens[ends[0] + 1 : ends[1]])):
            turned += PRE in document
            body = put_back(document)
            assert body == list(range(first, first + len(body)))
        kept = made.labels != IGNORE
        assert (made.labels[:-1][kept[:-1]] == made.ids[1:][kept[:-1]]).all()
        assert not kept[[*ends]].any()
    assert (turned == 100) if rate == 1.0 else (30 < turned < 70)


def test_a_mixture_draws_each_task_by_its_share_of_the_phase_and_names_it_to_the_model():
    tasks = [
        {"kind": "causal_lm", "weights": [1.0, 0.0], "token": "[MASK]"},
        {"kind": "span_corruption", "settings": {"rate": 0.5}, "weights": [3.0, 1.0]},
        {"kind": "prefix_lm", "weights": [0.0, 1.0], "token": "<fim_prefix>"},
    ]
    rewrite, row = rows("denoisers", 24, tasks=tasks), packed(24)
    counts = np.zeros((2, 3))
    for phase in range(2):
        for sample in range(400):
            counts[phase, rewrite.task_of(RowPlace(sample, phase))] += 1

    assert counts / 400 == pytest.approx(np.array([[0.25, 0.75, 0.0], [0.0, 0.5, 0.5]]), abs=0.06)
    causal = next(place for place in map(RowPlace, range(400)) if rewrite.task_of(place) == 0)
    made = rewrite(row, causal)
    assert (made.ids[0], made.labels[0], made.prefix) == (MASK, IGNORE, 1)
    assert np.array_equal(made.ids[1:], row.ids[:-1]) and np.array_equal(made.labels[1:], row.labels[:-1])
    with pytest.raises(ConfigError, match="are of 2 phases"):
        rewrite(row, RowPlace(0, 2))


def test_the_usual_mixture_is_ul2s():
    usual = choice("denoisers", tasks=[]).effective_tasks

    assert [one.kind for one in usual].count("prefix_lm") == 1
    assert {(one.settings["mean_span"], one.settings["rate"]) for one in usual if one.settings} == {
        (3.0, 0.15), (8.0, 0.15), (3.0, 0.5), (8.0, 0.5), (64.0, 0.15), (64.0, 0.5)
    }  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "changes", "token"),
    [
        ("masked", {"mask_token": "<mask>"}, "<mask>"),
        ("span_corruption", {"sentinels": "<s{}>"}, "<s0>"),
        ("fill_in_the_middle", {"suffix_token": "<suffix>"}, "<suffix>"),
        ("denoisers", {"tasks": [{"kind": "prefix_lm", "token": "[S2S]"}]}, "[S2S]"),
    ],
)
def test_a_tokenizer_without_the_special_tokens_is_refused_by_name(kind, changes, token):
    with pytest.raises(ConfigError, match=r"the tokenizer .* has no such token; name one") as refused:
        rows(kind, 24, **changes)

    assert repr(token) in str(refused.value)


def test_a_tokenizer_with_too_few_sentinels_is_refused_by_the_first_that_it_lacks():
    with pytest.raises(ConfigError, match="'<extra_id_16>'"):
        rows("span_corruption", 200, rate=0.5)


def test_whole_words_of_a_tokenizer_that_marks_none_are_refused():
    silent = TokenTable(TINY_TOKENS.named, EOS, TINY_TOKENS.special, None, "odd/tokenizer.json")

    with pytest.raises(ConfigError, match=r"odd/tokenizer\.json do not say where a word begins"):
        objective_of(choice("masked", whole_words=True)).rewriting(silent, 24)


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("masked", {"rate": 0.0}),
        ("masked", {"masked": 0.8, "random": 0.3}),
        ("span_corruption", {"sentinels": "<extra>"}),
        ("span_corruption", {"mean_span": 0.5}),
        ("denoisers", {"tasks": [{"kind": "dpo"}]}),
        ("denoisers", {"tasks": [{"kind": "prefix_lm", "settings": {"rate": 0.5}}]}),
        ("denoisers", {"tasks": [{"kind": "masked", "settings": {"rate": 5}}]}),
        ("denoisers", {"tasks": [{"kind": "prefix_lm", "weight": 0.0}]}),
        ("prefix_lm", {"rate": 0.5}),
    ],
)
def test_settings_that_make_no_sense_are_refused(kind, changes):
    with pytest.raises(ValidationError):
        choice(kind, **changes)
