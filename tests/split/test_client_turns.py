"""The turns of clients of other owners by themselves: which clients are asked, and when a turn is complete."""

import pytest

from phalanx.errors import DataError, FrameError
from phalanx.split.channel.turn_messages import ClientReady, ClientTurn, TurnDone
from phalanx.split.roles.turns import ClientTurns

MODEL, TOKENIZER = "ab" * 32, "cd" * 32
CLIENTS = ("north", "south")


def word(data="11" * 32, **changes):
    return ClientReady(**{"model": MODEL, "tokenizer": TOKENIZER, "data": data, **changes})


def turn(what="held_out", step=3):
    return ClientTurn(what=what, step=step, draw=5)


class SetClock:
    """A clock that a test sets."""

    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return SetClock()


@pytest.fixture
def turns(clock):
    return ClientTurns(CLIENTS, MODEL, num_classes=2, clock=clock)


@pytest.fixture
def ready(turns):
    turns.note_ready("south", word("22" * 32))
    turns.note_ready("north", word())
    return turns


@pytest.fixture
def measuring(ready):
    ready.begin_turn(turn(), 3)
    return ready


@pytest.fixture
def training(ready):
    ready.begin_turn(turn("train"), 3)
    return ready


# --- ready -----------------------------------------------------------------------------------------------------------


def test_a_session_is_ready_when_every_client_is_and_its_commitments_are_in_the_order_of_turns(turns):
    turns.note_ready("south", word("22" * 32))
    assert (turns.is_ready, dict(turns.data_commitments)) == (False, {"south": "22" * 32})

    turns.note_ready("north", word())

    assert turns.is_ready
    assert list(turns.data_commitments.items()) == [("north", "11" * 32), ("south", "22" * 32)]


def test_a_client_is_bound_to_its_first_word(turns):
    turns.note_ready("north", word())

    with pytest.raises(FrameError, match="already reported ready"):
        turns.note_ready("north", word("33" * 32))
    assert turns.data_commitments["north"] == "11" * 32


@pytest.mark.parametrize(
    ("change", "said"),
    [({"model": "ee" * 32}, "its model files differ"), ({"tokenizer": "ee" * 32}, "its tokenizer differs")],
)
def test_a_client_with_another_model_or_tokenizer_is_not_ready(turns, change, said):
    turns.note_ready("north", word())

    with pytest.raises(DataError, match=f"south: {said}"):
        turns.note_ready("south", word(**change))
    assert not turns.is_ready


# --- a turn begins ---------------------------------------------------------------------------------------------------


def test_no_turn_begins_before_every_client_is_ready(turns):
    turns.note_ready("north", word())

    with pytest.raises(FrameError, match="1 of 2 clients are ready"):
        turns.begin_turn(turn(), 3)


@pytest.mark.parametrize("step", [2, 4])
def test_a_turn_of_another_step_does_not_begin(ready, step):
    with pytest.raises(FrameError, match=f"turn of step {step}: the enclave is at step 3"):
        ready.begin_turn(turn(step=step), 3)


def test_no_turn_begins_inside_another(measuring):
    with pytest.raises(FrameError, match="2 have a turn to finish"):
        measuring.begin_turn(turn(), 3)


def test_no_turn_begins_after_the_end_has(ready):
    ready.begin_conclusion()
    for name in CLIENTS:
        ready.note_concluded(name)

    with pytest.raises(FrameError, match="turn of step 3"):
        ready.begin_turn(turn(), 3)


# --- microbatches ----------------------------------------------------------------------------------------------------


def test_a_client_may_send_what_its_turn_asked_for(measuring):
    measuring.check_turn("north", "held_out")


@pytest.mark.parametrize(("client", "what"), [("north", "train"), ("mallory", "held_out")])
def test_nothing_else_and_no_one_else_is_taken(measuring, client, what):
    with pytest.raises(FrameError, match="was asked for no microbatch"):
        measuring.check_turn(client, what)


def test_without_a_turn_no_microbatch_is_taken(ready):
    with pytest.raises(FrameError, match="was asked for no microbatch"):
        ready.check_turn("north", "held_out")


def test_a_client_that_is_done_sends_nothing_more(measuring):
    measuring.note_done("north", TurnDone(step=3))

    for late in (
        lambda: measuring.check_turn("north", "held_out"),
        lambda: measuring.note_done("north", TurnDone(step=3)),
    ):
        with pytest.raises(FrameError, match="was asked for no microbatch"):
            late()
    assert measuring.pop_finished_turn() is None


# --- a turn ends -----------------------------------------------------------------------------------------------------


def test_a_training_turn_is_what_its_step_came_to_and_is_handed_out_once(training):
    training.note_step(1.5, [(2.0, 3), (4.0, 5)])

    assert training.pop_finished_turn() == (turn("train"), [1.5, 6.0, 8.0])
    assert training.pop_finished_turn() is None


def test_a_step_that_no_turn_asked_for_is_refused(measuring):
    with pytest.raises(FrameError, match="no turn of 'train' is under way"):
        measuring.note_step(1.5, [])


