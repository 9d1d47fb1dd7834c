"""A document is named by its digest, by a file with its text, or by its name; the index keeps the order of digests."""

from types import SimpleNamespace

import numpy as np
import pytest

from phalanx.data.shards.index import record_hashes
from phalanx.data.shards.lookup import NamedDocument, find_document
from phalanx.data.shards.manifest import INDEX_BYTES
from phalanx.data.shards.merkle import leaf_hash
from phalanx.data.shards.records import document_digest
from phalanx.errors import DataError


class FakeDataset:
    """Documents by name, in one part; two may have one name."""

    directory = "dataset"

    def __init__(self, *documents):
        self._documents = documents
        self.manifest = SimpleNamespace(parts=[SimpleNamespace(group="text", split="train")])

    def document_entries(self, group, split):
        return [SimpleNamespace(name=name, digest=document_digest(text)) for name, text in self._documents]

    def index_table(self):
        rows = np.array([list(bytes.fromhex(document_digest(text))) for _, text in self._documents], np.uint8)
        return SimpleNamespace(read_all=lambda: {"digest": rows})


DATASET = FakeDataset(("one", "alpha\nbeta"), ("two", "gamma"), ("two", "delta"), ("same", "x"), ("same", "x"))


def test_a_digest_a_text_and_a_name_find_the_same_document(tmp_path):
    digest = document_digest("alpha\nbeta")
    (tmp_path / "plain").write_bytes(b"alpha\nbeta")
    (tmp_path / "windows").write_bytes(b" alpha\r\nbeta\r\n")

    assert find_document(DATASET, digest) == NamedDocument(digest, "digest")
    assert find_document(DATASET, "one") == NamedDocument(digest, "name")
    for file in ("plain", "windows"):
        assert find_document(DATASET, str(tmp_path / file)) == NamedDocument(digest, "text")
    # documents with one name and one text are one document
    assert find_document(DATASET, "same").digest == document_digest("x")


def test_a_text_that_is_not_there_keeps_its_own_digest(tmp_path):
    (tmp_path / "absent").write_bytes(b" absent\r\n")

    assert find_document(DATASET, str(tmp_path / "absent")).digest == document_digest(" absent\r\n")


@pytest.mark.parametrize(
    ("name", "message"),
    [("two", "2 documents have this name"), ("three", "is neither a file nor the name"), ("A" * 64, "is neither")],
)
def test_a_name_of_several_or_of_none_is_refused(name, message):
    with pytest.raises(DataError, match=message):
        find_document(DATASET, name)


def test_a_file_that_is_no_text_or_too_long_is_refused(tmp_path, monkeypatch):
    (tmp_path / "binary").write_bytes(b"a\xff")
    (tmp_path / "long").write_bytes(b"12345")
    monkeypatch.setattr("phalanx.data.shards.lookup._MAX_TEXT_BYTES", 4)

    with pytest.raises(DataError, match="is not UTF-8 at byte 1"):
        find_document(DATASET, str(tmp_path / "binary"))
    with pytest.raises(DataError, match="has more than 4 bytes"):
        find_document(DATASET, str(tmp_path / "long"))


def test_every_index_record_has_its_own_leaf():
    content = bytes(range(256)) * INDEX_BYTES

    hashes = record_hashes(content)

    assert len(hashes) == 256 and hashes[1] == leaf_hash(content[INDEX_BYTES : 2 * INDEX_BYTES])
