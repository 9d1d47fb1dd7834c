"""The headline says no more than is known: of audits what they found, of a run without a guard nothing of the kind."""

import pytest
from made_run import SUMMARY

from phalanx.report.headline import has_guard, headline_sentence, headline_tiles
from phalanx.report.page import render_run_report
from phalanx.report.read import RunRecord

HONEST = SUMMARY | {"attacks_injected": 0, "detections": 0, "evicted": [], "verdicts": []}
UNGUARDED = HONEST | {"guard": "off", "audits": 0, "false_accusations": 0}
ROUNDS = UNGUARDED | {
    "steps": 20,
    "federated": {
        "sites": ["north", "south", "west"],
        "asked": 3,
        "algorithm": "fedavg",
        "aggregator": "mean",
        "owner_sees": "sums of updates (masked), and no single one",
        "excluded": {},
    },
    "privacy": {"example": "all data of one site", "epsilon": 8.0, "delta": 1e-3, "epsilon_spent": 7.5},
}
PAIRS = UNGUARDED | {
    "preferences": {
        "accuracy_first": 0.5,
        "accuracy": 0.75,
        "margin_first": 0.0,
        "margin": 1.25,
        "loss_first": 0.693,
        "loss": 0.5,
    }
}
OF_AUDITS = ("attack", "audit", "accusation", "lie")


def record_of(summary, **config):
    return RunRecord("run", summary=summary, config=config)


@pytest.mark.parametrize("audits", [1, 7, 1600])
def test_where_audits_found_nothing_it_is_said_how_many_there_were(audits):
    found = headline_sentence(record_of(HONEST | {"guard": "phalanx", "audits": audits}))

    assert found.startswith("No lie was found in ")
    assert "nobody attacked" not in found.lower() and "false accusation" not in found


@pytest.mark.parametrize(
    "record",
    [
        record_of(UNGUARDED),
        # a summary of an older release says nothing of the guard, and its run file does
        record_of({key: one for key, one in UNGUARDED.items() if key != "guard"}, guard={"mode": "off"}),
        record_of(UNGUARDED | {"attacks_injected": None, "false_accusations": None}),
        record_of(ROUNDS),
        record_of(PAIRS),
    ],
    ids=["off", "older", "remote", "federated", "pairs"],
)
def test_without_a_guard_nothing_is_said_of_attacks_and_audits(record):
    page = str(render_run_report(record))

    assert not [word for word in OF_AUDITS if word in headline_sentence(record).lower()]
    assert not has_guard(record)
    assert not [name for name, *_ in headline_tiles(record) if name == "Audits"]
    assert ">Verdicts<" not in page and ">Audits<" not in page and "Attacked steps are marked" not in page


def test_a_drill_without_a_guard_says_what_it_did_and_that_nobody_checked():
    summary = UNGUARDED | {"attacks_injected": 3, "detections": None}

    assert headline_sentence(record_of(summary, guard={"mode": "off"})).startswith("3 steps attacked, nobody checked")


def test_a_federated_run_speaks_of_rounds_sites_and_privacy():
    found = headline_sentence(record_of(ROUNDS))

    assert found == (
        "20 rounds of 3 sites, the owner sees sums of updates (masked), and no single one, "
        "epsilon 7.5 of 8 spent, which protects all data of one site, 0 rounds lost."
    )
    names = {name: (value, remark) for name, value, remark in headline_tiles(record_of(ROUNDS))}
    assert "Steps" not in names and names["Rounds"][0] == "20"
    assert names["Sites"][0] == "3 of 3" and "north, south, west" in names["Sites"][1]


def test_a_site_that_is_asked_no_more_is_named_with_the_reason():
    facts = ROUNDS["federated"] | {"excluded": {"west": "refused again: over_norm"}}

    found = headline_sentence(record_of(ROUNDS | {"federated": facts}))

    assert "west gets no further orders (refused again: over_norm)" in found
    assert {name: value for name, value, _ in headline_tiles(record_of(ROUNDS | {"federated": facts}))}[
        "Sites"
    ] == "2 of 3"


def test_preferences_show_accuracy_and_margin():
    record = record_of(PAIRS)

    assert "accuracy 0.75 and margin 1.25 on held-out pairs" in headline_sentence(record)
    names = {name: (value, remark) for name, value, remark in headline_tiles(record)}
    assert names["Accuracy on pairs"] == (
        "0.75",
        "margin 1.25, before training 0.5, margin before 0, loss of a pair 0.5",
    )
    assert "Validation perplexity" not in names


@pytest.mark.parametrize("summary", [HONEST, UNGUARDED, ROUNDS, PAIRS], ids=["guarded", "off", "federated", "pairs"])
def test_a_model_that_is_worse_than_before_is_the_first_thing_that_is_said(summary):
    record = record_of(summary | {"worse_than_before": ["held-out loss 1.1 -> 140"]})

    assert headline_sentence(record).startswith("The model is worse than before training (held-out loss 1.1 -> 140), ")
    assert "worse than before</span>" in str(render_run_report(record))


@pytest.mark.parametrize("odd", [None, "x", 7, {}, [], {"sites": 3, "excluded": 4}, {"sites": None}])
def test_a_summary_with_odd_entries_is_shown_as_far_as_it_goes(odd):
    for key in ("federated", "privacy", "preferences", "worse_than_before"):
        assert str(render_run_report(record_of(ROUNDS | {key: odd})))
