"""Batches that would throw a model off: what counts as one, what is done with it, and what it came from."""

import json
import math
from dataclasses import replace

import pytest
import torch

from phalanx.data import BatchLoader
from phalanx.engine import NO_LIMITS, StepLimits
from phalanx.errors import ConfigError, FailedBatchError, NoHolderError, SpikeError
from phalanx.telemetry import read_metrics
from phalanx.train import load_run
from phalanx.train.engines.domain_engine import DomainEngine
from phalanx.train.records.stability import ReturnError, SpikeScore, StabilityJudge, robust_center
from phalanx.train.sessions import hooks
from phalanx.train.train_section import StabilityConfig
from tiny_run_file import tiny_run_file

SGD = "[parallel]\ndp = 1\n[checkpoint]\nevery = 5\n"
UNCLIPPED = ('optimizer.kind="sgd"', "optimizer.lr=0.5", "optimizer.clip_norm=1e9")
PLANTED = (24, 25, 26, 27, 32)


@pytest.fixture
def plant(monkeypatch):
    """Have the data hold batches of one repeated token at these places, which teach another one."""
    honest = BatchLoader.next_batch

    def plant_at(*places):
        def give(self):
            place = self.position_state()["num_samples"] // 8
            batch = honest(self)
            if place not in places:
                return batch
            ids = torch.full_like(batch.input_ids, 7)
            return replace(batch, input_ids=ids, labels=torch.full_like(batch.labels, 260))

        monkeypatch.setattr(BatchLoader, "next_batch", give)

    return plant_at


@pytest.fixture
def make_sgd(tmp_path):
    (tmp_path / "sgd.toml").write_text(tiny_run_file(SGD, steps=40, validate_every=0, held_out=4))
    return lambda *overrides: load_run(tmp_path / "sgd.toml", (*UNCLIPPED, *overrides))


def scored(losses, norms=None, **rule):
    score = SpikeScore(StabilityConfig(**rule))
    for loss, norm in zip(losses, norms or [1.0] * len(losses), strict=True):
        score.add_step(loss, norm)
    return score.make_limits()


def events(run_dir, kind):
    lines = (json.loads(line) for line in (run_dir / "events.jsonl").read_text().splitlines())
    return [line["body"] for line in lines if line["kind"] == kind]


def test_the_center_is_the_median_and_the_scale_that_of_normal_numbers():
    assert robust_center([1.0, 2.0, 3.0, 4.0, 1000.0], 0.0) == (3.0, pytest.approx(1.4826))
    assert robust_center([2.0] * 5, 0.25) == (2.0, 0.25)


def test_nothing_is_a_spike_before_there_are_enough_steps_and_without_numbers():
    assert scored([4.0] * 15) == NO_LIMITS
    assert scored([math.nan] * 40) == NO_LIMITS
    # a number that is none is a fault without any limits
    assert isinstance(NO_LIMITS.find_fault(0, math.nan, 1.0), FailedBatchError)
    assert not isinstance(NO_LIMITS.find_fault(0, 1.0, math.inf), SpikeError)


@pytest.mark.parametrize(("loss", "norm", "is_spike"), [(4.3, 1.0, True), (4.0, 9.0, True), (4.1, 1.5, False)])
def test_loss_and_norm_are_each_judged(loss, norm, is_spike):
    limits = scored([4.0 + 0.01 * (step % 3) for step in range(40)])

    assert isinstance(limits.find_fault(40, loss, norm), SpikeError) is is_spike


def test_a_limit_is_the_last_value_that_is_allowed():
    limits = StepLimits(max_loss=2.0, max_norm=3.0)

    assert limits.find_fault(0, 2.0, 3.0) is None
    assert isinstance(limits.find_fault(0, math.nextafter(2.0, 3.0), 3.0), SpikeError)


