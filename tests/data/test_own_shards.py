"""The shards that a run makes of its own sources are found by their signer and refused when they were altered."""

from types import SimpleNamespace

import numpy as np
import pytest

from phalanx.data import own_shards
from phalanx.data.own_shards import ShardPlace, open_own_shards, own_starts
from phalanx.data.run_dataset import TOKENIZER_FILE, _check_tokenizer, local_dataset
from phalanx.errors import DataError


def test_another_signer_has_another_place(tmp_path, monkeypatch):
    places = []
    for signer in ("first", "first", "second"):
        monkeypatch.setattr(own_shards, "load_signer", lambda key, signer=signer: signer)
        monkeypatch.setattr(own_shards, "fingerprint_of", lambda signer: f"of {signer}")
        places.append(ShardPlace.from_cache(tmp_path, "corpus", "text-").home)

    assert places[0] == places[1] != places[2]
    assert places[0].name.startswith("text-") and places[0].parent == tmp_path


def test_every_token_and_further_file_is_checked_and_the_cure_is_named(tmp_path, monkeypatch):
    read, beside = [], []

    class Tokens:
        def __init__(self, split):
            self.split = split

        def __len__(self):
            return {"train": 7, "validation": 0}[self.split]

        def read_tokens(self, start, stop):
            read.append((self.split, start, stop))

    def check_beside(name):
        beside.append(name)
        if name == "altered":
            raise DataError("altered: differs")

    files = ["rows"]
    shards = SimpleNamespace(
        tokens=lambda group, split: Tokens(split),
        manifest=SimpleNamespace(shard_tokens=3, files=files),
        check_beside=check_beside,
        document_starts=lambda group, split: np.array([0, 4, 7], np.uint32),
    )
    monkeypatch.setattr(own_shards, "open_dataset", lambda home, signer: shards)

    assert open_own_shards(tmp_path, None) is shards
    assert (read, beside) == ([("train", 0, 3), ("train", 3, 6), ("train", 6, 7)], ["rows"])
    assert own_starts(shards, "train").dtype == np.int64

    files.append("altered")
    with pytest.raises(DataError, match=f"delete {tmp_path} to make the data again") as refused:
        open_own_shards(tmp_path, None)
    assert refused.value.error_facts["code"] == "PHX-I018"


def test_a_datasets_tokenizer_that_was_altered_or_is_gone_is_refused(tmp_path):
    dataset = SimpleNamespace(manifest=SimpleNamespace(tokenizer=SimpleNamespace(digest="0" * 64, eos_id=0)))

    with pytest.raises(DataError, match="cannot be read"):
        _check_tokenizer(tmp_path / TOKENIZER_FILE, dataset, None)
    (tmp_path / TOKENIZER_FILE).write_text("{}")
    with pytest.raises(DataError, match="the signed manifest has"):
        _check_tokenizer(tmp_path / TOKENIZER_FILE, dataset, None)


def test_a_dataset_of_this_machine_stays_where_it_is(tmp_path):
    assert local_dataset(SimpleNamespace(path=tmp_path), tmp_path / "cache") == tmp_path
