"""A dataset in an object store is whole or not there, and believed no more than a stranger's disk."""

import hashlib
import json
from pathlib import Path

import fsspec
import pytest

from made_dataset import make_dataset
from object_store import ACCESS, need_object_store, object_store
from phalanx.cli.outcome import run_command as command
from phalanx.data import DataConfig, prepare_corpus
from phalanx.data.shards import SealKey, fingerprint_of, open_dataset
from phalanx.data.shards import stored as stored_module
from phalanx.data.shards.manifest import BesideRecord, sign_dataset
from phalanx.data.shards.stored import StoredDataset
from phalanx.errors import DataError
from phalanx.security.crypto import Identity
from tiny_dataset import write_tiny_dataset

need_object_store()

# the asynchronous client leaves its connections to the garbage collector
pytestmark = pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::DeprecationWarning")
SIGNER = Identity.without_certificate("signer")
OURS = fingerprint_of(SIGNER)


@pytest.fixture(scope="module")
def server():
    with object_store() as address:
        yield address


@pytest.fixture
def files(server, monkeypatch):
    for name, value in ACCESS.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("AWS_ENDPOINT_URL", server)
    # fsspec keeps a client for the process, of whatever server was there first
    fsspec.get_filesystem_class("s3").clear_instance_cache()
    found = fsspec.filesystem("s3")
    if not found.exists("sets"):
        found.mkdir("sets")
    yield found
    found.rm("sets", recursive=True)
    fsspec.get_filesystem_class("s3").clear_instance_cache()