def test_a_slow_rise_is_found_although_no_step_of_it_is_far_from_the_one_before():
    score = SpikeScore(StabilityConfig(window=16))
    for step in range(40):
        score.add_step(4.0 + 0.02 * (step % 2), 1.0)
    rising = [4.0 + 0.02 * step for step in range(40)]
    found = next(
        step
        for step, loss in enumerate(rising)
        if score.make_limits().find_fault(step, loss, 1.0) or score.add_step(loss, 1.0)
    )

    assert found < 20


def test_the_falling_loss_of_an_honest_run_is_no_spike():
    generator = torch.Generator().manual_seed(3)
    losses = [
        2.0 + 4.0 * math.exp(-step / 50) + 0.05 * float(torch.randn((), generator=generator)) for step in range(600)
    ]
    norms = [math.exp(0.3 * float(torch.randn((), generator=generator))) for _ in range(600)]
    score = SpikeScore(StabilityConfig())
    spikes = 0
    for step, (loss, norm) in enumerate(zip(losses, norms, strict=True)):
        spikes += score.make_limits().find_fault(step, loss, norm) is not None
        score.add_step(loss, norm)

    assert spikes == 0


def make_judge(action, *, is_repeated=False, max_failures=2):
    judge = StabilityJudge(StabilityConfig(action=action), max_failures, is_repeated)
    judge.load_steps([{"step": step, "loss": 4.0, "grad_norm": 1.0} for step in range(20)])
    judge.begin_batch()
    return judge


def test_the_same_numbers_again_and_an_honest_next_batch_say_that_the_batch_is_at_fault():
    judge, spike = make_judge("skip"), SpikeError("far", 9.0, 5.0)
    again = [judge.decide_repeat(20, spike), judge.decide_repeat(20, spike)]
    judge.begin_batch()

    event = judge.note_applied(20, 4.0, 1.0)

    assert again == [True, False]
    assert (event["fault"], event["num_spikes"], event["loss"]) == ("data", 2, 9.0)
    # each step has its own
    judge.begin_batch()
    assert judge.note_applied(21, 4.0, 1.0) is None


@pytest.mark.parametrize("second", [(4.0, 1.0), (8.9, 5.0)])
def test_other_numbers_of_the_same_batch_say_that_the_machine_is_at_fault(second):
    judge = make_judge("skip")
    judge.decide_repeat(20, SpikeError("far", 9.0, 5.0))
    if second[0] > 5:
        judge.decide_repeat(20, SpikeError("far", *second))
        judge.begin_batch()
        second = (4.0, 1.0)

    assert judge.note_applied(20, *second)["fault"] == "machine"


def test_a_batch_at_the_lower_rate_is_applied_whatever_it_comes_to():
    judge, spike = make_judge("lower_rate"), SpikeError("far", 9.0, 5.0)
    assert judge.decide_repeat(20, spike)
    assert judge.make_limits(20).max_loss < 9.0

    assert judge.decide_repeat(20, spike)

    assert judge.make_limits(20) == replace(NO_LIMITS, rate_factor=0.1)
    assert judge.note_applied(20, 9.0, 5.0)["fault"] == "data"
    judge.begin_batch()
    # a resumed run is told by the metrics what an undisturbed one knows
    resumed = make_judge("lower_rate")
    resumed.load_steps([{"step": step, "loss": 4.0 + 5.0 * (step == 20), "grad_norm": 1.0} for step in range(21)])
    for step in (21, 35, 36):
        assert judge.make_limits(step) == resumed.make_limits(step)
    assert [judge.make_limits(step).rate_factor for step in (35, 36)] == [0.1, 1.0]


def test_a_spike_of_a_step_that_is_not_done_next_is_not_that_of_another_step():
    judge = make_judge("skip")
    judge.decide_repeat(20, SpikeError("far", 9.0, 5.0))

    judge.forget_spikes()
    judge.begin_batch()

    assert judge.note_applied(15, 4.0, 1.0) is None
    assert judge.decide_repeat(16, SpikeError("far", 9.0, 5.0)), "a first spike is computed again"


