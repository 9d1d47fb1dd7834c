"""Encryption at rest: nothing readable on disk, every chunk in its place, keys that can be changed and never told."""

import base64
import json
import os
import re
import shutil
import stat
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st
from made_shards import STATE, make_shard

from phalanx.checkpoint import Retention, open_checkpoint, open_key, save_checkpoint, write_new_key
from phalanx.checkpoint.rotate import rotate_keys
from phalanx.checkpoint.sealed import FilePlace, FileSealer
from phalanx.errors import CertificateError, CheckpointError
from phalanx.security.crypto import Identity

PLACE = FilePlace("demo", 7, "stage-0.safetensors.sealed")
CHUNK = 2**20


@pytest.fixture
def key(tmp_path):
    path = tmp_path / "keys" / "checkpoint.key"
    path.parent.mkdir()
    write_new_key(path)
    return path


@pytest.fixture
def holder(key):
    return open_key(f"file:{key}")


@pytest.fixture
def save_sealed(tmp_path, owner, holder):
    def save_step(step, state=STATE, key=holder):
        shards = (make_shard(stage, step) for stage in range(2))
        return save_checkpoint(tmp_path / "sealed", step, shards, state, sign=owner, retention=Retention(9), key=key)

    return save_step


def opened(path, owner, key):
    return open_checkpoint(path, owner.public, run="demo", config_digest="ab" * 32, key=key)


def refusal(path, owner, key):
    with pytest.raises(CheckpointError) as caught:
        opened(path, owner, key)
    return str(caught.value)


def test_what_was_sealed_comes_back_bit_for_bit(save_sealed, owner, holder):
    path = save_sealed(7)

    checkpoint = opened(path, owner, holder)

    assert checkpoint.state == STATE
    for stage in range(2):
        loaded, expected = checkpoint.stage_tensors(stage), make_shard(stage, 7).tensors
        assert all(loaded[name].equal(expected[name]) for name in expected)
    names = sorted(file.name for file in path.iterdir())
    assert names == [
        "key.json",
        "manifest.json",
        "stage-0.safetensors.sealed",
        "stage-1.safetensors.sealed",
        "state.json.sealed",
    ]


def test_no_tensor_and_no_state_can_be_read_on_the_disk(save_sealed):
    path = save_sealed(7)

    tensor = make_shard(0, 7).tensors["weight/layers.0.w"].numpy().tobytes()
    for file in path.iterdir():
        assert tensor[:32] not in file.read_bytes()
        assert b"loader" not in file.read_bytes()


def test_two_savings_of_the_same_tensors_have_nothing_in_common(save_sealed):
    first = (save_sealed(7) / "stage-0.safetensors.sealed").read_bytes()

    second = (save_sealed(7) / "stage-0.safetensors.sealed").read_bytes()

    assert first[16:48] != second[16:48]


def test_without_a_key_or_with_another_one_it_is_refused_by_name(save_sealed, owner, tmp_path):
    path = save_sealed(7)
    write_new_key(tmp_path / "other.key")
    other = open_key(f"file:{tmp_path / 'other.key'}")

    assert "is encrypted; give its key" in refusal(path, owner, None)
    assert re.search(
        r"key\.json: was wrapped with key aes256-\w{16}, but checkpoint\.key is aes256-", refusal(path, owner, other)
    )


def test_a_key_of_another_step_or_run_does_not_open(save_sealed, owner, holder):
    first, second = save_sealed(7), save_sealed(8)
    shutil.copy(first / "key.json", second / "key.json")

    assert "key.json: does not open" in refusal(second, owner, holder)


def test_an_altered_wrapped_key_is_refused_by_name(save_sealed, owner, holder):
    path = save_sealed(7)
    record = json.loads((path / "key.json").read_bytes())
    record["wrapped"] = record["wrapped"][:-1] + ("0" if record["wrapped"][-1] != "0" else "1")
    (path / "key.json").write_text(json.dumps(record, sort_keys=True, separators=(",", ":")))

    assert "key.json: does not open" in refusal(path, owner, holder)
    (path / "key.json").write_text("{")
    assert "key.json: truncated or altered" in refusal(path, owner, holder)
    (path / "key.json").unlink()
    assert "key.json: missing" in refusal(path, owner, holder)


