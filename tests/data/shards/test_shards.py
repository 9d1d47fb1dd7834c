"""A dataset is read as it was written, and nothing of it that was altered is ever used."""

import resource
import shutil
from pathlib import Path

import numpy as np
import pytest

from forked_child import run_in_fork
from made_dataset import FACTS, entry_of, ids_of, make_dataset
from phalanx.data.shards import (
    DatasetWriter,
    DocumentEntry,
    SealKey,
    TokenSource,
    document_digest,
    fingerprint_of,
    load_signer,
    open_dataset,
)
from phalanx.errors import DataError
from phalanx.security.crypto import Identity


def numbers_of(group: str, split: str, documents: int = 60) -> list[int]:
    return [
        number
        for number in range(documents)
        if (split == "validation") == (number % 5 == 4) and (group == "books") == (number % 3 == 0)
    ]


@pytest.mark.parametrize("dtype", ["<u2", "<u4"])
@pytest.mark.parametrize("shard_tokens", [29, 300, 10_000])
def test_tokens_and_documents_are_read_as_they_were_written(tmp_path: Path, dtype, shard_tokens: int) -> None:
    make_dataset(tmp_path, dtype=dtype, shard_tokens=shard_tokens)

    dataset = open_dataset(tmp_path)

    assert dataset.groups == {"books": ("train", "validation"), "web": ("train", "validation")}
    for group, splits in dataset.groups.items():
        for split in splits:
            numbers = numbers_of(group, split)
            tokens, starts = dataset.tokens(group, split), dataset.document_starts(group, split)
            assert len(starts) == len(numbers) + 1
            for at, number in enumerate(numbers):
                assert tokens.read_tokens(int(starts[at]), int(starts[at + 1])).tolist() == ids_of(number).tolist()
            assert list(dataset.document_entries(group, split)) == [entry_of(number) for number in numbers]
            assert dataset.document_entry(group, split, 2) == entry_of(numbers[2])


def test_equal_documents_give_equal_datasets_byte_by_byte(tmp_path: Path) -> None:
    signer = Identity.without_certificate("signer")
    for name in ("a", "b"):
        make_dataset(tmp_path / name, signer=signer)

    files = [
        {
            path.relative_to(tmp_path / name): path.read_bytes()
            for path in (tmp_path / name).rglob("*")
            if path.is_file()
        }
        for name in ("a", "b")
    ]

    assert files[0] == files[1]


def flipped(path: Path, at: int) -> bytes:
    content = bytearray(path.read_bytes())
    content[at] ^= 1 << (at % 8)
    return bytes(content)


def read_everything(directory: Path, signer: str, key: SealKey | None = None) -> None:
    dataset = open_dataset(directory, signer, key)
    for group, splits in dataset.groups.items():
        for split in splits:
            dataset.tokens(group, split).read_tokens(0, len(dataset.tokens(group, split)))
    for _ in dataset.verify():
        pass


def files_of(directory: Path) -> list[Path]:
    return sorted(path for path in directory.rglob("*") if path.is_file())


