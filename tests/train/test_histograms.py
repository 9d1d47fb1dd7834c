"""Histograms of weights and gradients: of the very state that a checkpoint has, by every engine that opens it."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from phalanx.errors import ConfigError
from phalanx.telemetry import read_metrics
from phalanx.train import PastRun, load_run
from phalanx.train.saving.saver import PlainSaver
from phalanx.train.sessions.hooks import histogram_of
from tiny_run_file import tiny_run_file

ENGINES = {
    "alone": '[pipeline]\nstages = 2\n[guard]\nmode = "off"\n',
    "guarded": '[pipeline]\nstages = 4\n[guard]\nmode = "phalanx"\n',
    "lagging": '[pipeline]\nstages = 4\n[guard]\nmode = "phalanx"\ncommit_lag = 1\n',
    "domain": "[parallel]\ndp = 1\n",
}


@pytest.fixture
def load(tmp_path):
    def make(sections, *overrides):
        path = tmp_path / "drawn.toml"
        path.write_text(tiny_run_file(f"{sections}[checkpoint]\nevery = 0\njournal = false\n", steps=2))
        return load_run(path, overrides)

    return make


def test_counts_are_of_equal_bins_and_the_greatest_value_is_in_the_last():
    drawn = histogram_of("weights", "w", torch.tensor([[0.0, 1.0], [2.0, math.nan], [-math.inf, 4.0]]), bins=2)

    assert (drawn.low, drawn.high, drawn.counts, drawn.not_finite) == (0.0, 4.0, (2, 2), 2)
    assert drawn.edges == [0.0, 2.0, 4.0]


def test_a_tensor_of_one_value_or_of_none_has_a_histogram_too():
    assert histogram_of("weights", "w", torch.full((3,), 7.0), bins=2).metrics_row() == {
        **{"of": "weights", "name": "w", "low": 6.5, "high": 7.5, "counts": [0, 3], "not_finite": 0}
    }
    assert histogram_of("weights", "w", torch.tensor([math.nan]), bins=2).counts == (0, 0)


@given(st.lists(st.floats(width=32), max_size=40), st.integers(2, 128))
def test_every_value_is_counted_once(values, bins):
    drawn = histogram_of("gradients", "w", torch.tensor(values), bins)

    assert sum(drawn.counts) + drawn.not_finite == len(values)
    assert math.isfinite(drawn.low) and math.isfinite(drawn.high)


@pytest.mark.quick_cases("alone", "domain")
@pytest.mark.parametrize(
    "engine", [*(name for name in ENGINES if name != "lagging"), pytest.param("lagging", marks=pytest.mark.slow)]
)
def test_what_is_drawn_after_the_last_step_is_the_state_of_the_last_checkpoint(load, quietly, tmp_path, engine):
    quietly(load(ENGINES[engine], "train.histograms={bins=8}"), tmp_path / "run")

    checkpoint = PastRun(tmp_path / "run").open_verified()
    drawn = {
        (one["of"], one["name"]): one for one in read_metrics(tmp_path / "run" / "metrics.jsonl")[-1]["histograms"]
    }
    names = [name.removeprefix("weight/") for name in checkpoint.stages_by_tensor() if name.startswith("weight/")]
    assert {name for of, name in drawn if of == "weights"} == set(names)
    for of, part in (("weights", "weight"), ("gradients", "exp_avg")):
        for name in names:
            assert drawn[of, name] == histogram_of(of, name, checkpoint.read_tensor(f"{part}/{name}"), 8).metrics_row()
    assert any(sum(one["counts"]) > max(one["counts"]) for one in drawn.values() if one["of"] == "gradients")


def test_a_run_that_asks_for_none_collects_no_state(load, quietly, tmp_path, monkeypatch):
    def refuse(_):
        raise AssertionError("collected")

    monkeypatch.setattr(PlainSaver, "current_shards", refuse)

    quietly(load(ENGINES["alone"]), tmp_path / "run")

    assert all("histograms" not in row for row in read_metrics(tmp_path / "run" / "metrics.jsonl"))


def test_an_enclave_is_asked_for_none(load):
    with pytest.raises(ConfigError, match=r"train\.histograms: .*an enclave gives out its state only sealed"):
        load(
            "[split]\nclients = 2\ncut = 1\nallow_insecure_sim = true\n",
            "model.adapter={kind='lora', rank=2}",
            "train.histograms={}",
        )
