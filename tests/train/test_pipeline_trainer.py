"""A trainer of stages that lie in a guarded pipeline: an enclave trains with it as with a back part of its own."""

import math
from contextlib import ExitStack

import pytest
import torch

from phalanx.data import IGNORE
from phalanx.engine import UNGUARDED
from phalanx.errors import CheckpointError, DataError, FailedBatchError
from phalanx.models import LoraConfig
from phalanx.objectives.dpo import DpoSettings
from phalanx.objectives.pairs import REFERENCE
from phalanx.optimizers import OptimizerConfig
from phalanx.split import BackTrainer, FrontPart, SplitConfig, build_back, task_of
from phalanx.testing import MemoryCompany, random_batch, tiny_run
from phalanx.testing.tiny import with_split
from phalanx.train import step_inputs
from phalanx.train.engines.pipeline_trainer import PipelineTrainer
from phalanx.train.setup.stage_source import BackLibrary

CUT = 2


def joined_run():
    run = tiny_run(
        3,
        num_layers=5,
        adapter=LoraConfig(rank=2),
        # a power of two of targets, and nothing clipped: both trainers then have the same bits
        optimizer=OptimizerConfig(lr=1e-2, warmup_steps=2, clip_norm=100.0),
    )
    split = SplitConfig(cut=CUT, clients=2, allow_insecure_sim=True, workers_see_hidden_states=True)
    return with_split(run, split)


class OwnedCompany:
    """The stages of a trainer, in a company of this process."""

    def __init__(self, company):
        self.company, self.reports, self.begun_at = company, [], None

    def assign_stages(self, state, num_steps):
        company, engine = self.company, self.company.engine
        library = BackLibrary(company.source, company.plan, state, num_steps)
        # the company has begun with the untouched model
        engine.fall_back(library, num_steps, library.stage_digests())
        self.begun_at = num_steps
        return engine

    def report_guard(self, guard):
        self.reports.append(guard)

    def guard_metadata(self):
        return {"num_events": 1, "digest": "ab"}

    def check_guard_metadata(self, books):
        pass


@pytest.fixture
def make_trainer(tmp_path_factory):
    with ExitStack() as stack:
        cache = tmp_path_factory.mktemp("models")

        def make():
            company = stack.enter_context(MemoryCompany(joined_run(), tmp_path_factory.mktemp("run"), cache=cache))
            owned = OwnedCompany(company)
            return PipelineTrainer(whole_of(company), owned, company.source.vocab_size), owned

        yield make


def whole_of(company):
    run = company.run_config
    back = build_back(company.source, CUT, adapter=run.model.adapter, seed=run.train.seed)
    return BackTrainer(back, task_of(run.train.objective, 0), run.optimizer, run.train.steps, run.train.seed)


def microbatches(company, step):
    front, run = FrontPart(company.source, CUT), company.run_config
    fed = step_inputs(random_batch(run, company.source.vocab_size, step), run.train.microbatches)
    return [(front(ids), labels.clamp(min=0)) for ids, labels in zip(fed.ids, fed.labels, strict=True)]


def take(trainer, company, step):
    for hidden, labels in microbatches(company, step):
        trainer.learn_microbatch(hidden, labels)
    return trainer.step()


def test_steps_losses_measurements_and_weights_are_those_of_a_back_part_in_one_process(make_trainer):
    trainer, owned = make_trainer()
    whole = whole_of(owned.company)
    held_out = microbatches(owned.company, 99)[0]
    assert trainer.measure_microbatch(*held_out) == whole.measure_microbatch(*held_out)

    for step in range(3):
        norm = take(trainer, owned.company, step)

        assert norm == pytest.approx(take(whole, owned.company, step), rel=1e-12)
        assert list(trainer.step_losses) == whole.step_losses

    assert trainer.measure_microbatch(*held_out) == whole.measure_microbatch(*held_out)
    assert trainer.num_steps == whole.num_steps == 3
    for found, expected in (
        (trainer.state_tensors(), whole.state_tensors()),
        (dict(trainer.trained_weights()), dict(whole.trained_weights())),
    ):
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert [report.attempts for report in owned.reports] == [1, 1, 1]


