"""Files in an object store are listed, read and named as those of a directory."""

import gzip

import fsspec
import pytest
from source_records import raw_total, records, texts

from object_store import ACCESS, need_object_store, object_store
from phalanx.data.sources import JsonlConfig, TextConfig, open_source
from phalanx.errors import DataError

need_object_store()

# the asynchronous client leaves its connections to the garbage collector
pytestmark = pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::DeprecationWarning")


@pytest.fixture
def bucket(monkeypatch):
    for name, value in ACCESS.items():
        monkeypatch.setenv(name, value)
    with object_store() as address:
        monkeypatch.setenv("AWS_ENDPOINT_URL", address)
        # fsspec keeps a client for the process, of whatever server was there first
        fsspec.get_filesystem_class("s3").clear_instance_cache()
        files = fsspec.filesystem("s3", skip_instance_cache=True)
        files.mkdir("texts")
        yield files
    fsspec.get_filesystem_class("s3").clear_instance_cache()


def test_a_bucket_is_read_as_a_directory_is(bucket, tmp_path):
    contents = {"b.txt": b"second", "sub/c.txt.gz": gzip.compress(b"third"), "a.txt": b"first", "x.png": b"no"}
    (tmp_path / "sub").mkdir()
    for name, content in contents.items():
        bucket.pipe_file(f"texts/mine/{name}", content)
        (tmp_path / name).write_bytes(content)
    bucket.pipe_file("texts/other/d.txt", b"not below it")

    there, here = (TextConfig(path=place) for place in ("s3://texts/mine", tmp_path))

    assert records(there) == records(here)
    files = open_source(there).files
    assert [file.name for file in files if file.passed_over is None] == ["a.txt", "b.txt", "sub/c.txt.gz"]
    assert open_source(there).fingerprint() == open_source(here).fingerprint()

    bucket.pipe_file("texts/lines.jsonl", b'{"text": "one"}\n' * 2000)
    found = records(JsonlConfig(path="s3://texts/lines.jsonl"))
    assert (len(texts(found)), raw_total(found)) == (2000, 32_000)

    source = open_source(there)
    bucket.rm_file("texts/mine/a.txt")
    with pytest.raises(DataError, match=r"s3://texts/mine/a\.txt: cannot be read \((No such file|FileNotFound)"):
        list(source.read_file_records(source.files[0]))
    with pytest.raises(DataError, match="s3://texts/nothing: not found"):
        open_source(TextConfig(path="s3://texts/nothing"))


def test_an_address_without_a_client_names_the_extra():
    with pytest.raises(DataError, match=r"unheardof://x/y: .*install phalanx-train\[s3\]"):
        open_source(TextConfig(path="unheardof://x/y"))
