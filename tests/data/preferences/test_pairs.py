"""Preferences as data: shapes that are about, two rows a pair, no prompt on both sides, and errors with their line."""

import json
import resource

import pytest
import torch

from forked_child import run_in_fork
from phalanx.data import IGNORE, BatchLoader, BpeConfig, DataConfig
from phalanx.data.chat.settings import PreferencesConfig, PreferenceSource
from phalanx.data.preferences import prepare_preferences, trim_padding
from phalanx.data.preferences.encoder import EncodedAnswer
from phalanx.data.tokenizers import open_tokenizer
from phalanx.errors import ConfigError, DataError

HH = "\n\nHuman: is it {0}?\n\nAssistant: why {0}?\n\nHuman: tell me\n\nAssistant: {1}"


def pair(number, **changes):
    return {"prompt": f"question {number}?", "chosen": f" yes {number}", "rejected": f" no {number} no", **changes}


def written(path, lines):
    path.write_text("".join(json.dumps(line) + "\n" if isinstance(line, dict) else line for line in lines))
    return path


def prepared(path, shape="pairs", *, single=False, tokens=64, share=0.25, told=None, **settings):
    source = PreferenceSource(path=path, shape=shape)
    config = DataConfig(
        preferences=PreferencesConfig(sources=(source,), template="plain", **settings),
        tokenizer=BpeConfig(vocab_size=258),
        sequence_length=tokens,
        validation_share=share,
    )
    say = (told if told is not None else []).append
    return prepare_preferences(config, path.parent / "cache", 3, None, say, single=single)


def texts(corpus, batch):
    """Of each row its text, and what of it is learned."""
    backend = open_tokenizer(corpus.tokenizer_path, corpus.eos_id).backend
    said = []
    for ids, labels in zip(trim_padding(batch).input_ids, batch.labels, strict=True):
        end = int((labels != IGNORE).nonzero().max()) + 1
        learned = [label for label in labels.tolist() if label != IGNORE]
        said.append((backend.decode(ids[:end].tolist()), backend.decode(learned)))
        assert learned[-1] == corpus.eos_id == int(ids[end])
    return said


def test_a_pair_is_two_neighbours_with_one_prompt_of_which_the_answers_alone_are_learned(tmp_path):
    corpus = prepared(written(tmp_path / "a.jsonl", [pair(n, margin=n / 2) for n in range(20)]))

    batch = corpus.train_batch([0, 3])

    (better, worse), (answer, other) = zip(*texts(corpus, batch)[:2], strict=True)
    assert (better.split("?")[0], answer[:5], other[:4]) == (worse.split("?")[0], " yes ", " no ")
    assert better == worse.split("?")[0] + "?" + answer
    assert batch.indices == (0, 1, 6, 7)
    assert torch.equal(batch.extras["margin"][0::2], batch.extras["margin"][1::2])
    assert corpus.num_train_sequences + corpus.num_validation_sequences == 20
    assert 0 < corpus.num_validation_sequences < 12


def test_every_shape_gives_the_same_rows(tmp_path):
    texts_of = [
        {"prompt": [{"role": "user", "content": f"is {n}?"}], "good": f"yes {n}", "bad": f"no {n}"} for n in range(9)
    ]
    said = [
        {
            "prompt": one["prompt"],
            "chosen": [{"role": "assistant", "content": one["good"]}],
            "rejected": [{"role": "assistant", "content": one["bad"]}],
        }
        for one in texts_of
    ]
    whole = [{name: [*one["prompt"], *one[name]] for name in ("chosen", "rejected")} for one in said]
    lines = [
        {
            name: f"\n\nHuman: {one['prompt'][0]['content']}\n\nAssistant: {one[key]}"
            for name, key in (("chosen", "good"), ("rejected", "bad"))
        }
        for one in texts_of
    ]
    found = [
        prepared(written(tmp_path / f"{number}.jsonl", rows), shape)
        for number, (rows, shape) in enumerate([(said, "pairs"), (whole, "pairs"), (lines, "hh")])
    ]

    assert len({one.digest for one in found}) == 1
    text, learned = texts(found[0], found[0].train_batch([0]))[0]
    assert text.startswith("User: is ") and "\nAssistant: yes" in text
    assert learned.startswith(" yes")


def test_a_transcript_of_several_turns_keeps_them_all(tmp_path):
    rows = [{"chosen": HH.format(n, f"fine {n}"), "rejected": HH.format(n, f"bad {n}")} for n in range(8)]
    corpus = prepared(written(tmp_path / "a.jsonl", rows), "hh", tokens=96)

    ((text, learned), _) = texts(corpus, corpus.train_batch([0]))

    assert (text.count("User:"), text.count("Assistant:")) == (2, 2)
    assert "why" in text
    assert learned.startswith(" fine ")


