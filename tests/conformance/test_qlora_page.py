"""What the page of adapters says of QLoRA is the committed run, of the example as it is."""

import json
import re
from pathlib import Path

from phalanx.train import load_run

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "adapters.md").read_text(encoding="utf-8")
FOUND = json.loads((ROOT / "benchmarks" / "results" / "qlora-example-cpu-2cores-busy.json").read_text(encoding="utf-8"))
NAMES = {
    "float32": "lora",
    "bf16, float32 masters of the adapter": "lora_bf16",
    "`int8`": "int8",
    "`nf4`": "nf4",
}


def test_the_curve_is_that_of_the_raw_result_and_falls():
    steps, values = zip(*FOUND["held_out_perplexity"], strict=True)
    written = re.search(r"^\| steps \| (.+) \|$", PAGE, re.M)[1].split(" | ")
    measured = re.search(r"^\| held-out perplexity \| (.+) \|$", PAGE, re.M)[1].split(" | ")

    assert [int(one) for one in written] == list(steps)
    assert measured == [f"{value:.2f}" for value in values]
    assert f"{steps[-1]} steps of 4 sequences of 96 tokens, {FOUND['wall_s']:.0f} s" in PAGE
    assert list(values) == sorted(values, reverse=True)


def test_the_table_of_memory_is_that_of_the_raw_result_and_four_bits_are_least():
    rows = re.findall(r"^\| ([^|]+) \| (\d+) \| (\d+) \|$", PAGE, re.M)
    found = {NAMES[name]: {"weights_bytes": int(weights), "peak_bytes": int(peak)} for name, weights, peak in rows}
    measured = {
        arm: {key: round(of_arm[key] / 1e6) for key in ("weights_bytes", "peak_bytes")}
        for arm, of_arm in FOUND["memory"].items()
    }

    assert found == measured
    weights = [FOUND["memory"][arm]["weights_bytes"] for arm in NAMES.values()]
    assert weights == sorted(weights, reverse=True)


def test_the_example_is_the_run_that_was_measured(monkeypatch):
    monkeypatch.chdir(ROOT)

    run = load_run(ROOT / "examples" / FOUND["run"])

    assert run.train.steps == FOUND["steps"]
    assert run.model.base_quantization == "nf4"
    assert (run.train.batch_size, run.data.sequence_length) == (4, 96)
