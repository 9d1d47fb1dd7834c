"""A guarded pipeline of experts: routers' losses are recomputed like everything else, and a liar is named."""

import pytest

from phalanx.errors import ConfigError
from phalanx.lab.attacks import make_actor
from phalanx.pipeline import AttackConfig, GuardConfig
from phalanx.testing import random_batch, tiny_run
from phalanx.train import step_inputs

AUDITED = GuardConfig(audit_rate=1.0, step_audit_rate=1.0, owner_audit_rate=1.0)


def mixture_run(guard=AUDITED, **changes):
    run = tiny_run(guard=guard)
    architecture = {
        "model_type": "qwen3_moe",
        "vocab_size": 64,
        "num_hidden_layers": 4,
        "hidden_size": 16,
        "intermediate_size": 24,
        "moe_intermediate_size": 8,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 8,
        "max_position_embeddings": 8,
        "output_router_logits": True,
        "router_aux_loss_coef": 0.5,
        **changes,
    }
    return run.model_copy(update={"model": run.model.model_copy(update={"architecture": architecture})})


def test_a_verified_step_learns_the_routers_losses_of_all_stages(make_company):
    norms = {}
    for asked in (True, False):
        run = mixture_run(output_router_logits=asked)
        company = make_company(run)
        result = company.engine.train_turn(0, step_inputs(random_batch(run, 64, 0), run.train.microbatches))
        norms[asked] = result.gradient_norm
        assert company.verdicts == []
        assert result.guard.num_audits > 0

    assert abs(norms[True] - norms[False]) > 1e-4 * norms[False]


@pytest.mark.quick_cases("gaussian")
@pytest.mark.parametrize("attack", ["sign_flip", "gaussian"])
def test_a_liar_among_experts_is_named_and_no_bit_is_lost(make_company, honest_digest, tmp_path, attack):
    run = mixture_run()
    config = AttackConfig(kind=attack, stages=(2,), rate=0.3, seed=3)
    company = make_company(run, {2: make_actor(config, "worker-2", tmp_path / "attack.jsonl")})

    company.run(6)

    (verdict,) = company.verdicts
    assert verdict.party == "worker-2"
    assert company.weights_digest() == honest_digest(run, 6)


def test_experts_are_refused_where_honest_parties_may_round_otherwise(make_company):
    with pytest.raises(ConfigError, match="another rounding may choose other experts"):
        make_company(mixture_run(GuardConfig(classes="mixed")))
