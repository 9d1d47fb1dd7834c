"""What the page of preferences says of the reward model is what the committed run gave, of the example as it is."""

import json
from pathlib import Path

import pytest

from phalanx.evaluate import share_with_interval
from phalanx.train import load_run

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "preferences.md").read_text(encoding="utf-8")
FOUND = json.loads(
    (ROOT / "benchmarks" / "results" / "reward-harmless-cpu-2cores-busy.json").read_text(encoding="utf-8")
)


def test_the_page_says_what_was_measured():
    scores, interval = FOUND["preferences"], FOUND["interval"]

    assert share_with_interval(interval["count"], interval["of"]) == interval
    assert interval["share"] == pytest.approx(scores["accuracy"])
    assert f"Of the {interval['of']} held-out pairs it scores {interval['count']} the right way round" in PAGE
    assert f"after {FOUND['steps']} steps, {interval['share']:.2f}" in PAGE
    assert f"interval {interval['low']:.2f} to {interval['high']:.2f}" in PAGE
    assert f"\n{scores['accuracy_first']:.2f} before" in PAGE
    assert f"rises from {scores['loss_first']:.2f} to {scores['loss']:.2f}" in PAGE
    assert f"in {FOUND['wall_s'] / 60:.0f} minutes" in PAGE


def test_the_example_is_the_run_that_was_measured(monkeypatch):
    monkeypatch.chdir(ROOT)

    run = load_run(ROOT / "examples" / FOUND["run"])

    assert run.train.steps == FOUND["steps"]
    assert run.train.objective_kind == "reward"
