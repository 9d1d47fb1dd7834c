"""The key file: private, strict, and its epochs only grow."""

import json

import pytest

from phalanx.errors import DataError
from phalanx.serve.marks import MarkKeyRing
from phalanx.serve.marks.keys import MAX_EPOCHS


def test_an_epoch_is_added_and_earlier_keys_stay(tmp_path):
    path = tmp_path / "keys" / "marks.json"
    first = MarkKeyRing.create(path)
    second = MarkKeyRing.add_epoch(path)

    ring = MarkKeyRing.read(path)
    assert [key.epoch for key in ring.keys] == [1, 2]
    assert ring.keys == second.keys
    assert ring.keys[0] == first.newest
    assert ring.newest.secret != first.newest.secret
    assert path.stat().st_mode & 0o777 == 0o600


def test_a_file_is_never_overwritten(tmp_path):
    MarkKeyRing.create(tmp_path / "marks.json")
    with pytest.raises(DataError, match="exists already"):
        MarkKeyRing.create(tmp_path / "marks.json")


def test_a_file_that_others_can_read_is_refused(tmp_path):
    path = tmp_path / "marks.json"
    MarkKeyRing.create(path)
    path.chmod(0o644)

    with pytest.raises(DataError, match="mode is 0644"):
        MarkKeyRing.read(path)


@pytest.mark.parametrize(
    "change",
    [
        lambda record: record["epochs"].reverse(),
        lambda record: record["epochs"].pop(0),
        lambda record: record["epochs"].clear(),
        lambda record: record["epochs"][0].update(secret="ab" * 31),
        lambda record: record["epochs"][0].update(secret="AB" * 32),
        lambda record: record.update(version=2),
        lambda record: record.update(more=1),
    ],
    ids=["order", "gap", "empty", "short", "upper case", "version", "more"],
)
def test_a_malformed_file_is_refused_without_its_secrets(tmp_path, change):
    path = tmp_path / "marks.json"
    MarkKeyRing.create(path)
    MarkKeyRing.add_epoch(path)
    record = json.loads(path.read_text(encoding="utf-8"))
    secret = record["epochs"][1]["secret"]
    change(record)
    path.write_text(json.dumps(record), encoding="utf-8")

    with pytest.raises(DataError, match="is no file of mark keys") as refusal:
        MarkKeyRing.read(path)
    assert secret not in str(refusal.value)
    assert refusal.value.__cause__ is None


def test_a_full_file_takes_no_further_epoch(tmp_path, monkeypatch):
    monkeypatch.setattr("phalanx.serve.marks.keys.MAX_EPOCHS", 1)
    MarkKeyRing.create(tmp_path / "marks.json")

    with pytest.raises(DataError, match="begin a new file"):
        MarkKeyRing.add_epoch(tmp_path / "marks.json")
    assert MAX_EPOCHS == 256