def test_pairs_of_answers_are_learned_and_measured_as_by_a_back_part_in_one_process(tmp_path):
    run = joined_run()
    # both rows of a pair in a microbatch; its files are of no use here
    train = run.train.model_copy(update={"objective": DpoSettings(beta=0.5), "batch_size": 4 * run.train.microbatches})
    run = run.model_copy(update={"train": train})

    def pairs(company, step):
        generator = torch.Generator().manual_seed(step)
        for hidden, labels in microbatches(company, step):
            yield hidden, labels, {REFERENCE: torch.rand(len(labels), generator=generator) - 30.0}

    with MemoryCompany(run, tmp_path / "run", cache=tmp_path / "models") as company:
        owned = OwnedCompany(company)
        back = build_back(company.source, CUT, adapter=run.model.adapter, seed=train.seed)
        trainer = PipelineTrainer(whole_of(company), owned, company.source.vocab_size)
        whole = BackTrainer(back, task_of(train.objective, 0), run.optimizer, train.steps, train.seed)
        held_out = next(pairs(company, 99))

        for step in range(2):
            for one in (trainer, whole):
                for microbatch in pairs(company, step):
                    one.learn_microbatch(*microbatch)
            assert trainer.step() == pytest.approx(whole.step(), rel=1e-6)
            assert [targets for _, targets in trainer.step_losses] == [2] * train.microbatches
            assert [loss for loss, _ in trainer.step_losses] == pytest.approx([loss for loss, _ in whole.step_losses])

        found, expected = trainer.measure_microbatch(*held_out), whole.measure_microbatch(*held_out)
        assert (found.targets, found.answers) == (expected.targets, ())
        assert (found.loss, *found.pair_sums) == pytest.approx((expected.loss, *expected.pair_sums), rel=1e-5)


def test_another_session_goes_on_from_the_state_with_the_same_bits(make_trainer):
    (first, one), (second, other) = make_trainer(), make_trainer()
    for step in range(2):
        take(first, one.company, step)
    state = {name: tensor.clone() for name, tensor in first.state_tensors().items()}

    second.load_state(state, 2)
    found, expected = take(second, other.company, 2), take(first, one.company, 2)

    assert (found, other.begun_at, second.num_steps) == (expected, 2, 3)
    weights = dict(first.trained_weights())
    assert all(torch.equal(tensor, weights[name]) for name, tensor in second.trained_weights())


def test_a_state_that_comes_when_the_stages_are_at_work_is_refused(make_trainer):
    trainer, owned = make_trainer()
    state = {name: tensor.clone() for name, tensor in trainer.state_tensors().items()}
    take(trainer, owned.company, 0)

    with pytest.raises(CheckpointError, match="the pipeline is running"):
        trainer.load_state(state, 0)


@pytest.mark.parametrize("label", [-1, 64])
def test_a_label_outside_of_the_vocabulary_is_refused_before_any_stage_works(make_trainer, label):
    trainer, owned = make_trainer()
    hidden, labels = microbatches(owned.company, 0)[0]
    labels[0, 0] = label

    with pytest.raises(DataError, match=r"outside of the model's vocabulary, 0 .. 63"):
        trainer.learn_microbatch(hidden, labels)

    assert (trainer.num_learned, owned.begun_at) == (0, None)


def test_a_batch_without_a_target_fails_is_reported_and_is_forgotten(make_trainer):
    trainer, owned = make_trainer()
    for hidden, labels in microbatches(owned.company, 0):
        trainer.learn_microbatch(hidden, torch.full_like(labels, IGNORE))

    with pytest.raises(FailedBatchError, match="the batch has no label to learn"):
        trainer.step()

    assert (owned.reports, trainer.num_learned, trainer.num_steps) == ([UNGUARDED], 0, 0)
    assert all(math.isnan(loss) and count == 0 for loss, count in trainer.step_losses)
    assert take(trainer, owned.company, 0) > 0


def test_a_batch_that_is_not_finite_fails_and_the_next_one_is_taken(make_trainer):
    trainer, owned = make_trainer()
    for hidden, labels in microbatches(owned.company, 0):
        trainer.learn_microbatch(hidden * math.nan, labels)

    with pytest.raises(FailedBatchError):
        trainer.step()

    assert trainer.num_steps == 0
    assert take(trainer, owned.company, 0) > 0


def test_a_back_part_in_one_process_refuses_the_state_of_an_enclave_with_a_pipeline(make_trainer):
    trainer, owned = make_trainer()
    whole = whole_of(owned.company)

    whole.check_metadata({})
    with pytest.raises(CheckpointError, match="an enclave with a pipeline"):
        whole.check_metadata(trainer.state_metadata())
