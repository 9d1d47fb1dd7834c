"""docs/shards.md: a second reader, written from the page alone, reads its example; the program still makes it."""

import base64
import json
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from shard_vectors import SIGNER, on_page, vectors, write_dataset

from phalanx.data.shards import DocumentEntry, fingerprint_of, open_dataset
from phalanx.data.shards.writer import PartWriter
from phalanx.errors import DataError
from phalanx.verifier.forms import RefusedError, canonical, in_domain, require, sha256
from phalanx.verifier.shards import DatasetReader, check_proof

PAGE = on_page()
FINGERPRINT = fingerprint_of(SIGNER)


@pytest.fixture
def home(tmp_path: Path) -> Path:
    for name, content in {**PAGE["files"], "dataset.json": None}.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        data = PAGE[name].encode() if content is None else base64.b64decode(content)
        (tmp_path / name).write_bytes(data)
    return tmp_path


def test_the_page_shows_what_the_program_makes() -> None:
    assert vectors() == PAGE


def test_the_second_reader_finds_every_document(home: Path) -> None:
    reader = DatasetReader(home, FINGERPRINT)

    found = {
        (*reader.manifest.statement["parts"][part], one["digest"]): one["tokens"]
        for part in range(2)
        for one in reader.read_documents(part)
    }

    assert found == {(one["group"], one["split"], one["digest"]): one["tokens"] for one in PAGE["documents"]}
    assert reader.manifest.digest == PAGE["digest"]
    reader.check_all()


@pytest.mark.parametrize("name", sorted(PAGE["files"]))
def test_the_second_reader_refuses_a_flipped_byte(home: Path, name: str) -> None:
    content = bytearray((home / name).read_bytes())
    content[len(content) // 2] ^= 1
    (home / name).write_bytes(content)

    with pytest.raises(RefusedError):
        reader = DatasetReader(home, FINGERPRINT)
        reader.check_all()


@pytest.mark.parametrize(
    ("rows", "name", "message"),
    [
        ("files", "./tokenizer.json", "a second name"),
        ("files", "/etc/hostname", "is outside"),
        ("parts", "", "a part is there twice"),
    ],
)
def test_a_signer_cannot_have_one_file_read_again_and_again(home: Path, rows: str, name: str, message: str) -> None:
    """A manifest of 64 MiB can name each file half a million times."""
    body = json.loads((home / "dataset.json").read_bytes())["body"]
    if name:
        body[rows][name] = {"size_bytes": 0, "sha256": "0" * 64}
    else:
        body[rows].append({**body[rows][0], "documents": 0, "tokens": 0})
    parts = [[part["group"], part["split"]] for part in body["parts"]]
    index = {"dataset": sha256(canonical(body)), "documents": body["documents"], "index": body["index"]["root"]}

    def sign(domain: str, value: object) -> str:
        return SIGNER.sign_data(in_domain(domain, canonical(value))).hex()

    signatures = {
        "signature": sign("dataset-manifest/1", body),
        "index_signature": sign("dataset-index/1", {**index, "parts": parts}),
    }
    (home / "dataset.json").write_bytes(canonical({"body": body, "signer": FINGERPRINT, **signatures}))

    with pytest.raises(RefusedError, match=message):
        DatasetReader(home, FINGERPRINT).check_all()


def test_a_signer_cannot_hide_tokens_that_are_of_no_document(tmp_path: Path) -> None:
    """A run would train on them, and the index, which proves that a document is absent, would not know them."""

    def hide_tokens(self: PartWriter, ids: np.ndarray, entry: DocumentEntry) -> None:
        if not self.tokens:
            self._write_tokens(np.arange(3, dtype=self.dtype))
            self.tokens, self.by_source = 3, {0: [0, 3]}
        add_document(self, ids, entry)

    add_document = PartWriter.add_document
    with mock.patch.object(PartWriter, "add_document", hide_tokens):
        write_dataset(tmp_path)

    with pytest.raises(DataError, match="starts: does not rise from 0"):
        list(open_dataset(tmp_path).verify())
    with pytest.raises(RefusedError, match="starts: does not rise from 0"):
        DatasetReader(tmp_path, FINGERPRINT).check_all()


def test_the_second_reader_checks_proofs_of_presence_and_of_absence() -> None:
    present, absent = PAGE["proofs"]

    assert check_proof(canonical(present), FINGERPRINT).places == (("web", "train", 1),)
    assert check_proof(canonical(absent), FINGERPRINT).places == ()
    # without the record before it, there may be further places
    assert not check_proof(canonical({**present, "leaves": present["leaves"][1:]}), FINGERPRINT).is_complete
    with pytest.raises(RefusedError):
        turned = [{**one, "path": one["path"][::-1]} for one in present["leaves"]]
        check_proof(canonical({**present, "leaves": turned}), FINGERPRINT)


def derive_key(data_key: bytes, dataset: str, *purpose: str) -> bytes:
    """Return the key of one file of an encrypted dataset."""
    info = in_domain("dataset-file-key/1", canonical(list(purpose)))
    return HKDF(SHA256(), 32, bytes.fromhex(dataset), info).derive(data_key)


def open_leaf(data_key: bytes, dataset: str, file: str, number: int, stored: bytes) -> bytes:
    """Decrypt one leaf."""
    key, place = derive_key(data_key, dataset, "file", file), canonical([dataset, file, number])
    return AESGCM(key).decrypt(number.to_bytes(12, "big"), stored, in_domain("dataset-leaf/1", place))


def unwrap_key(content: bytes, wrapping_key: bytes, dataset: str) -> bytes:
    """Return the data key that ``dataset.key.json`` wraps."""
    record = json.loads(content)
    require(set(record) == {"key", "version", "wrapped"} and record["version"] == 1, "wrapped key")
    wrapped = bytes.fromhex(record["wrapped"])
    return AESGCM(wrapping_key).decrypt(wrapped[:12], wrapped[12:], in_domain("dataset-key/1", canonical([dataset])))


def test_the_second_reader_opens_a_leaf_with_the_unwrapped_key() -> None:
    shown = PAGE["encryption"]
    dataset = shown["seal"]["dataset"]
    data_key = unwrap_key(shown["dataset.key.json"].encode(), bytes.fromhex(shown["wrapping_key"]), dataset)

    assert data_key.hex() == shown["data_key"]
    assert derive_key(data_key, dataset, "commitment").hex() == shown["seal"]["commitment"]
    stored = bytes.fromhex(shown["stored"])
    assert open_leaf(data_key, dataset, shown["file"], shown["leaf"], stored).hex() == shown["plain"]
