"""A run reads a dataset of shards: its groups, its tokenizer and its held-out split, all as they were signed."""

import json
import shutil

import pytest
import tokenizers
from made_text import made_documents

from phalanx.data import BatchLoader, BpeConfig, DataConfig, prepare_corpus, unigram_perplexity, validation_batches
from phalanx.data.dataset_corpus import recipe_weights
from phalanx.data.shards import fingerprint_of
from phalanx.data.tokenizers.training import train_bpe
from phalanx.errors import ConfigError, DataError
from phalanx.security.crypto import Identity
from tiny_dataset import write_tiny_dataset

TEXTS = {"web": made_documents(30, words=20), "code": made_documents(12, seed=5, words=40)}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A dataset of two groups, every fifth document held out, and the tokenizer that encoded it."""
    home = tmp_path_factory.mktemp("dataset") / "docs"
    tokenizer = write_tiny_dataset(home, TEXTS)
    return home, tokenizer


def config(home, **changes) -> DataConfig:
    text = {"dataset": {"path": str(home)} | changes.pop("dataset", {}), "sequence_length": 16}
    return DataConfig.model_validate_json(json.dumps(text | changes))


def test_all_training_tokens_are_batched_and_none_that_is_held_out(made, tmp_path):
    home, tokenizer = made
    corpus = prepare_corpus(config(home, packing="best_fit"), tmp_path, seed=1)

    batch = corpus.train_batch(range(corpus.num_train_sequences))

    expected = [
        token
        for texts in TEXTS.values()
        for number, text in enumerate(texts)
        if number % 5 != 4
        for token in tokenizer.encode_texts([text])[0][1:]
    ]
    labels = batch.labels[(batch.labels >= 0) & (batch.labels != tokenizer.eos_id)]
    assert sorted(labels.tolist()) == sorted(expected)
    assert corpus.vocab_size == 300
    assert corpus.num_validation_sequences == sum(len(one.labels) for one in validation_batches(corpus, 3))
    assert 1 < unigram_perplexity(corpus) < 300
    assert "not verified" in corpus.trust


def test_a_field_of_documents_orders_a_phase(made, tmp_path):
    home, _ = made
    phases = [{"weights": {"web": 1.0}, "curriculum": {"by": "quality", "buckets": 1000}}]
    corpus = prepare_corpus(config(home, phases=phases, packing="best_fit"), tmp_path, seed=1)
    code, web = corpus.sample_order(1, 4).groups
    scores = web.scores("quality").tolist()

    seen = [scores[index - code.size] for index in BatchLoader(corpus, web.size, 1).next_batch().indices]

    assert seen == sorted(scores)


def test_groups_and_weights_are_those_of_the_run_file(made, tmp_path):
    home, _ = made
    only = prepare_corpus(config(home, dataset={"groups": ["code"]}), tmp_path, seed=1)
    loader = BatchLoader(
        prepare_corpus(config(home, dataset={"weights": {"web": 1.0, "code": 3.0}}), tmp_path, seed=1), 8, 1
    )

    loader.next_batch()

    assert loader.consumed_samples == {"code": 6, "web": 2}
    assert BatchLoader(only, 8, 1).consumed_samples == {"code": 0}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dataset": {"groups": ["mail"]}}, 'no group "mail".*the dataset code, web'),
        ({"dataset": {"weights": {"mail": 1.0}}}, 'no group "mail"'),
        ({"repeats": {"mail": 1.0}}, 'no group "mail"'),
        ({"phases": [{"weights": {"mail": 1.0}}]}, 'no group "mail"'),
        ({"dataset": {"groups": ["web"]}, "phases": [{"weights": {"code": 1.0}}]}, 'no group "code"'),
    ],
)
def test_a_group_that_the_dataset_has_not_is_refused_by_name(made, tmp_path, changes, message):
    with pytest.raises(ConfigError, match=message):
        prepare_corpus(config(made[0], **changes), tmp_path, seed=1)


def test_a_dataset_without_held_out_text_is_refused_unless_the_run_brings_its_own(made, tmp_path):
    few = tmp_path / "few"
    write_tiny_dataset(few, {"web": TEXTS["web"][:4], "code": TEXTS["code"][:4]})
    (tmp_path / "held_out.txt").write_text("\n".join(TEXTS["code"]))
    own = [{"name": "mine", "sources": [{"kind": "text", "path": str(tmp_path / "held_out.txt")}]}]

    with pytest.raises(DataError, match=r"validation split has no sequence of 16 tokens; build it with a larger"):
        prepare_corpus(config(few), tmp_path, seed=1)

    assert prepare_corpus(config(few, validation=own), tmp_path, seed=1).num_validation_sequences == 0


def test_a_field_that_is_not_there_is_refused_by_name(made, tmp_path):
    phases = [{"curriculum": {"by": "beauty"}}]
    loader = BatchLoader(prepare_corpus(config(made[0], phases=phases), tmp_path, seed=1), 4, 1)

    with pytest.raises(DataError, match=r'by "beauty": document .* no such field; it has quality'):
        loader.next_batch()


def test_a_tokenizer_with_other_ids_is_refused_and_an_equal_one_is_not(made, tmp_path):
    home, tokenizer = made
    other = train_bpe(iter(made_documents(40, seed=9)), BpeConfig(vocab_size=280))
    (tmp_path / "other.json").write_bytes(other.to_json())
    (tmp_path / "equal.json").write_bytes(json.dumps(json.loads(tokenizer.to_json()), indent=1).encode())

    equal = prepare_corpus(
        config(home, tokenizer={"kind": "file", "path": str(tmp_path / "equal.json")}), tmp_path, seed=1
    )

    assert equal.vocab_size == 300
    with pytest.raises(DataError, match=r"data\.tokenizer: differs from .* 280 tokens"):
        prepare_corpus(config(home, tokenizer={"kind": "file", "path": str(tmp_path / "other.json")}), tmp_path, seed=1)
    model = tmp_path / "model"
    model.mkdir()
    (model / "tokenizer.json").write_bytes(other.to_json())
    with pytest.raises(DataError, match=r"data\.tokenizer: differs from"):
        prepare_corpus(
            config(home, tokenizer={"kind": "model", "eos_token": "<|endoftext|>"}), tmp_path, 1, tokenizer_path=model
        )


def test_an_altered_tokenizer_and_another_signer_are_refused(made, tmp_path):
    home, _ = made
    kept = (home / "tokenizer.json").read_bytes()
    backend = tokenizers.Tokenizer.from_str(kept.decode())
    backend.add_tokens(["more"])
    try:
        (home / "tokenizer.json").write_text(backend.to_str())
        with pytest.raises(DataError, match=r"tokenizer\.json: has SHA-256 .* altered"):
            prepare_corpus(config(home), tmp_path, seed=1)
    finally:
        (home / "tokenizer.json").write_bytes(kept)
    stranger = fingerprint_of(Identity.without_certificate("stranger"))
    with pytest.raises(DataError, match="signed with key"):
        prepare_corpus(config(home, dataset={"signer": stranger}), tmp_path, seed=1)


def test_an_altered_token_is_refused_before_it_is_in_a_batch(made, tmp_path):
    home = tmp_path / "copy"
    shutil.copytree(made[0], home)
    shard = home / "shards" / "web.train" / "tokens-00000"
    content = bytearray(shard.read_bytes())
    content[300] ^= 1
    shard.write_bytes(content)
    corpus = prepare_corpus(config(home), tmp_path, seed=1)

    with pytest.raises(DataError, match=r"web\.train.tokens-00000"):
        corpus.train_batch(range(corpus.num_train_sequences))


def test_the_weights_of_a_recipe_are_the_mixture_of_a_run_that_gives_none(tmp_path):
    home, recipe = tmp_path / "made", "[[sources]]\nkind='text'\nname='web'\nweight=3.0\n"
    write_tiny_dataset(home, TEXTS, recipe=recipe + "[[sources]]\nkind='text'\nname='code'\nweight=1.0\n")

    def shares(**dataset):
        corpus = prepare_corpus(config(home, packing="best_fit", dataset=dataset), tmp_path / "cache", seed=1)
        return BatchLoader(corpus, 8, 1), corpus

    loader, _ = shares()
    for _ in range(5):
        loader.next_batch()
    assert loader.consumed_samples == {"code": 10, "web": 30}
    named, _ = shares(weights={"web": 1.0, "code": 1.0})
    for _ in range(5):
        named.next_batch()
    assert named.consumed_samples == {"code": 20, "web": 20}


@pytest.mark.parametrize(
    ("recipe", "weights"),
    [
        ("", {}),
        ("not = [toml", {}),
        ("[[sources]]\nkind='text'\n", {}),
        ("sources = 3\n", {}),
        (
            "[[sources]]\nkind='text'\nname='a'\ngroup='g'\nweight=1.5\n"
            "[[sources]]\nkind='text'\nname='b'\ngroup='g'\nweight=1.0\n[[sources]]\nkind='csv'\n",
            {"g": 2.5},
        ),
    ],
)
def test_a_group_weighs_what_all_of_its_sources_say(recipe, weights):
    assert recipe_weights(recipe) == weights