def test_returns_without_progress_are_counted_and_end():
    judge, spike = make_judge("roll_back", is_repeated=True), SpikeError("far", 9.0, 5.0)
    for step in (20, 18):
        with pytest.raises(ReturnError):
            judge.decide_repeat(step, spike)
        judge.begin_batch()

    assert judge.decide_repeat(20, spike) is False


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("train.stability={action='lower_rate'}", r"\[pipeline\] excludes train\.stability\.action = .lower_rate"),
        ("train.stability={threshold=0.0}", "threshold"),
        ("train.stability={window=8}", "window"),
        ("train.stability={action='stop'}", "action"),
    ],
)
def test_a_rule_that_cannot_work_is_refused(make_run, change, message):
    with pytest.raises(ConfigError, match=message):
        make_run(change)


def test_a_return_needs_checkpoints_and_states_that_are_known_to_be_right(make_run):
    rule = "train.stability={action='roll_back'}"
    with pytest.raises(ConfigError, match=r"checkpoint\.every = 0"):
        make_run(rule, "checkpoint.every=0")
    with pytest.raises(ConfigError, match=r'guard\.mode is "off"'):
        make_run(rule, "guard.mode='off'")


def test_the_digest_of_a_run_file_without_a_rule_is_what_it_was(make_run):
    assert "stability" not in make_run().model_dump(mode="json")["train"]


def test_a_pipeline_gives_a_planted_batch_up_and_goes_on_as_if_it_were_not_there(
    make_run, quietly, tmp_path, plant, monkeypatch
):
    changes = ("train.steps=20", "train.validate_every=0", "train.stability={}")
    plant(18)
    summary = quietly(make_run(*changes), tmp_path / "run")
    monkeypatch.undo()
    honest = BatchLoader.next_batch

    def leave_out(self):
        if self.position_state()["num_samples"] == 18 * 8:
            honest(self)
        return honest(self)

    monkeypatch.setattr(BatchLoader, "next_batch", leave_out)
    monkeypatch.setenv("PHALANX_CACHE", str(tmp_path / "cache"))
    other = quietly(make_run(*changes), tmp_path / "other")

    assert (summary["status"], summary["batches_skipped"], other["batches_skipped"]) == ("completed", 1, 0)
    assert summary["final_weights_digest"] == other["final_weights_digest"]
    assert [event["fault"] for event in events(tmp_path / "run", "spike_attributed")] == ["data"]


def test_a_machine_that_computes_wrong_once_is_told_from_a_bad_batch(make_sgd, quietly, tmp_path, monkeypatch):
    honest, wrong = DomainEngine.train_turn, [20]

    def miscompute(self, step, inputs):
        if step in wrong:
            wrong.remove(step)
            inputs = replace(inputs, labels=tuple(torch.full_like(part, 260) for part in inputs.labels))
        return honest(self, step, inputs)

    monkeypatch.setattr(DomainEngine, "train_turn", miscompute)
    summary = quietly(make_sgd("train.steps=24", "train.stability={threshold=3.0}"), tmp_path / "run")

    assert (summary["status"], summary["batches_skipped"]) == ("completed", 0)
    assert [event["fault"] for event in events(tmp_path / "run", "spike_attributed")] == ["machine"]


@pytest.mark.slow
def test_steps_that_are_lost_with_a_holder_are_judged_by_the_limits_that_they_had(
    make_sgd, quietly, tmp_path, monkeypatch
):
    honest, honest_limits, losses = DomainEngine.train_turn, hooks.RunHooks.make_limits, [23]
    limits = []

    def lose(self, step, inputs):
        if step in losses:
            losses.remove(step)
            raise NoHolderError("a rank is gone")
        return honest(self, step, inputs)

    def note_limits(self, step):
        limits.append((step, honest_limits(self, step)))
        return limits[-1][1]

    monkeypatch.setattr(DomainEngine, "train_turn", lose)
    monkeypatch.setattr(hooks.RunHooks, "make_limits", note_limits)
    quietly(make_sgd("train.steps=26", "train.stability={threshold=50.0}"), tmp_path / "run")

    assert [step for step, _ in limits] == [*range(24), *range(20, 26)]
    assert limits[20:24] == limits[24:28] != [(step, NO_LIMITS) for step in range(20, 24)]


