"""Each of the three engines passes named extra rows on to its loss, and says in its result which batch it was."""

import pytest
import torch

from phalanx.data import Batch
from phalanx.errors import DataError
from phalanx.models import LoraConfig, ModelConfig, open_model
from phalanx.objectives import OBJECTIVES
from phalanx.optimizers import OptimizerConfig
from phalanx.parallel import Controller, ParallelConfig, RankEnv, RankRecipe, RankTrainer, join_ranks
from phalanx.parallel.groups.mesh import open_domain
from phalanx.split import SplitConfig
from phalanx.split.training.task import NextToken
from phalanx.testing import MemoryCompany, SplitScenario, SplitSimulator, random_batch, tiny_run
from phalanx.train import step_inputs
from phalanx.train.engines.domain_engine import DomainEngine

WEIGHTED = "weighted_causal_lm"
CPU = torch.device("cpu")


def weighted(run):
    """The run with an objective that no run file can ask for."""
    return run.model_copy(update={"train": run.train.model_copy(update={"objective": WEIGHTED})})


def weighted_batch(run, vocab_size, factor):
    plain = random_batch(run, vocab_size, 0)
    return Batch(plain.input_ids, plain.labels, plain.indices, {"weights": torch.full(plain.labels.shape, factor)})


@pytest.fixture
def pipeline_step(tmp_path):
    """First step of a verified pipeline with three parties."""

    def step(factor):
        run = weighted(tiny_run())
        with MemoryCompany(run, tmp_path / f"company{factor}") as company:
            batch = weighted_batch(run, company.source.vocab_size, factor)
            result = company.engine.train_turn(0, step_inputs(batch, run.train.microbatches))
            assert (company.verdicts, company.event_bodies("alarm")) == ([], [])
            return result

    return step


@pytest.fixture
def domain_step(tmp_path):
    """First step of a domain of one rank."""
    run = tiny_run()
    source = open_model(run.model, tmp_path / "models", 0)
    recipe = RankRecipe(
        ParallelConfig(),
        OptimizerConfig(lr=1e-3, clip_norm=1.0),
        run.train.batch_size,
        run.train.microbatches,
        run.data.sequence_length,
        10,
        objective=WEIGHTED,
    )

    def step(factor):
        lead = Controller(RankTrainer(recipe, source, open_domain(ParallelConfig(), CPU)), None)
        inputs = step_inputs(weighted_batch(run, source.vocab_size, factor), run.train.microbatches)
        return DomainEngine(lead, 1).train_turn(0, inputs)

    with join_ranks(RankEnv(0, 1, 0, 1, tmp_path / "meeting"), CPU, "00" * 32):
        yield step


@pytest.mark.parametrize("engine", ["pipeline_step", "domain_step"])
def test_the_loss_follows_the_weights_and_the_digest_changes_with_them(engine, request):
    step = request.getfixturevalue(engine)

    once, twice = step(1.0), step(2.0)

    assert twice.loss == pytest.approx(2 * once.loss, rel=1e-6)
    assert twice.gradient_norm == pytest.approx(2 * once.gradient_norm, rel=1e-5)
    assert twice.num_targets == once.num_targets
    assert twice.batch != once.batch


def test_a_domain_refuses_rows_that_its_objective_does_not_read_before_any_rank_is_told(tmp_path):
    run = tiny_run()
    source = open_model(run.model, tmp_path / "models", 0)
    recipe = RankRecipe(
        ParallelConfig(), OptimizerConfig(lr=1e-3), run.train.batch_size, run.train.microbatches, 16, 10
    )
    with join_ranks(RankEnv(0, 1, 0, 1, tmp_path / "meeting"), CPU, "00" * 32):
        lead = Controller(RankTrainer(recipe, source, open_domain(ParallelConfig(), CPU)), None)
        batch = weighted_batch(run, source.vocab_size, 1.0)

        with pytest.raises(DataError, match=r"extras\.weights: the objective does not read them"):
            DomainEngine(lead, 1).train_turn(0, step_inputs(batch, run.train.microbatches))


@pytest.fixture
def split_scene(tmp_path):
    architecture = {"model_type": "gpt2", "n_layer": 2, "n_embd": 16, "n_head": 2, "vocab_size": 64, "n_positions": 8}
    source = open_model(ModelConfig(from_scratch=True, architecture=architecture), tmp_path, seed=0)
    return SplitScenario(
        source=source,
        split=SplitConfig(cut=1, clients=2, allow_insecure_sim=True),
        adapter=LoraConfig(rank=2),
        optimizer=OptimizerConfig(lr=1e-2),
        rows=2,
        seq=8,
        microbatches=4,
        total_steps=5,
        seed=0,
    )


def split_batch(factor):
    tokens = torch.randint(0, 64, (4, 2, 9), generator=torch.Generator().manual_seed(0))
    batch = [(rows[:, :-1].contiguous(), rows[:, 1:].contiguous()) for rows in tokens]
    return batch, [{"weights": torch.full((2, 8), factor)} for _ in batch]


def test_clients_of_a_split_seal_their_extra_rows_and_the_enclave_learns_by_them(split_scene):
    once, twice = (SplitSimulator(split_scene, task=NextToken(WEIGHTED)) for _ in range(2))

    first, second = once.step(*split_batch(1.0)), twice.step(*split_batch(2.0))

    assert second.loss == pytest.approx(2 * first.loss, rel=1e-6)
    assert second.norm == pytest.approx(2 * first.norm, rel=1e-5)
    # a number a token of four microbatches, and nothing of it in the open
    assert first.bytes_crossed == second.bytes_crossed > 4 * 2 * 8 * 4


@pytest.mark.parametrize("extras", [(), [{"mask": torch.ones(2, 8)}] * 4])
def test_a_client_sends_nothing_where_the_rows_of_the_objective_are_missing(split_scene, extras):
    simulator = SplitSimulator(split_scene, task=NextToken(WEIGHTED))

    with pytest.raises(DataError, match=r"the objective reads \['weights'\]"):
        simulator.step(split_batch(1.0)[0], extras)

    assert simulator.bytes_crossed == 0


def test_a_split_measures_held_out_rows_without_weights(split_scene):
    simulator, (batch, _) = SplitSimulator(split_scene, task=NextToken(WEIGHTED)), split_batch(1.0)

    found = simulator.measure_held_out(*batch[0])

    assert found == SplitSimulator(split_scene).measure_held_out(*batch[0])
    assert OBJECTIVES[WEIGHTED].extras.keys() == {"weights"}
