"""A fuzzer that cannot fail shows nothing: with one defence taken away it finds a schedule, out of so many."""

import random

import pytest
from hypothesis import HealthCheck, Phase, find, settings
from strategies import schedules

from phalanx.errors import FrameError
from phalanx.pipeline.protocol import mailbox as inbox
from phalanx.pipeline.protocol.messages import parse_message
from phalanx.pipeline.protocol.signed import StatementReader
from phalanx.pipeline.verify.audit_judgement import AuditJudgement

WITHIN = 300
SETTINGS = settings(
    max_examples=WITHIN,
    deadline=None,
    database=None,
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
)


def a_malformed_message_ends_its_reader(monkeypatch):
    def parse(kind, body):
        try:
            return parse_message(kind, body)
        except FrameError as exc:
            raise ValueError("malformed") from exc

    monkeypatch.setattr(inbox, "parse_message", parse)


def nobody_weighs_audits(monkeypatch):
    async def content(self, auditor, report, known, directions):
        return None

    monkeypatch.setattr(AuditJudgement, "weigh_report", content)


def headers_of_any_session_count(monkeypatch):
    bind = StatementReader._check_link

    def of_any_session(self, header, link):
        session, self.session = self.session, header.fields.run
        try:
            bind(self, header, link)
        finally:
            self.session = session

    monkeypatch.setattr(StatementReader, "_check_link", of_any_session)


PLANTED = {
    a_malformed_message_ends_its_reader: "ValueError('malformed')",
    nobody_weighs_audits: "the weights are not those of the honest run",
    headers_of_any_session_count: "honest and convicted",
}


@pytest.mark.slow
@pytest.mark.timeout(0)
@pytest.mark.parametrize(("plant", "says"), PLANTED.items(), ids=[plant.__name__ for plant in PLANTED])
def test_without_a_defence_the_fuzzer_finds_what_it_was_for(stage, monkeypatch, plant, says):
    # what is recorded of honest sessions is recorded first
    stage.honest("gradient", 3)
    stage.earlier("gradient")
    plant(monkeypatch)

    played = []

    def breaks(schedule):
        played.append(stage.faults(schedule, stage.play(schedule)))
        return any(says in fault for fault in played[-1])

    find(schedules(("gradient",)), breaks, settings=SETTINGS, random=random.Random(1))

    assert says in " ".join(played[-1])
    assert len(played) <= WITHIN
