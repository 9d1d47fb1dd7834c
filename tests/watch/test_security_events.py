"""Every kind of event is either ordinary or of a class, and every class is counted."""

import tomllib
from pathlib import Path

import pytest

from phalanx.watch.security_events import (
    CLASS_OF_KIND,
    ORDINARY_KINDS,
    SECURITY_CLASSES,
    SecurityCounts,
    classify_event,
    read_security_event,
)
from watched_run import VERDICT, event_row

KEYS = Path(__file__).parents[2] / "scripts" / "output_keys.toml"


def test_every_kind_of_event_is_in_one_table():
    kinds = set(tomllib.loads(KEYS.read_text())["events"])

    assert set(CLASS_OF_KIND) | ORDINARY_KINDS == kinds
    assert not set(CLASS_OF_KIND) & ORDINARY_KINDS


@pytest.mark.parametrize(
    ("kind", "body", "expected"),
    [
        ("verdict", VERDICT, "verdict"),
        ("refused", {"error": "SignatureError", "reason": "x"}, "bad_signature"),
        ("refused", {"error": "PeerRefusedError", "reason": "x"}, "refused_certificate"),
        ("refused", {"error": "FrameError", "reason": "truncated"}, "malformed_message"),
        ("refused", {"error": "FrameError", "reason": "beyond its allowance"}, "quota"),
        ("refused", {"error": ["not", "text"], "reason": None}, "malformed_message"),
        ("not_let_in", {"reason": "the token was used"}, "wrong_token"),
        ("not_let_in", {"reason": "another class"}, "refused_certificate"),
        ("client_evidence_refused", {}, "attestation"),
        ("release_refused", {}, "policy"),
        ("log_healed", {}, "log_tampering"),
        ("made_up", {}, "suspicion"),
        ("step", {}, None),
        ("lost", {"party": "worker-1"}, None),
    ],
)
def test_an_event_has_its_class(kind, body, expected):
    assert classify_event(kind, body) == expected


def test_an_event_names_its_subject_and_its_time_and_no_text_is_endless():
    event = read_security_event(event_row("verdict", VERDICT | {"reason": "x" * 10_000, "party": "y" * 1000}))

    assert (event.security_class, event.kind, event.subject) == ("verdict", "verdict", "y" * 80)
    assert len(event.text) <= 300
    assert event.time


@pytest.mark.parametrize(
    "row", [{}, {"kind": 3, "body": {}}, {"kind": "verdict", "body": []}, {"kind": "step", "body": {}}]
)
def test_what_is_no_security_event_is_none(row):
    assert read_security_event(row) is None


def test_counts_have_every_class():
    counts = SecurityCounts()
    counts.add_event("quota")

    assert counts.read_counts() == {name: int(name == "quota") for name in SECURITY_CLASSES}
