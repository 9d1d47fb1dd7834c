"""A pipeline with a first stage that is fed hidden states: the part of a model behind a front at other parties."""

import pytest
import torch

from phalanx.engine import StepInputs
from phalanx.lab.attacks import make_actor
from phalanx.models import LoraConfig, StageSpec, build_stage
from phalanx.optimizers import OptimizerConfig
from phalanx.pipeline import AttackConfig
from phalanx.pipeline.evidence.explain import explain_evidence
from phalanx.split import FrontPart, SplitConfig
from phalanx.testing import SplitScenario, SplitSimulator, random_batch, tiny_run
from phalanx.testing.tiny import with_split
from phalanx.train import step_inputs
from phalanx.train.setup.layout import make_plan

STEPS, CUT, LAYERS = 3, 2, 6
SPLIT = SplitConfig(cut=CUT, clients=2, allow_insecure_sim=True, workers_see_hidden_states=True)


def fed_run(stages=4, *, clip_norm=0.5):
    run = tiny_run(
        stages,
        num_layers=LAYERS,
        adapter=LoraConfig(rank=2),
        optimizer=OptimizerConfig(lr=1e-2, warmup_steps=2, clip_norm=clip_norm),
    )
    return with_split(run, SPLIT)


def batches(company, *, is_whole):
    """Token batches; whole ones have a target for every token, and so a power of two of them."""
    run = company.run_config
    for step in range(STEPS):
        batch = step_inputs(random_batch(run, company.source.vocab_size, step), run.train.microbatches)
        labels = tuple(one.clamp(min=0) for one in batch.labels) if is_whole else batch.labels
        yield StepInputs(batch.ids, labels, sum(int((one >= 0).sum()) for one in labels))


def train(company, *, is_whole=False):
    front = FrontPart(company.source, CUT)
    return [
        company.engine.train_turn(step, StepInputs(tuple(front(ids) for ids in fed.ids), fed.labels, fed.num_targets))
        for step, fed in enumerate(batches(company, is_whole=is_whole))
    ]


def train_split(company, *, is_whole=False):
    run = company.run_config
    simulator = SplitSimulator(
        SplitScenario(
            company.source,
            SPLIT,
            run.model.adapter,
            run.optimizer,
            rows=run.train.batch_size // run.train.microbatches,
            seq=run.data.sequence_length,
            microbatches=run.train.microbatches,
            total_steps=run.train.steps,
            seed=run.train.seed,
        )
    )
    taken = [simulator.step(list(zip(fed.ids, fed.labels, strict=True))) for fed in batches(company, is_whole=is_whole)]
    return taken, simulator.copy_adapters()


def adapters_of(company):
    return {
        name: parameter.detach().clone()
        for copy in company.engine.fetch_stages("weights")
        for name, parameter in copy.module.trainable_parameters().items()
    }


def test_stages_of_a_back_part_begin_behind_the_front_and_none_embeds(make_company):
    company = make_company(fed_run())

    first, *_, last = make_plan(company.run_config, company.source).stages

    assert (first.first_layer, last.end_layer) == (CUT, LAYERS)
    assert not any(
        "wte" in name for copy in company.engine.fetch_stages("weights") for name in copy.module.all_parameters()
    )


def test_a_stage_behind_the_front_takes_hidden_states_and_refuses_tokens(make_company):
    source = make_company(fed_run()).source
    spec = StageSpec(0, 2, CUT, LAYERS - 1)
    stage = build_stage(source, spec, adapter=None, activation_checkpointing=False, attention="sdpa", seed=0)

    assert (spec.is_first, spec.has_embedding) == (True, False)
    assert stage(torch.zeros(2, 8, 16)).shape == (2, 8, 16)
    with pytest.raises(Exception, match=r"expected \[batch, seq, 16\]"):
        stage(torch.zeros(2, 8, dtype=torch.int64))


@pytest.mark.parametrize("stages", [pytest.param(3, marks=pytest.mark.slow), 4])
def test_losses_and_adapters_are_the_bits_of_a_split_with_one_enclave(make_company, stages):
    company = make_company(fed_run(stages, clip_norm=100.0))

    results = train(company, is_whole=True)

    taken, adapters = train_split(company, is_whole=True)
    assert [result.loss for result in results] == [step.loss for step in taken]
    assert [result.gradient_norm for result in results] == pytest.approx([step.norm for step in taken], rel=1e-12)
    found = adapters_of(company)
    assert found.keys() == adapters.keys()
    assert all(torch.equal(found[name], adapters[name]) for name in adapters)


def test_losses_are_those_of_a_split_within_a_millionth_where_sums_round_differently(make_company):
    company = make_company(fed_run(clip_norm=1e-3))

    results = train(company)

    taken, _ = train_split(company)
    assert min(step.norm for step in taken) > 1e-3, "the test means to clip"
    assert [result.loss for result in results] == pytest.approx([step.loss for step in taken], rel=1e-6)


def test_every_microbatch_has_a_loss_of_its_own(make_company):
    company = make_company(fed_run())

    result = train(company)[-1]

    assert len(company.engine.microbatch_losses) == company.run_config.train.microbatches
    assert sum(company.engine.microbatch_losses) / result.num_targets == result.loss


def test_a_liar_in_the_middle_is_named_and_evicted_and_its_evidence_convicts(make_company):
    honest = make_company(fed_run())
    train(honest)
    lie = AttackConfig(kind="forward_sign_flip", stages=(1,), from_step=1)
    company = make_company(fed_run(), {1: make_actor(lie, "worker-1")})

    results = train(company)

    (verdict,) = company.verdicts
    assert (verdict.party, verdict.stage, verdict.step, verdict.offence) == ("worker-1", 1, 1, "message")
    assert company.evicted == ["worker-1"]
    assert [result.guard.attempts for result in results] == [1, 2, 1]
    assert company.weights_digest() == honest.weights_digest()
    facts = explain_evidence(company.run_dir / verdict.evidence)
    assert "worker-1" in str(facts)


def test_an_honest_company_blames_no_party(make_company):
    company = make_company(fed_run())

    results = train(company)

    assert (company.verdicts, company.evicted, company.lost) == ([], [], [])
    assert {result.guard.attempts for result in results} == {1}
