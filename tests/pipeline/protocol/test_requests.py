"""The owner's requests by themselves: an answer counts for the very request that it names, and for no other."""

import pytest
import torch

from phalanx.errors import FrameError
from phalanx.pipeline.protocol.message import ReceivedMessage
from phalanx.pipeline.protocol.messages import Bulk, Fetch, FetchBulk, FetchReply, SentDigest, parse_message
from phalanx.pipeline.protocol.needs import MessageNeed, TensorsNeed
from phalanx.pipeline.protocol.requests import Requests
from phalanx.transport import Allowances

PARTY, OTHER = "worker-1", "worker-2"
PLACE = {"epoch": 1, "step": 3}
KEY = (1, "forward", 0)
TENSORS = {"weight": torch.arange(4.0)}
BYTES = memoryview(TENSORS["weight"].numpy()).cast("B")


class Clock:
    def awake_seconds(self):
        return 0.0


class Desk:
    """Requests, with what was posted for them."""

    def __init__(self):
        self.posted = []
        self.requests = Requests(self._post, Clock(), Allowances(), 1000)

    def _post(self, party, message, payload):
        self.posted.append(message)

    def fetch(self, key=KEY, *, claim=False):
        return self.requests.begin_request(MessageNeed(PARTY, Fetch.from_key(1, 3, key, claim=claim)))

    def fetch_bulk(self, purpose="weights"):
        return self.requests.begin_request(TensorsNeed(PARTY, FetchBulk(**PLACE, stage=1, purpose=purpose), TENSORS))

    def reply(self, number, key=KEY, sender=PARTY, **changes):
        """An answer to a fetch comes; returns whether it was taken."""
        source, direction, microbatch = key
        place = {**PLACE, "source": source, "direction": direction, "microbatch": microbatch}
        message = FetchReply(**place, claim=False, evidence=None, request=number).model_copy(update=changes)
        return self.requests.accept_answer(ReceivedMessage(sender, message, memoryview(b""), None))

    def bulk(self, number, sender=PARTY, purpose="weights", **changes):
        about = {"stage": 1, "purpose": purpose, "offset": 0, "total": len(BYTES), "request": number}
        message = Bulk(**{**PLACE, **about, **changes})
        return self.requests.accept_answer(ReceivedMessage(sender, message, BYTES, None))


@pytest.fixture
def desk():
    return Desk()


def test_every_request_has_a_number_of_its_own_and_none_has_zero(desk):
    for _ in range(2):
        desk.fetch()
        desk.fetch_bulk()

    numbers = [message.request for message in desk.posted]
    assert len({*numbers}) == 4
    assert 0 not in numbers


def test_an_answer_is_taken_by_the_request_that_it_names(desk):
    first, second = desk.fetch(), desk.fetch()

    assert desk.reply(second.number)
    assert (first.answer is None, second.answer is None) == (True, False)
    assert desk.reply(first.number)
    assert first.answer is not None


def test_a_late_answer_to_an_earlier_request_is_not_one_to_the_newest(desk):
    earlier = desk.fetch()
    desk.requests.end_request(earlier)
    newest = desk.fetch()

    assert not desk.reply(earlier.number)
    assert newest.answer is None


@pytest.mark.parametrize(
    "changes",
    [
        {"sender": OTHER},
        {"key": (2, "forward", 0)},
        {"key": (1, "backward", 0)},
        {"key": (1, "forward", 1)},
        {"claim": True},
    ],
    ids=["another party", "another stage", "another direction", "another microbatch", "a claim"],
)
def test_an_answer_about_something_else_is_none_whatever_number_it_names(desk, changes):
    pending = desk.fetch()

    assert not desk.reply(pending.number, **changes)
    assert pending.answer is None


@pytest.mark.parametrize("number", [0, 99])
def test_an_answer_to_no_request_is_none(desk, number):
    desk.fetch()
    desk.fetch_bulk()

    assert not desk.reply(number)
    assert not desk.bulk(number)


def test_tensors_are_taken_by_the_request_that_they_name(desk):
    first, second = desk.fetch_bulk(), desk.fetch_bulk()

    assert desk.bulk(second.number)
    assert first.tensors is None
    assert torch.equal(second.tensors["weight"], TENSORS["weight"])


@pytest.mark.parametrize("changes", [{"sender": OTHER}, {"purpose": "undo"}, {"stage": 2}])
def test_tensors_of_something_else_are_none_whatever_number_they_name(desk, changes):
    pending = desk.fetch_bulk()

    assert not desk.bulk(pending.number, **changes)
    assert pending.tensors is None


def test_a_number_of_a_message_does_not_stand_for_tensors(desk):
    message, tensors = desk.fetch(), desk.fetch_bulk()

    assert not desk.bulk(message.number)
    assert not desk.reply(tensors.number)


# --- a commitment says one thing about each message ------------------------------------------------------------------


def commitment(*sent):
    body = {"received": (), "sent": [item.model_dump() for item in sent], "norm_squared": 1.0, "gradient": "ab" * 32}
    return {**PLACE, "stage": 1, **body}


@pytest.mark.parametrize("second", ["11" * 32, "22" * 32], ids=["the same digest", "another digest"])
def test_a_commitment_that_names_one_message_twice_is_refused(second):
    sent = [SentDigest(direction="forward", microbatch=0, digest=digest) for digest in ("11" * 32, second)]

    with pytest.raises(FrameError, match="names one message twice"):
        parse_message("commit", commitment(*sent))


def test_a_commitment_to_both_directions_of_a_microbatch_names_two_messages():
    sent = [SentDigest(direction=way, microbatch=0, digest="11" * 32) for way in ("forward", "backward")]

    assert len(parse_message("commit", commitment(*sent)).sent) == 2
