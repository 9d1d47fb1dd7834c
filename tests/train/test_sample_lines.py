"""A run's lines commit to its data: the whole corpus at the beginning, the samples of every step."""

import json

from phalanx.data import prepare_corpus
from phalanx.data.order import sample_indices
from phalanx.telemetry import read_metrics
from phalanx.train import load_run
from phalanx.train.records.samples import samples_digest


def test_lines_of_log_and_metrics_commit_to_the_samples_that_the_order_gives(trained_once, cache):
    _, home = trained_once
    run = load_run(home / "config.toml")
    corpus = prepare_corpus(run.data, cache / "data", run.train.seed)
    size, steps = run.train.batch_size, range(run.train.steps)
    expected = {
        step: samples_digest(sample_indices(step * size, size, corpus.num_train_sequences, run.train.seed))
        for step in steps
    }

    events = [json.loads(line) for line in (home / "events.jsonl").read_text().splitlines()]

    assert {line["step"]: line["samples_digest"] for line in read_metrics(home / "metrics.jsonl")} == expected
    logged = {one["body"]["step"]: one["body"]["samples"] for one in events if one["kind"] == "step"}
    assert logged == expected
    assert [one["body"]["corpus"] for one in events if one["kind"] == "run_started"] == [corpus.digest]
