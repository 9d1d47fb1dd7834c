import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sealed_pair import CLIENT, CUT, SERVER, plain, shake_hands

from phalanx.config import canonical_json
from phalanx.errors import SignatureError, TranscriptError
from phalanx.security.crypto import Identity, digest_hex, in_domain
from phalanx.security.seal import Transcript, compare_statements, read_statement
from phalanx.security.seal.context import Direction


@pytest.fixture
def ends():
    """Both sides' channels and transcripts."""
    client, server = shake_hands()
    return client, server, Transcript(client, CLIENT), Transcript(server, SERVER)


def cross(sender, receiver, noted_by, opened_by, steps):
    for step in steps:
        frame = sender.seal_tensor(CUT, step, 0, plain(step))
        noted_by.note_sent(digest_hex(frame))
        receiver.open_tensor(frame, CUT, step, 0)
        opened_by.note_received(digest_hex(frame))


def statements(client, server):
    return read_statement(client.sign_transcript(), CLIENT.public), read_statement(
        server.sign_transcript(), SERVER.public
    )


def test_both_sides_agree_on_what_crossed_in_whatever_order_the_directions_took_turns(ends):
    client, server, mine, theirs = ends
    compare_statements(*statements(mine, theirs))

    cross(client.sender, server.receiver, mine, theirs, range(2))
    cross(server.sender, client.receiver, theirs, mine, range(3))
    cross(client.sender, server.receiver, mine, theirs, range(2, 4))

    found = statements(mine, theirs)
    compare_statements(*found)
    assert (found[0].to_server.num_frames, found[0].to_client.num_frames) == (4, 3)


def test_a_frame_that_was_withheld_at_the_end_is_found(ends):
    client, server, mine, theirs = ends
    cross(client.sender, server.receiver, mine, theirs, range(2))
    mine.note_sent(digest_hex(client.sender.seal_tensor(CUT, 2, 0, plain())))

    with pytest.raises(TranscriptError, match=r"to_server: client-a counts 3, enclave 2; some were withheld"):
        compare_statements(*statements(mine, theirs))


def test_a_side_that_says_it_saw_another_frame_is_found(ends):
    _, _, mine, theirs = ends
    mine.note_sent(digest_hex(b"one"))
    theirs.note_received(digest_hex(b"other"))

    with pytest.raises(TranscriptError, match="both count 1, and not the same"):
        compare_statements(*statements(mine, theirs))


def test_frames_in_another_order_have_another_head(ends):
    _, _, mine, theirs = ends
    for frame in (b"one", b"two", b"last"):
        mine.note_sent(digest_hex(frame))
    for frame in (b"two", b"one", b"last"):
        theirs.note_received(digest_hex(frame))

    with pytest.raises(TranscriptError, match="not the same"):
        compare_statements(*statements(mine, theirs))


def test_statements_about_two_sessions_are_not_compared(ends):
    other, _ = shake_hands()

    with pytest.raises(TranscriptError, match="two runs or sessions"):
        compare_statements(*statements(Transcript(other, CLIENT), ends[3]))


def test_a_channel_begins_another_chain_than_each_other_one(ends):
    first, second = Transcript(ends[0], CLIENT), Transcript(shake_hands()[0], CLIENT)

    heads = {transcript.direction_head(direction).digest for transcript in (first, second) for direction in Direction}

    assert len(heads) == 4


def test_every_byte_of_a_statement_counts(ends):
    data = ends[2].sign_transcript()

    for position in range(len(data)):
        altered = bytearray(data)
        altered[position] ^= 0x01
        with pytest.raises((TranscriptError, SignatureError)):
            read_statement(bytes(altered), CLIENT.public)


def test_a_statement_of_somebody_else_is_refused(ends):
    impostor = Identity.without_certificate("client-a")

    with pytest.raises(TranscriptError, match="expected enclave"):
        read_statement(ends[2].sign_transcript(), SERVER.public)
    with pytest.raises(SignatureError, match="client-a"):
        read_statement(Transcript(ends[0], impostor).sign_transcript(), CLIENT.public)


HEAD = {"num_frames": 0, "digest": "0" * 64}


@pytest.mark.parametrize(
    "changes",
    [
        {"party": 1},
        {"to_server": 1},
        {"to_server": {}},
        {"to_server": HEAD | {"num_frames": -1}},
        {"to_server": HEAD | {"num_frames": True}},
        {"to_client": HEAD | {"digest": "0"}},
        {"to_client": HEAD | {"digest": 0}},
        {"more": 1},
    ],
)
def test_a_signed_statement_with_odd_contents_is_refused(ends, changes):
    body = json.loads(ends[2].sign_transcript())["body"] | changes
    signature = CLIENT.sign_data(in_domain("seal-statement/1", canonical_json(body))).hex()

    with pytest.raises(TranscriptError, match="malformed"):
        read_statement(canonical_json({"body": body, "signature": signature}), CLIENT.public)


@given(st.binary(max_size=200) | st.sampled_from([b"{}", b'{"body":1,"signature":2}', b'{"body":{},"signature":2}']))
def test_what_is_no_statement_is_refused(data):
    with pytest.raises(TranscriptError, match="malformed"):
        read_statement(data, CLIENT.public)


@pytest.mark.parametrize("digest", ["", "0", "z" * 64, "A" * 64])
def test_what_is_no_digest_is_not_noted(ends, digest):
    with pytest.raises(TranscriptError, match="64 lowercase hex"):
        ends[2].note_sent(digest)
