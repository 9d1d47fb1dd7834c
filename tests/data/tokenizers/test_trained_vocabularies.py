"""A vocabulary of every kind is the same at every run, takes every text, and gives no special token for any."""

import hashlib
import json
import os
import random
import subprocess
import sys

import pytest

from phalanx.data.tokenizers import (
    ByteBpeTraining,
    SentencePieceTraining,
    WordPieceTraining,
    train_tokenizer,
    vocabulary_digest,
)
from phalanx.data.tokenizers.probes import probe_texts
from phalanx.data.tokenizers.sentence_piece import prove_equal
from phalanx.data.tokenizers.training import MAX_WORD, TRAINERS, cut_words
from phalanx.errors import ConfigError, DataError


def made_texts(count=40):
    draw = random.Random(7)
    words = ["".join(draw.choices("aeioubcdlmnrst", k=draw.randint(2, 9))) for _ in range(150)]
    return [" ".join(draw.choices(words, k=60)) + f", No. {at * 317}.\n\nCaf\u00e9 {at}!" for at in range(count)]


CONFIGS = {
    "bpe": ByteBpeTraining(vocab_size=400, special_tokens=("<|user|>",)),
    "bpe, digits": ByteBpeTraining(vocab_size=400, split_digits=True, normalization="nfc"),
    "wordpiece": WordPieceTraining(vocab_size=300, special_tokens=("<|user|>",), lowercase=True, split_digits=True),
    "sentencepiece_bpe": SentencePieceTraining(
        kind="sentencepiece_bpe", vocab_size=500, special_tokens=("<|user|>",), split_digits=True
    ),
    "sentencepiece_unigram": SentencePieceTraining(
        kind="sentencepiece_unigram", vocab_size=450, special_tokens=("<|user|>",), normalization="nfkc"
    ),
}
TRAIN = (
    "import hashlib; from test_trained_vocabularies import *;"
    "[print(hashlib.sha256(train_tokenizer(iter(made_texts()), c).to_json()).hexdigest()) for c in CONFIGS.values()]"
)


@pytest.fixture(scope="module")
def trained():
    return {name: train_tokenizer(iter(made_texts()), config) for name, config in CONFIGS.items()}


@pytest.mark.parametrize("name", ["bpe", "bpe, digits", "wordpiece"])
@pytest.mark.parametrize("run", ["ab", "\n", "\u00bd", "!", "7"])
def test_a_word_without_end_is_cut_before_it_is_learned(trained, name, run):
    pre_tokenizer = trained[name].backend.pre_tokenizer
    plain = [*made_texts(2), "x" * (MAX_WORD - 1)]
    endless = f"It is\n{run * 5 * MAX_WORD}, he said."

    texts = list(cut_words(iter([*plain, endless]), trained[name].backend))

    longest = max(stop - start for text in texts for _, (start, stop) in pre_tokenizer.pre_tokenize_str(text))
    assert texts[: len(plain)] == plain
    assert longest <= MAX_WORD
    assert len("".join(texts[len(plain) :])) == len(endless)
    train_tokenizer(iter([*made_texts(), endless]), CONFIGS[name])


def test_every_kind_of_the_table_is_tested():
    assert {config.kind for config in CONFIGS.values()} == set(TRAINERS)


def test_the_same_texts_give_the_same_bytes_in_another_process_with_more_threads(trained):
    paths = os.pathsep.join([os.path.dirname(__file__), *sys.path])
    environment = os.environ | {"PYTHONPATH": paths, "TOKENIZERS_PARALLELISM": "true", "RAYON_NUM_THREADS": "5"}

    run = subprocess.run([sys.executable, "-c", TRAIN], env=environment, capture_output=True, check=True, text=True)

    here = [hashlib.sha256(one.to_json()).hexdigest() for one in trained.values()]
    assert run.stdout.split() == here


@pytest.mark.parametrize("name", CONFIGS)
def test_a_vocabulary_has_the_size_that_was_asked_for_and_its_special_tokens(trained, name):
    tokenizer, config = trained[name], CONFIGS[name]

    assert tokenizer.vocab_size == config.vocab_size
    assert len(tokenizer.backend.get_vocab(with_added_tokens=True)) == config.vocab_size
    assert tokenizer.backend.token_to_id(config.end_of_text) == tokenizer.eos_id
    assert all(tokenizer.backend.token_to_id(token) is not None for token in config.all_special)