def test_single_answers_have_a_companion_and_pairs_make_two_of_them(tmp_path):
    rows = [{"prompt": f"q {n}?", "completion": f" a {n}", "label": n % 2 == 0} for n in range(16)]
    labelled = prepared(written(tmp_path / "a.jsonl", rows), "labelled", single=True)
    split = prepared(written(tmp_path / "b.jsonl", [pair(n) for n in range(8)]), single=True)

    batch = labelled.train_batch(range(labelled.num_train_sequences))
    said = texts(labelled, batch)

    for example, companion in zip(said[0::2], said[1::2], strict=True):
        assert example[0].split("?")[0] == companion[0].split("?")[0]
        assert example[1] != companion[1]
    assert torch.equal(batch.extras["wanted"][0::2], batch.extras["wanted"][1::2])
    assert set(batch.extras["wanted"].tolist()) == {0, 1}
    assert split.num_train_sequences + split.num_validation_sequences == 16
    with pytest.raises(ConfigError, match="has single answers, which"):
        prepared(tmp_path / "a.jsonl", "labelled")


def test_no_prompt_is_on_both_sides_and_the_order_follows_from_the_seed(tmp_path):
    rows = [pair(n % 10, chosen=f" yes {n}") for n in range(40)]
    corpus = prepared(written(tmp_path / "a.jsonl", rows))

    sides = [
        {text.split("?")[0] for text, _ in texts(corpus, part.pair_batch(range(part.num_pairs)))}
        for part in (corpus.train, corpus.held_out)
    ]
    loader, again = (BatchLoader(corpus, 4, 5) for _ in range(2))
    first = [loader.next_batch() for _ in range(6)]
    again.load_position(json.loads(json.dumps({**again.position_state(), "num_samples": 8})))

    assert not sides[0] & sides[1]
    assert torch.equal(again.next_batch().input_ids, first[2].input_ids)
    assert all(batch.indices[at + 1] == batch.indices[at] + 1 for batch in first for at in range(0, 8, 2))
    assert prepared(tmp_path / "a.jsonl").digest == corpus.digest


@pytest.mark.parametrize(
    ("line", "shape", "told"),
    [
        (pair(9, rejected=" yes 9"), "pairs", "both answers are equal, so neither is better; remove the line"),
        (pair(9, rejected="  "), "pairs", "the rejected answer is empty; remove the line"),
        (pair(9, prompt=""), "pairs", "the prompt is empty; remove the line"),
        (pair(9, margin="much"), "pairs", "field 'margin' holds 'much', expected a number"),
        ({"prompt": "q"}, "pairs", "has no field 'chosen' with text or messages; its fields are: prompt; set `shape`"),
        ({"chosen": "a", "rejected": "b"}, "pairs", "has no field 'prompt', and its sides do not begin with the same"),
        (pair(9, prompt=7), "pairs", "field 'prompt' holds a JSON int, expected text or a list of messages"),
        (
            pair(9, chosen=[{"role": "user", "content": "x"}]),
            "pairs",
            "ends with a message of user, expected",
        ),
        ({"chosen": HH.format("a", "x"), "rejected": HH.format("b", "y")}, "hh", "the prompt is not shared"),
        (
            {"chosen": "hello", "rejected": "you"},
            "hh",
            "field 'chosen' has no answer: no line begins",
        ),
        ({"prompt": "q", "completion": " a", "label": 1}, "labelled", "field 'label' holds 1, expected true or false"),
        ("{broken\n", "pairs", "is not JSON"),
    ],
)
def test_a_line_that_is_no_preference_is_named_or_left_out_and_counted(tmp_path, line, shape, told):
    good = {
        "pairs": [pair(n) for n in range(8)],
        "hh": [{"chosen": HH.format(n, "x"), "rejected": HH.format(n, "y")} for n in range(8)],
        "labelled": [{"prompt": f"q {n}", "completion": f" {n}", "label": True} for n in range(8)],
    }[shape]
    path = written(tmp_path / "a.jsonl", [*good, line])
    single, said = shape == "labelled", []

    with pytest.raises(DataError) as caught:
        prepared(path, shape, single=single, tokens=96)
    corpus = prepared(path, shape, single=single, tokens=96, broken="drop", told=said)

    assert str(caught.value).startswith(f"{path}, line 9: ")
    assert told in str(caught.value)
    assert corpus.num_train_sequences + corpus.num_validation_sequences == 8
    assert said == ["data.preferences.sources.0: 1 lines are not preferences: dropped"]


def test_a_side_that_is_too_long_is_named_or_left_out(tmp_path):
    path, said = written(tmp_path / "a.jsonl", [*[pair(n) for n in range(8)], pair(8, chosen=" yes" * 80)]), []

    with pytest.raises(DataError, match=rf"{path}, line 9: prompt and answer have \d+ tokens, more than"):
        prepared(path)
    corpus = prepared(path, too_long="drop", told=said)

    assert corpus.num_train_sequences + corpus.num_validation_sequences == 8
    assert said == ["data: 1 of 9 preferences have a side of over 64 tokens: dropped"]