@pytest.mark.parametrize("stride", [61, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("sealed", [False, True])
def test_a_flipped_byte_anywhere_is_refused_with_its_file_named(tmp_path: Path, *, stride: int, sealed: bool) -> None:
    signer = Identity.without_certificate("signer")
    key = SealKey.create_file(tmp_path / "key") if sealed else None
    make_dataset(tmp_path / "d", 5, signer, shard_tokens=200, seal=key)
    read_everything(tmp_path / "d", fingerprint_of(signer), key)

    for path in files_of(tmp_path / "d"):
        whole = path.read_bytes()
        for at in range(0, len(whole), stride):
            path.write_bytes(flipped(path, at))
            with pytest.raises(DataError) as refused:
                read_everything(tmp_path / "d", fingerprint_of(signer), key)
            assert path.name.removesuffix(".tree") in str(refused.value), (path, at)
            path.write_bytes(whole)


@pytest.mark.parametrize("sealed", [False, True])
def test_a_flipped_token_is_refused_by_the_read_that_touches_its_leaf_and_by_no_other(
    tmp_path: Path, *, sealed: bool
) -> None:
    key = SealKey.create_file(tmp_path / "key") if sealed else None
    make_dataset(tmp_path / "d", 60, shard_tokens=300, seal=key)
    path = tmp_path / "d" / "shards" / "web.train" / "tokens-00001"
    path.write_bytes(flipped(path, 300))

    tokens = open_dataset(tmp_path / "d", key=key).tokens("web", "train")

    # 128 tokens a leaf, of 300 a shard
    assert len(tokens.read_tokens(300, 428)) == 128
    with pytest.raises(DataError, match=r"web.train/tokens-00001: leaf 1 \(bytes (256|272) to (437|469)\)"):
        tokens.read_tokens(427, 429)
    with pytest.raises(DataError, match="leaf 1"):
        tokens.read_tokens(440, 441)
    assert len(tokens.read_tokens(0, 300)) == 300


def test_no_byte_is_hashed_twice_and_none_that_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_dataset(tmp_path, 60, shard_tokens=300)
    hashed: list[int] = []
    from phalanx.data.shards import leaves

    def counted(data: memoryview) -> bytes:
        hashed.append(len(data))
        return whole(data)

    whole = leaves.leaf_hash
    monkeypatch.setattr(leaves, "leaf_hash", counted)
    tokens = open_dataset(tmp_path).tokens("web", "train")

    for start, stop in [(0, 10), (3, 120), (100, 130), (0, 256), (500, 501), (0, 256)]:
        tokens.read_tokens(start, stop)

    assert hashed == [256, 256, 182]


def test_many_shards_are_read_with_few_open_files_and_still_hashed_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_dataset(tmp_path, 60, shard_tokens=20)
    from phalanx.data.shards import leaves

    dataset = open_dataset(tmp_path)
    dataset._store._max_files = 3
    tokens = dataset.tokens("web", "train")
    before = tokens.read_tokens(0, len(tokens)).copy()
    monkeypatch.setattr(leaves, "leaf_hash", None)

    after = [tokens.read_tokens(at, at + 1)[0] for at in range(len(tokens))]

    assert after == before.tolist()
    assert len(dataset._store._mapped) == 3


def test_a_shard_that_was_replaced_after_its_map_was_given_back_is_checked_again(tmp_path: Path) -> None:
    make_dataset(tmp_path, 60, shard_tokens=300)
    tokens = open_dataset(tmp_path).tokens("web", "train")
    tokens.read_tokens(0, 300)
    path = tmp_path / "shards" / "web.train" / "tokens-00000"
    content = flipped(path, 0)
    path.unlink()
    path.write_bytes(content)

    tokens._shards[0].close_map()

    with pytest.raises(DataError, match="tokens-00000: leaf 0"):
        tokens.read_tokens(0, 1)


def test_what_is_read_cannot_be_written_to_and_stays_when_the_file_is_unmapped(tmp_path: Path) -> None:
    make_dataset(tmp_path, 60, shard_tokens=300)
    tokens = open_dataset(tmp_path).tokens("web", "train")

    one, over = tokens.read_tokens(0, 10), tokens.read_tokens(295, 310)
    expected = one.tolist()
    tokens._shards[0].close_map()

    assert one.tolist() == expected
    for read in (one, over):
        with pytest.raises(ValueError, match="read-only"):
            read[0] = 1


def test_a_dataset_of_another_signer_is_refused_and_an_unnamed_one_is_said(tmp_path: Path) -> None:
    first, second = load_signer(tmp_path / "keys" / "first"), load_signer(tmp_path / "keys" / "second")
    make_dataset(tmp_path / "d", signer=first)

    assert open_dataset(tmp_path / "d", fingerprint_of(first)).trust_statement == (
        f"signed with the expected key {fingerprint_of(first)}"
    )
    unnamed = open_dataset(tmp_path / "d")
    assert not unnamed.signer_was_named
    assert "not verified" in unnamed.trust_statement
    with pytest.raises(DataError, match=f"signed with key {fingerprint_of(first)}, expected") as refused:
        open_dataset(tmp_path / "d", fingerprint_of(second))
    assert refused.value.error_facts["code"] == "PHX-I028"


def test_an_unsigned_manifest_is_refused(tmp_path: Path) -> None:
    from phalanx.config import canonical_json
    from phalanx.security.crypto import parse_canonical

    make_dataset(tmp_path)
    path = tmp_path / "dataset.json"
    envelope = parse_canonical(path.read_bytes())

    for unsigned in ({"body": envelope["body"]}, {**envelope, "signature": ""}, {**envelope, "signer": ""}):
        path.write_bytes(canonical_json(unsigned))
        with pytest.raises(DataError, match="altered or damaged"):
            open_dataset(tmp_path)


def test_the_key_file_is_made_once_and_kept_from_others(tmp_path: Path) -> None:
    path = tmp_path / "keys" / "signer.key"

    first, again = load_signer(path), load_signer(path)

    assert fingerprint_of(first) == fingerprint_of(again)
    assert path.stat().st_mode & 0o777 == 0o600
    assert first.signing_key.private_bytes_raw().hex() not in fingerprint_of(first)
    path.chmod(0o644)
    with pytest.raises(DataError, match="others may have read this key"):
        load_signer(path)
    path.chmod(0o600)
    path.write_text("no key")
    with pytest.raises(DataError, match="does not hold 64 hex characters"):
        load_signer(path)


def test_an_encrypted_dataset_shows_no_token_digest_or_name_and_opens_with_its_key_alone(tmp_path: Path) -> None:
    key, other = SealKey.create_file(tmp_path / "key"), SealKey.create_file(tmp_path / "other")
    make_dataset(tmp_path / "d", seal=key)
    stored = b"".join(path.read_bytes() for path in files_of(tmp_path / "d"))

    assert b"notes/0000.txt" not in stored
    assert bytes.fromhex(entry_of(0).digest) not in stored
    assert ids_of(28).astype("<u2").tobytes() not in stored
    assert (tmp_path / "key").read_bytes().strip() not in stored
    with pytest.raises(DataError, match="is encrypted; give the file of its key"):
        open_dataset(tmp_path / "d")
    with pytest.raises(DataError, match="was wrapped with key"):
        open_dataset(tmp_path / "d", key=other)
    assert open_dataset(tmp_path / "d", key=SealKey.from_file(tmp_path / "key")).document_entry(
        "web", "train", 0
    ) == entry_of(1)


def test_two_encrypted_datasets_of_one_text_have_no_leaf_in_common(tmp_path: Path) -> None:
    key = SealKey.create_file(tmp_path / "key")
    for name in ("a", "b"):
        make_dataset(tmp_path / name, seal=key)

    leaves = [
        {
            path.read_bytes()[at : at + 64]
            for path in files_of(tmp_path / name / "shards")
            for at in range(0, path.stat().st_size, 64)
        }
        for name in ("a", "b")
    ]

    assert not leaves[0] & leaves[1]


def test_a_leaf_moved_to_another_place_does_not_open(tmp_path: Path) -> None:
    from phalanx.data.shards.seal import DatasetSeal

    seal = DatasetSeal.from_random()
    sealed = seal.file_cipher("shards/web.train/tokens-00000").seal_leaf(3, b"tokens")

    for cipher, index in (
        (seal.file_cipher("shards/web.train/tokens-00000"), 4),
        (seal.file_cipher("shards/web.train/tokens-00001"), 3),
        (DatasetSeal("0" * 32, seal._data_key).file_cipher("shards/web.train/tokens-00000"), 3),
    ):
        with pytest.raises(DataError, match=f"leaf {index} does not open"):
            cipher.open_leaf(index, sealed)


def test_decrypted_leaves_are_kept_within_a_bound(tmp_path: Path) -> None:
    key = SealKey.create_file(tmp_path / "key")
    make_dataset(tmp_path / "d", 60, seal=key)
    dataset = open_dataset(tmp_path / "d", key=key)
    dataset._store._max_plain_bytes = 700
    tokens = dataset.tokens("web", "train")

    for start in range(0, len(tokens) - 10, 10):
        tokens.read_tokens(start, start + 10)
        assert sum(map(len, dataset._store._plain.values())) == dataset._store._plain_bytes <= 700


def test_a_writer_that_was_killed_leaves_no_dataset_and_the_next_one_begins_anew(tmp_path: Path) -> None:
    signer = Identity.without_certificate("signer")
    make_dataset(tmp_path / "whole", signer=signer)
    with DatasetWriter(tmp_path / "going", "<u2", 300, 256) as writer:
        writer.part_writer("web", "train").add_document(ids_of(7), entry_of(7))
        shutil.copytree(tmp_path / "going", tmp_path / "d")

    with pytest.raises(DataError, match=r"dataset\.json: cannot be read"):
        open_dataset(tmp_path / "d")
    make_dataset(tmp_path / "d", signer=signer)

    assert (tmp_path / "d" / "dataset.json").read_bytes() == (tmp_path / "whole" / "dataset.json").read_bytes()
    assert not (tmp_path / "d" / ".incomplete").exists()


def test_an_end_that_was_cut_short_is_written_again(tmp_path: Path) -> None:
    make_dataset(tmp_path)
    (tmp_path / ".incomplete").mkdir()
    (tmp_path / "dataset.json").rename(tmp_path / ".incomplete" / "dataset.json")

    make_dataset(tmp_path)

    assert open_dataset(tmp_path).manifest.documents == 60


def test_a_dataset_and_folders_of_others_are_never_written_over(tmp_path: Path) -> None:
    make_dataset(tmp_path / "d")
    (tmp_path / "mine" / "shards").mkdir(parents=True)

    for name, message in (("d", "already has a dataset"), ("mine", "shards that belongs to no dataset")):
        with pytest.raises(DataError, match=message):
            DatasetWriter(tmp_path / name, "<u2")


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        (np.array([1, 70_000]), "tokens from 1 to 70000 do not fit <u2"),
        (np.array([-1, 3]), "tokens from -1 to 3 do not fit"),
        (np.array([1.0]), "tokens are float64"),
        (np.array([[1]]), r"tokens are int64 \[1, 1\]"),
    ],
)
def test_tokens_that_do_not_fit_are_refused(tmp_path: Path, ids, message: str) -> None:
    with DatasetWriter(tmp_path, "<u2") as writer, pytest.raises(DataError, match=message):
        writer.part_writer("web", "train").add_document(ids, entry_of(0))
    assert not (tmp_path / ".incomplete").exists()


