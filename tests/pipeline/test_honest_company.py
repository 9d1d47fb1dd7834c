"""An honest run: no party is blamed, and neither guard, layout nor schedule changes what is learnt."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from phalanx.data import IGNORE
from phalanx.models import LoraConfig
from phalanx.optimizers import OptimizerConfig, learning_rate
from phalanx.pipeline import GuardConfig, PipelineConfig
from phalanx.testing import random_batch, tiny_run

STEPS = 2
LAYERS = 8


def deep_run(stages, schedule="1f1b", **changes):
    pipeline = PipelineConfig(stages=stages, schedule=schedule, step_timeout_s=30.0)
    return tiny_run(num_layers=LAYERS, pipeline=pipeline, **changes)


def slow(value):
    return pytest.param(value, marks=pytest.mark.slow)


def losses_of(results):
    return [result.loss for result in results]


def train_whole(run, source, num_steps):
    """Train the un-sliced model with torch's own AdamW and clipping; return the losses and the model."""
    model = AutoModelForCausalLM.from_pretrained(source.directory, dtype=torch.float32, local_files_only=True).train()
    config = run.optimizer
    named = dict(model.named_parameters())
    groups = [
        {"params": [p for p in named.values() if p.ndim >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in named.values() if p.ndim < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=config.lr, betas=config.betas, eps=config.eps)
    losses, norms = [], []
    for step in range(num_steps):
        batch = random_batch(run, source.vocab_size, step)
        logits = model(batch.input_ids).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch.labels.flatten(), ignore_index=IGNORE)
        optimizer.zero_grad()
        loss.backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), config.clip_norm)))
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(config, step, run.train.steps)
        optimizer.step()
        losses.append(loss.item())
    return losses, norms, model


@pytest.mark.parametrize("stages", [3, slow(8)])
def test_a_pipeline_learns_what_the_whole_model_learns_under_torchs_own_optimizer(make_company, stages):
    run = deep_run(stages, optimizer=OptimizerConfig(lr=1e-2, weight_decay=0.2, clip_norm=0.25, warmup_steps=2))
    company = make_company(run)

    results = company.run(5)

    losses, norms, whole = train_whole(run, company.source, 5)
    assert min(norms) > 0.25, "the test means to clip"
    assert losses_of(results) == pytest.approx(losses, rel=2e-6)
    assert [result.gradient_norm for result in results] == pytest.approx(norms, rel=1e-5)
    expected = dict(whole.named_parameters())
    for copy in company.engine.fetch_stages("weights"):
        for name, parameter in copy.module.all_parameters().items():
            torch.testing.assert_close(parameter, expected[name], rtol=1e-4, atol=2e-6)


@pytest.mark.parametrize("stages", [slow(3), 6])
def test_both_schedules_end_with_the_same_bits(make_company, honest_digest, stages):
    company = make_company(deep_run(stages, "gpipe"))

    company.run(STEPS)

    assert company.weights_digest() == honest_digest(deep_run(stages, "1f1b"), STEPS)


@pytest.mark.quick_cases("3")
@pytest.mark.parametrize("stages", [3, slow(4), slow(5), 6, slow(7), slow(8)])
def test_the_guard_changes_no_bit_and_blames_nobody(make_company, honest_digest, stages):
    company = make_company(
        deep_run(
            stages,
            guard=GuardConfig(audit_rate=0.5, step_audit_rate=0.0, owner_audit_rate=0.0, gradient_screen=False),
        )
    )

    results = company.run(STEPS)

    assert company.weights_digest() == honest_digest(deep_run(stages), STEPS)
    losses, _, _ = train_whole(company.run_config, company.source, STEPS)
    assert losses_of(results) == pytest.approx(losses, rel=2e-6)
    assert [result.guard.num_audits for result in results] == [2 * (stages - 2)] * STEPS
    assert (company.verdicts, company.evicted, company.lost) == ([], [], [])
    assert [result.guard.attempts for result in results] == [1] * STEPS


def test_without_a_guard_nothing_is_audited_or_shadowed(make_company):
    company = make_company(tiny_run(guard=GuardConfig(mode="off")))

    results = company.run(2)

    assert [result.guard.num_audits for result in results] == [0, 0]
    assert dict(company.engine.stage_shadows) == {}


@pytest.mark.quick_cases("guard0", "guard4")
@pytest.mark.parametrize(
    "guard",
    [
        GuardConfig(shadow="lockstep"),
        slow(GuardConfig(shadow="lockstep", audit_rate=1.0)),
        GuardConfig(audit_rate=1.0),
        GuardConfig(audit_rate=0.01),
        GuardConfig(screen=False),
    ],
)
def test_every_kind_of_guard_ends_with_the_same_bits(make_company, honest_digest, guard):
    company = make_company(tiny_run(guard=guard))

    company.run(STEPS)

    assert company.weights_digest() == honest_digest(tiny_run(), STEPS)
    assert company.verdicts == []


def test_lockstep_audits_every_microbatch(make_company):
    company = make_company(tiny_run(guard=GuardConfig(shadow="lockstep", audit_rate=0.01, owner_audit_rate=0.0)))

    (result,) = company.run(1)

    assert result.guard.num_audits == 2 * 4


@pytest.mark.parametrize("shadow", ["gradient", "adapters"])
def test_adapters_are_trained_under_guard_with_the_bits_of_an_unguarded_run(make_company, honest_digest, shadow):
    pytest.importorskip("peft")
    run = tiny_run(guard=GuardConfig(shadow=shadow), adapter=LoraConfig(rank=2))
    company = make_company(run)

    company.run(STEPS)

    assert company.weights_digest() == honest_digest(run, STEPS)
    assert company.weights_digest() != honest_digest(run, 0)
    assert company.verdicts == []


@pytest.mark.parametrize("stages", [1, 2])
def test_an_owner_who_is_alone_needs_no_guard(make_company, stages):
    company = make_company(tiny_run(stages))

    results = company.run(2)

    assert [result.guard.num_audits for result in results] == [0, 0]
    assert dict(company.engine.stage_shadows) == {}
    assert set(company.engine.stage_holders.values()) == {"owner"}


def test_a_collected_state_is_the_one_that_was_agreed_on(make_company):
    company = make_company()
    company.run(2)

    states = {copy.spec.index: copy.compute_digest() for copy in company.engine.fetch_stages("state")}

    assert [state.step for state in states.values()] == [2, 2, 2, 2]
    again = {copy.spec.index: copy.compute_digest() for copy in company.engine.fetch_stages("state")}
    assert again == states