@pytest.mark.slow
def test_planted_batches_make_a_run_diverge_without_the_defence_and_not_with_it(make_sgd, quietly, tmp_path, plant):
    perplexities = {"clean": quietly(make_sgd(), tmp_path / "clean")["validation_perplexity"]}
    plant(*PLANTED)
    perplexities["none"] = quietly(make_sgd(), tmp_path / "none")["validation_perplexity"]
    for action in ("skip", "lower_rate", "roll_back"):
        rule = f'train.stability={{action="{action}", rate_factor=0.01}}'
        summary = quietly(make_sgd(rule, "train.max_failed_batches=5"), tmp_path / action)
        assert summary["status"] == "completed"
        perplexities[action] = summary["validation_perplexity"]

    # measured: 100 clean, 232 without, 102, 116 and 129 with
    assert perplexities["none"] > 2 * perplexities["clean"]
    assert perplexities["skip"] < 1.1 * perplexities["clean"]
    assert perplexities["lower_rate"] < 1.3 * perplexities["clean"]
    assert perplexities["roll_back"] < 1.5 * perplexities["clean"]
    for action in ("skip", "lower_rate", "roll_back"):
        assert {event["fault"] for event in events(tmp_path / action, "spike_attributed")} == {"data"}
    # what was applied at the lower rate stands in the metrics with it
    rates = {
        action: {row["step"]: row["lr"] for row in read_metrics(tmp_path / action / "metrics.jsonl")}
        for action in ("skip", "lower_rate")
    }
    assert rates["lower_rate"][20] == rates["skip"][20]
    assert rates["lower_rate"][24] == pytest.approx(0.01 * rates["skip"][24])
    back = events(tmp_path / "roll_back", "fell_back")
    assert back and all(body["to_step"] <= body["from_step"] for body in back)


@pytest.mark.slow
def test_a_rate_that_is_too_high_is_the_fault_of_the_state_and_ends_the_run(make_sgd, quietly, tmp_path):
    with pytest.raises(SpikeError, match=r"lower optimizer\.lr"):
        quietly(make_sgd("optimizer.lr=1.5", "train.stability={}"), tmp_path / "run")

    assert [event["fault"] for event in events(tmp_path / "run", "spike_attributed")][-1] == "state"


@pytest.mark.slow
@pytest.mark.parametrize("action", ["skip", "roll_back"])
def test_a_run_that_is_stopped_behind_a_spike_and_resumed_is_the_undisturbed_one(
    make_sgd, quietly, tmp_path, plant, monkeypatch, action
):
    plant(*PLANTED)
    rules = (f'train.stability={{action="{action}"}}', "train.max_failed_batches=5", "train.steps=32")
    undisturbed = quietly(make_sgd(*rules), tmp_path / "undisturbed")
    save, stops = hooks.RunHooks.save_if_due, []

    def stop(self, num_steps):
        if num_steps == 28 and not stops:
            stops.append(num_steps)
            raise KeyboardInterrupt
        save(self, num_steps)

    monkeypatch.setattr(hooks.RunHooks, "save_if_due", stop)
    quietly(make_sgd(*rules), tmp_path / "run")
    resumed = quietly(make_sgd(*rules), tmp_path / "run", resume=True)

    assert resumed["resumed_from"] == 25
    assert resumed["final_weights_digest"] == undisturbed["final_weights_digest"]