def test_another_data_key_under_the_right_key_is_refused(save_sealed, owner, holder):
    from phalanx.checkpoint.keys import new_data_key, wrap_for

    path = save_sealed(7)
    (path / "key.json").write_bytes(wrap_for(holder, new_data_key(), "demo", 7))

    assert "swapped: its data key differs from the signed manifest" in refusal(path, owner, holder)


# --- files in chunks -----------------------------------------------------------------------------------


def sealed(data, place=PLACE, sealer=None):
    return b"".join((sealer or FileSealer(bytes(32))).seal_file(place, [data]))


@given(
    size=st.one_of(st.integers(0, 100), st.sampled_from([CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK])),
    cut=st.integers(1, 1000),
)
def test_any_length_in_any_pieces_comes_back(size, cut):
    data = bytes(range(256)) * (size // 256 + 1)
    data = data[:size]
    step = max(1, size // cut)
    pieces = [data[at : at + step] for at in range(0, size, step)]

    found = b"".join(FileSealer(bytes(32)).seal_file(PLACE, pieces))

    assert FileSealer(bytes(32)).open_file(PLACE, found, "here") == data


@pytest.mark.parametrize(
    "place",
    [
        FilePlace("other", 7, PLACE.file),
        FilePlace("demo", 8, PLACE.file),
        FilePlace("demo", 7, "stage-1.safetensors.sealed"),
    ],
)
def test_a_file_opens_in_its_own_place_only(place):
    with pytest.raises(CheckpointError, match="here: chunk 0 of 1 does not open"):
        FileSealer(bytes(32)).open_file(place, sealed(b"text"), "here")


@pytest.mark.parametrize("cut", [1, 16, 17, CHUNK + 16, CHUNK + 40])
def test_a_file_that_was_cut_anywhere_is_refused(cut):
    data = sealed(bytes(2 * CHUNK + 24))

    with pytest.raises(CheckpointError, match="does not open"):
        FileSealer(bytes(32)).open_file(PLACE, data[:-cut], "here")


def test_chunks_that_changed_places_are_refused():
    data, size = sealed(bytes(CHUNK) + bytes([1]) * CHUNK), CHUNK + 16
    swapped = data[:16] + data[16 + size : 16 + 2 * size] + data[16 : 16 + size] + data[16 + 2 * size :]

    with pytest.raises(CheckpointError, match="chunk 0 of 3 does not open"):
        FileSealer(bytes(32)).open_file(PLACE, swapped, "here")


def test_a_plain_file_in_the_place_of_a_sealed_one_is_refused():
    with pytest.raises(CheckpointError, match="is not an encrypted file"):
        FileSealer(bytes(32)).open_file(PLACE, b"{}", "here")


# --- where keys come from ------------------------------------------------------------------------------


def test_a_new_key_is_for_its_owner_only_and_never_overwritten(key):
    assert stat.S_IMODE(key.stat().st_mode) == 0o600
    with pytest.raises(CertificateError, match="exists already"):
        write_new_key(key)


def test_a_key_that_others_may_read_is_refused(key):
    key.chmod(0o644)

    with pytest.raises(CheckpointError, match="mode is 0644"):
        open_key(f"file:{key}")


def test_a_key_may_come_from_the_environment(key, monkeypatch, holder):
    monkeypatch.setenv("CHECKPOINT_KEY", key.read_text())

    assert open_key("env:CHECKPOINT_KEY").name == holder.name


@pytest.mark.parametrize("value", ["", "ab" * 31, "zz" * 32, "ab" * 33])
def test_a_malformed_key_is_refused_and_not_repeated(monkeypatch, value):
    monkeypatch.setenv("CHECKPOINT_KEY", value)

    with pytest.raises(CheckpointError, match="does not hold 64 hex characters") as caught:
        open_key("env:CHECKPOINT_KEY")

    assert not value or value not in str(caught.value)
    assert caught.value.__cause__ is None


@pytest.mark.parametrize(
    ("where", "said"),
    [
        ("env:NOT_SET_ANYWHERE", "the environment has no NOT_SET_ANYWHERE"),
        ("file:/nowhere/key", "No such file"),
        ("command:", "the command is empty"),
        ("vault:key", 'expected "file:PATH"'),
    ],
)
def test_a_missing_key_is_named(where, said):
    with pytest.raises(CheckpointError, match=said):
        open_key(where)


def test_a_holder_does_not_show_its_key(key, holder):
    assert key.read_text().strip() not in repr(holder)
    assert "0" * 64 not in repr(FileSealer(bytes(32)))


KMS = """
import base64, json, sys
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
question = json.load(sys.stdin)
data, context = (base64.b64decode(question[name]) for name in ("data", "context"))
cipher, nonce = AESGCM(b"k" * 32), b"n" * 12
act = cipher.encrypt if question["operation"] == "wrap" else cipher.decrypt
try:
    print(json.dumps({"data": base64.b64encode(act(nonce, data, context)).decode()}))
except Exception:
    print("secret: " + base64.b64encode(data).decode())
    sys.exit(3)
"""


@pytest.fixture
def command(tmp_path):
    """A program that keeps a key, as the client of a key management service does."""
    path = tmp_path / "kms.py"
    path.write_text(KMS)
    return open_key(f"command:{sys.executable} {path}")


def test_a_program_may_keep_the_key(save_sealed, owner, command):
    path = save_sealed(7, key=command)

    assert opened(path, owner, command).state == STATE


def test_what_a_program_says_when_it_fails_is_not_repeated(save_sealed, owner, command):
    first, second = save_sealed(7, key=command), save_sealed(8, key=command)
    shutil.copy(first / "key.json", second / "key.json")

    said = refusal(second, owner, command)

    assert re.search(r"command-python\S* could not unwrap: exit code 3", said)
    assert "secret" not in said


@pytest.mark.parametrize("answer", ["", "[]", '{"data": 3}', '{"data": "***"}', "{}"])
def test_a_program_that_answers_nonsense_is_refused(tmp_path, answer):
    script = tmp_path / "answer.py"
    script.write_text(f"print({answer!r})")

    with pytest.raises(CheckpointError, match=r'answered with no \{"data": base64\} to wrap'):
        open_key(f"command:{sys.executable} {script}").wrap_key(bytes(32), b"")


def test_a_program_that_is_missing_is_named():
    with pytest.raises(CheckpointError, match="command-no-such-program cannot be run"):
        open_key("command:/no-such-program").wrap_key(bytes(32), b"")


# --- rotation ------------------------------------------------------------------------------------------


def test_after_a_rotation_the_new_key_opens_and_the_old_one_does_not(save_sealed, owner, holder, tmp_path):
    paths = [save_sealed(7), save_sealed(8)]
    before = [(path / "manifest.json").read_bytes() for path in paths]
    write_new_key(tmp_path / "new.key")
    new = open_key(f"file:{tmp_path / 'new.key'}")

    assert rotate_keys(tmp_path / "sealed", owner.public, holder, new) == [7, 8]

    assert [(path / "manifest.json").read_bytes() for path in paths] == before
    for path in paths:
        assert opened(path, owner, new).state == STATE
        assert "was wrapped with key" in refusal(path, owner, holder)


def test_an_interrupted_rotation_goes_on(save_sealed, owner, holder, tmp_path):
    save_sealed(7)
    write_new_key(tmp_path / "new.key")
    new = open_key(f"file:{tmp_path / 'new.key'}")
    rotate_keys(tmp_path / "sealed", owner.public, holder, new)
    path = save_sealed(8)

    assert rotate_keys(tmp_path / "sealed", owner.public, holder, new) == [7, 8]

    assert opened(path, owner, new).step == 8


def test_a_foreign_checkpoint_is_not_rotated(save_sealed, holder, tmp_path):
    path = save_sealed(7)
    before = (path / "key.json").read_bytes()
    stranger = Identity.without_certificate("owner")

    with pytest.raises(CheckpointError, match="foreign: signed with key"):
        rotate_keys(tmp_path / "sealed", stranger.public, holder, holder)

    assert (path / "key.json").read_bytes() == before


def test_plain_ones_are_passed_over(save, owner, holder, tmp_path):
    save(3)

    assert rotate_keys(tmp_path, owner.public, holder, holder) == []


def test_the_wrapped_key_is_text_that_anyone_may_see(save_sealed, key):
    record = json.loads((save_sealed(7) / "key.json").read_bytes())

    assert set(record) == {"version", "key", "wrapped"}
    assert key.read_text().strip() not in json.dumps(record)
    assert base64.b64encode(bytes.fromhex(key.read_text().strip())).decode() not in json.dumps(record)
    assert os.path.getsize(key) == 65
