"""The curve on the page of chats is that of the committed run, of the example as it is."""

import json
import re
from pathlib import Path

from phalanx.train import load_run

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "chat.md").read_text(encoding="utf-8")
FOUND = json.loads((ROOT / "benchmarks" / "results" / "sft-example-cpu-2cores-busy.json").read_text(encoding="utf-8"))


def test_the_curve_is_that_of_the_raw_result_and_falls():
    steps, values = zip(*FOUND["held_out_perplexity"], strict=True)
    written = re.search(r"^\| steps \| (.+) \|$", PAGE, re.M)[1].split(" | ")
    measured = re.search(r"^\| held-out assistant perplexity \| (.+) \|$", PAGE, re.M)[1].split(" | ")

    assert [int(one) for one in written] == list(steps)
    assert measured == [f"{value:.2f}" for value in values]
    assert f"in its {steps[-1]} steps, {FOUND['wall_s'] / 60:.0f} minutes" in PAGE
    assert values[-1] < values[0] / 2


def test_the_example_is_the_run_that_was_measured(monkeypatch):
    monkeypatch.chdir(ROOT)

    run = load_run(ROOT / "examples" / FOUND["run"])

    assert run.train.steps == FOUND["steps"]
    assert run.data.conversations is not None
    assert run.guard.is_enabled
