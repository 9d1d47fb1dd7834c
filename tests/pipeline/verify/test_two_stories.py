"""A party that equivocates, or shows what no party signed, is named from signatures alone."""

import dataclasses
import json

import pytest
import torch

from phalanx.pipeline import PipelineConfig
from phalanx.pipeline.protocol.messages import Activation, Commit, FetchReply, PassedOnHeader
from phalanx.pipeline.protocol.signed import to_signed
from phalanx.security.crypto import digest_hex
from phalanx.testing import Actor, rewrite_only, tampering, tiny_run
from phalanx.transport import SignedHeader, sign_header

FALSE = "7" * 64
SIZE_BYTES = 2 * 8 * 16 * 4


def run_against(make_company, honest_digest, stage, actor, run=None):
    """Run a company with one liar; return its one verdict after checking that nothing else was harmed."""
    run = run or tiny_run()
    company = make_company(run, {stage: actor})
    company.run(2)
    assert company.evicted == [f"worker-{stage}"], company.events
    assert company.weights_digest() == honest_digest(run, 2)
    return company.verdicts[0]


def commit_with(change):
    """Rewrite the commitments of a stage."""
    return Actor(rewrite=rewrite_only(Commit, lambda outgoing, commit: [outgoing.with_fields(change(commit))]))


@pytest.mark.quick_cases("2-forward")
@pytest.mark.parametrize(("stage", "direction"), [(1, "backward"), (2, "forward")])
def test_a_stage_that_commits_to_another_tensor_than_it_sent_is_named(make_company, honest_digest, stage, direction):
    def other_digest(commit):
        altered = [
            sent.model_copy(update={"digest": FALSE}) if (sent.direction, sent.microbatch) == (direction, 3) else sent
            for sent in commit.sent
        ]
        return {"sent": tuple(altered)}

    verdict = run_against(make_company, honest_digest, stage, commit_with(other_digest))

    assert (verdict.offence, verdict.stage) == ("equivocation", stage)
    assert "microbatch 3" in verdict.reason
    assert direction in verdict.reason


def test_a_stage_that_commits_to_nothing_that_it_sent_is_named(make_company, honest_digest):
    verdict = run_against(make_company, honest_digest, 1, commit_with(lambda commit: {"sent": ()}))

    assert verdict.offence == "equivocation"


def test_a_neighbour_that_is_told_another_story_than_the_owner_gives_the_stage_away(make_company, honest_digest):
    # the tensor on the link is a lie, the commitment speaks of the honest one
    honest = {}

    def remember(direction, step, microbatch, tensor):
        honest[direction, microbatch] = digest_hex(tensor.contiguous().numpy().tobytes())
        return -tensor if direction == "forward" else tensor

    def commit_honestly(commit):
        sent = [s.model_copy(update={"digest": honest[s.direction, s.microbatch]}) for s in commit.sent]
        return {"sent": tuple(sent)}

    actor = dataclasses.replace(commit_with(commit_honestly), wrap_copy=tampering(remember))

    verdict = run_against(make_company, honest_digest, 2, actor)

    assert verdict.offence in ("equivocation", "message")


