"""A run says that its model is worse than before where held-out rows show it, and only there."""

import math

import pytest

from phalanx.train.batches.preferences import PreferenceScores
from phalanx.train.batches.scores import MeanReward, Scores, ValidationResult
from phalanx.train.records.comparison import describe_worse, worse_figures
from phalanx.train.records.summary import Figures


def figures(first, last, named_first=None, named_last=None):
    found = Figures()
    found.note_validation(ValidationResult(first, named_first or {}), first=True)
    found.note_validation(ValidationResult(last, named_last or {}))
    return found


@pytest.mark.parametrize(
    ("first", "last", "words"),
    [
        (math.exp(1.1), math.exp(140.0), ["held-out loss 1.1 -> 140"]),
        (math.exp(1.1), math.inf, ["held-out loss 1.1 -> not a finite number"]),
        (math.exp(1.1), math.nan, ["held-out loss 1.1 -> not a finite number"]),
        (math.exp(5.0), math.exp(4.0), []),
        # what four digits do not show is no change
        (math.exp(5.00001), math.exp(5.00002), []),
        (math.inf, math.inf, []),
        (
            Scores(1.1, 0.42, 0.4),
            Scores(140.0, 0.31, 0.3),
            ["held-out accuracy 0.42 -> 0.31", "held-out loss 1.1 -> 140"],
        ),
        (Scores(1.1, 0.42, 0.4), Scores(1.0, 0.41, 0.3), ["held-out accuracy 0.42 -> 0.41"]),
        (Scores(1.1, 0.42, 0.4), Scores(1.0, 0.5, 0.5), []),
        (
            PreferenceScores(0.69, 0.5, 0.0, 0.0),
            PreferenceScores(2.0, 0.4, -1.0, 0.1),
            ["accuracy on held-out pairs 0.5 -> 0.4", "loss of a held-out pair 0.69 -> 2"],
        ),
        (MeanReward(0.5), MeanReward(0.25), ["held-out reward 0.5 -> 0.25"]),
        (MeanReward(0.25), MeanReward(0.5), []),
    ],
)
def test_what_became_worse_is_named_with_both_figures(first, last, words):
    assert worse_figures(figures(first, last).held_out_measures()) == words


def test_what_was_measured_once_or_never_is_not_compared():
    found = Figures()
    assert worse_figures(found.held_out_measures()) == []
    found.note_validation(5.0, first=True)
    assert worse_figures(found.held_out_measures()) == []


def test_further_sets_count_where_the_run_has_no_rows_of_its_own_held_out():
    named = {"general": math.exp(2.0), "code": math.exp(3.0)}, {"general": math.exp(4.0), "code": math.exp(2.0)}

    assert worse_figures(figures(None, None, *named).held_out_measures()) == ["loss on general 2 -> 4"]
    # what a model forgets of other texts is in the table of sets, and no verdict on the training
    assert worse_figures(figures(math.exp(3.0), math.exp(2.0), *named).held_out_measures()) == []


@pytest.mark.parametrize(("privacy", "why"), [({}, False), ({"privacy": {}}, True)])
def test_the_end_of_a_run_says_it_in_one_line_and_where_there_is_noise_names_it(privacy, why):
    summary = {"worse_than_before": ["held-out loss 1.1 -> 140"], **privacy}

    (line,) = describe_worse(summary)

    assert line.startswith("WORSE THAN BEFORE: held-out loss 1.1 -> 140. ")
    assert ("noise" in line) is why
    assert describe_worse({"worse_than_before": []}) == describe_worse({}) == []