def test_facts_that_do_not_fit_the_documents_are_refused(tmp_path: Path) -> None:
    signer = Identity.without_certificate("signer")
    for at, (ids, source, message) in enumerate(
        [(1000, 0, "token 1000 is outside of the tokenizer's 1000"), (1, 2, "a document names source 2 of 2")]
    ):
        with DatasetWriter(tmp_path / str(at), "<u2") as writer, pytest.raises(DataError, match=message):
            writer.part_writer("web", "train").add_document(np.array([ids]), DocumentEntry("0" * 64, source, "name"))
            writer.finish_dataset(FACTS, signer)
    with DatasetWriter(tmp_path / "empty", "<u2") as writer, pytest.raises(DataError, match="no document is left"):
        writer.finish_dataset(FACTS, signer)


@pytest.mark.parametrize("is_streamed", [False, True])
def test_a_signed_dataset_with_tokens_beyond_its_vocabulary_is_refused_at_the_read(
    tmp_path: Path, is_streamed: bool
) -> None:
    def fetch(name: str, begin: int, stop: int) -> bytes:
        return (tmp_path / name).read_bytes()[begin:stop]

    tokenizer = FACTS.tokenizer.model_copy(update={"vocab_size": 2})
    with DatasetWriter(tmp_path, "<u2") as writer:
        part = writer.part_writer("web", "train")
        part.add_document(np.array([1, 5]), entry_of(0))
        part.max_token_id = 0
        writer.finish_dataset(FACTS.model_copy(update={"tokenizer": tokenizer}), Identity.without_certificate("signer"))

    dataset = open_dataset(tmp_path, stream=TokenSource(fetch, 2**22) if is_streamed else None)
    with pytest.raises(DataError, match="leaf 0 has token 5, but the vocabulary has 2"):
        dataset.tokens("web", "train").read_tokens(0, 1)


