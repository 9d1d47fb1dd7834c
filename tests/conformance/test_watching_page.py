"""docs/watching.md: what viewers cost is the raw result of the bench, and within the bar of one hundredth."""

import json
from pathlib import Path

from phalanx.watch.page import MAX_ANSWERS_PER_S

ROOT = Path(__file__).resolve().parents[2]
PAGE = " ".join((ROOT / "docs" / "watching.md").read_text(encoding="utf-8").split())


def test_a_hundred_viewers_take_at_most_a_hundredth_of_the_machine():
    result = json.loads((ROOT / "benchmarks" / "results" / "viewers-cpu-2cores-busy.json").read_text(encoding="utf-8"))

    assert result["viewers"] >= 100
    assert result["max_answers_per_s"] == MAX_ANSWERS_PER_S
    assert result["max_share_of_machine"] <= 0.01
    answer, share = 1000 * result["answer_cpu_s"], 100 * result["max_share_of_machine"]
    counts = f"{answer:.2f} ms of a processor, and {MAX_ANSWERS_PER_S:.0f} a second {share:.2f} % of its two processors"
    assert counts in PAGE
    low, high = min(result["step_ratios"]), max(result["step_ratios"])
    assert f"{result['step_ratio']:.2f} times ({low:.2f} to {high:.2f})" in PAGE
