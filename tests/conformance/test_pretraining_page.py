"""The curves on the page of pre-training are those of the committed runs, of the examples as they are."""

import json
import re
from pathlib import Path

import pytest

from phalanx.train import load_run

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "pretraining.md").read_text(encoding="utf-8")
each_example = pytest.mark.parametrize("name", ["bert", "t5"])


def found_of(name):
    return json.loads((ROOT / "benchmarks" / "results" / f"{name}-example-cpu-2cores-busy.json").read_text())


def row_of(name):
    (row,) = re.findall(rf"^\| `{name}\.toml` \| (.+) \|$", PAGE, re.M)
    return row.split(" | ")


@each_example
def test_the_curve_is_that_of_the_raw_result_and_falls_below_unigrams(name):
    found = found_of(name)
    steps, values = zip(*found["held_out_perplexity"][1:], strict=True)
    on_words = found["on_words"]

    assert f"| steps | {' | '.join(map(str, steps))} | words: model | words: unigrams |" in PAGE
    assert row_of(name) == [
        *(f"{value:.1f}" for value in values),
        f"{on_words['model']:.1f}",
        f"{on_words['unigrams']:.1f}",
    ]
    assert on_words["model"] < on_words["unigrams"]
    assert found["detections"] > 0
    assert found["false_accusations"] == 0


@each_example
def test_the_example_is_the_run_that_was_measured(name, monkeypatch):
    monkeypatch.chdir(ROOT)

    run = load_run(ROOT / "examples" / found_of(name)["run"])

    assert run.train.steps == found_of(name)["steps"]
    assert run.guard.is_enabled
    assert run.attack.from_step == run.train.steps // 2
