"""A run file has workers write its texts: where all of them lie, the run has the bits of one without them."""

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from phalanx.errors import ConfigError
from phalanx.rollouts import processes
from phalanx.rollouts.evidence import explain_any_evidence
from phalanx.train import load_run, train

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "grpo.toml"
SMALL = (
    "train.steps=2",
    "train.batch_size=32",
    "train.validate_every=2",
    "pipeline.stages=2",
    "optimizer.warmup_steps=0",
)
LIAR = ("phalanx.lab.attacks.rollouts.worker", "best_of_several")


def run_of(*overrides):
    return load_run(EXAMPLE, [*SMALL, *overrides])


def test_a_run_without_the_section_has_the_digest_that_it_had():
    assert "rollouts" not in run_of().model_dump(mode="json")


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (("rollouts.workers=0",), "rollouts: expected workers = N"),
        (("rollouts.workers=2", "train.precision='bf16'"), "are checked in fp32 only"),
    ],
)
def test_what_cannot_be_checked_is_refused(overrides, words):
    with pytest.raises(ConfigError, match=words):
        run_of(*overrides)


def trained(home, *overrides):
    """Summary, and what the log says of writers."""
    summary = train(run_of(*overrides), home, console=Console(file=io.StringIO()))
    lines = [json.loads(one) for one in (home / "events.jsonl").read_text().splitlines()]
    return summary, [one["body"] for one in lines if one.get("kind") == "rollout_verdict"]


@pytest.mark.slow
def test_a_run_with_writers_that_all_lie_has_the_bits_of_one_without_them(tmp_path, monkeypatch):
    alone, _ = trained(tmp_path / "alone")
    monkeypatch.setattr(processes, "_COMMAND", LIAR)

    lied_to, verdicts = trained(tmp_path / "lied_to", "rollouts.workers=2", "rollouts.check.rate=1.0")

    assert lied_to["final_weights_digest"] == alone["final_weights_digest"]
    assert {(one["party"], one["offence"]) for one in verdicts} == {("writer-0", "draw"), ("writer-1", "draw")}
    assert lied_to["rollouts"]["convicted"] == {"writer-0": "draw", "writer-1": "draw"}
    for one in verdicts:
        facts = explain_any_evidence(tmp_path / "lied_to" / one["evidence"], None, None)
        assert facts["conclusion"].startswith(f"holds: {one['party']}")


@pytest.mark.slow
def test_a_run_with_honest_writers_blames_none(tmp_path):
    summary, verdicts = trained(tmp_path / "run", "rollouts.workers=1", "rollouts.check.rate=1.0")

    assert verdicts == []
    assert summary["rollouts"] == {"convicted": {}, "left_out": {}, "unanswered": {}}
