"""A party that lies about a served text is named, with evidence, and its shadow goes on; without checks it wins."""

import asyncio
import json
import threading

import pytest
from liars import (
    BENDERS,
    FORMS,
    AfterTokens,
    Babbler,
    EarlierAnswer,
    ForeignStage,
    NoNumber,
    Refuser,
    Silent,
    TwoAnswers,
)
from safetensors.torch import load_file, save_file
from stage_scene import Scene, texts_of, worker_file

from machine_patience import patience_s
from phalanx.errors import ConfigError, EvidenceError, ModelError, PeerLostError
from phalanx.pipeline.evidence.files import file_digest
from phalanx.serve.engine import GenerationRequest, SamplingSettings, collect_events
from phalanx.serve.stages import StageHolder, explain_served_evidence
from phalanx.serve.stages.staged_model import check_convictions
from phalanx.serve.stages.transcript import StageLostError

PROMPTS = ["the end", "in a day", "and the", "an inn"]
ONE_STAGE = (("liar", "honest"),)


def lied_scene(tmp_path, directory, liar, **changes):
    return Scene(tmp_path, directory, {"liar": liar}, stages=ONE_STAGE, **changes)


@pytest.mark.parametrize("kind", sorted(BENDERS))
def test_a_liar_is_named_and_its_shadow_goes_on(kind, directory, one_process, tmp_path):
    right = texts_of(one_process, PROMPTS)

    with lied_scene(tmp_path, directory, BENDERS[kind]()) as scene:
        lied = scene.texts(PROMPTS)
        rechecks = scene.rechecks()
        after = scene.texts(PROMPTS)
        rechecks_after = scene.rechecks()[len(PROMPTS) :]

    (verdict,) = scene.relay.verdicts
    assert (verdict.party, verdict.offence, scene.relay.departures) == ("liar", "message", {"liar": "convicted"})
    assert lied != right
    # every text that was wrong is called so
    assert all(text == correct or word == "refuted" for text, correct, word in zip(lied, right, rechecks, strict=True))
    assert (after, rechecks_after) == (right, ["yes"] * len(PROMPTS))
    facts = explain_served_evidence(tmp_path / verdict.evidence, scene.pki / "authority.pem", "serve-1")
    assert facts["conclusion"].startswith("holds: liar signed")


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=() if kind == "after_tokens" else pytest.mark.slow) for kind in sorted(BENDERS)]
)
def test_every_liar_wins_where_nothing_is_redone(kind, directory, one_process, tmp_path):
    with lied_scene(tmp_path, directory, BENDERS[kind](), check_rate=0.0) as scene:
        lied = scene.texts(PROMPTS)
        rechecks = scene.rechecks()

    assert lied != texts_of(one_process, PROMPTS)
    assert (rechecks, scene.relay.verdicts) == (["no"] * len(PROMPTS), [])


def test_a_number_that_is_none_is_looked_into_at_once_and_no_text_is_wrong(directory, one_process, tmp_path):
    with lied_scene(tmp_path, directory, NoNumber(), check_rate=0.0) as scene:
        texts = scene.texts(PROMPTS)

    assert texts == texts_of(one_process, PROMPTS)
    (verdict,) = scene.relay.verdicts
    assert (verdict.party, verdict.offence, verdict.measured) == ("liar", "message", None)
    facts = explain_served_evidence(tmp_path / verdict.evidence, scene.pki / "authority.pem", "serve-1")
    assert facts["conclusion"].startswith("holds: liar signed")


@pytest.mark.parametrize("kind", sorted(FORMS))
def test_an_answer_that_is_not_of_its_step_convicts_without_any_check(kind, directory, one_process, tmp_path):
    with lied_scene(tmp_path, directory, FORMS[kind](), check_rate=0.0) as scene:
        texts = scene.texts(PROMPTS)

    assert texts == texts_of(one_process, PROMPTS)
    (verdict,) = scene.relay.verdicts
    assert (verdict.party, verdict.offence) == ("liar", "form")
    facts = explain_served_evidence(tmp_path / verdict.evidence, scene.pki / "authority.pem", "serve-1")
    assert facts["conclusion"].startswith("holds: liar signed")


