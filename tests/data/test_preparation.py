"""Text becomes a corpus: its counts add up, its splits share nothing, and damage to it is noticed."""

import json
import shutil

import pytest
from made_text import made_config, made_documents, write_text

from phalanx.config import canonical_json
from phalanx.data import BpeConfig, FileTokenizerConfig, ModelTokenizerConfig, prepare_corpus
from phalanx.data.manifest import parse_manifest
from phalanx.data.shards import default_signing_key, document_digest, fingerprint_of, load_signer, open_dataset
from phalanx.data.sources import JsonlConfig, TextConfig
from phalanx.data.tokenizers import Encoder
from phalanx.errors import DataError


@pytest.fixture
def config(tmp_path):
    return made_config(tmp_path / "text")


def documents_of(corpus, split):
    """The documents of one split, decoded from the tokens on disk."""
    import numpy as np
    import tokenizers

    backend = tokenizers.Tokenizer.from_file(str(corpus.tokenizer_path))
    tokens = np.asarray(open_dataset(corpus.directory).tokens("text", split)[:])
    ends = np.flatnonzero(tokens == corpus.eos_id)
    return [backend.decode(part.tolist()[:-1]) for part in np.split(tokens, ends + 1)[:-1]]


def test_every_document_arrives_once_and_in_order(config, tmp_path):
    corpus = prepare_corpus(config, tmp_path / "cache", seed=1)

    train, validation = documents_of(corpus, "train"), documents_of(corpus, "validation")

    assert sorted(train + validation) == sorted(made_documents())
    assert train == [text for text in made_documents() if text in set(train)]
    assert 3 < len(validation) < 25


def test_the_counts_add_up_from_bytes_to_sequences(tmp_path):
    documents = made_documents()
    config = made_config(tmp_path / "text", [*documents, documents[3], "  \n ", documents[5] + "  \r\n"])

    manifest = prepare_corpus(config, tmp_path / "cache", seed=1).manifest

    (source,) = manifest.sources
    assert (source.documents, source.empty_documents, source.duplicate_documents) == (63, 1, 2)
    assert manifest.train.documents + manifest.validation.documents == 60
    kept = manifest.train.size_bytes + manifest.validation.size_bytes
    assert kept == sum(len(text.encode()) for text in documents) == source.size_bytes - source.duplicate_bytes
    for split in (manifest.train, manifest.validation):
        assert split.tokens == split.sequences * 16 + 1 + split.left_over_tokens
        assert 0 <= split.left_over_tokens < 16


def test_a_text_in_two_sources_is_never_in_both_splits(tmp_path):
    documents = made_documents()
    lines = tmp_path / "same.jsonl"
    lines.write_text("\n".join(json.dumps({"text": text}) for text in documents))
    sources = (write_text(tmp_path / "text", documents), JsonlConfig(path=lines))

    corpus = prepare_corpus(made_config(tmp_path / "text", sources=sources), tmp_path / "cache", seed=1)

    assert not set(documents_of(corpus, "train")) & set(documents_of(corpus, "validation"))
    assert corpus.manifest.sources[1].duplicate_documents == 60


def test_new_documents_move_no_other_across_the_split(config, tmp_path):
    before = prepare_corpus(config, tmp_path / "cache", seed=1)
    more = made_config(tmp_path / "more", made_documents() + made_documents(20, seed=9))

    after = prepare_corpus(more, tmp_path / "cache", seed=1)

    assert set(documents_of(before, "validation")) <= set(documents_of(after, "validation"))
    assert set(documents_of(before, "train")) <= set(documents_of(after, "train"))


def test_the_same_input_gives_the_same_digest_anywhere(config, tmp_path):
    (tmp_path / "elsewhere").mkdir()
    copy = made_config(tmp_path / "elsewhere" / "text")

    first = prepare_corpus(config, tmp_path / "cache", seed=1)
    second = prepare_corpus(copy, tmp_path / "cache2", seed=1)

    assert first.digest == second.digest
    assert str(tmp_path) not in first.manifest.model_dump_json()


