"""The figures of the page of runs are those of the raw result."""

import json
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_rates_that_searches_come_to_are_those_of_the_raw_result():
    result = json.loads((ROOT / "benchmarks/results/sweep-rates-cpu-2cores-busy.json").read_text())
    page = (ROOT / "docs/runs.md").read_text()
    shown = page.partition("<!-- sweep rates -->\n")[2].partition("<!-- end of sweep rates -->")[0].splitlines()[2:]

    assert shown == [
        f"| {row['seed']} | {row['trials']} | {row['rate']:.5f} | {row['ratio']:.3f} | {row['loss']:.4f} | "
        f"{100 * row['share']:.1f} % |"
        for row in result["searches"]
    ]
    assert f"is {result['best_rate']:.5f} with a loss of {result['best_loss']:.4f}" in page
    assert f"grid of {result['points']} learning rates" in page and f"{result['grid_steps']:,} steps" in page
    # what the page promises: within a tenth of the best rate, with a third of the steps
    assert all(row["ratio"] < 1.1 and 3 * row["steps"] <= result["grid_steps"] for row in result["searches"])
