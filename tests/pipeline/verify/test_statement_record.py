"""The record of signed statements by itself: one place for each identity, and the first word stays there."""

import pytest
from hand_made import EPOCH, HOLDER, OWNER, SHADOW, STAGE, STEP, make_world, received

from phalanx.errors import FrameError
from phalanx.pipeline.protocol.messages import (
    Activation,
    Apply,
    Audit,
    AuditReport,
    Commit,
    Fault,
    Fetch,
    FetchReply,
    GradientHeld,
    Ready,
    ScreenHit,
    StateDigest,
    StepAudited,
    UpdateReport,
    parse_message,
)
from phalanx.pipeline.protocol.signed import STATE, WHOLE_MODEL, StatementKey, statements_in, to_signed
from phalanx.pipeline.verify.state_judgement import gradient_headers
from phalanx.pipeline.verify.statement_record import StatementRecord

PLACE = {"epoch": EPOCH, "step": STEP, "stage": STAGE}
GRADIENT = {"gradient": "ab" * 32, "norm_squared": 1.0}
STATE_NOW = StateDigest(step=STEP, weights="aa" * 32, moments="bb" * 32)
OTHER_STATE = STATE_NOW.model_copy(update={"weights": "cc" * 32})


@pytest.fixture
def record():
    return StatementRecord()


def hear(record, message, sender=HOLDER):
    """Let the record take a message; return its header as evidence shows it, and what it contradicts."""
    item = received(message, sender)
    contradicted = record.add_message(sender, message, item.header)
    return to_signed(item.header), contradicted


def commit(**changes):
    return Commit(**{**PLACE, **GRADIENT, "received": (), "sent": (), **changes})


def held(**changes):
    return GradientHeld(**{**PLACE, **GRADIENT, "parts": (), **changes})


def audited(**changes):
    return StepAudited(**{**PLACE, **GRADIENT, "order": 4, **changes})


def report(**changes):
    digests = {"forward": "11" * 32, "backward": "22" * 32}
    return AuditReport(**{**PLACE, "microbatch": 0, "inputs": (), "digests": digests, "order": 4, **changes})


def order(**changes):
    what = {"microbatches": (0,), "directions": ("forward",), "order": 4, "urgent": True}
    return Audit(**{**PLACE, **what, **changes})


def ready(state=STATE_NOW, epoch=EPOCH, stage=STAGE):
    return Ready(epoch=epoch, states={str(stage): state})


def update(state=STATE_NOW, epoch=EPOCH, step=STEP):
    return UpdateReport(epoch=epoch, step=step, states={str(STAGE): state}, usage={}, bytes_sent={})


# --- identity --------------------------------------------------------------------------------------------------------


ONE_MESSAGE = {"commit": commit, "gradient": held, "step audit": audited, "report": report, "order": order}


@pytest.mark.parametrize("make", ONE_MESSAGE.values(), ids=ONE_MESSAGE)
@pytest.mark.parametrize("name", ["epoch", "step", "stage", "author"])
def test_what_differs_in_place_or_author_is_another_statement(record, make, name):
    first, author = make(), HOLDER
    if name == "author":
        second, author = make(), SHADOW
    else:
        second = make(**{name: getattr(first, name) + 1})
    header, _ = hear(record, first)

    other, contradicted = hear(record, second, author)

    assert (contradicted, len(record)) == (None, 2)
    assert (record.header_of(HOLDER, first), record.header_of(author, second)) == (header, other)


@pytest.mark.parametrize("make", [audited, report, order], ids=["step audit", "report", "order"])
def test_answers_to_two_orders_are_two_statements(record, make):
    hear(record, make())

    assert hear(record, make(order=5))[1] is None
    assert len(record) == 2


def test_reports_on_two_microbatches_are_two_statements(record):
    hear(record, report())

    assert hear(record, report(microbatch=1))[1] is None
    assert len(record) == 2


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (commit(), commit(norm_squared=2.0)),
        (commit(), commit(gradient="cd" * 32)),
        (held(), held(gradient="cd" * 32)),
        (audited(), audited(norm_squared=None)),
        (report(), report(digests={"forward": "33" * 32, "backward": "22" * 32})),
        (report(), report(digests={"forward": "11" * 32})),
        (order(), order(directions=("forward", "backward"))),
        (ready(), ready(OTHER_STATE)),
    ],
    ids=["norm", "gradient", "held", "step audit", "digest", "direction left out", "order", "ready"],
)
def test_the_first_word_stays_and_a_different_one_is_told_with_what_it_contradicts(record, first, second):
    header, _ = hear(record, first)

    assert hear(record, second)[1] == header

    (key, content), *_ = statements_in(HOLDER, first)
    assert (record.get_statement(key).content, record.get_statement(key).header) == (content, header)
    assert record.header_of(HOLDER, second) is None
    assert len(record) == 1


def test_the_same_word_in_another_frame_is_no_contradiction_and_takes_no_room(record):
    header, _ = hear(record, commit())

    for _ in range(100):
        assert hear(record, commit())[1] is None

    assert (len(record), record.header_of(HOLDER, commit())) == (1, header)


def test_a_state_is_one_statement_whichever_message_it_came_in(record):
    header, _ = hear(record, update())

    assert hear(record, ready(OTHER_STATE))[1] == header
    assert record.signed_state(HOLDER, STAGE, STATE_NOW) == header


def test_a_state_is_of_the_steps_that_it_has_taken_and_not_of_the_step_of_its_message():
    later = STATE_NOW.model_copy(update={"step": STEP + 1})

    ((key, content),) = statements_in(HOLDER, update(later, step=STEP))

    assert (key, content) == (StatementKey(STATE, HOLDER, EPOCH, STEP + 1, STAGE), later)


