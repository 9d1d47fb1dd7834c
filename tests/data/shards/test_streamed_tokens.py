"""Tokens that are fetched as they are read are those of a local copy, within a cache and a quota, or are refused."""

import itertools
import json
from pathlib import Path

import numpy as np
import pytest
from pydantic import ValidationError

from made_dataset import make_dataset
from phalanx.config import digest_config
from phalanx.data import BatchLoader, DataConfig, prepare_corpus
from phalanx.data.phases import DatasetConfig
from phalanx.data.run_dataset import TokenFetcher
from phalanx.data.shards import SealKey, TokenSource, leaves, open_dataset
from phalanx.data.shards.leaves import VerifiedFile
from phalanx.data.shards.stored import StoredDataset
from phalanx.errors import DataError
from tiny_dataset import write_tiny_dataset

LEAF = 256
PART = ("notes", "train")


class Store:
    """Gives byte ranges of a directory, counts them, and lies from some request on if it is told to."""

    def __init__(self, directory, lies_from=None):
        self.requests = []
        self._directory, self._lies_from = directory, lies_from

    def fetch(self, name, begin, stop):
        self.requests.append((name, begin, stop))
        content = bytearray((self._directory / name).read_bytes()[begin:stop])
        if self._lies_from is not None and len(self.requests) >= self._lies_from:
            content[0] ^= 1
        return bytes(content)


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    monkeypatch.setattr(leaves, "_BLOCK_BYTES", 2 * LEAF)


def streamed(directory, store, cache_bytes=10 * LEAF, key=None):
    return open_dataset(directory, key=key, stream=TokenSource(store.fetch, cache_bytes))


def first_part(dataset):
    group = next(iter(dataset.groups))
    return group, "train"


@pytest.mark.parametrize("is_sealed", [False, True])
def test_streamed_tokens_are_those_of_the_files_in_any_order(tmp_path, is_sealed):
    key = None
    if is_sealed:
        SealKey.create_file(tmp_path / "data.key")
        key = SealKey.from_file(tmp_path / "data.key")
    make_dataset(tmp_path / "set", 300, seal=key, shard_tokens=700)
    local = open_dataset(tmp_path / "set", key=key)
    part = first_part(local)
    store = Store(tmp_path / "set")
    stream, whole = streamed(tmp_path / "set", store, key=key).tokens(*part), local.tokens(*part)
    generator = np.random.default_rng(3)

    for start in generator.integers(0, len(whole) - 40, 200):
        assert np.array_equal(stream[start : start + 40], whole[start : start + 40])
    assert np.array_equal(stream[0 : len(whole)], whole[0 : len(whole)])

    assert {name.rpartition("/")[2][:6] for name, _, _ in store.requests} == {"tokens"}


