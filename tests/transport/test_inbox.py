"""The inbox by itself: in order, bounded for each sender, closed to those that were cut off; and what each may send."""

import threading

import pytest

from phalanx.errors import PeerLostError, PeerRefusedError
from phalanx.transport.inbox import Allowance, Allowances, CheckedFrame, Inbox, LinkFault

BOUND = 10_000
OVERHEAD = 1024
SECONDS = 20.0


def frame(sender="worker", number=0, payload=b""):
    return CheckedFrame(sender, "tensor", {"n": number}, memoryview(payload), None)


def fault(peer="worker"):
    return LinkFault(peer, PeerLostError("gone"))


@pytest.fixture
def inbox():
    return Inbox(BOUND)


def put(inbox, item, size_bytes, timeout_s=0.0):
    inbox.put_frame(item, size_bytes, timeout_s)


def numbers(inbox):
    found = []
    while (item := inbox.get_item(0.0)) is not None:
        found.append(item.peer if isinstance(item, LinkFault) else (item.sender, item.body["n"]))
    return found


# --- order -----------------------------------------------------------------------------------------------------------


def test_frames_of_all_senders_come_out_in_the_order_in_which_they_came(inbox):
    for number, sender in enumerate(("worker", "mallory", "worker")):
        put(inbox, frame(sender, number), 10)

    assert numbers(inbox) == [("worker", 0), ("mallory", 1), ("worker", 2)]
    assert inbox.get_item(0.0) is None


def test_a_fault_waits_its_turn_unless_its_party_is_cut_off(inbox):
    put(inbox, frame("worker", 0), 10)
    put(inbox, frame("mallory", 1), 10)
    inbox.put_fault(fault("mallory"))

    inbox.cut_off("worker", fault("worker"))

    assert numbers(inbox) == ["worker", ("mallory", 1), "mallory"]


# --- bounds ----------------------------------------------------------------------------------------------------------

TENSOR = b"x"


@pytest.mark.parametrize("over", [0, 1])
def test_a_sender_has_room_for_exactly_the_bound(inbox, over):
    put(inbox, frame(payload=TENSOR), BOUND - 2 * OVERHEAD - 100)

    if over:
        with pytest.raises(PeerLostError, match="no room for 101 bytes within 0 s"):
            put(inbox, frame(payload=TENSOR), 101)
    else:
        put(inbox, frame(payload=TENSOR), 100)


@pytest.mark.parametrize("over", [0, 1])
def test_a_frame_without_payload_has_room_until_twice_the_bound(inbox, over):
    put(inbox, frame(payload=TENSOR), BOUND - OVERHEAD)

    if over:
        with pytest.raises(PeerLostError):
            put(inbox, frame(), BOUND - OVERHEAD + 1)
    else:
        put(inbox, frame(), BOUND - OVERHEAD)


def test_one_frame_of_any_size_passes_where_nothing_of_its_sender_lies(inbox):
    put(inbox, frame(payload=TENSOR), 100 * BOUND)

    assert inbox.get_item(0.0) is not None


def test_a_full_share_of_one_sender_leaves_another_its_own(inbox):
    put(inbox, frame("mallory", payload=TENSOR), BOUND)

    put(inbox, frame("worker", payload=TENSOR), BOUND)

    assert len(numbers(inbox)) == 2


def test_what_was_taken_out_makes_room_again(inbox):
    put(inbox, frame(payload=TENSOR), BOUND)
    inbox.get_item(0.0)
    put(inbox, frame(payload=TENSOR), BOUND - 2 * OVERHEAD)

    put(inbox, frame(payload=TENSOR), 0)

    assert len(numbers(inbox)) == 2


def test_a_sender_that_waits_goes_on_when_there_is_room(inbox):
    put(inbox, frame(number=0, payload=TENSOR), BOUND)
    waiting = threading.Thread(
        daemon=True, target=put, args=(inbox, frame(number=1, payload=TENSOR), BOUND, 10 * SECONDS)
    )
    waiting.start()

    assert inbox.get_item(SECONDS).body["n"] == 0
    assert inbox.get_item(SECONDS).body["n"] == 1
    waiting.join(SECONDS)


# --- cut off, refused, closed ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["refuse", "cut_off"])
def test_nothing_more_of_a_refused_sender_comes_in_and_others_still_do(inbox, how):
    inbox.refuse_sender("mallory") if how == "refuse" else inbox.cut_off("mallory", fault("mallory"))

    with pytest.raises(PeerRefusedError, match="mallory: was evicted"):
        put(inbox, frame("mallory"), 10)
    put(inbox, frame("worker"), 10)
    assert ("worker", 0) in numbers(inbox)


def test_what_was_accepted_before_a_refusal_stays_and_before_a_cut_goes(inbox):
    for sender in ("worker", "mallory"):
        put(inbox, frame(sender), 10)

    inbox.refuse_sender("worker")
    inbox.cut_off("mallory", fault("mallory"))

    assert numbers(inbox) == ["mallory", ("worker", 0)]


@pytest.mark.parametrize(("how", "error"), [("refuse", PeerRefusedError), ("close", PeerLostError)])
def test_a_sender_that_waits_for_room_is_told_at_once_that_there_will_be_none(inbox, how, error):
    put(inbox, frame(payload=TENSOR), BOUND)
    raised = []

    def late():
        try:
            put(inbox, frame(payload=TENSOR), BOUND, 10 * SECONDS)
        except (PeerRefusedError, PeerLostError) as exc:
            raised.append(type(exc))

    waiting = threading.Thread(target=late, daemon=True)
    waiting.start()
    inbox.refuse_sender("worker") if how == "refuse" else inbox.close()
    waiting.join(SECONDS)

    assert raised == [error]


