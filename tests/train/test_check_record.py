"""Steps as ranges, and what a record of checks keeps over checkpoints, resumes, rollbacks and other runs."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.errors import CheckpointError
from phalanx.pipeline import GuardConfig, StageChecks
from phalanx.train.records.check_record import CheckRecord, Spans, adopted_record
from phalanx.train.records.trust import Drifts, describe_ranges, describe_trust, trust_figures

ENDS = st.tuples(st.integers(0, 60), st.integers(0, 8)).map(lambda pair: (pair[0], sum(pair)))
VERDICT = {"party": "worker-1", "stage": 1, "step": 6, "offence": "gradient"}


def steps_of(ranges):
    return {step for first, last in ranges for step in range(first, last + 1)}


def record_of(*words, party="worker-1", guard=None):
    """A record of steps from 0 on in which the party's work rests on these words."""
    record = CheckRecord(guard)
    for step, word in enumerate(words):
        record.note_applied(step, {1: StageChecks(frozenset({"messages"}), party, word)})
    return record


def in_doubt(record):
    return [steps_of(doubt.steps) for doubt in record.list_doubts()]


@given(st.lists(st.tuples(st.booleans(), ENDS), max_size=40))
def test_ranges_hold_what_a_set_holds(changes):
    spans, truth = Spans(limit=1000), set()
    for puts_in, (first, last) in changes:
        if puts_in:
            spans.add_range(first, last)
            truth |= set(range(first, last + 1))
        else:
            taken = spans.take_out(first, last)
            assert steps_of(taken) == truth & set(range(first, last + 1))
            truth -= set(range(first, last + 1))

        assert steps_of(spans.ranges) == truth
        assert (spans.step_count, spans.newest_step) == (len(truth), max(truth, default=None))
        assert all(later[0] > earlier[1] + 1 for earlier, later in zip(spans.ranges, spans.ranges[1:], strict=False))


def test_with_many_ranges_the_oldest_become_one_and_the_number_stays():
    spans = Spans(limit=3)
    for step in range(0, 20, 2):
        spans.add_range(step, step)

    assert spans.ranges == [(0, 14), (16, 16), (18, 18)]
    assert spans.step_count == 10


@given(st.lists(st.sampled_from([None, frozenset(), frozenset({"worker-2"})]), max_size=12), st.integers(0, 12))
def test_what_was_undone_is_in_no_figure(words, back):
    record, shorter = record_of(*words), record_of(*words[:back])
    record.observe("rolled_back", {"to": back, "step": len(words)})
    for one in (record, shorter):
        one.observe("verdict", VERDICT)

    assert record.list_doubts() == shorter.list_doubts()
    assert record.checks_by_stage().get(1) == shorter.checks_by_stage().get(1) or not words[:back]
    assert record.unverified_counts().get(1, 0) == shorter.unverified_counts().get(1, 0)


@given(st.lists(st.sampled_from([None, frozenset(), frozenset({"worker-2"})]), min_size=1, max_size=12))
def test_a_checkpoint_keeps_all_of_it(words):
    record = record_of(*words)
    record.observe("verdict", VERDICT)
    again = CheckRecord()
    again.load_json(json.loads(json.dumps(record.to_json())))

    assert (again.list_doubts(), again.checks_by_stage(), again.unverified_counts()) == (
        record.list_doubts(),
        record.checks_by_stage(),
        record.unverified_counts(),
    )
    assert again.to_json() == record.to_json()


def test_a_conviction_outlives_the_return_to_an_older_checkpoint_and_its_doubt_shrinks_to_what_is_left():
    record = record_of(None, None, None, None)
    saved = record_of(None, None).to_json()
    record.observe("verdict", VERDICT)

    record.load_json(saved)

    assert in_doubt(record) == [{0, 1}]


def test_a_party_that_came_back_under_the_same_certificate_is_the_same_one():
    record = record_of(None, None)
    record.observe("verdict", {**VERDICT, "party": "worker-1.2"})

    assert [(doubt.party, doubt.convicted_in) for doubt in record.list_doubts()] == [("worker-1", (6,))]


def test_who_was_never_convicted_is_believed_and_not_doubted():
    record = record_of(None, frozenset({"worker-2"}), frozenset())

    assert (record.list_doubts(), record.unverified_counts()) == ([], {1: 1})


def test_what_a_convicted_auditor_vouched_for_is_believed_of_others_and_doubted_of_none():
    record = record_of(None, frozenset({"worker-2"}), frozenset())
    record.observe("verdict", {**VERDICT, "party": "worker-2", "stage": 2})

    assert (record.list_doubts(), record.unverified_counts()) == ([], {1: 2})


