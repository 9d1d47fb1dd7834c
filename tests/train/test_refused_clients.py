"""What the owner of a split records of clients that admission refuses, and what a report says of it."""

from types import SimpleNamespace

import pytest

from phalanx.report.headline import _guard_tile
from phalanx.split.channel import turn_messages as ask
from phalanx.train.records.record import describe_event
from phalanx.train.sessions.split_parties import EXCLUDED, REFUSED, RefusedClients


def word(client="west", **changes):
    facts = {"client": client, "step": 4, "reason": "over_norm", "figure": 7.5, "bound": 2.0, "is_excluded": False}
    return ask.ClientRefused(**{**facts, **changes})


def test_refusals_are_counted_by_client_and_the_shut_out_are_kept_with_figure_and_bound():
    seen = []
    refused = RefusedClients(lambda kind, body: seen.append((kind, body)))

    for message in (
        word(),
        word(step=5),
        word("south", reason="not_finite", figure=None),
        word(step=6, is_excluded=True),
    ):
        assert refused.take_refusal(message)

    assert refused.facts["refusals"] == {"west": 2, "south": 1}
    assert refused.facts["excluded"] == {"west": {"step": 6, "reason": "over_norm", "figure": 7.5, "bound": 2.0}}
    assert refused.figures == {"clients_refused": 3.0, "clients_excluded": 1.0}
    assert [kind for kind, _ in seen] == [REFUSED] * 3 + [EXCLUDED]


def test_any_other_message_is_left_to_others():
    assert not RefusedClients(lambda kind, body: None).take_refusal(ask.Conclude())


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        (REFUSED, "step 4: the data of west is ignored: over_norm, 7.5 of at most 2.0"),
        (EXCLUDED, "step 4: west is excluded: over_norm, 7.5 of at most 2.0"),
    ],
)
def test_a_person_is_told_in_a_sentence(kind, said):
    assert describe_event(kind, word().model_dump(mode="json"))[1] == said


@pytest.mark.parametrize(
    ("admission", "said"),
    [
        ({"refusals": {}, "excluded": {"west": {"reason": "far"}}}, "excluded: west (far)"),
        ({"refusals": {"west": 1}, "excluded": {}}, None),
        ({"excluded": ["west"]}, None),
        ("west", None),
    ],
)
def test_a_report_names_clients_that_were_shut_out_and_takes_nothing_else_for_one(admission, said):
    summary = {"split": {"mode": "sealed", "worth": "a tier", "admission": admission}}

    remarks = _guard_tile(SimpleNamespace(summary=summary))[2]

    assert remarks == ("a tier" if said is None else f"a tier, {said}")