def test_two_answers_to_one_step_convict(directory, one_process, tmp_path):
    with lied_scene(tmp_path, directory, TwoAnswers(), check_rate=0.0) as scene:
        texts = scene.texts(PROMPTS)

    assert texts == texts_of(one_process, PROMPTS)
    (verdict,) = scene.relay.verdicts
    assert (verdict.party, verdict.offence) == ("liar", "equivocation")
    facts = explain_served_evidence(tmp_path / verdict.evidence, scene.pki / "authority.pem", "serve-1")
    assert facts["conclusion"].startswith("holds: liar signed")


@pytest.mark.parametrize(
    ("holder", "cause"),
    [
        (Refuser, "refused"),
        (Silent, "silent"),
        pytest.param(EarlierAnswer, "silent", marks=pytest.mark.slow),
        (ForeignStage, "frames"),
        (Babbler, "frames"),
    ],
)
def test_who_does_not_answer_is_taken_out_and_convicted_of_nothing(holder, cause, directory, one_process, tmp_path):
    # silence alone is waited for; who is honest answers in time on a busy machine as well
    timeout_s = patience_s(4.0) if cause == "silent" else 60.0
    with lied_scene(tmp_path, directory, holder(), answer_timeout_s=timeout_s) as scene:
        texts = scene.texts(PROMPTS)
        rechecks = scene.rechecks()

    assert texts == texts_of(one_process, PROMPTS)
    assert (scene.relay.departures, scene.relay.verdicts) == ({"liar": cause}, [])
    assert rechecks == ["yes"] * len(PROMPTS)


class LiesThenRefuses(AfterTokens):
    """Lies about some tokens, then says that it does not go on."""

    def is_target(self, piece, position):
        return position >= 8

    def answer_step(self, step, digest, payload):
        if step.order >= 9:
            raise ModelError("no more for today")
        return super().answer_step(step, digest, payload)


def test_a_text_that_a_shadow_takes_over_from_a_liar_ends_with_an_error(directory, one_process, tmp_path):
    # no text is over before the liar leaves
    endless = SamplingSettings(temperature=0.0, logit_bias=dict.fromkeys(one_process.served.turn_ends, -100.0))
    with lied_scene(tmp_path, directory, LiesThenRefuses(), check_rate=0.0) as scene:
        texts = scene.texts(PROMPTS[:2], sampling=endless)
        rechecks = scene.rechecks()

    assert all(isinstance(text, StageLostError) for text in texts)
    assert rechecks == ["refuted"] * 2
    (verdict,) = scene.relay.verdicts
    assert (verdict.party, verdict.offence) == ("liar", "message")


def test_a_shadow_that_lies_in_taking_over_is_named_and_not_the_one_before(directory, one_process, tmp_path):
    holders = {"first": Refuser(6), "second": AfterTokens()}
    with Scene(tmp_path, directory, holders, stages=(("first", "second", "third"),), check_rate=0.0) as scene:
        texts = scene.texts(["the end of a day and in the end"])

    assert texts == texts_of(one_process, ["the end of a day and in the end"])
    assert scene.relay.departures == {"first": "refused", "second": "convicted"}
    assert [verdict.party for verdict in scene.relay.verdicts] == ["second"]


class Accomplice(AfterTokens):
    """Tells the lies of its partner; waits at a late token until the checks of earlier texts are done."""

    def __init__(self, max_steps=10**6):
        super().__init__()
        self.max_steps, self.finish_checks, self.has_begun = max_steps, lambda: None, threading.Event()

    def answer_step(self, step, digest, payload):
        self.has_begun.set()
        if step.order >= self.max_steps:
            raise ModelError("no more for today")
        return super().answer_step(step, digest, payload)

    def is_target(self, piece, position):
        if position == 40:
            self.finish_checks()
        return super().is_target(piece, position)


