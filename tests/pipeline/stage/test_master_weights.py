"""bf16 weights with fp32 masters: what is computed is transformers' in bf16, what is updated and kept is fp32."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from phalanx.errors import ConfigError
from phalanx.lab.attacks import make_actor
from phalanx.models import ModelConfig, StageSpec, build_stage, open_model, tie_head
from phalanx.models.master_weights import keep_masters
from phalanx.pipeline import AttackConfig, GuardConfig
from phalanx.pipeline.assignment.stage_memory import stage_counts
from phalanx.testing import MemoryCompany, tiny_run
from phalanx.train.setup.layout import make_plan

STEPS = 4


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("models")


def run_of(**changes):
    run = tiny_run(4, **changes)
    return run.model_copy(update={"train": run.train.model_copy(update={"precision": "bf16_weights"})})


def trained(run, directory, cache, actors=None):
    with MemoryCompany(run, directory, actors or {}, cache=cache) as company:
        company.run(STEPS)
        return company.weights_digest(), company.verdicts, company.evicted


@pytest.fixture(scope="module")
def clean(cache, tmp_path_factory):
    return trained(run_of(), tmp_path_factory.mktemp("clean"), cache)


def stages_of(source, num_stages):
    layers = source.num_layers // num_stages
    found = [
        build_stage(
            source,
            StageSpec(i, num_stages, i * layers, (i + 1) * layers),
            adapter=None,
            activation_checkpointing=False,
            attention="sdpa",
            seed=1,
        )
        for i in range(num_stages)
    ]
    tie_head(found[0], found[-1])
    for stage in reversed(found):
        keep_masters(stage)
    return found


def test_logits_are_those_of_transformers_whole_model_in_bf16_bit_for_bit(cache):
    source = open_model(run_of().model, cache, seed=3)
    whole = AutoModelForCausalLM.from_pretrained(source.directory, dtype=torch.bfloat16, local_files_only=True).eval()
    ids = torch.randint(0, 64, (2, 8), generator=torch.Generator().manual_seed(0))

    for num_stages in (2, 4):
        x = ids
        for stage in stages_of(source, num_stages):
            x = stage.eval()(x)
        assert x.dtype == torch.float32
        assert torch.equal(x, whole(ids).logits.float())


def test_an_update_below_the_last_place_of_bf16_is_not_lost(cache):
    stage = stages_of(open_model(run_of().model, cache, seed=3), 2)[1]
    name = next(name for name in stage.trainable_parameters() if name.endswith("attn.c_attn.weight"))
    master, ids = stage.trainable_parameters()[name], torch.zeros(1, 8, 16)
    stage(ids)
    before = stage.computing[name].detach().clone()

    with torch.no_grad():
        for _ in range(64):
            master.mul_(1 + 2.0**-12)
    stage(ids)

    assert master.dtype == torch.float32
    assert not torch.equal(stage.computing[name], before)
    assert torch.equal(stage.computing[name], master.to(torch.bfloat16))


def test_masters_are_what_is_digested_and_a_clean_run_accuses_nobody(clean, cache, tmp_path):
    digest, verdicts, evicted = clean

    assert (verdicts, evicted) == ([], [])
    assert trained(run_of(), tmp_path / "again", cache)[0] == digest
    full = tiny_run(4)
    assert trained(full, tmp_path / "full", cache)[0] != digest
    with MemoryCompany(run_of(), tmp_path / "kept", cache=cache) as company:
        company.run(2)
        company.save_step()
        company.run(1)
        company.fall_back()
        company.run(STEPS - 2)
        assert company.weights_digest() == digest


@pytest.mark.quick_cases("sign_flip")
@pytest.mark.parametrize("attack", ["sign_flip", "gaussian"])
def test_a_liar_is_named_and_no_bit_is_lost(clean, cache, tmp_path, attack):
    config = AttackConfig(kind=attack, stages=(2,), rate=0.3, seed=1)

    digest, verdicts, evicted = trained(run_of(), tmp_path / "bad", cache, {"worker-2": make_actor(config, "worker-2")})

    assert evicted == ["worker-2"]
    assert {(verdict.party, verdict.stage) for verdict in verdicts} == {("worker-2", 2)}
    assert digest == clean[0]


def test_what_bf16_weights_cannot_carry_is_refused_by_name(cache):
    mixed = run_of(guard=GuardConfig(classes="mixed"))
    source = open_model(ModelConfig(**mixed.model.model_dump(exclude_none=True)), cache, seed=3)

    with pytest.raises(ConfigError, match=r'"bf16_weights" with guard\.classes = "mixed"'):
        make_plan(mixed, source)
    documents = run_of()
    documents = documents.model_copy(update={"data": documents.data.model_copy(update={"attention": "document"})})
    with pytest.raises(ConfigError, match=r'"bf16_weights" with data\.attention'):
        make_plan(documents, source)
    prefixes = run_of()
    prefixes = prefixes.model_copy(
        update={"train": type(prefixes.train)(**{**prefixes.train.model_dump(), "objective": "prefix_lm"})}
    )
    with pytest.raises(ConfigError, match=r'"bf16_weights" with a prefix in its rows'):
        make_plan(prefixes, source)


def test_the_memory_of_a_stage_counts_two_bytes_a_weight_and_four_a_master(cache):
    run, full = run_of(), tiny_run(4)
    source = open_model(run.model, cache, seed=3)

    narrow, wide = (stage_counts(make_plan(one, source), 1) for one in (run, full))

    assert wide.size_bytes == 4 * wide.parameters
    assert narrow.size_bytes == 2 * narrow.parameters + 4 * narrow.trainable
