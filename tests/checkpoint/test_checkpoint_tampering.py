import json
import os
import re
import shutil

import pytest

from phalanx.checkpoint import latest_checkpoint, open_checkpoint
from phalanx.config import canonical_json
from phalanx.errors import CheckpointError
from phalanx.security.crypto import Identity, in_domain


@pytest.fixture
def path(save):
    return save(50)


def refusal(path, owner, **expected):
    """What the error says that a checkpoint is refused with."""
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(path, owner.public, **{"run": "demo", "config_digest": "ab" * 32, **expected})
    return str(caught.value)


def flip(file, position):
    data = bytearray(file.read_bytes())
    data[position] ^= 1
    file.write_bytes(data)


def resigned(path, identity, change):
    """Change the body of a manifest and sign it again with the right key, as a hostile owner could."""
    file = path / "manifest.json"
    envelope = json.loads(file.read_bytes())
    change(envelope["body"])
    message = in_domain("checkpoint-manifest/1", canonical_json(envelope["body"]))
    envelope["signature"] = identity.sign_data(message).hex()
    file.write_bytes(canonical_json(envelope))


@pytest.mark.parametrize("name", ["stage-1.safetensors", "state.json", "manifest.json"])
@pytest.mark.parametrize("position", [0, -1, 40])
def test_one_flipped_bit_is_refused_and_the_file_named(path, owner, name, position):
    flip(path / name, position)

    assert re.search(f"{name}.*altered|{name}: found keys", refusal(path, owner))


def test_every_byte_of_the_manifest_counts(path, owner):
    whole = (path / "manifest.json").read_bytes()
    for position in range(0, len(whole), 7):
        (path / "manifest.json").write_bytes(whole)
        flip(path / "manifest.json", position)

        assert re.search("manifest.json", refusal(path, owner))


@pytest.mark.parametrize("name", ["stage-2.safetensors", "state.json", "manifest.json"])
def test_a_truncated_file_is_refused_and_named(path, owner, name):
    os.truncate(path / name, 30)

    assert re.search(f"{name}: truncated", refusal(path, owner))


def test_an_emptied_file_is_refused(path, owner):
    os.truncate(path / "stage-0.safetensors", 0)

    assert re.search("stage-0.safetensors: truncated: 0 bytes", refusal(path, owner))


def test_a_longer_file_is_refused_and_named(path, owner):
    with (path / "stage-0.safetensors").open("ab") as stream:
        stream.write(b"\x00")

    assert re.search("stage-0.safetensors: altered", refusal(path, owner))


@pytest.mark.parametrize("name", ["stage-0.safetensors", "state.json", "manifest.json"])
def test_a_missing_file_is_refused_and_named(path, owner, name):
    (path / name).unlink()

    assert re.search(f"{name}: missing", refusal(path, owner))


def test_a_missing_directory_is_refused(tmp_path, owner):
    assert re.search("manifest.json: missing", refusal(tmp_path / "step-00000001", owner))


def test_an_extra_file_is_refused_and_named(path, owner):
    (path / "stage-3.safetensors").write_bytes(b"")

    assert re.search("holds 'stage-3.safetensors', which the manifest does not name", refusal(path, owner))


def test_a_shard_of_another_step_is_refused_and_named(save, path, owner):
    other = save(60)
    shutil.copy(other / "stage-1.safetensors", path / "stage-1.safetensors")

    assert re.search("stage-1.safetensors: altered or swapped", refusal(path, owner))


def test_two_stages_that_change_places_are_refused(path, owner):
    (path / "stage-0.safetensors").rename(path / "spare")
    (path / "stage-1.safetensors").rename(path / "stage-0.safetensors")
    (path / "spare").rename(path / "stage-1.safetensors")

    assert re.search("stage-0.safetensors: altered or swapped", refusal(path, owner))


def test_a_whole_checkpoint_under_the_name_of_another_step_is_refused(path, owner):
    moved = path.rename(path.with_name("step-00000090"))

    assert re.search(
        "manifest.json: swapped: it belongs to step 50, but its directory is step-00000090", refusal(moved, owner)
    )


def test_a_copy_under_a_name_that_is_no_step_is_accepted(path, owner):
    moved = path.rename(path.with_name("best"))

    assert open_checkpoint(moved, owner.public, run=None, config_digest=None).step == 50