def test_the_cache_is_bounded_and_what_it_dropped_is_fetched_and_checked_again(tmp_path):
    make_dataset(tmp_path / "set", 300, shard_tokens=10_000)
    store = Store(tmp_path / "set")
    dataset = streamed(tmp_path / "set", store, cache_bytes=4 * LEAF)
    stream = dataset.tokens(*first_part(dataset))

    for _ in range(2):
        for start in range(0, len(stream) - 1, LEAF // 2):
            stream[start : start + 1]
            assert dataset._store._plain_bytes <= 4 * LEAF

    # read front to back each block comes once in a pass, and none survives the rest of it
    size = 2 * len(stream)
    assert len(store.requests) == 2 * -(-size // (2 * LEAF))


def test_of_the_cache_what_was_not_read_for_longest_goes_first(tmp_path):
    make_dataset(tmp_path / "set", 300, shard_tokens=10_000)
    store = Store(tmp_path / "set")
    # two blocks of two leaves
    dataset = streamed(tmp_path / "set", store, cache_bytes=4 * LEAF)
    stream = dataset.tokens(*first_part(dataset))

    for leaf in (0, 1, 2, 3, 0, 1, 4, 0, 1):
        stream[leaf * LEAF // 2 : leaf * LEAF // 2 + 1]

    assert [begin // LEAF for _, begin, _ in store.requests] == [0, 2, 4]


def test_a_leaf_that_comes_while_it_is_kept_counts_once(tmp_path):
    make_dataset(tmp_path / "set", 300, shard_tokens=10_000)
    dataset = streamed(tmp_path / "set", Store(tmp_path / "set"), cache_bytes=5 * LEAF)
    stream = dataset.tokens(*first_part(dataset))

    for start in np.random.default_rng(5).integers(0, len(stream) - 1, 200):
        stream[start : start + 1]

    assert dataset._store._plain_bytes == sum(map(len, dataset._store._plain.values()))


def test_a_store_that_gives_other_bytes_later_is_found_out(tmp_path):
    make_dataset(tmp_path / "set", 300, shard_tokens=10_000)
    store = Store(tmp_path / "set", lies_from=6)
    dataset = streamed(tmp_path / "set", store, cache_bytes=2 * LEAF)
    stream = dataset.tokens(*first_part(dataset))
    for block in range(5):
        stream[block * LEAF : block * LEAF + 1]

    with pytest.raises(DataError, match=r"leaf 0 .* has SHA-256 .*, expected .*: altered or damaged"):
        stream[0:1]


def test_without_the_check_of_what_comes_the_same_store_changes_a_token(tmp_path, monkeypatch):
    make_dataset(tmp_path / "set", 300, shard_tokens=10_000)
    local = open_dataset(tmp_path / "set")
    part = first_part(local)
    monkeypatch.setattr(VerifiedFile, "_compare_hash", lambda *_: None)

    stream = streamed(tmp_path / "set", Store(tmp_path / "set", lies_from=1)).tokens(*part)

    assert stream[0:1] != local.tokens(*part)[0:1]


def test_a_store_that_gives_fewer_bytes_is_refused(tmp_path):
    make_dataset(tmp_path / "set", 300)
    dataset = open_dataset(tmp_path / "set", stream=TokenSource(lambda *_: b"short", 4 * LEAF))

    with pytest.raises(DataError, match="5 bytes came for bytes 0 to 511: altered or damaged"):
        dataset.tokens(*first_part(dataset))[0:1]


@pytest.fixture
def stored(tmp_path):
    """A dataset in a store that fsspec keeps in memory, and its local original."""
    texts = {name: [f"{name} number {at} of {at * at} things" for at in range(120)] for name in ("web", "code")}
    write_tiny_dataset(tmp_path / "here", texts)
    address = f"memory://{tmp_path.name}/mine"
    StoredDataset(address).upload_dataset(tmp_path / "here")
    return tmp_path / "here", address


def config_of(path, stream=None, **more):
    dataset = {"path": str(path)} | ({} if stream is None else {"stream": stream})
    return DataConfig.model_validate_json(json.dumps({"dataset": dataset, "sequence_length": 16, **more}))


ORDERS = {
    "shuffled": {},
    "windows": {"phases": [{"curriculum": {"by": "place", "buckets": 5}}]},
    "mixture": {"phases": [{"weights": {"web": 3.0, "code": 1.0}}]},
}


@pytest.mark.parametrize("order", ORDERS)
def test_a_run_that_streams_has_the_batches_of_one_that_reads_a_copy(stored, tmp_path, order):
    home, address = stored
    there, here = (
        prepare_corpus(config_of(path, stream, **ORDERS[order]), tmp_path / "cache", seed=1)
        for path, stream in ((address, {"cache_bytes": 2**22}), (home, None))
    )

    assert there.digest == here.digest
    loaders = [BatchLoader(corpus, 8, 5) for corpus in (there, here)]
    for _ in range(40):
        left, right = (loader.next_batch() for loader in loaders)
        assert np.array_equal(left.input_ids, right.input_ids)
    (brought,) = tmp_path.glob("cache/streamed-*")
    assert not [path for path in brought.rglob("tokens-*") if path.suffix != ".tree"]


def test_windows_in_order_of_place_give_every_sequence_once_front_to_back(stored, tmp_path):
    home, _ = stored
    text = {"dataset": {"path": str(home), "groups": ["web"]}, "sequence_length": 16}
    text["phases"] = [{"curriculum": {"by": "place", "buckets": 5}}]
    corpus = prepare_corpus(DataConfig.model_validate_json(json.dumps(text)), tmp_path / "cache", seed=1)
    size = corpus.num_train_sequences

    epoch = corpus.sample_order(7, 8).sample_sequences(np.arange(size)).tolist()

    assert sorted(epoch) == list(range(size))
    edges = [size * bucket // 5 for bucket in range(6)]
    for start, stop in itertools.pairwise(edges):
        assert sorted(epoch[start:stop]) == list(range(start, stop)) != epoch[start:stop]


def test_a_quota_ends_a_run_before_the_store_is_asked_for_more(stored):
    home, address = stored
    config = config_of(address, {"max_fetched_bytes": 700}).dataset
    fetcher = TokenFetcher(address, config.stream)
    name = next(str(path.relative_to(home)) for path in home.rglob("tokens-00000"))
    assert len(fetcher.fetch_bytes(name, 0, 600)) == 600

    assert len(fetcher.fetch_bytes(name, 600, 700)) == 100
    with pytest.raises(DataError, match=r"700 bytes were fetched, and 1 more exceed max_fetched_bytes = 700"):
        fetcher.fetch_bytes(name, 700, 701)

    assert fetcher.fetched_bytes == 700


def test_a_directory_is_not_streamed_and_no_stream_leaves_the_digest_as_it_was():
    with pytest.raises(ValidationError, match="the dataset is in a directory, which is read in place; remove it"):
        config_of("/data/mine", {})

    assert "stream" not in DatasetConfig(path=Path("mine")).model_dump()
    plain, asked = (config_of("s3://sets/mine", stream) for stream in (None, {}))
    assert digest_config(plain) != digest_config(asked)
