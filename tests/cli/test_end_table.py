"""The table at the end of a run has the rows that the run has, in its own words."""

import pytest

from phalanx.cli.report import print_summary

PLAIN = {
    "status": "completed",
    "steps": 20,
    "loss_first": 5.7,
    "loss_last": 4.1,
    "validation_perplexity": None,
    "tokens_per_s": 1000.0,
    "guard": "off",
    "audits": 0,
    "attacks_injected": 0,
    "detections": 0,
    "false_accusations": 0,
    "evicted": [],
    "replaced": [],
    "verdicts_refused": 0,
    "steps_redone": 0,
    "takeovers": 0,
    "steps_lost": 0,
    "in_doubt": None,
    "worse_than_before": [],
    "final_weights_digest": "ab" * 32,
}
OF_ROUNDS = {
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


def rows_of(capsys, summary):
    print_summary(summary)
    lines = [line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines()]
    return {line[0]: line[1] for line in lines}


def test_a_run_without_a_guard_has_no_row_of_one_and_none_of_what_was_not_measured(capsys):
    assert list(rows_of(capsys, PLAIN)) == [
        "status",
        "steps",
        "loss_first",
        "loss_last",
        "tokens_per_s",
        "steps_lost",
        "final_weights_digest",
    ]


@pytest.mark.parametrize("injected", [0, None])
def test_a_guarded_run_that_is_no_drill_says_its_audits_and_nothing_of_attacks(capsys, injected):
    rows = rows_of(capsys, PLAIN | {"guard": "phalanx", "audits": 7, "in_doubt": False, "attacks_injected": injected})

    assert rows["audits"] == "7" and rows["in_doubt"] == "False"
    assert not {"attacks_injected", "detections", "false_accusations", "evicted", "replaced"} & rows.keys()


def test_a_drill_has_all_its_rows_also_where_nothing_was_found(capsys):
    rows = rows_of(capsys, PLAIN | {"guard": "phalanx", "audits": 7, "attacks_injected": 3})

    assert (rows["attacks_injected"], rows["detections"], rows["false_accusations"]) == ("3", "0", "0")


def test_a_conviction_is_never_left_out(capsys):
    changed = {"guard": "phalanx", "detections": 1, "false_accusations": 1, "evicted": ["worker-1"]}

    rows = rows_of(capsys, PLAIN | changed)

    assert (rows["false_accusations"], rows["evicted"]) == ("1", '["worker-1"]')


def test_rounds_are_called_rounds_and_say_who_took_part_and_what_is_spent(capsys):
    rows = rows_of(capsys, PLAIN | OF_ROUNDS)

    assert rows["rounds"] == "20" and not {"steps", "steps_lost", "audits", "excluded"} & rows.keys()
    assert rows["sites"].startswith("north, south, west; 3 asked a round; the owner sees sums of updates (masked)")
    assert rows["privacy"] == "protects all data of one site"
    assert rows["epsilon_spent"] == "7.5 of 8 at delta 0.001"


def test_pairs_show_accuracy_and_margin_before_and_after(capsys):
    pairs = {"accuracy_first": 0.5, "accuracy": 0.75, "margin_first": 0.0, "margin": 1.25, "kl": 0.1}

    rows = rows_of(capsys, PLAIN | {"preferences": pairs})

    assert [rows[name] for name in ("accuracy", "accuracy_first", "margin", "margin_first")] == [
        "0.75",
        "0.5",
        "1.25",
        "0",
    ]


def test_a_model_that_is_worse_than_before_is_named_behind_the_status(capsys):
    rows = rows_of(capsys, PLAIN | {"worse_than_before": ["held-out loss 1.1 -> 140", "accuracy 0.42 -> 0.31"]})

    assert list(rows)[:2] == ["status", "worse_than_before"]
    assert rows["worse_than_before"] == "held-out loss 1.1 -> 140, accuracy 0.42 -> 0.31"