def test_a_checkpoint_signed_by_somebody_else_is_refused(path):
    assert re.search("manifest.json: foreign: signed with key", refusal(path, Identity.without_certificate("owner")))


def test_a_signature_of_another_key_under_the_right_name_is_refused(path, owner):
    resigned(path, Identity.without_certificate("owner"), lambda body: body.update(step=70))

    assert re.search("manifest.json: altered: the signature of owner does not match", refusal(path, owner))


def test_a_signature_for_another_purpose_is_refused(path, owner):
    file = path / "manifest.json"
    envelope = json.loads(file.read_bytes())
    envelope["signature"] = owner.sign_data(canonical_json(envelope["body"])).hex()
    file.write_bytes(canonical_json(envelope))

    assert re.search("manifest.json: altered: the signature", refusal(path, owner))


@pytest.mark.parametrize(
    ("expected", "found"),
    [
        ({"run": "other"}, "foreign: it belongs to run 'demo', expected 'other'"),
        ({"config_digest": "cd" * 32}, "foreign: config digest abababababab.*run file"),
        ({"at_least_step": 51}, "rolled back: it is from step 50, expected step 51 or later"),
    ],
)
def test_another_run_config_or_an_older_step_is_refused(path, owner, expected, found):
    assert re.search(f"manifest.json: {found}", refusal(path, owner, **expected))


def test_the_very_step_that_is_asked_for_is_not_rolled_back(path, owner):
    checkpoint = open_checkpoint(path, owner.public, run=None, config_digest=None, at_least_step=50)

    assert checkpoint.step == 50


@pytest.mark.parametrize("name", ["../state.json", "/etc/passwd", "stage-0.safetensors\n", "stage-00.safetensors"])
def test_a_name_that_leaves_the_directory_is_refused_even_when_signed(path, owner, name):
    resigned(path, owner, lambda body: body["files"].update({name: body["files"].pop("state.json")}))

    assert re.search("manifest.json: files", refusal(path, owner))


@pytest.mark.parametrize(
    "change",
    [
        lambda body: body.update(version=2),
        lambda body: body.update(step="50"),
        lambda body: body.update(unknown=1),
        lambda body: body["files"].pop("state.json"),
        lambda body: body["shards"].append(body["shards"][0]),
        lambda body: body["shards"].pop(),
        lambda body: body["files"]["state.json"].update(size_bytes=-1),
        lambda body: body["files"]["state.json"].update(sha256="AB" * 32),
    ],
)
def test_a_manifest_of_another_shape_is_refused_even_when_signed(path, owner, change):
    resigned(path, owner, change)

    assert re.search("manifest.json: ", refusal(path, owner))


@pytest.mark.parametrize("data", [b"", b"{}", b"[]", b"null", b"\xff\xfe", b"[" * 5000, b'{"body":NaN}'])
def test_a_manifest_that_is_something_else_is_refused(path, owner, data):
    (path / "manifest.json").write_bytes(data)

    assert re.search("manifest.json: ", refusal(path, owner))


def test_a_link_in_place_of_a_file_is_refused(path, owner, tmp_path):
    (path / "state.json").rename(tmp_path / "elsewhere.json")
    (path / "state.json").symlink_to(tmp_path / "elsewhere.json")

    assert re.search("state.json: cannot be read", refusal(path, owner))


def test_a_directory_or_a_pipe_in_place_of_a_file_is_refused_without_waiting(path, owner):
    (path / "stage-0.safetensors").unlink()
    os.mkfifo(path / "stage-0.safetensors")

    assert re.search("stage-0.safetensors: is not a regular file", refusal(path, owner))


def test_a_file_that_changes_after_opening_is_refused_when_it_is_read(path, owner):
    checkpoint = open_checkpoint(path, owner.public, run="demo", config_digest="ab" * 32)
    flip(path / "stage-1.safetensors", -1)

    assert checkpoint.stage_tensors(0)
    with pytest.raises(CheckpointError, match=r"stage-1.safetensors: altered"):
        checkpoint.stage_tensors(1)


def test_a_damaged_newest_checkpoint_is_never_skipped_silently(save, tmp_path, owner):
    save(10)
    (save(20) / "stage-0.safetensors").unlink()

    assert re.search("step-00000020/stage-0.safetensors: missing", refusal(latest_checkpoint(tmp_path), owner))
