"""What leaves a party that breaks the protocol, message by message."""

import json

import pytest
import torch
from driven_stage import tensor

from phalanx.lab.attacks import make_attack
from phalanx.pipeline.protocol.messages import (
    Activation,
    AuditReport,
    Commit,
    FetchReply,
    PassedOnHeader,
    SentDigest,
    UpdateReport,
)
from phalanx.testing import OutgoingMessage, WorkerCrash

NOW = {"epoch": 0, "step": 2}
PLACES = [(direction, m) for direction in ("forward", "backward") for m in range(4)]
RECEIVED = tuple(
    PassedOnHeader(header=json.dumps({"payload_digest": f"{m}" * 64, "sequence": m}), signature="aa") for m in range(4)
)


def activation(direction, microbatch, step=2):
    target = 2 if direction == "forward" else 0
    message = Activation(
        epoch=0,
        step=step,
        microbatch=microbatch,
        direction=direction,
        source=1,
        target=target,
        dtype="float32",
        shape=(2, 8, 16),
    )
    return OutgoingMessage(f"worker-{target}", message, tensor(microbatch).numpy().tobytes())


def commit(step=2):
    sent = tuple(SentDigest(direction=direction, microbatch=m, digest="1" * 64) for direction, m in PLACES)
    message = Commit(epoch=0, step=step, stage=1, received=RECEIVED, sent=sent, norm_squared=1.0, gradient="2" * 64)
    return OutgoingMessage("owner", message)


def fetched(microbatch=0, step=2):
    message = FetchReply(
        epoch=0, step=step, microbatch=microbatch, direction="forward", source=1, claim=False, evidence=RECEIVED[0]
    )
    return OutgoingMessage("worker-3", message, b"1234")


def report(microbatch, step=2):
    message = AuditReport(
        epoch=0, step=step, stage=2, microbatch=microbatch, inputs=(), digests={"forward": "3" * 64}, order=1
    )
    return OutgoingMessage("owner", message)


APPLIED = OutgoingMessage("owner", UpdateReport(**NOW, states={}, usage={}, bytes_sent={}))
LETTERS = [*(activation(*place) for place in PLACES), commit(), fetched(), report(0), APPLIED]


@pytest.fixture
def liar(attack_config, tmp_path):
    def make(kind, **changes):
        return make_attack(attack_config(kind, **changes), "worker-1", tmp_path / "attack.jsonl")

    return make


def told(tmp_path):
    log = tmp_path / "attack.jsonl"
    return [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []


KINDS = ("equivocation", "withholding", "withheld_answer", "stall", "forged_receipt", "crash_when_challenged")


@pytest.mark.parametrize("kind", KINDS)
def test_outside_of_its_steps_every_letter_leaves_as_it_is(liar, kind, tmp_path):
    attack = liar(kind)

    for outgoing in (activation("forward", 0, step=1), commit(step=1), fetched(step=1), report(0, step=1)):
        assert list(attack.rewrite_message(outgoing)) == [outgoing]

    assert told(tmp_path) == []


def test_an_equivocator_sends_a_lie_and_keeps_the_truth_for_its_books(liar, tmp_path):
    outgoing = activation("forward", 1)

    lie, own = liar("equivocation").rewrite_message(outgoing)

    assert (lie.receiver, lie.message) == (outgoing.receiver, outgoing.message)
    assert torch.equal(torch.frombuffer(bytearray(lie.payload), dtype=torch.float32), -tensor(1).flatten())
    assert own == OutgoingMessage("worker-1", outgoing.message, outgoing.payload)
    (record,) = told(tmp_path)
    assert (record["what"], record["direction"], record["microbatch"]) == ("equivocation", "forward", 1)


@pytest.mark.parametrize("kind", ["equivocation", "withholding"])
def test_an_attack_on_tensors_keeps_to_its_direction(liar, kind, tmp_path):
    attack = liar(kind, direction="backward", **({"strength": 1.0} if kind == "withholding" else {}))

    for place in PLACES:
        outgoing = activation(*place)
        assert (list(attack.rewrite_message(outgoing)) == [outgoing]) == (place[0] == "forward")

    assert [record["direction"] for record in told(tmp_path)] == ["backward"] * 4


def test_the_strength_of_withholding_is_the_share_that_does_not_leave(liar, tmp_path):
    attack = liar("withholding", strength=0.5)

    kept = [m for m in range(400) if not attack.rewrite_message(activation("forward", m))]

    # four standard deviations
    assert abs(len(kept) - 200) < 40
    assert [record["microbatch"] for record in told(tmp_path)] == kept
    assert all(attack.rewrite_message(outgoing) for outgoing in (commit(), fetched(), report(0), APPLIED))


def test_a_withheld_answer_is_the_only_letter_that_is_missing(liar, tmp_path):
    attack = liar("withheld_answer")

    missing = [outgoing.message.kind for outgoing in LETTERS if not attack.rewrite_message(outgoing)]

    assert missing == ["fetched"]
    assert [record["what"] for record in told(tmp_path)] == ["withheld answer"]


def test_a_stalled_party_says_nothing_any_more(liar, tmp_path):
    attack = liar("stall")

    assert [list(attack.rewrite_message(outgoing)) for outgoing in LETTERS] == [[]] * len(LETTERS)
    # not even in a step that is none of the attack's
    assert list(attack.rewrite_message(commit(step=3))) == []
    assert [(record["what"], record["step"]) for record in told(tmp_path)] == [("stall", 2)]


def test_a_forged_receipt_differs_in_one_header_and_keeps_its_signature(liar, tmp_path):
    outgoing = commit()

    (sent,) = liar("forged_receipt").rewrite_message(outgoing)

    pairs = list(zip(sent.message.received, RECEIVED, strict=True))
    ((forged, honest),) = [pair for pair in pairs if pair[0] != pair[1]]
    assert forged.signature == honest.signature
    assert json.loads(forged.header)["sequence"] == json.loads(honest.header)["sequence"]
    assert sent.message.model_copy(update={"received": RECEIVED}) == outgoing.message
    assert [record["what"] for record in told(tmp_path)] == ["forged receipt"]


def test_who_has_lied_dies_when_it_is_challenged(liar, make_copy):
    attack = liar("crash_when_challenged")
    assert attack.rewrite_message(fetched())

    attack.wrap_copy(make_copy(), True).runner.forward(2, 0, tensor(0))

    assert all(
        attack.rewrite_message(outgoing) for outgoing in (activation("forward", 0), commit(), report(0), APPLIED)
    )
    with pytest.raises(WorkerCrash):
        attack.rewrite_message(fetched())


def test_an_audit_aware_liar_is_honest_where_it_has_seen_most_audits(liar, make_copy):
    attack = liar("audit_aware", strength=0.5)
    runner = attack.wrap_copy(make_copy(), True).runner
    for microbatch in (3, 3, 1, 3, 0, 1):
        assert list(attack.rewrite_message(report(microbatch, step=1))) == [report(microbatch, step=1)]

    sent = [runner.forward(2, m, tensor(m)) for m in range(4)]

    honest = make_copy().runner
    lied = [m for m in range(4) if not torch.equal(sent[m], honest.forward(2, m, tensor(m)))]
    assert lied == [0, 2]
