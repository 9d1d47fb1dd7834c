"""Frames that are refused between the enclave's process and its parties are sent again, though not for ever."""

import pytest
from split_house import House
from split_scene import make_scene, train

from phalanx.errors import FrameError, SealError
from phalanx.split.channel import messages as say
from phalanx.split.channel.resend_window import TRIES, ReceiveWindow, SendWindow
from phalanx.testing import SplitSimulator


class Spoiling:
    """A link with frames that arrive changed, some times; what is refused does not open, as with any link."""

    def __init__(self, link, spoiled):
        self._link, self._spoiled, self.refused = link, list(spoiled), 0

    def __getattr__(self, name):
        return getattr(self._link, name)

    def unpack_tensor(self, frame, kind, step, microbatch, digest=""):
        spoil = self._spoiled.pop(0) if self._spoiled else False
        if spoil:
            self.refused += 1
            frame = bytearray(frame)
            frame[-1] ^= 1
        return self._link.unpack_tensor(frame, kind, step, microbatch, digest)


def spoil_uploads(session, client, pattern):
    links = session.server._enclave._links
    links[client] = Spoiling(links[client], pattern)
    return links[client]


def spoil_replies(session, client, pattern):
    side = session.lead._ends[client].side
    side.link = Spoiling(side.link, pattern)
    return side.link


@pytest.mark.parametrize(
    ("pattern", "client"),
    [
        ((True,), "client-0"),
        ((False, True, True), "client-1"),
        *(
            pytest.param(pattern, client, marks=pytest.mark.slow)
            for pattern, client in (
                ((True,), "client-1"),
                ((False, True, True), "client-0"),
                ((False, False, True), "client-0"),
                ((False, False, True), "client-1"),
            )
        ),
    ],
    ids=str,
)
def test_a_refused_frame_is_sent_again_and_the_bits_are_those_of_an_undisturbed_run(source, tmp_path, client, pattern):
    expected = train(SplitSimulator(make_scene(source)), 3)
    with House(source, tmp_path).open() as session:
        link = spoil_uploads(session, client, pattern)
        losses = [session.train_turn(number) for number in range(3)]
        statements = session.lead.compare_transcripts(session.house.identities["enclave"].public)

    assert losses == expected
    assert link.refused == sum(pattern)
    assert len(statements) == 3


def test_a_reply_that_does_not_open_is_asked_for_again(source, tmp_path):
    expected = train(SplitSimulator(make_scene(source)), 2)
    with House(source, tmp_path).open() as session:
        links = [spoil_replies(session, name, (True, True)) for name in ("client-0", "client-1")]
        losses = [session.train_turn(number) for number in range(2)]

    assert losses == expected
    assert [link.refused for link in links] == [2, 2]


def test_a_frame_that_never_opens_ends_the_session_after_so_many_tries_and_costs_no_step(source, tmp_path):
    expected = train(SplitSimulator(make_scene(source)), 2)
    house = House(source, tmp_path)
    session = house.open()
    losses = [session.train_turn(0)]
    step, number, blob = session.lead.request_state()
    kept = bytes(blob)
    session.lead.settle_state(number)
    link = spoil_uploads(session, "client-1", [True] * 99)
    with pytest.raises(SealError):
        session.train_turn(1)
    session.die()

    with house.open() as again:
        again.lead.restore_state(step, memoryview(kept))
        losses.append(again.train_turn(1))

    assert link.refused == TRIES
    assert losses == expected


def test_a_reply_that_never_opens_ends_the_session(source, tmp_path):
    with House(source, tmp_path).open() as session:
        link = spoil_replies(session, "client-0", [True] * 99)
        with pytest.raises(SealError):
            session.train_turn(0)
        session.lead.end_session()

    assert link.refused == TRIES


def test_nobody_is_repeated_what_was_never_said(source, tmp_path):
    with House(source, tmp_path).open() as session, pytest.raises(FrameError, match="no reply"):
        session.lead.enclave_peers[1].connection.request_answer(say.RepeatRequest(), say.Reply)


def upload(attempt=0):
    return say.Upload(what="train", microbatch=0, rows=1, attempt=attempt)


def test_what_was_under_way_before_a_refusal_was_heard_of_is_dropped():
    waiting = ReceiveWindow("client-0", 4)
    waiting.add_frame(upload(), memoryview(b"a"))
    waiting.pop_frame()
    assert waiting.refuse_frame() == say.ResendRequest(taken=0, attempt=1)

    waiting.add_frame(upload(), memoryview(b"late"))

    assert waiting.oldest_upload is None
    waiting.add_frame(upload(1), memoryview(b"again"))
    assert waiting.pop_frame()[1] == b"again"
    with pytest.raises(FrameError, match="was not refused"):
        waiting.add_frame(upload(2), memoryview(b"early"))


@pytest.mark.parametrize(
    "asked",
    [
        say.ResendRequest(taken=0, attempt=1),
        say.ResendRequest(taken=4, attempt=1),
        say.ResendRequest(taken=2, attempt=2),
    ],
)
def test_an_enclave_gets_nothing_again_that_is_not_of_the_step(asked):
    posted = []
    sending = SendWindow("client-0", lambda message, frame: posted.append(bytes(frame)))
    sending.send_frames(upload(), (bytearray(b"1"), bytearray(b"2")))
    sending.note_taken()
    sending.send_frames(upload(), (bytearray(b"3"), bytearray(b"4")))

    with pytest.raises(FrameError, match="none of this step"):
        sending.resend_frames(asked)

    assert posted == [b"1", b"2", b"3", b"4"]
    sending.resend_frames(say.ResendRequest(taken=3, attempt=1))
    assert posted[4:] == [b"4"]


def test_an_enclave_gets_nothing_for_ever():
    sending = SendWindow("client-0", lambda message, frame: None)
    sending.send_frames(upload(), (bytearray(b"1"), bytearray(b"2")))
    for attempt in range(1, TRIES):
        sending.resend_frames(say.ResendRequest(taken=0, attempt=attempt))

    with pytest.raises(FrameError, match="again and again"):
        sending.resend_frames(say.ResendRequest(taken=0, attempt=TRIES))


def test_every_frame_may_be_asked_for_as_often():
    posted = []
    sending = SendWindow("client-0", lambda message, frame: posted.append(bytes(frame)))
    sending.send_frames(upload(), (bytearray(b"1"), bytearray(b"2")))

    for attempt in range(1, 2 * (TRIES - 1) + 1):
        sending.resend_frames(say.ResendRequest(taken=(attempt - 1) // (TRIES - 1), attempt=attempt))

    assert posted == [b"1", b"2"] * TRIES + [b"2"] * (TRIES - 1)


def test_an_enclave_that_asks_for_two_frames_in_turn_gets_nothing_for_ever():
    sending = SendWindow("client-0", lambda message, frame: None)
    sending.send_frames(upload(), (bytearray(b"1"), bytearray(b"2")))
    sending.resend_frames(say.ResendRequest(taken=0, attempt=1))
    sending.resend_frames(say.ResendRequest(taken=1, attempt=2))

    with pytest.raises(FrameError, match="none of this step"):
        sending.resend_frames(say.ResendRequest(taken=0, attempt=3))
