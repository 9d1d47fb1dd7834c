"""What happens where a defence is off: each attacker here wins against a toy, and loses against the channel."""

import pytest
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from sealed_pair import CUT, plain, shake_hands

from phalanx.errors import SealError
from phalanx.security.seal import Purpose, TensorKind
from phalanx.security.seal.header import TAG_BYTES, SealRefusal

KEY = b"\x09" * 32
SECRET = b"diagnosis: asthma, severe, inhaler"


def xor(one, other):
    return bytes(a ^ b for a, b in zip(one, other, strict=True))


class RestartsAtZero:
    """A toy sender that begins with nonce 0 at every start, under a key that it keeps."""

    def __init__(self):
        self._counter = 0

    def seal(self, data):
        nonce = self._counter.to_bytes(12, "big")
        self._counter += 1
        return AESGCM(KEY).encrypt(nonce, data, None)


def test_a_nonce_that_is_used_twice_reveals_what_was_sealed():
    known = b"a report that the attacker wrote".ljust(len(SECRET))
    before = RestartsAtZero().seal(known)
    after_restart = RestartsAtZero().seal(SECRET)

    read = xor(xor(before, after_restart)[: len(known)], known)

    assert read == SECRET


def test_a_channel_that_starts_again_reveals_nothing_that_way():
    known, secret = plain(1), plain(2)
    frames = []
    for data in (known, secret):
        client, _ = shake_hands()
        frames.append(client.sender.seal_tensor(CUT, 0, 0, data)[-CUT.size_bytes - 3 * TAG_BYTES :])

    read = xor(xor(*frames)[:32], known[:32])

    assert sum(a == b for a, b in zip(read, secret, strict=False)) < 8


class TakesWhatOpens:
    """A toy receiver that takes the nonce from the frame and keeps no order."""

    def open(self, frame):
        return AESGCM(KEY).decrypt(frame[:12], frame[12:], None)


def test_without_order_a_replayed_batch_is_trained_on_as_often_as_the_attacker_likes():
    frame = bytes(12) + AESGCM(KEY).encrypt(bytes(12), SECRET, None)
    receiver = TakesWhatOpens()

    trained_on = [receiver.open(frame) for _ in range(3)]

    assert trained_on == [SECRET] * 3


def test_with_order_it_is_trained_on_once():
    client, server = shake_hands()
    frame = client.sender.seal_tensor(CUT, 0, 0, plain())
    server.receiver.open_tensor(frame, CUT, 0, 0)

    for step in range(2):
        with pytest.raises(SealError) as caught:
            server.receiver.open_tensor(frame, CUT, step, 0)
        assert caught.value.reason == SealRefusal.REPLAYED


def test_without_a_tag_a_flipped_bit_flips_what_is_trained_on():
    sealed = AESGCM(KEY).encrypt(bytes(12), SECRET, None)
    stream = AESGCM(KEY).encrypt(bytes(12), bytes(len(SECRET)), None)[:-TAG_BYTES]
    altered = bytearray(sealed[:-TAG_BYTES])
    altered[0] ^= ord("d") ^ ord("D")

    assert xor(altered, stream) == b"D" + SECRET[1:]


def test_labels_cannot_be_passed_off_as_activations():
    client, server = shake_hands()
    label = TensorKind(Purpose.LABEL, "y", "uint8", (70,))
    frame = client.sender.seal_tensor(label, 0, 0, plain())

    with pytest.raises(SealError) as caught:
        server.receiver.open_tensor(frame, CUT, 0, 0)
    assert caught.value.reason == SealRefusal.OTHER_TENSOR
