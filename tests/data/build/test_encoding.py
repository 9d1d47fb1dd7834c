"""Documents become tokens, and their split depends on content and seed alone."""

import json
from types import SimpleNamespace

import numpy as np
import pytest

from phalanx.data.build.encoding import encode_piece, encoded_documents, split_of, training_texts
from phalanx.data.pack import token_dtype
from phalanx.data.shards import document_digest
from phalanx.data.sources import Document, Origin


def output(share=0.5, seed=0):
    return SimpleNamespace(validation_share=share, seed=seed)


TEXTS = [f"text {number}" for number in range(400)]


def test_a_split_has_about_its_share_and_follows_content_and_seed():
    digests = [document_digest(text) for text in TEXTS]
    splits = [split_of(digest, output(0.1)) for digest in digests]

    assert 20 < splits.count("validation") < 60
    assert [split_of(digest, output(0.1)) for digest in reversed(digests)] == splits[::-1]
    assert [split_of(digest, output(0.1, seed=1)) for digest in digests] != splits
    # a larger share moves no document back
    assert all(split_of(d, output(0.2)) == "validation" for d, s in zip(digests, splits, strict=True) if s != "train")
    assert {split_of(digest, output(0.0)) for digest in digests} == {"train"}


def test_training_texts_are_those_of_the_split():
    documents = [Document(text, text) for text in TEXTS]

    chosen = list(training_texts(documents, output()))

    assert chosen == [text for text in TEXTS if split_of(document_digest(text), output()) == "train"]


@pytest.mark.parametrize(("vocab_size", "dtype"), [(1, "<u2"), (65536, "<u2"), (65537, "<u4")])
def test_the_type_holds_every_token(vocab_size, dtype):
    assert token_dtype(vocab_size) == dtype


@pytest.mark.parametrize("vocab_size", [300, 70_000])
def test_tokens_and_entries_of_a_piece_come_back(tmp_path, vocab_size):
    def encode_batch(texts):
        return [np.arange(len(text)) for text in texts]

    encoder = SimpleNamespace(tokenizer=SimpleNamespace(vocab_size=vocab_size, eos_id=299), encode_batch=encode_batch)
    origin = Origin(raw_bytes=9, raw_digest="d", url="https://a.example", fetched_at=None)
    documents = [Document("one", "äb", origin, {"stars": 5}), Document("two", "")]

    summary = encode_piece(tmp_path, documents, encoder, output())
    first, second = encoded_documents(tmp_path, summary["dtype"])

    assert summary == {"tokens": 4, "dtype": token_dtype(vocab_size)}
    assert (first[1].tolist(), second[1].tolist()) == ([0, 1, 299], [299])
    assert first[0]["fields"] == {
        "stars": 5, "raw_bytes": 9, "raw_digest": "d", "url": "https://a.example", "text_bytes": 3,
    }  # fmt: skip
    assert first[0]["digest"] == document_digest("äb") and json.dumps(first[0])
