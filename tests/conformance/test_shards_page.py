"""docs/shards.md: a second reader, written from the page alone, reads its example; the program still makes it."""

import base64
from pathlib import Path

import pytest
from shard_vectors import SIGNER, on_page, vectors

from phalanx.data.shards import fingerprint_of
from phalanx.verifier.forms import RefusedError, canonical
from phalanx.verifier.shards import DatasetReader, check_proof, derive_key, open_leaf, unwrap_key

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


def test_the_second_reader_checks_proofs_of_presence_and_of_absence() -> None:
    present, absent = PAGE["proofs"]

    assert check_proof(canonical(present), FINGERPRINT).places == (("web", "train", 1),)
    assert check_proof(canonical(absent), FINGERPRINT).places == ()
    # without the record before it, there may be further places
    assert not check_proof(canonical({**present, "leaves": present["leaves"][1:]}), FINGERPRINT).is_complete
    with pytest.raises(RefusedError):
        turned = [{**one, "path": one["path"][::-1]} for one in present["leaves"]]
        check_proof(canonical({**present, "leaves": turned}), FINGERPRINT)


def test_the_second_reader_opens_a_leaf_with_the_unwrapped_key() -> None:
    shown = PAGE["encryption"]
    dataset = shown["seal"]["dataset"]
    data_key = unwrap_key(shown["dataset.key.json"].encode(), bytes.fromhex(shown["wrapping_key"]), dataset)

    assert data_key.hex() == shown["data_key"]
    assert derive_key(data_key, dataset, "commitment").hex() == shown["seal"]["commitment"]
    stored = bytes.fromhex(shown["stored"])
    assert open_leaf(data_key, dataset, shown["file"], shown["leaf"], stored).hex() == shown["plain"]
