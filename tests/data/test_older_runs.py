"""What older versions made goes on: configs and sources that say nothing new have the digests that they had then."""

import json

import pytest

from phalanx.config import digest_config
from phalanx.data import DataConfig
from phalanx.data.sources import open_source

FILES = {
    "a.txt": "one\n\ntwo\n",
    "a.jsonl": '{"text":"x"}\n',
    "a.html": "<html><body><p>hello there world</p></body></html>",
}
SOURCES = {
    "text": {"kind": "text", "path": "texts", "delimiter": "\n\n"},
    "jsonl": {"kind": "jsonl", "path": "texts"},
    "html": {"kind": "html", "path": "texts", "encoding": "utf-8"},
}
MADE_BEFORE = {
    "text": "a29e1510f7bca7365ca190ccf2013b9a7b321ce3222227f8a26fe38c3afe85e8",
    "jsonl": "f6108d29aac991c4f256a9371cd309c6b26f77d15cf3c6ef8e883f70f682c576",
}


@pytest.fixture
def home(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "texts").mkdir()
    for name, content in FILES.items():
        (tmp_path / "texts" / name).write_text(content)


def config(*sources):
    written = {"sources": sources, "tokenizer": {"kind": "bpe"}, "sequence_length": 16}
    return DataConfig.model_validate_json(json.dumps(written))


def test_a_config_without_a_new_key_has_the_digest_that_it_had():
    found = config(*SOURCES.values(), {"kind": "python_manual"}, {"kind": "python_docstrings"})

    assert digest_config(found) == "6ab9379f517ea4708cac8344ee1a6489a398fed27c4d3f38eedad48af4f39b65"


@pytest.mark.parametrize("kind", MADE_BEFORE)
def test_a_source_without_a_new_key_has_the_fingerprint_that_it_had(home, kind):
    (source,) = config(SOURCES[kind]).sources

    assert open_source(source).fingerprint() == MADE_BEFORE[kind]


@pytest.mark.parametrize("key", [{"max_ratio": 7}, {"max_record_bytes": 9}])
def test_a_new_key_is_in_digest_and_fingerprint(home, key):
    (plain,), (other,) = (config(SOURCES["text"] | keys).sources for keys in ({}, key))

    assert digest_config(plain) != digest_config(other)
    assert open_source(plain).fingerprint() != open_source(other).fingerprint()