def test_of_many_states_in_one_message_a_single_different_one_contradicts(record):
    several = Ready(epoch=EPOCH, states={"1": STATE_NOW, "2": STATE_NOW})
    header, _ = hear(record, several)

    assert hear(record, Ready(epoch=EPOCH, states={"2": OTHER_STATE, "1": STATE_NOW}))[1] == header
    assert record.signed_state(HOLDER, 2, OTHER_STATE) is None


def test_a_decision_is_one_statement_about_the_whole_model(record):
    decision = Apply(epoch=EPOCH, step=STEP, clip_coefficient=0.5)
    header, _ = hear(record, decision, OWNER)

    assert record.get_statement(StatementKey("apply", OWNER, EPOCH, STEP, WHOLE_MODEL)).header == header
    assert hear(record, decision.model_copy(update={"clip_coefficient": 1.0}), OWNER)[1] == header


# --- what is not stored ----------------------------------------------------------------------------------------------


TENSOR_PLACE = {"epoch": EPOCH, "step": STEP, "microbatch": 0, "direction": "forward", "source": STAGE}
NO_STATEMENTS = {
    "a tensor": Activation(**TENSOR_PLACE, target=2, dtype="float32", shape=(2, 8, 16)),
    "a request": Fetch(**TENSOR_PLACE, claim=False),
    "an answer": FetchReply(**TENSOR_PLACE, claim=False, evidence=None),
    "an alarm": ScreenHit(**TENSOR_PLACE, reason="odd"),
    "a complaint": Fault(epoch=EPOCH, about=SHADOW, error="FrameError", reason="odd"),
}


@pytest.mark.parametrize("message", NO_STATEMENTS.values(), ids=NO_STATEMENTS)
def test_a_message_that_no_verdict_rests_on_states_nothing(record, message):
    assert hear(record, message)[1] is None
    assert len(record) == 0


def test_what_the_owner_says_to_itself_has_no_signature_and_is_not_stored(record):
    assert record.add_message(OWNER, commit(), None) is None

    assert len(record) == 0
    assert record.header_of(OWNER, commit()) is None


# --- states over changes of roles ------------------------------------------------------------------------------------


def test_of_one_state_signed_in_two_epochs_the_last_header_is_shown(record):
    hear(record, ready(epoch=EPOCH + 1))
    last, _ = hear(record, ready(epoch=EPOCH + 2))
    hear(record, ready(epoch=EPOCH))

    assert record.signed_state(HOLDER, STAGE, STATE_NOW) == last


def test_two_states_signed_in_two_epochs_are_two_statements_and_each_is_found(record):
    # a rollback may lie between the two
    before, _ = hear(record, ready(epoch=EPOCH))
    after, contradicted = hear(record, ready(OTHER_STATE, epoch=EPOCH + 1))

    assert contradicted is None
    assert record.signed_state(HOLDER, STAGE, STATE_NOW) == before
    assert record.signed_state(HOLDER, STAGE, OTHER_STATE) == after


@pytest.mark.parametrize(
    ("author", "stage", "state"),
    [(SHADOW, STAGE, STATE_NOW), (HOLDER, 2, STATE_NOW), (HOLDER, STAGE, OTHER_STATE)],
    ids=["another party", "another stage", "another state"],
)
def test_a_state_that_was_not_signed_is_not_found(record, author, stage, state):
    hear(record, ready())

    assert record.signed_state(author, stage, state) is None


# --- size ------------------------------------------------------------------------------------------------------------


def test_what_no_open_step_rests_on_is_let_go(record):
    for step in range(6):
        hear(record, commit(step=step))
        hear(record, ready(STATE_NOW.model_copy(update={"step": step})))

    record.forget_before(5)

    left = [step for step in range(6) if record.header_of(HOLDER, commit(step=step)) is not None]
    assert (left, len(record)) == ([3, 4, 5], 6)


def test_the_record_of_a_long_run_is_as_long_as_that_of_its_open_steps(record):
    sizes = []
    for step in range(50):
        record.forget_before(step)
        for microbatch in range(4):
            hear(record, report(step=step, microbatch=microbatch, order=step))
        sizes.append(len(record))

    assert max(sizes) == sizes[-1] == 12


# --- a world that hears them -----------------------------------------------------------------------------------------


@pytest.fixture
def world(model_cache):
    return make_world(model_cache)


def test_a_judgement_shows_the_headers_in_which_both_copies_signed_the_state(world):
    record, state = world.facts.record, world.state
    by_holder, _ = hear(record, ready(state), HOLDER)
    by_shadow, _ = hear(record, ready(state), SHADOW)

    shown = gradient_headers(world.facts, world.facts.ledger, STAGE)

    assert shown == {"commit": None, "state_holder": by_holder, "state_shadow": by_shadow}


def test_a_report_is_shown_with_the_very_order_that_it_answers(world):
    record = world.facts.record
    drawn, _ = hear(record, order(order=1, directions=("forward", "backward"), urgent=False), OWNER)
    urgent, _ = hear(record, order(order=2), OWNER)

    assert world.facts.order_header(report(order=1)) == drawn
    assert world.facts.order_header(report(order=2)) == urgent
    assert world.facts.order_header(report(order=3)) is None


def test_beginning_anew_forgets_everything(world):
    hear(world.facts.record, commit())

    world.facts.forget_states()

    assert len(world.facts.record) == 0


def test_a_state_of_a_name_that_is_no_stages_number_is_refused_before_it_could_be_stored():
    body = ready().model_dump(mode="json") | {"states": {"01": STATE_NOW.model_dump()}}

    with pytest.raises(FrameError):
        parse_message("ready", body)
