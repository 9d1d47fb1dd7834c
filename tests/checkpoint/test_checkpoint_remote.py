"""Copies in an object store: whole or not there, found again, and believed no more than a stranger's disk."""

import hashlib

import fsspec
import pytest
from made_shards import STATE, make_shard

from object_store import ACCESS, need_object_store, object_store
from phalanx.checkpoint import RemoteStore, Retention, open_checkpoint, open_key, save_checkpoint, write_new_key
from phalanx.checkpoint import remote as remote_module
from phalanx.errors import CheckpointError

need_object_store()

# the asynchronous client leaves its connections to the garbage collector
pytestmark = pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::DeprecationWarning")


@pytest.fixture(scope="module")
def server():
    with object_store() as address:
        yield address


@pytest.fixture
def bucket(server, monkeypatch, request):
    for name, value in ACCESS.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("AWS_ENDPOINT_URL", server)
    name = f"b{abs(hash(request.node.name)) % 10**12}"
    files = fsspec.filesystem("s3", skip_instance_cache=True)
    files.mkdir(name)
    return name


@pytest.fixture
def store(bucket):
    return RemoteStore(f"s3://{bucket}/runs", "demo")


@pytest.fixture
def files():
    return fsspec.filesystem("s3")


def opened(path, owner, key=None):
    return open_checkpoint(path, owner.public, run="demo", config_digest="ab" * 32, key=key)


def test_what_was_copied_out_comes_back_bit_for_bit(save, owner, store, tmp_path):
    store.upload_checkpoint(save(7))
    store.upload_checkpoint(save(8))

    assert store.list_steps() == {7, 8}
    found = opened(store.fetch_checkpoint(7, tmp_path / "elsewhere", owner.public), owner)

    assert found.step == 7
    for stage in range(3):
        loaded, expected = found.stage_tensors(stage), make_shard(stage, 7).tensors
        assert all(loaded[name].equal(expected[name]) for name in expected)


def test_an_encrypted_one_comes_back_with_its_wrapped_key(owner, store, tmp_path):
    write_new_key(tmp_path / "a.key")
    key = open_key(f"file:{tmp_path / 'a.key'}")
    store.upload_checkpoint(
        save_checkpoint(tmp_path / "sealed", 7, [make_shard(0, 7)], STATE, sign=owner, retention=Retention(1), key=key)
    )

    path = store.fetch_checkpoint(7, tmp_path / "elsewhere", owner.public)

    assert opened(path, owner, key).state == STATE


def test_what_a_run_keeps_of_an_encrypted_model_comes_back_with_its_wrapped_key(store, tmp_path):
    kept, back = tmp_path / "kept_model", tmp_path / "back" / "kept_model"
    kept.mkdir()
    back.parent.mkdir()
    (kept / "model.sealed").write_bytes(b"sealed")
    (kept / "key.json").write_bytes(b"{}")
    store.upload_kept(kept)

    store.fetch_kept({"model.sealed": hashlib.sha256(b"sealed").hexdigest()}, back, wrapped=True)

    assert {path.name: path.read_bytes() for path in back.iterdir()} == {"model.sealed": b"sealed", "key.json": b"{}"}
    assert store.list_steps() == set()
    with pytest.raises(CheckpointError, match="is no plain name"):
        store.fetch_kept({"../owner/signing.key": "0"}, tmp_path / "back" / "other", wrapped=False)


def test_what_is_no_longer_kept_is_removed_there_too(save, store):
    for step in (7, 8, 9):
        store.upload_checkpoint(save(step))

    store.prune_steps({8, 9})

    assert store.list_steps() == {8, 9}


def test_half_a_copy_is_none_and_is_removed_with_those_no_longer_kept(save, store, bucket, files):
    store.upload_checkpoint(save(7))
    files.rm_file(f"{bucket}/runs/demo/step-00000007/manifest.json")

    assert store.list_steps() == set()

    store.upload_checkpoint(save(8))
    store.prune_steps({8})

    files.invalidate_cache()
    assert not files.exists(f"{bucket}/runs/demo/step-00000007")
    assert store.list_steps() == {8}