LONG = "the oldest words of it, then " * 4


@pytest.mark.parametrize("single", [False, True])
def test_a_long_prompt_loses_its_beginning_on_both_sides_and_no_answer_a_token(tmp_path, single):
    rows = [pair(n, chosen=" yes indeed", rejected=" no") for n in range(8)]
    path = written(tmp_path / "a.jsonl", [*rows, pair(0, prompt=f"{LONG}question?", chosen=" yes", rejected=" no no")])
    said = []

    corpus = prepared(path, share=0.0, single=single, told=said)

    batch = corpus.train_batch(range(corpus.num_train_sequences))
    backend = open_tokenizer(corpus.tokenizer_path, corpus.eos_id).backend
    learned = [int((labels != IGNORE).nonzero().max()) + 2 for labels in batch.labels]
    found = [backend.decode(ids[:end].tolist()) for ids, end in zip(batch.input_ids, learned, strict=True)]
    better, worse = (next(text for text in found if text.endswith(f"question?{end}")) for end in (" yes", " no no"))
    assert not better.startswith("the oldest")
    if not single:
        assert better.removesuffix(" yes") == worse.removesuffix(" no no")
        assert max(learned) == 64
    assert len(said) == 1
    assert "have a side of over 64 tokens: their prompts lack up to" in said[0]
    assert "their answers none; raise data.sequence_length, or set data.preferences.too_long" in said[0]


def test_a_cut_leaves_the_tokenizers_first_token_and_the_one_that_the_answer_is_predicted_from():
    labels = [IGNORE, IGNORE, IGNORE, 14, 15, IGNORE]
    answer = EncodedAnswer([1, 11, 12, 13, 14, 15], labels, 4, num_first=1)

    shorter = [answer.shorten_prompt(tokens) for tokens in (0, 1, 2, 3)]

    assert answer.num_spare == 2
    assert [cut.ids for cut in shorter] == [
        [1, 11, 12, 13, 14, 15],
        [1, 12, 13, 14, 15],
        [1, 13, 14, 15],
        [1, 13, 14, 15],
    ]
    assert shorter[2].labels == [IGNORE, 14, 15, IGNORE]


@pytest.mark.parametrize(("policy", "why"), [("refuse", "= 64; raise it"), ("cut", "of the prompt does not suffice")])
def test_answers_are_never_cut_and_a_long_prompt_can_be_refused(tmp_path, policy, why):
    long = {"prompt": f"{LONG}?"} if policy == "refuse" else {"chosen": " yes" * 80}
    path = written(tmp_path / "a.jsonl", [pair(0), pair(1, **long)])

    with pytest.raises(DataError, match=why):
        prepared(path, share=0.0, too_long=policy)


def test_what_nobody_can_learn_from_is_refused(tmp_path):
    with pytest.raises(DataError, match="pairs are left for training"):
        prepared(written(tmp_path / "a.jsonl", [pair(0)]), share=0.5)
    with pytest.raises(DataError, match=r"data\.preferences: .*b\.jsonl: has no preference"):
        prepared(written(tmp_path / "b.jsonl", ["\n"]))
    with pytest.raises(ValueError, match="template: unknown template 'other'; expected model, chatml, plain"):
        PreferencesConfig(sources=(PreferenceSource(path=tmp_path),), template="other")


def test_no_more_preferences_are_read_than_allowed_over_all_sources(tmp_path):
    sources = [
        PreferenceSource(path=written(tmp_path / f"{start}.jsonl", [pair(n) for n in range(start, start + 5)]))
        for start in (0, 10, 20)
    ]
    config = DataConfig(
        preferences=PreferencesConfig(sources=tuple(sources), template="plain"),
        tokenizer=BpeConfig(vocab_size=258),
        sequence_length=64,
        validation_share=0.0,
        max_documents=5,
    )

    corpus = prepare_preferences(config, tmp_path / "cache", 3, None, [].append)

    assert corpus.num_train_sequences == 5


def test_a_vocabulary_that_a_crash_has_cut_off_is_written_again(tmp_path):
    path = written(tmp_path / "a.jsonl", [pair(n) for n in range(20)])
    first = prepared(path)
    content = first.tokenizer_path.read_bytes()
    first.tokenizer_path.write_bytes(content[:100])

    assert prepared(path).digest == first.digest
    assert first.tokenizer_path.read_bytes() == content


def test_a_full_disk_is_told_where_a_vocabulary_is_kept(tmp_path):
    path = written(tmp_path / "a.jsonl", [pair(n) for n in range(20)])

    def prepare_on_full_disk():
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))
        with pytest.raises(DataError, match=r"tokenizer\.json: cannot be written .* free space"):
            prepared(path)

    assert run_in_fork(prepare_on_full_disk) == 0