def test_a_further_file_that_was_altered_is_named(tmp_path: Path) -> None:
    (tmp_path / "report.json").write_text("{}")
    facts = FACTS.model_copy(update={"files": ("report.json",)})
    with DatasetWriter(tmp_path, "<u2") as writer:
        writer.part_writer("web", "train").add_document(ids_of(0), entry_of(0))
        writer.finish_dataset(facts, Identity.without_certificate("signer"))
    assert list(open_dataset(tmp_path).verify())[-1] == "report.json"

    (tmp_path / "report.json").write_text("[]")

    with pytest.raises(DataError, match=r"report\.json: has SHA-256"):
        list(open_dataset(tmp_path).verify())


def test_composed_and_decomposed_text_have_one_digest() -> None:
    assert document_digest("e\u0301") == document_digest("\u00e9") != document_digest("e")
    with pytest.raises(DataError, match="lone surrogate at character 1"):
        document_digest("a\ud800")


def test_a_full_disk_is_told_when_a_dataset_is_written(tmp_path: Path) -> None:
    """What a stream holds back is written when it is closed, and that must not take the place of the first error."""

    def write_on_full_disk() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))
        with pytest.raises(DataError, match=r"cannot be written .* free space, or give another path"):
            make_dataset(tmp_path / "full")

    assert run_in_fork(write_on_full_disk) == 0
