"""docs/shards.md: a second reader, written from the page alone, reads its example; the program still makes it."""

import ast
import base64
from pathlib import Path

import pytest
from independent_shard_reader import Reader, RefusedError, check_proof, derive, open_leaf, unwrap
from shard_vectors import SIGNER, on_page, vectors

from phalanx.data.shards import fingerprint_of

PAGE = on_page()
READER = Path(__file__).with_name("independent_shard_reader.py")
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


def test_the_second_reader_imports_nothing_of_the_first() -> None:
    tree = ast.parse(READER.read_text(encoding="utf-8"))
    imported = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    imported |= {str(node.module) for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}

    assert {name.partition(".")[0] for name in imported} == {"cryptography", "hashlib", "json", "pathlib", "struct"}


def test_the_second_reader_finds_every_document(home: Path) -> None:
    reader = Reader(home, FINGERPRINT)

    found = {
        (*reader.statement["parts"][part], one["digest"]): one["tokens"]
        for part in range(2)
        for one in reader.documents(part)
    }

    assert found == {(one["group"], one["split"], one["digest"]): one["tokens"] for one in PAGE["documents"]}
    assert reader.digest == PAGE["digest"]
    reader.check_index()


@pytest.mark.parametrize("name", sorted(PAGE["files"]))
def test_the_second_reader_refuses_a_flipped_byte(home: Path, name: str) -> None:
    content = bytearray((home / name).read_bytes())
    content[len(content) // 2] ^= 1
    (home / name).write_bytes(content)

    with pytest.raises(RefusedError):
        reader = Reader(home, FINGERPRINT)
        reader.check_index()


def test_the_second_reader_checks_proofs_of_presence_and_of_absence() -> None:
    present, absent = PAGE["proofs"]

    assert check_proof(present, FINGERPRINT) == [("web", "train", 1)]
    assert check_proof(absent, FINGERPRINT) == []
    with pytest.raises(RefusedError):
        check_proof({**present, "leaves": present["leaves"][1:]}, FINGERPRINT)
    with pytest.raises(RefusedError):
        check_proof(
            {**present, "leaves": [{**one, "path": one["path"][::-1]} for one in present["leaves"]]}, FINGERPRINT
        )


def test_the_second_reader_opens_a_leaf_with_the_unwrapped_key() -> None:
    shown = PAGE["encryption"]
    dataset = shown["seal"]["dataset"]
    data_key = unwrap(shown["dataset.key.json"].encode(), bytes.fromhex(shown["wrapping_key"]), dataset)

    assert data_key.hex() == shown["data_key"]
    assert derive(data_key, dataset, "commitment").hex() == shown["seal"]["commitment"]
    stored = bytes.fromhex(shown["stored"])
    assert open_leaf(data_key, dataset, shown["file"], shown["leaf"], stored).hex() == shown["plain"]
