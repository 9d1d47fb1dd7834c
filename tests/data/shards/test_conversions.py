"""Tokens go to Parquet and Megatron and come back the same; a malformed file is refused in a sentence."""

import itertools
import random
import struct
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from made_dataset import FACTS, VOCAB_SIZE, make_dataset
from phalanx.data.shards import DatasetWriter, open_dataset
from phalanx.data.shards.foreign import ForeignTokens, TokenFile, import_tokens, tokens_digest
from phalanx.data.shards.megatron import open_megatron, write_megatron
from phalanx.data.shards.parquet import read_parquet, write_parquet
from phalanx.errors import DataError
from phalanx.security.crypto import Identity

SIGNER = Identity.without_certificate("signer")
PARTS = [("books", "train"), ("books", "validation"), ("web", "train"), ("web", "validation")]


def imported(paths: list[Path], home: Path):
    with DatasetWriter(home, "<u2", 300, 256) as writer:
        files = [TokenFile.from_path(path) for path in paths]
        import_tokens(ForeignTokens(files, FACTS.tokenizer, licence="CC0-1.0"), writer, SIGNER)
    return open_dataset(home)


def documents_of(dataset, group: str, split: str) -> list[list[int]]:
    starts, tokens = dataset.document_starts(group, split).tolist(), dataset.tokens(group, split)
    return [tokens[start:stop].tolist() for start, stop in itertools.pairwise(starts)]


def test_parquet_comes_back_with_tokens_names_digests_and_fields(tmp_path: Path) -> None:
    make_dataset(tmp_path / "d")
    before = open_dataset(tmp_path / "d")
    paths = [write_parquet(before, *part, tmp_path / f"{'.'.join(part)}.parquet") for part in PARTS]

    after = imported(paths, tmp_path / "again")

    for part in PARTS:
        assert documents_of(after, *part) == documents_of(before, *part)
        told = [
            [(one.name, one.digest, one.fields) for one in data.document_entries(*part)] for data in (before, after)
        ]
        assert told[0] == told[1]
    assert [source.licence for source in after.manifest.sources] == ["CC0-1.0"] * 4


@pytest.mark.parametrize("dtype", ["<u2", "<u4"])
def test_megatron_comes_back_with_the_same_tokens(tmp_path: Path, dtype) -> None:
    make_dataset(tmp_path / "d", dtype=dtype)
    before = open_dataset(tmp_path / "d")
    paths = [write_megatron(before, *part, tmp_path / ".".join(part))[1] for part in PARTS]

    after = imported(paths, tmp_path / "again")

    for part in PARTS:
        assert documents_of(after, *part) == documents_of(before, *part)
    first = after.document_entry("web", "train", 0)
    assert first.name == "web.train.idx/0"
    assert first.digest == tokens_digest(np.array(documents_of(after, "web", "train")[0]))


def read_as_megatron_does(prefix: Path) -> list[list[int]]:
    """Read the published layout: magic, version, type, counts, lengths, byte offsets, borders of documents."""
    index = Path(f"{prefix}.idx").read_bytes()
    assert index[:9] == b"MMIDIDX\0\0"
    version, code, sequences, edges = struct.unpack("<QBQQ", index[9:34])
    assert version == 1
    dtype = {8: np.uint16, 4: np.int32}[code]
    lengths = np.frombuffer(index, np.int32, sequences, 34)
    pointers = np.frombuffer(index, np.int64, sequences, 34 + 4 * sequences)
    borders = np.frombuffer(index, np.int64, edges, 34 + 12 * sequences)
    assert borders.tolist() == list(range(sequences + 1))
    content = Path(f"{prefix}.bin").read_bytes()
    return [
        np.frombuffer(content, dtype, length, pointer).tolist()
        for length, pointer in zip(lengths, pointers, strict=True)
    ]


@pytest.mark.parametrize("dtype", ["<u2", "<u4"])
def test_what_is_written_for_megatron_has_its_published_layout(tmp_path: Path, dtype) -> None:
    make_dataset(tmp_path / "d", dtype=dtype)
    dataset = open_dataset(tmp_path / "d")

    write_megatron(dataset, "web", "train", tmp_path / "web.train")

    assert read_as_megatron_does(tmp_path / "web.train") == documents_of(dataset, "web", "train")


