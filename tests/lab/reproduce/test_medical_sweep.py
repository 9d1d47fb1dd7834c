"""The whole comparison on a tiny model: every arm, an interruption, and the bits that must agree."""

import io
import json
import math
from pathlib import Path

import pytest
from rich.console import Console

from phalanx.data import BpeConfig
from phalanx.data.tasks import Example, LabelledExamples
from phalanx.data.tokenizers import train_bpe
from phalanx.errors import DataError
from phalanx.lab.reproduce import medical
from phalanx.lab.reproduce.medical import CellBar, reproduce_medical, workshop
from phalanx.lab.reproduce.medical.cell import MedicalCell, missing_part
from phalanx.lab.reproduce.medical.size import MedicalSize
from phalanx.models import ModelConfig

WORDS = ("fever cough lung breath", "bone fracture joint cast")
TASK = LabelledExamples(
    ("chest", "limb"),
    tuple(Example(f"{WORDS[n % 2]} of patient number {n}", n % 2, f"site {n % 5}") for n in range(80)),
)
SIZE = MedicalSize(
    tasks=("made", "gone"), seeds=(0,), train=32, test=12, tokens=8, epochs=1, layers=2, cut=1, rows=2, rank=2
)
ARCHITECTURE = {
    "model_type": "llama",
    "num_hidden_layers": 3,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": 270,
    "max_position_embeddings": 16,
    "tie_word_embeddings": True,
    "bos_token_id": 0,
    "eos_token_id": 0,
}


@pytest.fixture
def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model with a tokenizer, one task that is there and one that is not; returns the file of finished rows."""
    home = tmp_path / "model"
    home.mkdir()
    (home / "config.json").write_text(json.dumps(ARCHITECTURE))
    tokenizer = train_bpe(iter([example.text for example in TASK.examples]), BpeConfig(vocab_size=270))
    (home / "tokenizer.json").write_bytes(tokenizer.to_json())
    monkeypatch.setenv("PHALANX_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(workshop, "MODEL", ModelConfig(path=str(home), from_scratch=True))
    monkeypatch.setattr(medical, "SIZES", {"quick": SIZE})
    monkeypatch.setattr(medical, "TASKS", {"made": medical.TASKS["medquad"]})
    monkeypatch.setattr(medical, "load_tasks", lambda size, home: ({"made": TASK}, {"gone": "not found"}))
    return tmp_path / "cache" / "reproduce" / "medical.jsonl"


@pytest.mark.slow
def test_an_interrupted_comparison_goes_on_and_sealing_changes_no_bit(made, monkeypatch):
    run_cell = workshop.run_cell
    trained = []

    def dies_once(cell, bench):
        if cell.arm == "split_sealed" and cell not in trained:
            trained.append(cell)
            raise DataError("the power failed")
        trained.append(cell)
        return run_cell(cell, bench)

    monkeypatch.setattr(workshop, "run_cell", dies_once)
    with pytest.raises(DataError, match="power"):
        reproduce_medical(size="quick")
    half = len(made.read_text().splitlines())
    found = reproduce_medical(size="quick")
    again = reproduce_medical(size="quick")

    wanted = [row for row in found["rows"] if "note" not in row]
    assert 0 < half < len(wanted)
    assert len(trained) == len(wanted) + 1
    assert again["rows"] == found["rows"]
    assert found["missing"] == 0
    assert found["absent"] == {"gone": "not found"}
    sealed = next(one for one in found["comparisons"] if one["against"] == "split_plain")
    assert (sealed["same_bits"], sealed["seeds"], sealed["difference"]) == (1, 1, 0.0)
    assert all(0 <= row["accuracy"] <= 1 for row in wanted)
    # five sites among four clients, none divided
    assert {len(row["client_texts"]) for row in wanted} == {4}
    assert all(missing_part(row["arm"]) == row["note"] for row in found["rows"] if "note" in row)
    json.dumps(found, allow_nan=False)


def test_nothing_is_trained_to_show_what_is_finished(made):
    found = reproduce_medical(size="quick", only_finished=True)

    assert found["missing"] > 0
    assert math.isfinite(found["protocol"]["noise_epsilon_per_token"])
    assert not made.exists()


@pytest.mark.parametrize("is_terminal", [False, True])
def test_the_bar_says_each_finished_cell(is_terminal):
    shown = io.StringIO()
    console = Console(file=shown, force_terminal=is_terminal, width=120)

    with CellBar(console) as bar:
        bar.set_totals(2, 1)
        bar.show_finished("2 of 2", MedicalCell("icd10", 0, "fedavg"), {"accuracy": 0.81234, "wall_s": 3.2})

    assert "reproduce: 2 of 2: icd10, seed 0: fedavg: accuracy 0.812, 3 s" in shown.getvalue()