@pytest.mark.parametrize("leaves_before", [False, True])
def test_no_open_text_goes_on_where_both_holders_of_its_stage_tell_the_same_lie(
    leaves_before, directory, one_process, tmp_path
):
    """Attacker: both holders of a stage. One text is redone while another one, that is not drawn, is being written.

    The first holder is convicted while it serves, or after it has left the open text to its accomplice.
    """
    first, second = Accomplice(25) if leaves_before else Accomplice(), Accomplice()
    endless = {"logit_bias": dict.fromkeys(one_process.served.turn_ends, -100.0)}
    with Scene(tmp_path, directory, {"liar": first, "honest": second}, stages=ONE_STAGE) as scene:
        scene.relay._draw.is_drawn = lambda text, records: text == 0
        (second if leaves_before else first).finish_checks = scene.relay.finish_checks
        if leaves_before:
            check_text = scene.relay._check_text
            scene.relay._check_text = lambda text: second.has_begun.wait(60) and check_text(text)

        async def ask(max_tokens):
            sampling = SamplingSettings(temperature=0.0, **endless)
            request = GenerationRequest(
                model="tiny", text="the end", owner="alice", max_tokens=max_tokens, sampling=sampling
            )
            ids = scene.engine.served.encode_prompt(request)
            return await collect_events(await scene.engine.open_events(request, ids, ""))

        async def run():
            return await asyncio.gather(ask(16), ask(60), return_exceptions=True)

        _, long_text = asyncio.run(run())
        later = scene.texts(PROMPTS[:1])

    assert isinstance(long_text, StageLostError), "the shadow's word stood for the lie of a convicted party"
    assert scene.relay.verdicts[0].party == "liar"
    if not leaves_before:
        assert scene.relay.departures == {"liar": "convicted", "honest": "convicted"}
        assert [verdict.party for verdict in scene.relay.verdicts] == ["liar", "honest"]
        assert all(isinstance(text, StageLostError) for text in later)


def test_where_nobody_is_left_texts_end_with_an_error_and_so_do_later_ones(directory, tmp_path):
    holders = {"liar": Refuser(), "honest": Refuser()}
    with Scene(tmp_path, directory, holders, stages=ONE_STAGE) as scene:
        texts = scene.texts(PROMPTS)
        later = scene.texts(PROMPTS[:1])
        with pytest.raises(StageLostError):
            asyncio.run(scene.engine.embed_texts([(5, 6, 7)], ""))

    assert all(isinstance(text, StageLostError) for text in [*texts, *later])
    assert scene.relay.verdicts == []


def test_of_several_texts_of_a_liar_one_file_of_evidence_is_written_and_it_is_not_admitted_again(directory, tmp_path):
    with lied_scene(tmp_path, directory, AfterTokens()) as scene:
        scene.texts(PROMPTS)
        rechecks = scene.rechecks()

    with pytest.raises(ConfigError, match="stages: liar was convicted"):
        check_convictions(tmp_path / "evidence", ("honest", "liar"))
    check_convictions(tmp_path / "evidence", ("honest",))
    assert rechecks.count("refuted") > 1
    assert len(list((tmp_path / "evidence").glob("*.json"))) == 1


@pytest.mark.parametrize("change", ["inputs", "output", "stage/", "piece", "party"])
def test_evidence_that_was_altered_convicts_nobody(change, directory, tmp_path):
    with lied_scene(tmp_path, directory, AfterTokens()) as scene:
        scene.texts(PROMPTS[:1])
        scene.rechecks()
    path = tmp_path / scene.relay.verdicts[0].evidence
    record = json.loads(path.read_text())
    if change == "party":
        record["verdict"]["party"] = "honest"
    elif change == "piece":
        record["pieces"] = record["pieces"][:-1]
    else:
        tensors = load_file(path.with_suffix(".safetensors"))
        name = next(name for name in tensors if name.startswith(change))
        tensors[name] = tensors[name] + 1.0
        save_file(tensors, path.with_suffix(".safetensors"))
        record["tensors"]["sha256"] = file_digest(path.with_suffix(".safetensors"))
    path.write_text(json.dumps(record))

    with pytest.raises(EvidenceError):
        explain_served_evidence(path, scene.pki / "authority.pem", "serve-1")


def test_an_honest_party_refuses_what_its_file_does_not_allow(directory, tmp_path):
    holder = StageHolder(worker_file(max_size_bytes=100))
    with (
        pytest.raises(PeerLostError, match="liar: max_size_bytes: the owner wants"),
        lied_scene(tmp_path, directory, holder),
    ):
        pytest.fail("the stage was loaded")