def test_megatron_documents_of_several_sequences_are_joined(tmp_path: Path) -> None:
    content = np.arange(10, dtype="<i4")
    (tmp_path / "a.train.bin").write_bytes(content.tobytes())
    header = struct.pack("<9sQBQQ", b"MMIDIDX\0\0", 1, 4, 3, 3)
    tables = [np.array([2, 3, 5], "<i4"), np.array([0, 8, 20], "<i8"), np.array([0, 2, 3], "<i8")]
    # a byte a sequence behind it: the modes of newer versions
    (tmp_path / "a.train.idx").write_bytes(header + b"".join(table.tobytes() for table in tables) + bytes(3))

    found = open_megatron(tmp_path / "a.train")

    assert [ids.tolist() for ids in found.read_documents()] == [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9]]


@pytest.mark.parametrize(
    ("lengths", "pointers", "borders", "message"),
    [
        ([2, 9], [0, 8], [0, 2], "outside of the 40 bytes"),
        ([2, -1], [0, 8], [0, 2], "outside of the 40 bytes"),
        ([2, 1], [0, -8], [0, 2], "outside of the 40 bytes"),
        ([2, 1], [0, 7], [0, 2], "outside of the 40 bytes"),
        ([2, 1], [0, 2**62], [0, 2], "outside of the 40 bytes"),
        ([2, 1], [0, 8], [0, 3], "do not cover its sequences"),
        ([2, 1], [0, 8], [1, 2], "do not cover its sequences"),
        ([2, 1], [0, 8], [0, 2, 1, 2], "do not cover its sequences"),
    ],
)
def test_an_index_that_speaks_of_what_is_not_there_is_refused(
    tmp_path: Path, lengths, pointers, borders, message: str
) -> None:
    (tmp_path / "a.bin").write_bytes(np.arange(10, dtype="<i4").tobytes())
    header = struct.pack("<9sQBQQ", b"MMIDIDX\0\0", 1, 4, len(lengths), len(borders))
    tables = [np.array(lengths, "<i4"), np.array(pointers, "<i8"), np.array(borders, "<i8")]
    (tmp_path / "a.idx").write_bytes(header + b"".join(table.tobytes() for table in tables))

    with pytest.raises(DataError, match=message):
        open_megatron(tmp_path / "a")


@pytest.mark.parametrize("kind", ["parquet", "megatron"])
def test_damaged_files_are_refused_or_read_and_never_end_in_a_traceback(tmp_path: Path, kind: str) -> None:
    make_dataset(tmp_path / "d")
    dataset = open_dataset(tmp_path / "d")
    if kind == "parquet":
        path = write_parquet(dataset, "web", "train", tmp_path / "web.train.parquet")
    else:
        path = write_megatron(dataset, "web", "train", tmp_path / "web.train")[1]
    whole, rng, refused = path.read_bytes(), random.Random(7), 0

    for _ in range(150):
        content = bytearray(whole)
        for _ in range(rng.randint(1, 8)):
            content[rng.randrange(len(content))] = rng.randrange(256)
        path.write_bytes(content if rng.random() < 0.8 else content[: rng.randrange(len(content))])
        try:
            for row in TokenFile.from_path(path).token_rows():
                assert row.ids.dtype.kind in "iu"
        except DataError as exc:
            assert str(tmp_path) in str(exc)
            refused += 1

    assert refused > 20


def test_parquet_without_lists_of_integers_is_refused(tmp_path: Path) -> None:
    for number, (column, message) in enumerate(
        [
            (pa.array(["text"]), 'has no column "tokens" with lists of integers'),
            (pa.array([[1.5]]), 'has no column "tokens" with lists of integers'),
            (pa.array([[1, None]]), "a row has no tokens, or an empty one"),
            (pa.array([[1], None]), "a row has no tokens, or an empty one"),
        ]
    ):
        path = tmp_path / f"{number}.parquet"
        pq.write_table(pa.table({"tokens": column}), path)
        with pytest.raises(DataError, match=message):
            list(read_parquet(path))


def test_parquet_of_others_needs_no_more_than_tokens(tmp_path: Path) -> None:
    path = tmp_path / "web.train.parquet"
    pq.write_table(pa.table({"tokens": [[1, 2], [3], []]}), path)

    dataset = imported([path], tmp_path / "d")

    assert documents_of(dataset, "web", "train") == [[1, 2], [3], []]
    assert dataset.document_entry("web", "train", 1).name == "web.train.parquet/1"


def test_a_token_beyond_the_tokenizer_and_a_name_without_group_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "web.train.parquet"
    pq.write_table(pa.table({"tokens": [[VOCAB_SIZE]]}), path)

    with pytest.raises(DataError, match=f"token {VOCAB_SIZE} is outside of the tokenizer's {VOCAB_SIZE}"):
        imported([path], tmp_path / "d")
    for name in ("web.parquet", "web.train.txt"):
        with pytest.raises(DataError, match="rename it"):
            TokenFile.from_path(tmp_path / name)
