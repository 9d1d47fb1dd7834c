"""docs/protocol.md says what the schemas say: a kind, a field or an offence that one of them lacks turns this red."""

import typing

import pytest
from neighbours import KINDS
from protocol_page import CONTENT, IDENTITY, LISTENERS, MESSAGES, SAYERS, table, words

from phalanx.engine import Offence
from phalanx.pipeline.evidence.explain import _EXPLAIN
from phalanx.pipeline.protocol.messages import _MESSAGES
from phalanx.pipeline.worker.party import _ONLY_FROM_OWNER

PARTIES = {"owner", "worker", "holder", "shadow", "auditor", "neighbour"}


def test_every_kind_of_message_has_a_row():
    assert MESSAGES.keys() == KINDS.keys() == _MESSAGES.keys()


@pytest.mark.parametrize("kind", KINDS)
def test_the_row_of_a_kind_has_every_field_once(kind):
    assert sorted((*IDENTITY[kind], *CONTENT[kind])) == sorted(KINDS[kind].model_fields)


@pytest.mark.parametrize("kind", KINDS)
def test_who_says_it_to_whom_is_one_of_the_parties(kind):
    assert {MESSAGES[kind]["from"], MESSAGES[kind]["to"]} <= PARTIES


def test_what_a_party_takes_from_the_owner_alone_is_said_by_the_owner():
    assert {cls.kind for cls in _ONLY_FROM_OWNER} <= {kind for kind, sayer in SAYERS.items() if sayer == "owner"}


def test_what_the_owner_gets_in_a_state_is_said_by_workers():
    counted = {kind for row in table("States of the owner") for kind in words(row["statements that count"])}
    counted.discard("none")

    to_owner = {kind for kind, listener in LISTENERS.items() if listener == "owner"}
    assert to_owner <= counted
    assert counted <= {kind for kind, sayer in SAYERS.items() if sayer == "worker"}


def test_every_offence_has_a_row_and_an_explanation():
    offences = {words(row["offence"])[0] for row in table("Convictions")}

    assert offences == set(typing.get_args(Offence)) == _EXPLAIN.keys()


def test_what_convicts_are_statements_of_the_table_of_messages():
    for row in table("Convictions"):
        named = {word for n, word in enumerate(row["statements that convict"].split("`")) if n % 2}
        assert named <= MESSAGES.keys()
