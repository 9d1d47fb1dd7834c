"""What follows where a judgement is refused: first nothing, then the party that it is about is replaced, unblamed."""

import os
import stat

import pytest
from hand_made import HOLDER, OWNER, SHADOW, STAGE, make_world

from phalanx.pipeline.assignment.assignment import Assignment
from phalanx.pipeline.membership.admission import Admission
from phalanx.pipeline.membership.members import Files, Members
from phalanx.pipeline.owner.verdicts import Verdicts

TWICE = "it was wrong twice, without evidence that others could check"
WITHHELD = "it did not send its signed data"


@pytest.fixture
def world(model_cache):
    return make_world(model_cache)


@pytest.fixture
def verdicts(world, tmp_path):
    members = Members([HOLDER, SHADOW], Admission(world.plan), addresses={}, certificates={})
    return Verdicts(world.facts, members, Files(tmp_path, lambda stage: world.build(), world.facts.observe))


def judgement(world, party=HOLDER, accuser=SHADOW, stage=STAGE, offence="message"):
    return world.facts.make_judgement(offence, party, stage, "made up", accuser=accuser)


def replaced(verdicts, found, silent=()):
    return verdicts.party_to_replace(found, silent)


def test_a_judgement_of_the_owner_is_refused_unwritten(world, verdicts, tmp_path):
    assert verdicts.confirm_judgement(judgement(world, OWNER)) is None

    ((kind, body),) = world.events
    assert (kind, body["party"], body["evidence"]) == ("verdict_refused", OWNER, None)
    assert (verdicts.confirmed_verdicts, list(tmp_path.iterdir())) == ([], [])


def test_a_judgement_that_no_signature_bears_out_is_refused_and_kept_apart(world, verdicts, tmp_path):
    assert verdicts.confirm_judgement(judgement(world)) is None

    ((kind, body),) = world.events
    assert (kind, body["party"]) == ("verdict_refused", HOLDER)
    assert body["why"]
    assert verdicts.confirmed_verdicts == []
    assert list((tmp_path / "evidence").glob("*.json")) == []
    assert (tmp_path / body["evidence"]).is_file()
    assert (tmp_path / body["evidence"]).with_suffix(".safetensors").is_file()


def test_each_refused_judgement_keeps_its_evidence_and_is_counted(world, verdicts, tmp_path):
    for _ in range(3):
        verdicts.confirm_judgement(judgement(world))

    kept = [tmp_path / body["evidence"] for _, body in world.events]
    assert len({*kept}) == 3
    assert all(path.is_file() and path.with_suffix(".safetensors").is_file() for path in kept)
    assert verdicts.num_refused == 3


def test_evidence_can_be_read_by_its_owner_alone(world, verdicts, tmp_path):
    """Attacker: another user of the owner's machine; text can be rebuilt from the tensors of a verdict."""
    umask = os.umask(0)
    try:
        verdicts.confirm_judgement(judgement(world))
    finally:
        os.umask(umask)

    modes = {path: stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "evidence").rglob("*")}
    assert {mode for path, mode in modes.items() if path.is_file()} == {0o600}
    assert {mode for path, mode in modes.items() if path.is_dir()} == {0o700}
    assert stat.S_IMODE((tmp_path / "evidence").stat().st_mode) == 0o700


def test_a_silent_party_is_replaced_at_once_and_not_blamed(world, verdicts):
    assert replaced(verdicts, judgement(world), {HOLDER}) == (HOLDER, WITHHELD)


@pytest.mark.parametrize("party", [HOLDER, SHADOW])
def test_who_withheld_what_it_had_signed_is_replaced_at_once_and_never_convicted(world, verdicts, tmp_path, party):
    found = judgement(world, party, OWNER, offence="transfer")

    assert verdicts.confirm_judgement(found) is None
    assert replaced(verdicts, found) == (party, WITHHELD)
    assert (verdicts.confirmed_verdicts, list(tmp_path.iterdir())) == ([], [])


@pytest.mark.parametrize("accuser", [SHADOW, OWNER])
def test_the_first_time_nobody_is_replaced_and_the_second_time_the_party_that_was_found_wrong(world, verdicts, accuser):
    found = judgement(world, HOLDER, accuser)

    assert [replaced(verdicts, found) for _ in range(2)] == [None, (HOLDER, TWICE)]


def test_an_accuser_does_not_pay_for_evidence_that_the_accused_has_spoiled(world, verdicts):
    found = [replaced(verdicts, judgement(world, HOLDER, SHADOW)) for _ in range(10)]

    assert {each and each[0] for each in found} == {None, HOLDER}


def test_two_parties_have_each_been_found_wrong_once(world, verdicts):
    assert replaced(verdicts, judgement(world, HOLDER, SHADOW)) is None
    assert replaced(verdicts, judgement(world, SHADOW, HOLDER)) is None


def test_a_worker_that_would_have_the_owner_convicted_is_replaced_the_second_time(world, verdicts):
    found = judgement(world, OWNER, SHADOW)

    assert [replaced(verdicts, found) for _ in range(2)] == [None, (SHADOW, TWICE)]


@pytest.mark.parametrize(
    ("holders", "shadows", "party"),
    [({STAGE: HOLDER}, {STAGE: SHADOW}, HOLDER), ({STAGE: OWNER}, {STAGE: SHADOW}, SHADOW), ({STAGE: OWNER}, {}, None)],
)
def test_where_the_owner_names_itself_a_copy_of_that_stage_is_replaced(world, verdicts, holders, shadows, party):
    world.facts.assignment = Assignment(holders, shadows)
    found = judgement(world, OWNER, OWNER)

    assert replaced(verdicts, found) is None
    assert replaced(verdicts, found) == (party and (party, TWICE))