def test_a_closed_inbox_takes_nothing_and_hands_out_what_lies_in_it(inbox):
    put(inbox, frame(), 10)

    inbox.close()

    with pytest.raises(PeerLostError):
        put(inbox, frame(), 10)
    assert inbox.get_item(SECONDS).sender == "worker"
    # a reader of a closed inbox never waits, nor asks again and again
    with pytest.raises(PeerLostError, match="closed"):
        inbox.get_item(SECONDS)


# --- who waits -------------------------------------------------------------------------------------------------------


def test_a_reader_that_does_not_wait_has_no_waiting_call(inbox):
    inbox.get_item(0.0)

    assert inbox.waiting_call is None


def test_a_reader_that_waits_in_vain_is_seen_by_the_number_of_its_call(inbox):
    inbox.get_item(0.0)
    reader = threading.Thread(target=inbox.get_item, args=(SECONDS,))
    reader.start()
    while inbox.waiting_call is None:
        pass

    assert inbox.waiting_call == 2
    put(inbox, frame(), 10)
    # there is something for it: it waits in vain no more, whether it has woken up or not
    assert inbox.waiting_call is None
    reader.join(SECONDS)


def test_a_reader_is_told_at_once_that_its_inbox_was_closed(inbox):
    told = []

    def read():
        with pytest.raises(PeerLostError, match="closed"):
            inbox.get_item(60.0)
        told.append(inbox.waiting_call)

    reader = threading.Thread(target=read)
    reader.start()
    while inbox.waiting_call is None:
        pass

    inbox.close()

    reader.join(SECONDS)
    assert told == [None]


# --- what each may send ----------------------------------------------------------------------------------------------


@pytest.fixture
def allowances():
    found = Allowances()
    found.limit_peers(Allowance(messages=3, size_bytes=100, refusals=2))
    return found


def test_without_a_bound_everything_passes():
    assert Allowances().spend_frame("worker", 2**60) is None
    assert Allowances().spend_refusal("worker", 2**60) is None


def test_a_peer_may_send_exactly_so_many_messages(allowances):
    assert [allowances.spend_frame("worker", 0) for _ in range(3)] == [None] * 3

    assert allowances.spend_frame("worker", 0) == "more than 3 messages in a step"


@pytest.mark.parametrize(("size_bytes", "why"), [(100, None), (101, "more than 100 bytes in a step")])
def test_a_peer_may_send_exactly_so_many_bytes(allowances, size_bytes, why):
    assert allowances.spend_frame("worker", size_bytes) == why


def test_a_peer_may_have_exactly_so_many_words_refused(allowances):
    assert [allowances.spend_refusal("worker", 0) for _ in range(2)] == [None] * 2

    assert allowances.spend_refusal("worker", 0) == "more than 2 refused messages in a step"


@pytest.mark.parametrize(("size_bytes", "allowed"), [(64 * 1024 - 1, True), (2 * 64 * 1024, False)])
def test_a_long_refused_word_counts_as_several(allowances, size_bytes, allowed):
    assert (allowances.spend_refusal("worker", size_bytes) is None) is allowed


def test_each_peer_is_counted_by_itself_and_a_new_step_counts_anew(allowances):
    for peer in ("worker", "mallory"):
        assert [allowances.spend_frame(peer, 10) for _ in range(3)] == [None] * 3
        assert allowances.spend_refusal(peer, 0) is None

    allowances.renew_all()

    assert [allowances.spend_frame("worker", 30) for _ in range(3)] == [None] * 3
    assert [allowances.spend_refusal("worker", 0) for _ in range(2)] == [None] * 2


def test_a_peer_that_once_sent_too_much_stays_cut_off_for_its_first_reason(allowances):
    allowances.spend_frame("worker", 101)
    allowances.renew_all()

    assert allowances.spend_frame("worker", 0) == "more than 100 bytes in a step"
    assert allowances.spend_refusal("worker", 0) == "more than 100 bytes in a step"


def test_a_trusted_peer_is_not_counted(allowances):
    allowances.exempt_peer("owner")

    assert [allowances.spend_frame("owner", 1000) for _ in range(9)] == [None] * 9
    assert [allowances.spend_refusal("owner", 10**6) for _ in range(9)] == [None] * 9


def test_what_was_granted_lasts_over_steps_until_it_is_used_and_only_for_its_peer(allowances):
    allowances.grant_frames("worker", 1, 50)
    allowances.spend_frame("worker", 100)
    allowances.renew_all()

    assert allowances.spend_frame("worker", 150) is None
    assert [allowances.spend_frame("worker", 0) for _ in range(3)] == [None] * 3
    # both grants are used up now
    assert allowances.spend_frame("worker", 0) == "more than 3 messages in a step"
    assert allowances.spend_frame("mallory", 101) is not None


def test_a_used_grant_is_used_up(allowances):
    allowances.grant_frames("worker", 0, 50)
    assert allowances.spend_frame("worker", 150) is None
    allowances.renew_all()

    assert allowances.spend_frame("worker", 101) == "more than 100 bytes in a step"