def test_the_second_time_the_cache_is_used(config, tmp_path):
    told: list[str] = []
    first = prepare_corpus(config, tmp_path / "cache", seed=1, progress=lambda phase, _: told.append(phase))
    assert set(told) == {"read", "vocabulary", "encode"}
    told.clear()

    second = prepare_corpus(config, tmp_path / "cache", seed=1, progress=lambda phase, _: told.append(phase))

    assert told == []
    assert second.digest == first.digest


@pytest.mark.parametrize("change", ["text", "seed", "vocabulary", "length", "share", "documents"])
def test_whatever_matters_makes_another_corpus(config, tmp_path, change):
    first = prepare_corpus(config, tmp_path / "cache", seed=1)
    changes = {
        "vocabulary": {"tokenizer": BpeConfig(vocab_size=301)},
        "length": {"sequence_length": 17},
        "share": {"validation_share": 0.3},
        "documents": {"max_documents": 50},
    }.get(change, {})
    documents = made_documents(61) if change == "text" else None

    changed = made_config(tmp_path / "text", documents, **changes)
    second = prepare_corpus(changed, tmp_path / "cache", seed=2 if change == "seed" else 1)

    assert first.manifest.key != second.manifest.key
    assert len(list((tmp_path / "cache").iterdir())) == 2


def test_a_limit_keeps_the_first_documents(tmp_path):
    config = made_config(tmp_path / "text", max_documents=40)

    corpus = prepare_corpus(config, tmp_path / "cache", seed=1)

    assert set(documents_of(corpus, "train") + documents_of(corpus, "validation")) == set(made_documents()[:40])


def test_a_ready_made_tokenizer_is_used_as_it_is(config, tmp_path):
    first = prepare_corpus(config, tmp_path / "cache", seed=1)
    by_file = made_config(tmp_path / "text", tokenizer=FileTokenizerConfig(path=first.tokenizer_path))
    (first.tokenizer_path.parent / "config.json").write_text('{"eos_token_id": 0}')
    by_model = made_config(tmp_path / "text", tokenizer=ModelTokenizerConfig())

    second = prepare_corpus(by_file, tmp_path / "cache", seed=1)
    third = prepare_corpus(by_model, tmp_path / "cache", seed=1, tokenizer_path=first.tokenizer_path.parent)

    digests = {corpus.manifest.train.digest for corpus in (first, second, third)}
    assert len(digests) == 1


def test_a_corpus_is_a_dataset_signed_by_the_user_that_names_its_documents(config, tmp_path):
    corpus = prepare_corpus(config, tmp_path / "cache", seed=1)

    found = open_dataset(corpus.directory, fingerprint_of(load_signer(default_signing_key())))

    assert found.signer_was_named
    assert len(list(found.verify())) == 12
    texts = documents_of(corpus, "train")
    for number, entry in enumerate(found.document_entries("text", "train")):
        assert entry.digest == document_digest(texts[number])
        assert entry.name.startswith(str(tmp_path / "text"))
    assert "vocab_size = 300" in found.manifest.recipe.content


def test_shards_that_another_key_signed_are_not_opened_but_made_again(config, tmp_path, monkeypatch):
    theirs = prepare_corpus(config, tmp_path / "cache", seed=1)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "another"))

    mine = prepare_corpus(config, tmp_path / "cache", seed=1)

    assert mine.digest == theirs.digest
    assert mine.directory != theirs.directory
    # a forger that puts its own in my place is found out by the signature
    shutil.rmtree(mine.directory)
    theirs.directory.rename(mine.directory)
    with pytest.raises(DataError, match=r"signed .* delete"):
        prepare_corpus(config, tmp_path / "cache", seed=1)


SHARDS = ["shards/text.train/tokens-00000", "shards/text.validation/tokens-00000"]