def test_a_measuring_turn_is_complete_with_the_last_client_and_sums_over_all(measuring):
    measuring.note_measurement("south", 0.5, 2, found=[0, 1], true=[0, 0])
    measuring.note_done("south", TurnDone(step=3))
    assert measuring.pop_finished_turn() is None
    measuring.note_measurement("north", 0.25, 1, found=[1], true=[1])
    measuring.note_done("north", TurnDone(step=3))

    # summed loss, targets, then of each class: texts of it, texts taken for it, right ones
    assert measuring.pop_finished_turn() == (turn(), [0.75, 3.0, 2.0, 1.0, 1.0, 1.0, 2.0, 1.0])


def test_what_a_turn_measured_is_not_in_the_next_one(measuring):
    measuring.note_measurement("south", 0.5, 2, found=[0], true=[0])
    for name in CLIENTS:
        measuring.note_done(name, TurnDone(step=3))
    measuring.pop_finished_turn()
    measuring.begin_turn(turn(step=4), 4)
    for name in CLIENTS:
        measuring.note_done(name, TurnDone(step=4))

    assert measuring.pop_finished_turn() == (turn(step=4), [0.0] * 8)


def test_the_order_of_clients_is_in_no_bit_of_the_sum(turns):
    losses = [1e16, 1.0, -1e16]
    sums = []
    for order in (losses, losses[::-1]):
        found = ClientTurns(("north",), MODEL, num_classes=0)
        found.note_ready("north", word())
        found.begin_turn(turn(), 3)
        for loss in order:
            found.note_measurement("north", loss, 1, [], [])
        found.note_done("north", TurnDone(step=3))
        sums.append(found.pop_finished_turn()[1][0])

    assert sums == [1.0, 1.0]


def test_a_client_that_does_not_count_when_the_turn_is_complete_is_in_no_number_of_it():
    counting = set(CLIENTS)
    found = ClientTurns(CLIENTS, MODEL, num_classes=2, counts=counting.__contains__)
    for name in CLIENTS:
        found.note_ready(name, word())
    found.begin_turn(turn(), 3)
    found.note_measurement("south", 90.0, 2, found=[0, 1], true=[0, 0])
    found.note_measurement("north", 0.25, 1, found=[1], true=[1])
    found.note_done("south", TurnDone(step=3))
    counting.remove("south")
    found.note_done("north", TurnDone(step=3))

    assert found.pop_finished_turn() == (turn(), [0.25, 1.0, 0.0, 0.0, 0.0, 1.0, 1.0, 1.0])


@pytest.mark.parametrize("step", [2, 4])
def test_word_of_another_step_completes_no_turn(measuring, step):
    with pytest.raises(FrameError, match=f"has measured at step {step}, which is not that of the turn"):
        measuring.note_done("north", TurnDone(step=step))


# --- the end ---------------------------------------------------------------------------------------------------------


def test_the_end_is_there_when_every_client_has_compared(ready):
    ready.begin_conclusion()

    assert [ready.note_concluded(name) for name in CLIENTS] == [False, True]


def test_the_end_does_not_begin_inside_a_turn(measuring):
    with pytest.raises(FrameError, match="the end: 2 clients have a turn to finish"):
        measuring.begin_conclusion()


def test_a_client_concludes_once_and_only_when_it_was_asked(ready):
    with pytest.raises(FrameError, match="was not asked to conclude"):
        ready.note_concluded("north")
    ready.begin_conclusion()
    ready.note_concluded("north")
    with pytest.raises(FrameError, match="was not asked to conclude"):
        ready.note_concluded("north")


def test_a_turn_is_no_word_of_the_end(measuring):
    with pytest.raises(FrameError, match="was not asked to conclude"):
        measuring.note_concluded("north")


# --- who is waited for -----------------------------------------------------------------------------------------------


def named(turns, clock, seconds, act=lambda: None):
    """The clients that are named at each second from the next on, where some are."""
    found = {}
    for _ in range(seconds):
        clock.now += 1
        act()
        if names := turns.overdue_clients("south"):
            found[int(clock.now)] = names
    return found


def test_a_turn_that_waits_names_its_clients_once_in_a_while(measuring, clock):
    measuring.note_done("north", TurnDone(step=3))

    assert named(measuring, clock, 25) == {10: ("south",), 20: ("south",)}


def test_what_is_measured_begins_the_wait_anew(measuring, clock):
    named(measuring, clock, 9)
    measuring.note_measurement("south", 0.5, 1, [0], [0])

    assert named(measuring, clock, 9) == {}


def test_a_client_that_measures_a_row_a_second_for_ever_is_named(measuring, clock):
    measuring.note_done("north", TurnDone(step=3))

    found = named(measuring, clock, 130, lambda: measuring.note_measurement("south", 0.5, 1, [0], [0]))

    assert found == {60: ("south",), 120: ("south",)}


def test_a_turn_is_timed_from_its_own_beginning(measuring, clock):
    named(measuring, clock, 59, lambda: measuring.note_measurement("south", 0.5, 1, [0], [0]))
    for name in CLIENTS:
        measuring.note_done(name, TurnDone(step=3))
    measuring.pop_finished_turn()
    measuring.begin_turn(turn(), 3)

    assert named(measuring, clock, 9) == {}


def test_a_step_waits_for_the_client_that_is_due_alone(training, clock):
    assert named(training, clock, 10) == {10: ("south",)}


def test_the_end_waits_for_all_that_have_not_compared(ready, clock):
    ready.begin_conclusion()

    assert named(ready, clock, 10) == {10: CLIENTS}


def test_where_no_turn_waits_no_client_is_named(ready, clock):
    assert named(ready, clock, 200) == {}