def test_where_folders_are_real_half_a_copy_without_a_manifest_is_removed_too(save, tmp_path):
    store = RemoteStore(f"file://{tmp_path / 'remote'}", "demo")
    store.upload_checkpoint(save(7))
    (tmp_path / "remote" / "demo" / "step-00000007" / "manifest.json").unlink()

    store.prune_steps(set())

    assert list((tmp_path / "remote" / "demo").iterdir()) == []


def test_an_altered_copy_is_refused_by_name(save, owner, store, bucket, files, tmp_path):
    store.upload_checkpoint(save(7))
    name = f"{bucket}/runs/demo/step-00000007/stage-1.safetensors"
    data = bytearray(files.cat_file(name))
    data[-1] ^= 1
    files.pipe_file(name, bytes(data))

    with pytest.raises(CheckpointError, match=r"stage-1\.safetensors: altered or swapped"):
        opened(store.fetch_checkpoint(7, tmp_path / "elsewhere", owner.public), owner)


def test_a_longer_copy_is_not_even_brought(save, owner, store, bucket, files, tmp_path):
    store.upload_checkpoint(save(7))
    name = f"{bucket}/runs/demo/step-00000007/stage-1.safetensors"
    files.pipe_file(name, files.cat_file(name) + bytes(10_000))

    with pytest.raises(CheckpointError, match=r"stage-1\.safetensors: altered: more than the"):
        store.fetch_checkpoint(7, tmp_path / "elsewhere", owner.public)

    assert list((tmp_path / "elsewhere").iterdir()) == []


def test_a_manifest_of_somebody_else_brings_nothing(save, owner, store, bucket, files, tmp_path):
    from phalanx.security.crypto import Identity

    store.upload_checkpoint(save(7))

    with pytest.raises(CheckpointError, match="foreign: signed with key"):
        store.fetch_checkpoint(7, tmp_path / "elsewhere", Identity.without_certificate("owner").public)

    assert list((tmp_path / "elsewhere").iterdir()) == []


def test_a_missing_one_is_named(owner, store, tmp_path):
    with pytest.raises(CheckpointError, match=r"cannot bring step-00000003/manifest\.json: it is not there"):
        store.fetch_checkpoint(3, tmp_path / "elsewhere", owner.public)


def test_a_bucket_that_is_not_there_is_an_error_that_tells_no_secret(save, bucket):
    store = RemoteStore("s3://no-such-bucket-here/runs", "demo")

    with pytest.raises(
        CheckpointError, match=r"s3://no-such-bucket-here/runs/demo cannot take step-00000007"
    ) as caught:
        store.upload_checkpoint(save(7))

    assert ACCESS["AWS_SECRET_ACCESS_KEY"] not in str(caught.value)


def test_a_server_that_is_gone_is_an_error(save, monkeypatch, bucket):
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    fsspec.filesystem("s3").clear_instance_cache()

    with pytest.raises(CheckpointError, match="cannot take step-00000007"):
        RemoteStore("s3://bucket/runs", "demo").upload_checkpoint(save(7))
    fsspec.filesystem("s3").clear_instance_cache()


def test_another_kind_of_store_works_as_well(save, owner, tmp_path):
    store = RemoteStore(f"file://{tmp_path}/far", "demo")
    store.upload_checkpoint(save(7))

    assert store.list_steps() == {7}
    assert opened(store.fetch_checkpoint(7, tmp_path / "elsewhere", owner.public), owner).step == 7


def test_a_client_that_is_not_installed_is_named():
    with pytest.raises(CheckpointError, match=r"checkpoint\.remote: .*(install|Protocol not known)"):
        RemoteStore("nosuch://bucket", "demo")


def test_no_more_is_copied_than_the_manifest_says():
    import io

    with pytest.raises(CheckpointError, match="here: altered: more than the 5 bytes"):
        remote_module._copy_at_most(io.BytesIO(bytes(6)), io.BytesIO(), 5, "here")
