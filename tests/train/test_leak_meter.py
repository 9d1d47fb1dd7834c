"""The leak meter shows in the metrics what a model repeats, ends a run at a limit, and changes no bit of it."""

import json
import math

import pytest
import torch
from torch.nn.functional import cross_entropy

from phalanx.data import BatchLoader, prepare_corpus
from phalanx.data.batch import IGNORE
from phalanx.data.sources import CanarySettings
from phalanx.errors import ConfigError
from phalanx.redteam.extraction import CanaryExposure
from phalanx.redteam.opening import TargetChoice, open_target
from phalanx.security.privacy.leakage import LeakLosses
from phalanx.telemetry.metrics import read_metrics
from phalanx.train import load_run
from phalanx.train.records.run_directory import cache_beside
from tiny_run_file import tiny_run_file

PLANTED = 'sources = [{ kind = "python_manual" }, { kind = "canaries", count = 2, copies = 40 }]'
ENGINES = {"pipeline": "[pipeline]\nstages = 3\n", "domain": "[parallel]\ndp = 1\n"}
FIGURES = {"leak_exposure_bits", "leak_exposure_mean_bits", "leak_membership_auc", "leak_true_negatives", "leak_wall_s"}
METER = "\n[leak_meter]\nevery = 5\nrows = 4\ncandidates = 15\n"


@pytest.fixture
def run_tiny(tmp_path, quietly):
    def run(sections, name="run", *, steps=12, planted=PLANTED, resume=False, only_load=False):
        text = tiny_run_file(sections, steps=steps, validate_every=0)
        text = text.replace('sources = [{ kind = "python_manual" }]', planted).replace("max_documents = 12\n", "")
        text = text.replace("sequence_length = 16", "sequence_length = 48").replace(
            "n_positions = 16", "n_positions = 64"
        )
        path = tmp_path / f"{name}.toml"
        path.write_text(text)
        config = load_run(path)
        if only_load:
            return config
        summary = quietly(config, tmp_path / name, resume=resume)
        return summary, read_metrics(tmp_path / name / "metrics.jsonl")

    return run


@pytest.mark.quick_cases("domain")
@pytest.mark.parametrize("engine", ENGINES)
def test_curves_stand_beside_the_loss_at_the_interval_and_at_the_end(run_tiny, engine):
    summary, rows = run_tiny(ENGINES[engine] + METER)

    measured = [row for row in rows if "leak_wall_s" in row]
    assert [row["step"] for row in measured] == [4, 9, 11]
    assert all(row.keys() >= FIGURES for row in measured)
    assert all(0 <= row["leak_exposure_bits"] <= math.log2(16) for row in measured)
    assert summary["leak"]["measurements"] == 3
    assert summary["leak"]["exposure_bits"] == measured[-1]["leak_exposure_bits"]
    # the price is told
    assert "leak meter: 25 rows took" in summary["shown"]


@pytest.mark.slow
def test_a_run_is_the_same_with_and_without_the_meter(run_tiny):
    measured, rows = run_tiny(ENGINES["domain"] + METER, "measured")
    plain, others = run_tiny(ENGINES["domain"], "plain")

    assert measured["final_weights_digest"] == plain["final_weights_digest"]
    assert [row["loss"] for row in rows] == [row["loss"] for row in others]
    assert "leak" not in plain


def test_the_last_point_equals_the_exact_calculation_after_the_run(run_tiny, tmp_path):
    summary, rows = run_tiny(ENGINES["domain"] + METER, steps=10)

    config = load_run(tmp_path / "run.toml")
    with open_target(TargetChoice(str(tmp_path / "run"))) as target:
        exposure = CanaryExposure(candidates=15).run(target)
        corpus = prepare_corpus(config.data, cache_beside(tmp_path / "run") / "data", config.train.seed)
        drawn = BatchLoader(corpus, 4, config.train.seed).next_sequences()
        members = [exact_loss(target.model.module, corpus.train_batch([number])) for number in drawn]
        strangers = [exact_loss(target.model.module, corpus.validation_batch([number])) for number in range(4)]
    exact = LeakLosses(members=tuple(members), strangers=tuple(strangers)).read_leak()
    assert isinstance(target.canaries, CanarySettings)
    assert target.canaries.copies == 40
    assert exposure.details["exposure_bits"] == summary["leak"]["exposure_bits"]
    assert exposure.details["exposure_mean_bits"] == summary["leak"]["exposure_mean_bits"]
    assert exact["membership_auc"] == rows[-1]["leak_membership_auc"]
    assert exact["true_negatives"] == rows[-1]["leak_true_negatives"]


@torch.no_grad()
def exact_loss(module, batch):
    logits = module(input_ids=batch.input_ids).logits[0].double()
    return float(cross_entropy(logits, batch.labels[0], ignore_index=IGNORE))


def events(run_dir, kind):
    lines = [json.loads(line) for line in (run_dir / "events.jsonl").read_text().splitlines()]
    return [line["body"] for line in lines if line["kind"] == kind]


def test_a_run_stops_at_the_limit_and_a_resumed_one_does_not_go_on(run_tiny, tmp_path):
    meter = METER + 'max_exposure = 0.01\naction = "stop"\n'

    summary, rows = run_tiny(ENGINES["domain"] + meter, steps=30)
    (limit, *_) = events(tmp_path / "run", "leak_limit")
    resumed, after = run_tiny(ENGINES["domain"] + meter, steps=30, resume=True)

    assert (summary["status"], summary["steps"]) == ("completed", limit["step"] + 1)
    assert summary["steps"] < 30
    assert "deduplicate the text" in summary["shown"]
    assert resumed["steps"] == summary["steps"]
    assert len(after) == len(rows)


def test_a_warning_lets_the_run_go_on(run_tiny, tmp_path):
    summary, _ = run_tiny(ENGINES["domain"] + METER + "max_exposure = 0.01\n")

    assert summary["steps"] == 12
    assert events(tmp_path / "run", "leak_limit")


def test_without_canaries_membership_alone_is_measured(run_tiny):
    plain = 'sources = [{ kind = "python_manual" }]'

    _, rows = run_tiny(ENGINES["domain"] + METER, planted=plain, steps=5)

    assert "leak_membership_auc" in rows[-1]
    assert "leak_exposure_bits" not in rows[-1]
    with pytest.raises(ConfigError, match="no canary is planted"):
        run_tiny(ENGINES["domain"] + METER + "max_exposure = 2.0\n", "limited", planted=plain)


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        (METER + "max_exposure = 4.0\n", "15 candidates show 4 at most"),
        (METER + "action = 'panic'\n", "action"),
        (METER + "evry = 3\n", "did you mean 'every'"),
        ("[split]\ncut = 2\nallow_insecure_sim = true\n" + METER, "leak_meter"),
        ('[federated]\nsites = ["a", "b"]\n' + METER, "leak_meter"),
    ],
)
def test_a_meter_that_cannot_work_is_refused(run_tiny, sections, message):
    with pytest.raises(ConfigError, match=message):
        run_tiny(sections, only_load=True)


def test_another_objective_than_the_next_token_is_refused(run_tiny, tmp_path):
    run_tiny(ENGINES["domain"] + METER, only_load=True)
    with pytest.raises(ConfigError, match="leak_meter"):
        load_run(tmp_path / "run.toml", ("train.objective=prefix_lm",))