@pytest.mark.parametrize("name", CONFIGS)
def test_no_text_gives_a_special_token(trained, name):
    tokenizer, config = trained[name], CONFIGS[name]
    special = {tokenizer.backend.token_to_id(token) for token in (config.end_of_text, *config.special_tokens)}

    for text in probe_texts(config.all_special):
        assert not special & set(tokenizer.backend.encode(text, add_special_tokens=False).ids)


@pytest.mark.parametrize("name", ["bpe", "sentencepiece_bpe", "sentencepiece_unigram"])
def test_what_gives_nothing_up_gives_every_text_back(trained, name):
    backend = trained[name].backend
    texts = [text for text in (*made_texts(3), *probe_texts(("<|user|>",))) if "\u2581" not in text]
    normal = {"sentencepiece_unigram": backend.normalizer}.get(name)

    for text in texts:
        expected = text if normal is None else normal.normalize_str(text).replace("\u2581", " ")
        assert backend.decode(backend.encode(text, add_special_tokens=False).ids) == expected


@pytest.mark.parametrize("name", ["bpe, digits", "wordpiece", "sentencepiece_bpe"])
def test_each_digit_is_a_token_where_digits_are_split(trained, name):
    encoded = trained[name].backend.encode("in 1999, 12 of 345", add_special_tokens=False)

    tokens = [token for token in encoded.tokens if any(character.isdigit() for character in token)]
    assert len(tokens) == 9


def test_a_vocabulary_without_byte_fallback_has_an_unknown_token():
    config = SentencePieceTraining(
        kind="sentencepiece_bpe", vocab_size=200, byte_fallback=False, character_coverage=1.0
    )
    backend = train_tokenizer(iter(made_texts()), config).backend

    assert backend.encode("漢", add_special_tokens=False).tokens == ["<unk>"]
    assert backend.token_to_id("<0x41>") is None


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (ByteBpeTraining(vocab_size=5000), r"supports \d+ tokens only; lower"),
        (ByteBpeTraining(vocab_size=100), "special tokens and single characters are already 257; raise"),
        (WordPieceTraining(vocab_size=5000), r"supports \d+ tokens only; lower"),
        (WordPieceTraining(vocab_size=5), r"are already \d+; raise"),
        (SentencePieceTraining(kind="sentencepiece_bpe", vocab_size=5000), r"too large .* at most \d+"),
        (SentencePieceTraining(kind="sentencepiece_unigram", vocab_size=50), r"too small .* at least \d+"),
    ],
)
def test_a_size_that_the_text_cannot_have_is_refused_with_the_one_that_it_can(config, said):
    with pytest.raises(DataError, match=said) as refused:
        train_tokenizer(["a short text, a short text"], config)

    assert refused.value.error_facts["code"] == "PHX-I017"


@pytest.mark.parametrize("name", CONFIGS)
def test_no_text_at_all_is_refused(name):
    with pytest.raises(DataError, match="tokenizer"):
        train_tokenizer([], CONFIGS[name])


def test_a_conversion_that_gives_other_ids_is_refused_with_the_text(trained):
    class Other:
        def encode(self, text):
            return [0, *trained["sentencepiece_bpe"].backend.encode(text, add_special_tokens=False).ids]

    with pytest.raises(DataError, match="from token 0 on, for the text that starts 'abc'"):
        prove_equal(Other(), trained["sentencepiece_bpe"].backend, None, ["abc"])


def test_the_digest_is_of_what_decides_ids_and_of_nothing_else(trained):
    one = trained["bpe"]
    same = json.loads(one.to_json())
    changed = type(one)(
        one.backend.from_str(json.dumps(same | {"decoder": None, "post_processor": None})), 400, one.eos_id
    )
    swapped = json.loads(one.to_json())
    vocabulary = swapped["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    other = type(one)(one.backend.from_str(json.dumps(swapped)), 400, one.eos_id)

    assert vocabulary_digest(changed) == vocabulary_digest(one)
    assert vocabulary_digest(other) != vocabulary_digest(one)
    assert vocabulary_digest(type(one)(one.backend, 400, 7)) != vocabulary_digest(one)
    assert len({vocabulary_digest(tokenizer) for tokenizer in trained.values()}) == len(CONFIGS)


@pytest.mark.parametrize("tokens", [("<a>", "<a>"), ("<|endoftext|>",), (" <a>",)])
def test_special_tokens_that_are_not_apart_are_refused(tokens):
    with pytest.raises((ConfigError, ValueError), match=r"appears twice|white space"):
        ByteBpeTraining(vocab_size=400, special_tokens=tokens)
