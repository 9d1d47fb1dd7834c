"""`phalanx calibrate` on a tiny run with real text: one JSON object, or tables and a line for the run file."""

import json
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from phalanx.cli import run_command
from phalanx.train import load_run

TINY = """
[model]
from_scratch = true

[model.architecture]
model_type = "gpt2"
vocab_size = 280
n_positions = 16
n_embd = 16
n_layer = 3
n_head = 2
resid_pdrop = 0.0
embd_pdrop = 0.0
attn_pdrop = 0.0
bos_token_id = 0
eos_token_id = 0

[data]
sources = [{ kind = "text", path = "PATH" }]
tokenizer = { kind = "bpe", vocab_size = 280 }
sequence_length = 16

[train]
steps = 20
batch_size = 32
microbatches = 32
seed = 3

[optimizer]
lr = 1e-2

[pipeline]
stages = 3
"""


@pytest.fixture
def run_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PHALANX_CACHE", str(tmp_path / "cache"))
    text = tmp_path / "text"
    text.mkdir()
    for n in range(40):
        words = " ".join(f"word{(n * k * k) % 97} of {k}" for k in range(60))
        (text / f"{n}.txt").write_text(f"Document {n}: {words}.\n")
    path = tmp_path / "tiny.toml"
    path.write_text(TINY.replace("PATH", str(text)))
    return path


def test_json_is_one_object_on_stdout_and_in_the_file(
    run_file: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # enough for a tail, and a test may take seconds only
    monkeypatch.setattr("phalanx.lab.calibrate.session.QUICK_MESSAGES", 32)
    out = tmp_path / "results" / "calibration.json"

    code = run_command(["calibrate", str(run_file), "--quick", "--json", "--out", str(out)])

    assert code == 0
    result = json.loads(capsys.readouterr().out)
    assert result == json.loads(out.read_text())
    assert (result["name"], result["run"], result["quick"], result["num_steps"]) == ("calibrate", "tiny", True, 1)
    rows = {(row["path"], row["reference"], row["direction"]): row for row in result["rows"]}
    assert all(row["num_messages"] == 32 and row["num_tokens"] == 32 * 16 for row in rows.values())
    assert 0 < rows["fp64", "fp32", "backward"]["max"] < 1e-4 < rows["bf16", "fp32", "forward"]["max"]
    assert {row["operator"] for row in result["operators"]} == {"attention", "mlp", "linear", "norm"}
    # a path is measured or absent with a reason, never both
    measured = {row["path"] for row in result["rows"]}
    assert measured.isdisjoint(result["absent"])
    assert {"fp32, compiled", "bf16, compiled"} <= set(result["absent"])
    assert all(result["absent"].values())


def made_result(tolerance: float | None) -> dict[str, Any]:
    figures = {
        "num_messages": 128,
        "share_bit_equal": 0.25,
        "q50": 1.234e-7,
        "max": 5.678e-7,
        "tau_1_per_million": None,
    }
    where = {"path": "fp64", "reference": "fp32"}
    return {
        "name": "calibrate",
        "precision": "fp32",
        "rows": [{**where, "direction": "backward", "drift_alarms": 3, **figures}],
        "operators": [{**where, "operator": "norm", **figures}],
        "thresholds": [{"precision": "fp32", "tau": 1e-5, "per_million": 0.125, "worst": "somebody"}],
        "absent": {"fp32, GPU": "torch finds no GPU"},
        "suggested": {"tolerance": tolerance, "reason": "because"},
    }


def shown(
    result: dict[str, Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], run_file: Path
) -> str:
    module = ModuleType("phalanx.lab.calibrate")
    vars(module).update(calibrate=lambda run, quick: result)
    monkeypatch.setitem(sys.modules, "phalanx.lab.calibrate", module)
    assert run_command(["calibrate", str(run_file)]) == 0
    return capsys.readouterr().out


def test_the_table_ends_with_a_tolerance_that_a_run_file_takes(
    run_file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = shown(made_result(2e-5), monkeypatch, capsys, run_file)

    found = re.search(r"^\[guard\]\ntolerance = (\S+)  # fp32: because$", out, re.MULTILINE)
    assert found, out
    assert load_run(run_file, [f"guard.tolerance={found[1]}"]).guard.tolerance == 2e-5
    for text in ("fp64 against fp32", "25 %", "1.2e-07", "5.7e-07", "somebody", "torch finds no GPU"):
        assert text in out
    assert "drift alarms: fp64 against fp32, backward  3" in out
    # an 80-column terminal cuts no figure
    assert "…" not in out


def test_without_a_suggestion_no_line_for_the_run_file_is_printed(
    run_file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = shown(made_result(None), monkeypatch, capsys, run_file)

    assert "no tolerance suggested for fp32: because" in out
    assert "[guard]" not in out


def test_an_impossible_run_exits_with_the_code_of_its_error(run_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["calibrate", str(run_file), "--set", "pipeline.stages=2"]) == 2
    assert "leaves no stage in other hands" in capsys.readouterr().err
    assert run_command(["calibrate", str(run_file.with_name("missing.toml"))]) == 2


def test_the_help_shows_an_example(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["calibrate", "--help"]) == 0

    assert "Example: phalanx calibrate " in capsys.readouterr().out