@pytest.mark.parametrize("name", [*SHARDS, "dataset.json", "tokenizer.json", "manifest.json"])
@pytest.mark.parametrize("damage", ["changed", "truncated", "removed"])
def test_a_damaged_cache_is_refused_and_says_what_to_delete(config, tmp_path, name, damage):
    home = prepare_corpus(config, tmp_path / "cache", seed=1).directory
    path = home / name
    content = path.read_bytes()
    if damage == "removed":
        path.unlink()
    else:
        path.write_bytes(content[:-2] if damage == "truncated" else b"X" + content[1:])

    with pytest.raises(DataError, match="delete") as caught:
        prepare_corpus(config, tmp_path / "cache", seed=1)

    assert str(home) in str(caught.value)


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        (("train", "documents"), 1, "documents do not add up"),
        (("validation", "size_bytes"), 1, "bytes do not add up"),
        (("train", "sequences"), 1, "train sequences do not add up"),
        (("format",), 2, "format"),
        (("seed",), "1", "seed"),
        (("token_dtype",), "O", "token_dtype"),
    ],
)
def test_a_manifest_that_lies_is_refused(config, tmp_path, key, value, said):
    manifest = json.loads(
        canonical_json(prepare_corpus(config, tmp_path / "cache", seed=1).manifest.model_dump(mode="json"))
    )
    inner = manifest if len(key) == 1 else manifest[key[0]]
    inner[key[-1]] = value

    with pytest.raises(DataError, match=said):
        parse_manifest(canonical_json(manifest), "manifest.json")


def test_a_failure_leaves_nothing_behind(config, tmp_path):
    def fail(phase, _):
        if phase == "encode":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prepare_corpus(config, tmp_path / "cache", seed=1, progress=fail)

    assert list((tmp_path / "cache").iterdir()) == []
    assert prepare_corpus(config, tmp_path / "cache", seed=1).num_train_sequences > 0


def test_the_first_of_two_processes_wins(config, tmp_path):
    def overtaken(phase, _):
        if phase == "vocabulary" and not any((tmp_path / "cache").glob("[!.]*")):
            prepare_corpus(config, tmp_path / "cache", seed=1)

    corpus = prepare_corpus(config, tmp_path / "cache", seed=1, progress=overtaken)

    assert list((tmp_path / "cache").iterdir()) == [corpus.directory]


@pytest.mark.parametrize(
    ("documents", "changes", "said"),
    [
        ([" "], {}, "holds no text"),
        (["abc abc " * 40], {"validation_share": 0.0, "sequence_length": 10_000}, "one sequence needs 10001"),
        (made_documents(), {"validation_share": 0.0001}, "raise data.validation_share"),
        (["abc \ud800"], {}, "lone surrogate"),
    ],
)
def test_too_little_or_broken_text_is_refused(tmp_path, documents, changes, said):
    lines = tmp_path / "a.jsonl"
    lines.write_text("\n".join(json.dumps({"text": text}) for text in documents))
    changes = {"tokenizer": BpeConfig(vocab_size=258), **changes, "sources": (JsonlConfig(path=lines),)}

    with pytest.raises(DataError, match=said):
        prepare_corpus(made_config(tmp_path / "text", **changes), tmp_path / "cache", seed=1)


def test_a_file_that_changes_while_it_is_read_is_noticed(tmp_path):
    path = tmp_path / "log"
    config = made_config(path, sources=(TextConfig(path=path, delimiter="\n=====\n"),), max_documents=None)

    def grow(phase, _):
        path.write_text("another text")

    # the report comes every 200 documents, while the source is still open
    write_text(path, made_documents(250))
    with pytest.raises(DataError, match="changed while it was read"):
        prepare_corpus(config, tmp_path / "cache", seed=1, progress=grow)


def test_a_cache_that_cannot_be_written_is_refused(config, tmp_path):
    (tmp_path / "file").write_text("")

    with pytest.raises(DataError, match="cannot be written"):
        prepare_corpus(config, tmp_path / "file" / "cache", seed=1)


def test_the_faster_library_gives_the_same_corpus(config, tmp_path, monkeypatch):
    slow = prepare_corpus(config, tmp_path / "slow", seed=1)
    monkeypatch.setattr("phalanx.data.tokenizers.encoder._WORTH_BYTES", 0)
    made = []
    monkeypatch.setattr("phalanx.data.preparation.Encoder", lambda *given: made.append(Encoder(*given)) or made[-1])

    fast = prepare_corpus(config, tmp_path / "fast", seed=1)

    assert [encoder.library for encoder in made] == ["tiktoken"]
    assert fast.digest == slow.digest
