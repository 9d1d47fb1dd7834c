"""``phalanx data verify`` says what holds of a dataset or a proof, by which signer, and what does not."""

import json
import re
from pathlib import Path

import pytest

from made_dataset import entry_of, make_dataset
from phalanx.cli.outcome import run_command
from phalanx.data.shards import SealKey, fingerprint_of, open_dataset
from phalanx.data.shards.proof import prove_document
from phalanx.security.crypto import Identity

SIGNER = Identity.without_certificate("signer")
FINGERPRINT = fingerprint_of(SIGNER)


def test_a_whole_dataset_is_said_to_be_whole_and_by_whom_it_is_signed(tmp_path: Path, capsys) -> None:
    make_dataset(tmp_path / "d", 60, SIGNER)

    assert run_command(["data", "verify", str(tmp_path / "d"), "--signer", FINGERPRINT]) == 0
    named = capsys.readouterr().out
    assert run_command(["data", "verify", str(tmp_path / "d"), "--json"]) == 0
    unnamed = json.loads(capsys.readouterr().out)

    assert "all bytes match the signature" in named
    assert f"signed with the expected key {FINGERPRINT}" in named
    assert (unnamed["documents"], unnamed["signer"], unnamed["signer_was_named"]) == (60, FINGERPRINT, False)
    assert "not verified" in unnamed["trust"]


def test_an_encrypted_dataset_is_checked_with_its_key(tmp_path: Path, capsys) -> None:
    make_dataset(tmp_path / "d", 60, SIGNER, seal=SealKey.create_file(tmp_path / "key"))

    assert run_command(["data", "verify", str(tmp_path / "d")]) == 3
    assert "is encrypted; give the file of its key" in capsys.readouterr().err
    assert run_command(["data", "verify", str(tmp_path / "d"), "--key", str(tmp_path / "key")]) == 0


def test_a_key_that_is_rotated_opens_a_dataset_and_the_old_one_no_longer_does(tmp_path: Path, capsys) -> None:
    old, new = tmp_path / "old", tmp_path / "new"
    assert run_command(["data", "new-key", str(old)]) == run_command(["data", "new-key", str(new)]) == 0
    assert old.stat().st_mode & 0o777 == 0o600
    make_dataset(tmp_path / "d", 60, SIGNER, seal=SealKey.from_file(old))
    before = (tmp_path / "d" / "dataset.json").read_bytes()

    assert run_command(["data", "rotate", str(tmp_path / "d"), "--key", str(old), "--to", str(new)]) == 0

    assert run_command(["data", "verify", str(tmp_path / "d"), "--key", str(new), "--signer", FINGERPRINT]) == 0
    assert run_command(["data", "verify", str(tmp_path / "d"), "--key", str(old)]) == 3
    assert "was wrapped with key" in capsys.readouterr().err
    assert (tmp_path / "d" / "dataset.json").read_bytes() == before
    # with a key that does not open it nothing is written
    content = (tmp_path / "d" / "dataset.key.json").read_bytes()
    assert run_command(["data", "rotate", str(tmp_path / "d"), "--key", str(old), "--to", str(old)]) == 3
    assert (tmp_path / "d" / "dataset.key.json").read_bytes() == content


def test_a_dataset_in_the_clear_has_no_key_to_rotate(tmp_path: Path, capsys) -> None:
    make_dataset(tmp_path / "d", 60, SIGNER)
    SealKey.create_file(tmp_path / "key")

    assert (
        run_command(
            ["data", "rotate", str(tmp_path / "d"), "--key", str(tmp_path / "key"), "--to", str(tmp_path / "key")]
        )
        == 3
    )
    assert "is not encrypted and has no key to change" in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(("number", "words"), [(3, "is in the dataset"), (99, "is not in the dataset")])
def test_a_proof_is_checked_without_the_dataset(tmp_path: Path, capsys, number: int, words: str) -> None:
    make_dataset(tmp_path / "d", 60, SIGNER)
    proof = tmp_path / "proof.json"
    proof.write_bytes(prove_document(open_dataset(tmp_path / "d"), entry_of(number).digest).to_bytes())

    assert run_command(["data", "verify", "--proof", str(proof), "--signer", FINGERPRINT]) == 0
    assert words in capsys.readouterr().out
    assert run_command(["data", "verify", "--proof", str(proof), "--signer", "0" * 64]) == 3
    assert f"signed with key {FINGERPRINT}, expected" in capsys.readouterr().err


def test_a_flipped_byte_a_missing_dataset_and_no_argument_end_in_a_sentence(tmp_path: Path, capsys) -> None:
    make_dataset(tmp_path / "d", 60, SIGNER)
    shard = tmp_path / "d" / "shards" / "web.train" / "tokens-00000"
    shard.write_bytes(bytes([shard.read_bytes()[0] ^ 1]) + shard.read_bytes()[1:])

    for arguments, code, message in (
        (["data", "verify", str(tmp_path / "d")], 3, "web.train/tokens-00000: leaf 0"),
        (["data", "verify", str(tmp_path / "none")], 3, "cannot be read"),
        (["data", "verify", "--proof", str(shard)], 3, "proves nothing"),
        (["data", "verify", "--proof", str(tmp_path / "none")], 3, "cannot be read"),
        (["data", "verify"], 2, "expected either a dataset or --proof FILE"),
    ):
        assert run_command(arguments) == code
        assert message in capsys.readouterr().err


@pytest.mark.parametrize("place", [0, 7, 8, 20, -1])
def test_the_two_digests_of_an_altered_tree_are_shown_where_they_differ(tmp_path: Path, capsys, place: int) -> None:
    make_dataset(tmp_path / "d", 60, SIGNER)
    trees = sorted((tmp_path / "d").rglob("*.tree"))
    # a tree of one leaf is its own root: an altered byte of it alters two digits of the root
    tree = next(path for path in trees if path.stat().st_size == 32)
    content = bytearray(tree.read_bytes())
    content[place] ^= 0x10
    tree.write_bytes(content)

    assert run_command(["data", "verify", str(tmp_path / "d")]) == 3

    told = " ".join(capsys.readouterr().err.split())
    found, expected = re.search(r"has root ([0-9a-f]+)\.\.\., but the manifest has ([0-9a-f]+)\.\.\.", told).groups()
    assert found != expected
    assert bytes(content).hex().startswith(found)
