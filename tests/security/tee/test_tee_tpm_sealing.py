"""Secrets sealed to a machine's state, against a real TPM implementation."""

import json
import secrets

import pytest

from phalanx.config import canonical_json
from phalanx.errors import CheckpointError, RollbackError, TpmError
from phalanx.security.seal import BlobPlace, BlobSealer
from phalanx.security.tee import TpmCounter, TpmSealer
from phalanx.security.tee.tpm import wire
from phalanx.security.tee.tpm.wire import TpmCommand

SECRET = secrets.token_bytes(32)
PCRS = (0, 7, 16)


@pytest.fixture
def sealer(device):
    return TpmSealer(device, PCRS)


def test_a_secret_opens_in_the_state_in_which_it_was_sealed(sealer):
    sealed = sealer.seal_secret(SECRET)

    assert sealer.unseal_secret(sealed) == SECRET
    assert SECRET not in sealed
    assert SECRET.hex().encode() not in sealed


def test_after_a_pcr_has_changed_a_secret_stays_closed(sealer, device):
    sealed = sealer.seal_secret(SECRET)

    device.extend_pcr(16, b"\x01" * 32)

    with pytest.raises(TpmError, match="PCRs 0, 7, 16 have other values"):
        sealer.unseal_secret(sealed)


def test_a_secret_opens_by_its_policy_alone(sealer, device):
    """Not by the empty password, which is publicly known."""
    sealed = json.loads(sealer.seal_secret(SECRET))
    device.extend_pcr(16, b"\x01" * 32)
    with device.primary_key(wire.OWNER, wire.storage_key()) as (parent, _):
        parts = (bytes.fromhex(sealed[name]) for name in ("private", "public"))
        parameters = b"".join(wire.size_prefixed(part) for part in parts)
        item, _ = device.make_object(TpmCommand.LOAD, (parent,), parameters, wire.password_authorisation())

    with pytest.raises(TpmError, match="UNSEAL"):
        device.send_command(TpmCommand.UNSEAL, (item,), b"", wire.password_authorisation())


def test_a_pcr_that_was_not_chosen_may_change(sealer, device):
    sealed = sealer.seal_secret(SECRET)

    device.extend_pcr(23, b"\x01" * 32)

    assert sealer.unseal_secret(sealed) == SECRET


def test_after_a_restart_in_the_same_state_a_secret_opens(bare_tpm):
    with bare_tpm.open() as device:
        sealed = TpmSealer(device, PCRS).seal_secret(SECRET)

    bare_tpm.restart()

    with bare_tpm.open() as device:
        assert TpmSealer(device, PCRS).unseal_secret(sealed) == SECRET


def test_naming_other_pcrs_in_the_envelope_opens_nothing(sealer, device):
    sealed = json.loads(sealer.seal_secret(SECRET))
    device.extend_pcr(16, b"\x01" * 32)
    sealed["pcrs"] = [0, 7]

    with pytest.raises(TpmError):
        sealer.unseal_secret(canonical_json(sealed))


def test_another_tpm_does_not_open_it(sealer, tmp_path):
    from bare_tpm import BareTpm

    sealed = sealer.seal_secret(SECRET)
    (tmp_path / "other").mkdir()
    other = BareTpm(tmp_path / "other")
    try:
        with other.open() as device, pytest.raises(TpmError):
            TpmSealer(device, PCRS).unseal_secret(sealed)
    finally:
        other.close()


@pytest.mark.parametrize("part", ["public", "private"])
def test_an_altered_byte_opens_nothing(sealer, part):
    sealed = json.loads(sealer.seal_secret(SECRET))
    raw = bytearray.fromhex(sealed[part])
    raw[-1] ^= 1
    sealed[part] = raw.hex()

    with pytest.raises(TpmError):
        sealer.unseal_secret(canonical_json(sealed))


@pytest.mark.parametrize(
    "sealed",
    [b"", b"{}", b"\xff", b'{"pcrs":"0","phalanx_tpm_sealed":1,"private":"00","public":"00"}',
     b'{"pcrs":[0],"phalanx_tpm_sealed":1,"private":"x","public":"00"}',
     b'{"pcrs":[0],"phalanx_tpm_sealed":1,"private":7,"public":"00"}'],
)  # fmt: skip
def test_what_is_no_sealed_secret_is_refused(sealer, sealed):
    with pytest.raises(CheckpointError):
        sealer.unseal_secret(sealed)


@pytest.mark.parametrize("size", [0, 129])
def test_what_a_tpm_cannot_hold_is_refused(sealer, size):
    with pytest.raises(TpmError, match="1 to 128"):
        sealer.seal_secret(bytes(size))


def test_the_longest_and_the_shortest_secret_open(sealer):
    for size in (1, 128):
        assert sealer.unseal_secret(sealer.seal_secret(b"\x07" * size)) == b"\x07" * size


def test_a_state_at_rest_opens_with_key_and_counter_of_the_tpm_and_an_older_one_does_not(device):
    sealer, counter = TpmSealer(device, PCRS), TpmCounter.create_counter(device)
    sealed_key, place = sealer.seal_secret(SECRET), BlobPlace("run", "adapters", 7)
    blobs = BlobSealer(bytes(sealer.unseal_secret(sealed_key)), counter)
    older, newer = blobs.seal_blob(place, b"older"), blobs.seal_blob(place, b"newer")

    opened = BlobSealer(bytes(sealer.unseal_secret(sealed_key)), counter)

    assert opened.open_blob(place, newer) == b"newer"
    with pytest.raises(RollbackError, match="older state was put back"):
        opened.open_blob(place, older)


def test_nothing_stays_behind_in_the_tpm(sealer, device):
    """A TPM holds three objects; one that was forgotten would stop the fourth use."""
    for _ in range(5):
        assert sealer.unseal_secret(sealer.seal_secret(SECRET)) == SECRET
    for _ in range(5):
        with pytest.raises(TpmError):
            sealer.unseal_secret(
                canonical_json({"phalanx_tpm_sealed": 1, "pcrs": [0], "public": "00", "private": "00"})
            )
    assert sealer.unseal_secret(sealer.seal_secret(SECRET)) == SECRET