def test_who_was_replaced_for_what_it_did_leaves_doubt_about_what_it_did_until_then():
    record = record_of(None, None, frozenset(), frozenset({"worker-2"}), None, None)
    record.observe("distrusted", {"party": "worker-1", "step": 5})

    (doubt,) = record.list_doubts()
    assert (steps_of(doubt.steps), doubt.convicted_in, doubt.last_verified) == ({0, 1, 4}, (), 5)
    # and its word about others' work of before then is nobody's
    record.observe("distrusted", {"party": "worker-2", "step": 9})
    assert in_doubt(record) == [{0, 1, 3, 4}]


def test_doubt_without_a_conviction_outlives_a_return_to_an_older_checkpoint_and_says_so():
    record = record_of(None, None, None)
    saved = json.loads(json.dumps(record.to_json()))
    record.observe("distrusted", {"party": "worker-1", "step": 3})

    record.load_json(saved)

    assert in_doubt(record) == [{0, 1, 2}]
    lines = describe_trust(trust_figures(record, Drifts(), (), guarded=True))
    assert "were computed by worker-1, which was replaced after a fault, without a conviction." in lines[0]
    record.observe("rolled_back", {"step": 3, "to": 0})
    assert record.list_doubts() == []


def test_in_another_run_the_same_name_is_somebody_else():
    old = record_of(None, None)
    old.observe("verdict", VERDICT)
    record = CheckRecord()
    record.load_json(adopted_record(old.to_json(), "abcdef0123456789"))
    record.note_applied(2, {1: StageChecks(frozenset(), "worker-1", None)})

    assert [(doubt.party, steps_of(doubt.steps)) for doubt in record.list_doubts()] == [("abcdef01/worker-1", {0, 1})]
    again = adopted_record(record.to_json(), "ffffffff00000000")
    assert sorted(work[1] for work in again["work"]) == ["abcdef01/worker-1", "ffffffff/worker-1"]


@pytest.mark.parametrize("damage", [{"work": [[1]]}, {"work": None}, {"convicted": []}, {"made": [[1, 2, {}]]}])
def test_a_malformed_record_is_refused(damage):
    with pytest.raises(CheckpointError, match="record of checks"):
        CheckRecord().load_json({**record_of(None).to_json(), **damage})


def test_as_many_ranges_are_kept_apart_as_can_be_undone():
    words = [None if step % 2 else frozenset() for step in range(1000)]
    record = record_of(*words, guard=GuardConfig(commit_lag=1))
    record.observe("rolled_back", {"to": 999, "step": 1000})
    record.observe("verdict", VERDICT)

    assert record.unverified_counts() == {1: 499}
    assert record.list_doubts()[0].last_verified == 998


@pytest.mark.parametrize(("checkpoints", "advice"), [((0, 2, 4), "--from-step 2"), ((4,), "train again")])
def test_the_console_says_what_to_do(checkpoints, advice):
    record = record_of(frozenset(), frozenset(), frozenset(), None, None)
    record.observe("verdict", VERDICT)
    figures = trust_figures(record, Drifts(), checkpoints, guarded=True)

    said = describe_trust(figures)

    assert "steps 3 to 4 of stage 1 were computed by worker-1, which was convicted in step 6" in said[0]
    assert advice in said[1]
    assert figures["in_doubt"] is True


def test_of_a_run_without_stages_nothing_is_said():
    assert trust_figures(CheckRecord(), Drifts(), (), guarded=None) == {}
    assert trust_figures(record_of(None), Drifts(), (), guarded=False)["in_doubt"] is None
    assert trust_figures(record_of(None), Drifts(), (), guarded=True)["in_doubt"] is False


def test_drifts_are_rows_by_stage_party_and_direction():
    drifts = Drifts()
    for step, bias in ((4, 3.0), (9, -7.5)):
        body = {"step": step, "stage": 1, "party": "worker-1", "direction": "forward", "bias_sigmas": bias, "audits": 3}
        drifts.observe("drift", body)

    (row,) = drifts.drift_rows()

    assert row == {
        **{"stage": 1, "party": "worker-1", "direction": "forward"},
        **{"first_step": 4, "last_step": 9, "times": 2, "bias_sigmas": -7.5},
    }
    assert (
        "worker-1 drifted to one side at stage 1 (forward), first seen in step 4"
        in describe_trust({"drifts": [row]})[0]
    )


def test_ranges_are_said_shortly():
    assert describe_ranges([(3, 3)]) == "step 3"
    assert describe_ranges([(0, 4), (7, 7)]) == "steps 0 to 4, 7"
    assert describe_ranges([(n, n) for n in range(0, 20, 2)]).endswith("14 and 2 more ranges")