def contents(directory: Path) -> dict[str, bytes]:
    return {str(path.relative_to(directory)): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


@pytest.mark.parametrize("is_sealed", [False, True])
def test_what_was_copied_out_comes_back_byte_for_byte(files, tmp_path, is_sealed):
    key = None
    if is_sealed:
        SealKey.create_file(tmp_path / "data.key")
        key = SealKey.from_file(tmp_path / "data.key")
    make_dataset(tmp_path / "here", signer=SIGNER, seal=key)

    StoredDataset("s3://sets/mine").upload_dataset(tmp_path / "here")
    assert command(["data", "copy", "s3://sets/mine", str(tmp_path / "back"), "--signer", OURS]) == 0

    assert contents(tmp_path / "back") == contents(tmp_path / "here")
    assert len(list(open_dataset(tmp_path / "back", OURS, key).verify())) == 19


def test_a_run_reads_a_dataset_by_its_address_and_brings_it_once(files, tmp_path, monkeypatch):
    texts = {name: [f"{name} number {at} of {at * at} things" for at in range(30)] for name in ("web", "code")}
    write_tiny_dataset(tmp_path / "here", texts)
    assert command(["data", "copy", str(tmp_path / "here"), "s3://sets/mine"]) == 0

    def corpus(path: object):
        text = {"dataset": {"path": str(path)}, "sequence_length": 16}
        return prepare_corpus(DataConfig.model_validate_json(json.dumps(text)), tmp_path / "cache", seed=1)

    there = corpus("s3://sets/mine")
    monkeypatch.setattr(StoredDataset, "download_dataset", None)

    assert there.digest == corpus("s3://sets/mine").digest == corpus(tmp_path / "here").digest
    rows = [one.train_batch([0, 5]).input_ids.tolist() for one in (there, corpus(tmp_path / "here"))]
    assert rows[0] == rows[1]


def test_a_run_streams_a_dataset_by_ranges_of_its_objects(files, tmp_path):
    texts = {name: [f"{name} number {at} of {at * at} things" for at in range(30)] for name in ("web", "code")}
    write_tiny_dataset(tmp_path / "here", texts)
    assert command(["data", "copy", str(tmp_path / "here"), "s3://sets/mine"]) == 0

    def rows(dataset):
        text = {"dataset": dataset, "sequence_length": 16}
        corpus = prepare_corpus(DataConfig.model_validate_json(json.dumps(text)), tmp_path / "cache", seed=1)
        return corpus.train_batch(list(range(corpus.num_train_sequences))).input_ids.tolist()

    assert rows({"path": "s3://sets/mine", "stream": {}}) == rows({"path": str(tmp_path / "here")})


def test_a_copy_that_was_cut_off_is_no_dataset_and_goes_on(files, tmp_path, monkeypatch):
    make_dataset(tmp_path / "here", signer=SIGNER)
    sent, put_file = [], files.put_file

    def counted(path, there, **more):
        if len(sent) == 7:
            sent.append("cut off")
            raise OSError(104, "Connection reset by peer")
        sent.append(there)
        return put_file(path, there, **more)

    monkeypatch.setattr(files, "put_file", counted)
    with pytest.raises(DataError, match=r"cannot take the dataset \(Connection reset"):
        StoredDataset("s3://sets/mine").upload_dataset(tmp_path / "here")
    with pytest.raises(DataError, match="is missing or incomplete"):
        StoredDataset("s3://sets/mine").download_dataset(tmp_path / "half")

    StoredDataset("s3://sets/mine").upload_dataset(tmp_path / "here")
    StoredDataset("s3://sets/mine").download_dataset(tmp_path / "back")

    # each once, and the manifest by another way
    assert len(sent) == len(set(sent)) == len(contents(tmp_path / "here"))
    assert contents(tmp_path / "back") == contents(tmp_path / "here")


def test_leftovers_of_another_copy_are_written_over(files, tmp_path):
    make_dataset(tmp_path / "here", signer=SIGNER)
    (name,) = (name for name in contents(tmp_path / "here") if name.endswith("books.train/starts"))
    files.pipe_file(f"sets/mine/{name}", b"x" * (tmp_path / "here" / name).stat().st_size)
    files.pipe_file("sets/mine/copy-in-progress", b"0" * 64)

    StoredDataset("s3://sets/mine").upload_dataset(tmp_path / "here")
    StoredDataset("s3://sets/mine").download_dataset(tmp_path / "back")

    assert contents(tmp_path / "back") == contents(tmp_path / "here")
    make_dataset(tmp_path / "other", documents=20, signer=SIGNER)
    with pytest.raises(DataError, match="has another dataset"):
        StoredDataset("s3://sets/mine").upload_dataset(tmp_path / "other")


def test_a_store_that_lies_gives_nothing_that_is_used(files, tmp_path, monkeypatch, capsys):
    make_dataset(tmp_path / "here", signer=SIGNER)
    stored = StoredDataset("s3://sets/mine")
    stored.upload_dataset(tmp_path / "here")
    shard = "sets/mine/shards/web.train/tokens-00000"
    content = files.cat_file(shard)

    # a flipped byte comes over, and is found by its leaf
    files.pipe_file(shard, bytes([content[0] ^ 1]) + content[1:])
    assert command(["data", "copy", "s3://sets/mine", str(tmp_path / "flipped"), "--signer", OURS]) == 3
    assert "leaf 0" in capsys.readouterr().err
    files.pipe_file(shard, content + b"more")
    with pytest.raises(DataError, match="exceeds its signed size of 600 bytes"):
        stored.download_dataset(tmp_path / "longer")
    files.rm_file(shard)
    with pytest.raises(DataError, match=r"cannot bring shards/web\.train/tokens-00000: it is missing"):
        stored.download_dataset(tmp_path / "missing")
    assert not any((tmp_path / name).exists() for name in ("longer", "missing"))
    # a dataset of its own
    theirs = Identity.without_certificate("another")
    make_dataset(tmp_path / "theirs", signer=theirs)
    StoredDataset("s3://sets/theirs").upload_dataset(tmp_path / "theirs")
    with pytest.raises(DataError, match="signed with key"):
        StoredDataset("s3://sets/theirs").download_dataset(tmp_path / "swapped", OURS)
    monkeypatch.setattr(stored_module, "MAX_MANIFEST_BYTES", 100)
    with pytest.raises(DataError, match="exceeds 100 bytes"):
        StoredDataset("s3://sets/theirs").read_signed()


@pytest.mark.parametrize("name", ["../outside", "/etc/outside"])
def test_a_signed_name_outside_of_the_dataset_is_not_written(files, tmp_path, name):
    manifest = make_dataset(tmp_path / "here", signer=SIGNER)
    outside = BesideRecord(size_bytes=1, sha256=hashlib.sha256(b"x").hexdigest())
    content = sign_dataset(manifest.model_copy(update={"files": {name: outside}}), SIGNER)
    files.pipe_file("sets/mine/dataset.json", content)

    with pytest.raises(DataError, match="is outside of the dataset"):
        StoredDataset("s3://sets/mine").download_dataset(tmp_path / "back", OURS)


def test_a_copy_needs_one_folder_and_one_address(tmp_path, capsys):
    assert command(["data", "copy", str(tmp_path), str(tmp_path / "b")]) == 2
    assert "expected one directory and one address" in capsys.readouterr().err
    assert command(["data", "copy", "nosuch://a", str(tmp_path / "b")]) == 3
    assert "install phalanx-train[s3]" in capsys.readouterr().err
