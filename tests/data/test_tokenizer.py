"""Vocabularies are the same for the same text, and no text can forge the end of a document."""

import json
import os
import subprocess
import sys

import pytest
from made_text import made_documents

from phalanx.data import BpeConfig, FileTokenizerConfig, ModelTokenizerConfig
from phalanx.data.tokenizers import load_tokenizer, train_bpe
from phalanx.data.tokenizers.config import END_OF_TEXT
from phalanx.errors import ConfigError, DataError

TRAIN = (
    "import hashlib; from made_text import made_documents; from phalanx.data.tokenizers import train_bpe;"
    "from phalanx.data import BpeConfig;"
    "t = train_bpe(iter(made_documents(400)), BpeConfig(vocab_size=400));"
    "print(hashlib.sha256(t.to_json()).hexdigest())"
)


@pytest.fixture(scope="module")
def trained():
    return train_bpe(iter(made_documents()), BpeConfig(vocab_size=300))


def test_every_byte_survives_a_round_trip(trained):
    text = "\x00 tab\t caf\u00e9 \u6f22\u5b57 \U0001f6e1 \n\n end"

    (ids,) = trained.encode_texts([text])

    assert trained.backend.decode(ids) == text
    assert trained.vocab_size == 300
    assert max(ids) < 300


def test_the_end_of_text_cannot_be_written_in_a_document(trained):
    (ids,) = trained.encode_texts([f"one {END_OF_TEXT} two"])

    assert trained.eos_id not in ids
    assert trained.backend.decode(ids) == f"one {END_OF_TEXT} two"


def test_the_vocabulary_does_not_depend_on_threads():
    digests = set()
    for threads in ("false", "true"):
        environment = os.environ | {
            "TOKENIZERS_PARALLELISM": threads,
            "PYTHONPATH": os.pathsep.join(sys.path),
        }
        command = [sys.executable, "-c", TRAIN]
        run = subprocess.run(command, env=environment, capture_output=True, check=True)
        digests.add(run.stdout)

    assert len(digests) == 1


def test_a_vocabulary_that_the_text_cannot_fill_is_refused():
    with pytest.raises(DataError, match=r"vocab_size=5000: the training text supports \d+ tokens only; lower"):
        train_bpe(iter(["a short text, a short text"]), BpeConfig(vocab_size=5000))


def test_a_tokenizer_file_gives_the_same_ids(trained, tmp_path):
    path = tmp_path / "tokenizer.json"
    path.write_bytes(trained.to_json())

    loaded = load_tokenizer(FileTokenizerConfig(path=path), None)

    assert loaded.encode_texts(made_documents(5)) == trained.encode_texts(made_documents(5))
    assert (loaded.vocab_size, loaded.eos_id) == (trained.vocab_size, trained.eos_id)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("tokenizer_config.json", {"eos_token": END_OF_TEXT}),
        ("tokenizer_config.json", {"eos_token": {"content": END_OF_TEXT}}),
        ("config.json", {"eos_token_id": 0}),
    ],
)
def test_a_model_names_its_own_end_of_text(trained, tmp_path, name, content):
    (tmp_path / "tokenizer.json").write_bytes(trained.to_json())
    (tmp_path / name).write_text(json.dumps(content))

    assert load_tokenizer(ModelTokenizerConfig(), tmp_path).eos_id == 0
    assert load_tokenizer(ModelTokenizerConfig(eos_token="a"), tmp_path).eos_id != 0


def test_a_model_tokenizer_without_what_it_needs_is_refused(trained, tmp_path):
    with pytest.raises(ConfigError, match=r"nor vocab\.json and merges\.txt to make one"):
        load_tokenizer(ModelTokenizerConfig(), None)
    with pytest.raises(DataError, match="cannot be read"):
        load_tokenizer(ModelTokenizerConfig(), tmp_path)
    (tmp_path / "tokenizer.json").write_bytes(trained.to_json())
    with pytest.raises(DataError, match="has no end-of-text token"):
        load_tokenizer(ModelTokenizerConfig(), tmp_path)
    with pytest.raises(DataError, match="'<nope>' is not in the vocabulary"):
        load_tokenizer(ModelTokenizerConfig(eos_token="<nope>"), tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(DataError, match="expected an object"):
        load_tokenizer(ModelTokenizerConfig(), tmp_path)


@pytest.mark.parametrize("content", [b"", b"{}", b"[1]", b'{"model": {"type": "BPE"}}', b"\xff"])
def test_a_malformed_tokenizer_file_is_refused(tmp_path, content):
    path = tmp_path / "tokenizer.json"
    path.write_bytes(content)

    with pytest.raises(DataError, match=r"tokenizer\.json"):
        load_tokenizer(FileTokenizerConfig(path=path), None)
