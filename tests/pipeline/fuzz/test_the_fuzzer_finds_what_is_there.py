"""A fuzzer that cannot fail shows nothing: with one defence taken away it says so, within so many schedules."""

import random

import pytest
from hypothesis import HealthCheck, Phase, find, settings
from strategies import schedules

from phalanx.pipeline import intake
from phalanx.pipeline.inquest import Inquest
from phalanx.pipeline.updates import Updates
from phalanx.security.crypto import Peer
from phalanx.transport import SignedHeader

WITHIN = 150
SETTINGS = settings(
    max_examples=WITHIN,
    deadline=None,
    database=None,
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
)


def answers_are_handed_on_as_they_came(monkeypatch):
    fetch = Inquest._fetch

    def unbounded(self, party, key, ledger):
        found = fetch(self, party, key, ledger)
        answer = self.courier.fetch(party, type(found[0]).of(ledger.epoch, ledger.step, key)) if found else None
        return found if answer is None else (answer.message, *found[1:])

    monkeypatch.setattr(Inquest, "_fetch", unbounded)


def any_number_is_a_stage(monkeypatch):
    monkeypatch.setattr(intake, "_MAX_DIGITS", 10**6)


def any_signature_holds(monkeypatch):
    monkeypatch.setattr(SignedHeader, "verify", lambda self, peer: None)
    monkeypatch.setattr(Peer, "verify", lambda self, signature, data: None)


def nobody_compares_states(monkeypatch):
    monkeypatch.setattr(Updates, "weigh_states", lambda self: None)


PLANTED = {
    any_number_is_a_stage: ("gradient", "ended: ValueError"),
    any_signature_holds: ("gradient", "honest and convicted"),
}


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("plant", "company", "says"), [(p, *rest) for p, rest in PLANTED.items()])
def test_without_a_defence_the_fuzzer_finds_what_it_was_for(stage, monkeypatch, plant, company, says):
    stage.earlier(company)
    plant(monkeypatch)

    def breaks(schedule):
        return any(says in fault for fault in stage.faults(schedule, stage.play(schedule)))

    find(schedules((company,)), breaks, settings=SETTINGS, random=random.Random(1))