@pytest.mark.parametrize("stage", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_receiver_that_forges_a_header_is_named_and_not_the_sender(make_company, honest_digest, stage):
    def forge(commit):
        first, *rest = commit.received
        fields = json.loads(first.header) | {"payload_digest": FALSE}
        header = json.dumps(fields, sort_keys=True, separators=(",", ":"))
        return {"received": (PassedOnHeader(header=header, signature=first.signature), *rest)}

    verdict = run_against(make_company, honest_digest, stage, commit_with(forge))

    assert (verdict.offence, verdict.stage) == ("forgery", stage)
    assert "committed to an input that no party sent it" in verdict.reason


def test_a_receiver_that_hides_an_input_is_named(make_company, honest_digest):
    verdict = run_against(make_company, honest_digest, 1, commit_with(lambda commit: {"received": commit.received[1:]}))

    assert (verdict.offence, verdict.stage) == ("forgery", 1)
    assert "did not commit to this input" in verdict.reason


def test_a_sender_that_tells_the_auditor_another_story_is_named_by_its_own_signatures(make_company, honest_digest):
    # worker-1 answers the auditor of stage 2 with another tensor, under a header that it signs once more
    company_of = {}

    def two_stories(outgoing, fetched):
        if fetched.claim or fetched.evidence is None or fetched.source != 1:
            return [outgoing]
        lie = (-torch.frombuffer(bytearray(outgoing.payload), dtype=torch.float32)).numpy().tobytes()
        signer = company_of["it"].party_identity("worker-1")
        fields = open_header(fetched.evidence)
        told = sign_header(signer, dataclasses.replace(fields, payload_digest=digest_hex(lie)))
        changed = outgoing.with_fields({"evidence": to_signed(told)})
        return [type(outgoing)(changed.receiver, changed.message, lie)]

    company = make_company(tiny_run(5), {1: Actor(rewrite=rewrite_only(FetchReply, two_stories))})
    company_of["it"] = company
    # the auditor must not be worker-1 itself, which knows what it sent
    assert company.engine.stage_shadows[2] == "worker-3"

    company.run(2)

    (verdict,) = company.verdicts
    assert (verdict.party, verdict.offence) == ("worker-1", "equivocation")
    assert company.weights_digest() == honest_digest(tiny_run(5), 2)


def test_a_sender_that_gives_the_auditor_bytes_that_it_did_not_sign_is_passed_over(make_company, honest_digest):
    # bytes that do not match a header blame nobody; the auditor gets them from the receiver
    def other_bytes(outgoing, fetched):
        if fetched.claim or fetched.source != 1:
            return [outgoing]
        return [type(outgoing)(outgoing.receiver, outgoing.message, bytes(len(outgoing.payload)))]

    company = make_company(tiny_run(5), {1: Actor(rewrite=rewrite_only(FetchReply, other_bytes))})

    company.run(2)

    assert company.verdicts == []
    assert company.weights_digest() == honest_digest(tiny_run(5), 2)


def open_header(signed):
    return SignedHeader(signed.header.encode(), bytes.fromhex(signed.signature)).fields


@pytest.mark.quick_cases("1-forward-shape", "2-forward-dtype")
@pytest.mark.parametrize(
    ("stage", "direction", "field"),
    [(1, "forward", "shape"), (1, "backward", "dtype"), (2, "forward", "dtype"), (2, "backward", "shape")],
)
def test_a_tensor_of_another_shape_or_type_convicts_its_sender(make_company, honest_digest, stage, direction, field):
    value = {"shape": (2, 4, 32), "dtype": "float64"}[field]

    def disguise(outgoing, message):
        if message.direction != direction or message.step != 1:
            return [outgoing]
        return [outgoing.with_fields({field: value})]

    actor = Actor(rewrite=rewrite_only(Activation, disguise))

    verdict = run_against(make_company, honest_digest, stage, actor)

    assert (verdict.offence, verdict.stage) == ("shape", stage)


@pytest.mark.parametrize(
    "size", [SIZE_BYTES - 4, *(pytest.param(size, marks=pytest.mark.slow) for size in (0, SIZE_BYTES + 4))]
)
def test_a_payload_of_another_size_than_its_claim_convicts_its_sender(make_company, honest_digest, size):
    def cut(outgoing, message):
        if message.step != 1 or message.direction != "forward":
            return [outgoing]
        return [type(outgoing)(outgoing.receiver, message, bytes(size))]

    run = tiny_run(pipeline=PipelineConfig(stages=4, step_timeout_s=3.0))

    verdict = run_against(make_company, honest_digest, 1, Actor(rewrite=rewrite_only(Activation, cut)), run)

    assert (verdict.offence, verdict.stage) == ("shape", 1)
