"""What differs between two run files, judged by itself: allowed by the table, told in words, or refused by name."""

import pytest

from phalanx.errors import ConfigError
from phalanx.optimizers import learning_rate
from phalanx.security.privacy.config import PrivacyConfig
from phalanx.train.records.run_changes import CHANGEABLE, changes_between


@pytest.fixture
def changed(make_run):
    """The changes from one set of overrides to another."""
    return lambda before, now: changes_between(make_run(*before), make_run(*now), "runs/mine")


def test_the_same_run_file_changes_nothing(changed):
    found = changed((), ())

    assert (dict(found.keys), found.step_counts) == ({}, None)


def test_a_longer_run_is_told_with_both_rates(changed, make_run):
    found, run = changed((), ("train.steps=12",)), make_run("train.steps=12")

    was, now = (learning_rate(run.optimizer, 6, steps) for steps in (6, 12))
    assert (found.step_counts, found.rates_at(run, 6)) == ((6, 12), (was, now))
    said = found.describe_changes(run, 6)
    assert said.startswith("train.steps: 6 -> 12; Steps before 6 stay unchanged. From step 6 on")
    assert f"schedule of 12 steps: {now:.3g}, where the old length had {was:.3g}" in said


def test_where_the_length_stays_no_rate_is_told(changed, make_run):
    found, run = changed((), ("checkpoint.every=3",)), make_run("checkpoint.every=3")

    assert (found.step_counts, found.rates_at(run, 6)) == (None, None)
    assert found.describe_changes(run, 6) == "checkpoint.every: 2 -> 3"


@pytest.mark.parametrize("steps", [5, 1])
def test_a_run_is_not_made_shorter(changed, steps):
    with pytest.raises(ConfigError, match=f"train.steps: found {steps}, expected 6 or more"):
        changed((), (f"train.steps={steps}",))


def test_a_key_of_a_section_in_the_table_may_change(changed):
    rule = "train.early_stopping={patience=2}"

    found = changed(("train.validate_every=2",), ("train.validate_every=2", rule))

    assert found.keys["train.early_stopping.patience"] == (None, 2)
    assert {key.rpartition(".")[0] for key in found.keys} <= {"train", "train.early_stopping"}


def test_what_decides_a_weight_is_refused_with_both_values(changed):
    with pytest.raises(ConfigError, match=r"train\.seed \(0 there, 9 here\).*--from runs/mine") as raised:
        changed(("train.seed=0",), ("train.seed=9",))

    assert (
        raised.value.error_facts["key"],
        raised.value.error_facts["found"],
        raised.value.error_facts["expected"],
    ) == (
        "train.seed",
        "9",
        "0",
    )


def test_the_same_run_file_of_an_enclave_changes_nothing_and_another_is_refused(changed):
    split = ("pipeline-", "split={cut=2,clients=2,allow_insecure_sim=true}", "model.adapter={rank=2}")

    assert dict(changed(split, split).keys) == {}
    with pytest.raises(ConfigError, match=r"train\.steps differ, and an enclave's evidence"):
        changed(split, (*split, "train.steps=12"))


def test_one_forbidden_key_among_allowed_ones_is_the_one_that_is_named(changed):
    with pytest.raises(ConfigError) as raised:
        changed((), ("train.steps=12", "optimizer.lr=0.5"))

    assert "optimizer.lr" in str(raised.value)
    assert "train.steps (" not in str(raised.value)


def test_layers_may_be_cut_anew_where_workers_serve_stages_without_noise(changed, make_run):
    before, now = ("pipeline.stages=3",), ("pipeline.stages=4", "pipeline.respawns=1")
    noise = {"privacy": PrivacyConfig(epsilon=8.0, delta=1e-4, clip_norm=0.5)}

    found = changed(before, now)

    assert found.cuts_anew
    assert "From step 6 on, the layers are cut into stages anew" in found.describe_changes(make_run(*now), 6)
    assert not changed(before, (*before, "pipeline.respawns=1")).cuts_anew
    with pytest.raises(
        ConfigError, match=r"pipeline\.respawns \(0 there, 1 here\), pipeline\.stages \(3 there, 4 here\)"
    ):
        changes_between(*(make_run(*keys).model_copy(update=noise) for keys in (before, now)), "runs/mine")


OTHERS = (
    "train.seed=9",
    "optimizer.lr=0.5",
    "optimizer.weight_decay=0.5",
    "train.batch_size=16",
    "data.validation_share=0.3",
)


@pytest.mark.parametrize(("number", "ellipsis"), [(4, False), (5, True)])
def test_of_many_forbidden_keys_four_are_shown(changed, number, ellipsis):
    with pytest.raises(ConfigError) as raised:
        changed((), OTHERS[:number])

    assert str(raised.value).count(" there, ") == 4
    assert (", ...;" in str(raised.value)) is ellipsis


def test_a_name_that_only_begins_like_one_of_the_table_is_not_in_it(changed, monkeypatch):
    # `checkpoint.keep` is in the table: were it read as a beginning, so would be whatever begins with it
    without = {key: why for key, why in CHANGEABLE.items() if key != "checkpoint.keep_every"}
    monkeypatch.setattr("phalanx.train.records.run_changes.CHANGEABLE", without)

    with pytest.raises(ConfigError, match=r"checkpoint\.keep_every"):
        changed((), ("checkpoint.keep_every=4",))
