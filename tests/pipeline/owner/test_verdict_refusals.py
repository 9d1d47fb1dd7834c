"""What follows where a judgement is refused: first nothing, then the accuser is replaced, for its word did not hold."""

import os
import stat

import pytest
from hand_made import HOLDER, OWNER, SHADOW, STAGE, make_world

from phalanx.pipeline.assignment.assignment import Assignment
from phalanx.pipeline.membership.admission import Admission
from phalanx.pipeline.membership.members import Files, Members
from phalanx.pipeline.owner.verdicts import Verdicts
from phalanx.pipeline.verify.signed_history import SignedHistory

TWICE = "what it said twice was not borne out by what parties had signed"


@pytest.fixture
def world(model_cache):
    return make_world(model_cache)


@pytest.fixture
def verdicts(world, tmp_path):
    members = Members([HOLDER, SHADOW], Admission(world.plan), addresses={}, certificates={})
    return Verdicts(world.facts, members, Files(tmp_path, lambda stage: world.build(), world.facts.observe))


def judgement(world, party=HOLDER, accuser=SHADOW, stage=STAGE):
    return world.facts.judgement("message", party, stage, "made up", accuser=accuser)


def replaced(verdicts, found, silent=()):
    return verdicts.to_replace(found, silent)


def test_a_judgement_of_the_owner_is_refused_unwritten(world, verdicts, tmp_path):
    assert verdicts.judge(judgement(world, OWNER), SignedHistory(), excludes=True) is None

    ((kind, body),) = world.events
    assert (kind, body["party"], body["evidence"]) == ("verdict_refused", OWNER, None)
    assert (verdicts.passed, list(tmp_path.iterdir())) == ([], [])


def test_a_judgement_that_no_signature_bears_out_is_refused_and_kept_apart(world, verdicts, tmp_path):
    assert verdicts.judge(judgement(world), SignedHistory(), excludes=True) is None

    ((kind, body),) = world.events
    assert (kind, body["party"]) == ("verdict_refused", HOLDER)
    assert body["why"]
    assert verdicts.passed == []
    assert list((tmp_path / "evidence").glob("*.json")) == []
    assert (tmp_path / body["evidence"]).is_file()
    assert (tmp_path / body["evidence"]).with_suffix(".safetensors").is_file()


def test_each_refused_judgement_keeps_its_evidence_and_is_counted(world, verdicts, tmp_path):
    for _ in range(3):
        verdicts.judge(judgement(world), SignedHistory(), excludes=True)

    kept = [tmp_path / body["evidence"] for _, body in world.events]
    assert len({*kept}) == 3
    assert all(path.is_file() and path.with_suffix(".safetensors").is_file() for path in kept)
    assert verdicts.num_refused == 3


def test_evidence_can_be_read_by_its_owner_alone(world, verdicts, tmp_path):
    """Attacker: another user of the owner's machine; text can be rebuilt from the tensors of a verdict."""
    umask = os.umask(0)
    try:
        verdicts.judge(judgement(world), SignedHistory(), excludes=True)
    finally:
        os.umask(umask)

    modes = {path: stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "evidence").rglob("*")}
    assert {mode for path, mode in modes.items() if path.is_file()} == {0o600}
    assert {mode for path, mode in modes.items() if path.is_dir()} == {0o700}
    assert stat.S_IMODE((tmp_path / "evidence").stat().st_mode) == 0o700


def test_a_silent_party_is_replaced_at_once_and_not_blamed(world, verdicts):
    assert replaced(verdicts, judgement(world), {HOLDER}) == (HOLDER, "it brought no answer")


def test_the_first_time_nobody_is_replaced_and_the_second_time_the_accuser(world, verdicts):
    assert replaced(verdicts, judgement(world)) is None
    assert replaced(verdicts, judgement(world)) == (SHADOW, TWICE)


def test_two_accusers_have_each_spoken_once(world, verdicts):
    assert replaced(verdicts, judgement(world, HOLDER, SHADOW)) is None
    assert replaced(verdicts, judgement(world, SHADOW, HOLDER)) is None


def test_where_the_owner_itself_found_it_the_party_that_it_is_about_is_replaced(world, verdicts):
    found = judgement(world, HOLDER, OWNER)

    assert [replaced(verdicts, found) for _ in range(2)] == [None, (HOLDER, TWICE)]


@pytest.mark.parametrize(
    ("holders", "shadows", "party"),
    [({STAGE: HOLDER}, {STAGE: SHADOW}, HOLDER), ({STAGE: OWNER}, {STAGE: SHADOW}, SHADOW), ({STAGE: OWNER}, {}, None)],
)
def test_where_the_owner_names_itself_a_copy_of_that_stage_is_replaced(world, verdicts, holders, shadows, party):
    world.facts.assignment = Assignment(holders, shadows)
    found = judgement(world, OWNER, OWNER)

    assert replaced(verdicts, found) is None
    assert replaced(verdicts, found) == (party and (party, TWICE))
