"""The leak meter shows in the metrics what a model repeats, ends a run at a limit, and changes no bit of it."""

import math

import pytest

from phalanx.telemetry.metrics import read_metrics
from phalanx.train import load_run, train
from tiny_run_file import tiny_run_file

PLANTED = 'sources = [{ kind = "python_manual" }, { kind = "canaries", count = 2, copies = 40 }]'
ENGINES = {"pipeline": "[pipeline]\nstages = 3\n", "domain": "[parallel]\ndp = 1\n"}
FIGURES = {"leak_exposure_bits", "leak_exposure_mean_bits", "leak_membership_auc", "leak_true_negatives", "leak_wall_s"}


def run_tiny(tmp_path, sections, name="run", *, steps=12, planted=PLANTED, length=48):
    text = tiny_run_file(sections, steps=steps, validate_every=0)
    text = text.replace('sources = [{ kind = "python_manual" }]', planted)
    text = text.replace("sequence_length = 16", f"sequence_length = {length}").replace(
        "n_positions = 16", "n_positions = 64"
    )
    text = text.replace("max_documents = 12\n", "")
    path = tmp_path / f"{name}.toml"
    path.write_text(text)
    summary = train(load_run(path), tmp_path / name)
    return summary, read_metrics(tmp_path / name / "metrics.jsonl")


@pytest.mark.parametrize("engine", ENGINES)
def test_curves_stand_beside_the_loss_at_the_interval_and_at_the_end(tmp_path, engine):
    summary, rows = run_tiny(tmp_path, f"{ENGINES[engine]}\n[leak_meter]\nevery = 5\nrows = 4\ncandidates = 15\n")

    measured = [row for row in rows if "leak_wall_s" in row]
    assert [row["step"] for row in measured] == [4, 9, 11]
    assert all(row.keys() >= FIGURES for row in measured)
    assert all(0 <= row["leak_exposure_bits"] <= math.log2(16) for row in measured)
    assert summary["leak"]["measurements"] == 3
    assert summary["leak"]["exposure_bits"] == measured[-1]["leak_exposure_bits"]
