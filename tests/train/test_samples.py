"""Texts that the model writes at validation: what they are, that they repeat, and where they are shown."""

import pytest
import torch

from phalanx.data import prepare_corpus
from phalanx.errors import ConfigError
from phalanx.models import build_stage, open_model, partition_layers, tie_head
from phalanx.report import write_report
from phalanx.telemetry import read_metrics
from phalanx.train.batches.samples import Continuation, TextSampler, continue_prompt

SAMPLES = "train.samples={prompts=['The ','x'],tokens=5}"
PLAIN = {"adapter": None, "activation_checkpointing": False, "attention": "sdpa", "seed": 0}


class Counting:
    """A stage that says token n + 1 after token n, or what it is told to."""

    def __init__(self, size=10, told=None):
        self.size, self.summary_fields, self.training, self.seen = size, told, True, []

    def parameters(self):
        return iter([torch.zeros(1)])

    def train(self, mode):
        self.training = mode

    def eval(self):
        self.training = False

    def __call__(self, ids):
        assert not self.training
        self.seen.append(ids[0].tolist())
        logits = torch.full((1, ids.shape[1], self.size), -9.0)
        logits[0, -1, (int(ids[0, -1]) + 1) % self.size] = 9.0
        return logits if self.summary_fields is None else self.summary_fields(logits)


def rule(**changes):
    return Continuation(**{"tokens": 4, "context": 3, "vocab_size": 10, "eos_id": 0} | changes)


def test_every_token_is_the_likeliest_one_after_those_before_it():
    stage = Counting()

    assert continue_prompt([stage], [1, 2], rule()) == [3, 4, 5, 6]
    # the whole context for each token, and no more than it
    assert stage.seen == [[1, 2], [1, 2, 3], [2, 3, 4], [3, 4, 5]]
    assert stage.training


def test_the_end_of_text_ends_a_text():
    assert continue_prompt([Counting()], [7], rule()) == [8, 9]


def test_a_token_that_there_is_no_text_for_is_never_written():
    # the model's vocabulary is padded
    assert continue_prompt([Counting(size=16)], [9], rule(tokens=1, eos_id=99))[0] < 10


@pytest.mark.parametrize("broken", [float("nan"), float("inf")])
def test_a_broken_model_writes_nothing(broken):
    assert continue_prompt([Counting(told=lambda logits: logits * broken)], [1], rule()) == []


def test_a_drawn_text_is_the_same_for_a_seed_and_another_one_for_another():
    even = Counting(told=torch.zeros_like)

    first, again, other = (
        continue_prompt([even], [1], rule(tokens=40, eos_id=99, temperature=1.0, seed=seed)) for seed in (1, 1, 2)
    )

    assert first == again != other
    assert len(set(first)) > 3


def test_a_prompt_without_a_token_is_refused(make_run, cache):
    run = make_run("train.samples={prompts=['ok'],tokens=1}")
    corpus = prepare_corpus(run.data, cache / "data", run.train.seed)
    config = run.train.samples.model_copy(update={"prompts": ("",)})

    with pytest.raises(ConfigError, match="has no token"):
        TextSampler(config, corpus.tokenizer_path, rule())


def test_what_is_written_is_what_the_whole_model_says(make_run, cache):
    run = make_run(SAMPLES)
    source = open_model(run.model, cache / "models", run.train.seed)
    corpus = prepare_corpus(run.data, cache / "data", run.train.seed)
    stages = [build_stage(source, spec, **PLAIN) for spec in partition_layers(source.num_layers, 2, None, 0.0, 0.0)]
    tie_head(stages[0], stages[-1])
    (whole,) = [build_stage(source, spec, **PLAIN) for spec in partition_layers(source.num_layers, 1, None, 0.0, 0.0)]
    sampler = TextSampler.from_run(run, corpus)

    assert sampler.write_samples(stages) == sampler.write_samples([whole])


def test_the_texts_of_each_validation_are_kept_and_the_last_ones_shown(make_run, quietly, trained_once, tmp_path):
    summary = quietly(make_run(SAMPLES), tmp_path / "run")

    rows = {row["step"]: row["samples"] for row in read_metrics(tmp_path / "run" / "metrics.jsonl") if "samples" in row}
    assert set(rows) == {2, 5}
    assert [one["prompt"] for one in rows[5]] == ["The ", "x"]
    assert all(one["text"] for one in rows[5])
    # looking changes no weight and no draw
    assert summary["final_weights_digest"] == trained_once[0]["final_weights_digest"]
    assert "'The ' -> " in summary["shown"]
    assert "Texts of the model" in write_report(tmp_path / "run").read_text()


@pytest.mark.parametrize("section", ["[parallel]\ndp = 1\n"])
def test_an_engine_that_shows_no_logits_is_refused_by_name(run_file, section):
    from phalanx.train import load_run
    from tiny_run_file import tiny_run_file

    run_file.write_text(tiny_run_file(section))

    with pytest.raises(ConfigError, match=r"\[parallel\] excludes train\.samples: ranks return losses"):
        load_run(run_file, [SAMPLES])


def test_a_text_of_the_model_is_escaped_in_the_report(tmp_path):
    (tmp_path / "metrics.jsonl").write_text(
        '{"step": 1, "loss": 1.0, "samples": [{"prompt": "a", "text": "<script>x</script>"}]}\n'
    )

    assert "<script>x" not in write_report(tmp_path).read_text()
