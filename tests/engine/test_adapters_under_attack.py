"""Every kind of adapter on a guarded pipeline: liars are named, and the weights are those of a clean run."""

import pytest

from phalanx.config.extras import has_bitsandbytes
from phalanx.lab.attacks import make_actor
from phalanx.models import LoraConfig, PrefixConfig, PromptEncoderConfig
from phalanx.pipeline import AttackConfig
from phalanx.testing import MemoryCompany, tiny_run

KINDS = {
    "dora": LoraConfig(rank=2, dora=True),
    "rslora": LoraConfig(rank=2, rslora=True),
    "ptuning": PrefixConfig(kind="ptuning", tokens=3),
    "p-tuning": PromptEncoderConfig(kind="prompt_encoder", tokens=3),
    "p-tuning-lstm": PromptEncoderConfig(kind="prompt_encoder", tokens=3, encoder="lstm", encoder_size=4),
    "nf4": LoraConfig(rank=2, quantize="nf4"),
}
NEEDS_QUANT = pytest.mark.skipif(not has_bitsandbytes(), reason="needs the extra `quant`")
each_kind = pytest.mark.parametrize("kind", [pytest.param(k, marks=[NEEDS_QUANT] * (k == "nf4")) for k in KINDS])
STEPS = 4


def run_of(kind):
    run = tiny_run(4, adapter=KINDS[kind])
    # virtual tokens have places of their own
    longer = {**run.model.architecture, "n_positions": 16}
    return run.model_copy(update={"model": run.model.model_copy(update={"architecture": longer})})


def trained(run, directory, cache, actors=None):
    with MemoryCompany(run, directory, actors or {}, cache=cache) as company:
        results = company.run(STEPS)
        return company.weights_digest(), results, company.verdicts, company.evicted


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="module")
def clean(cache, tmp_path_factory):
    there = [kind for kind in KINDS if kind != "nf4" or has_bitsandbytes()]
    return {kind: trained(run_of(kind), tmp_path_factory.mktemp("clean"), cache) for kind in there}


@each_kind
def test_a_clean_run_learns_is_audited_and_nobody_is_accused(clean, kind):
    _, results, verdicts, evicted = clean[kind]

    assert (verdicts, evicted) == ([], [])
    assert all(result.guard.num_audits and result.gradient_norm > 0 for result in results)


@each_kind
@pytest.mark.parametrize("attack", ["sign_flip", pytest.param("gaussian", marks=pytest.mark.slow)])
def test_a_stage_that_lies_in_three_steps_of_ten_is_named_and_no_bit_is_lost(clean, cache, tmp_path, kind, attack):
    config = AttackConfig(kind=attack, stages=(2,), rate=0.3, seed=1)

    digest, results, verdicts, evicted = trained(
        run_of(kind), tmp_path / "attacked", cache, {"worker-2": make_actor(config, "worker-2")}
    )

    assert evicted == ["worker-2"]
    assert {(verdict.party, verdict.stage, verdict.offence) for verdict in verdicts} == {("worker-2", 2, "message")}
    # the step with the first lie was redone, and behind it there is no liar left
    assert sorted(result.guard.attempts for result in results) == [1, 1, 1, 2]
    assert digest == clean[kind][0]


def test_without_the_guard_the_same_liar_has_its_way(clean, cache, tmp_path):
    run = run_of("ptuning")
    unguarded = run.model_copy(update={"guard": run.guard.model_copy(update={"mode": "off"})})
    config = AttackConfig(kind="sign_flip", stages=(2,), rate=0.3, seed=1)

    digest, _, verdicts, evicted = trained(
        unguarded, tmp_path / "attacked", cache, {"worker-2": make_actor(config, "worker-2")}
    )

    assert (verdicts, evicted) == ([], [])
    assert digest != clean["ptuning"][0]
