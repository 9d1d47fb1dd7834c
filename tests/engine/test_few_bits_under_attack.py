"""Moments of a byte a number on a guarded pipeline: every copy has the same bytes, also after a lie."""

import pytest
import torch

from phalanx.config.extras import has_bitsandbytes
from phalanx.errors import ConfigError
from phalanx.lab.attacks import make_actor
from phalanx.optimizers import OptimizerConfig, StageOptimizer
from phalanx.pipeline import AttackConfig, PartyLayout
from phalanx.testing import MemoryCompany, tiny_run
from phalanx.train.setup.layout import _check_few_bits

NEEDS_QUANT = pytest.mark.skipif(not has_bitsandbytes(), reason="needs the extra `quant`")
FEW_BITS = OptimizerConfig(kind="adamw8bit", lr=1e-2)
STEPS = 4


def run_of(optimizer):
    run = tiny_run(4, optimizer=optimizer)
    # matrices of 4,096 numbers and more
    wider = {**run.model.architecture, "n_embd": 64}
    return run.model_copy(update={"model": run.model.model_copy(update={"architecture": wider})})


def trained(run, directory, cache, actors=None):
    with MemoryCompany(run, directory, actors or {}, cache=cache) as company:
        results = company.run(STEPS)
        return company.weights_digest(), results, company.verdicts, company.evicted


@NEEDS_QUANT
@pytest.mark.parametrize("attack", ["sign_flip", "gaussian", "wrong_learning_rate"])
def test_a_liar_is_named_and_the_bits_are_those_of_a_clean_run(tmp_path, attack):
    run, cache = run_of(FEW_BITS), tmp_path / "models"
    clean, results, *accused = trained(run, tmp_path / "clean", cache)
    config = AttackConfig(kind=attack, stages=(2,), rate=0.3, seed=1)

    digest, redone, _, evicted = trained(
        run, tmp_path / "attacked", cache, {"worker-2": make_actor(config, "worker-2")}
    )

    assert (accused, evicted) == ([[], []], ["worker-2"])
    assert sum(result.guard.attempts for result in redone) > len(results)
    assert digest == clean
    assert clean != trained(run_of(OptimizerConfig(lr=1e-2)), tmp_path / "wide", cache)[0]


@NEEDS_QUANT
def test_the_way_back_ends_with_the_same_bytes():
    generator = torch.Generator().manual_seed(3)
    drawn = {"large": torch.randn(64, 72, generator=generator), "small": torch.randn(40, generator=generator)}
    optimizer = StageOptimizer({name: torch.nn.Parameter(one) for name, one in drawn.items()}, FEW_BITS)

    def copied():
        return {name: tensor.clone() for name, tensor in optimizer.state_tensors().items()}

    seen = []
    for step in range(3):
        gradients = {name[7:]: one * (step + 1) for name, one in copied().items() if name.startswith("weight")}
        seen.append(copied())
        optimizer.keep_snapshot()
        optimizer.step(gradients, 1e-2, 0.5)

    optimizer.restore_snapshot()

    assert seen[2]["exp_avg_8bit/large"].dtype == torch.uint8
    assert list(optimizer.state_tensors()) == list(seen[2])
    assert all(torch.equal(tensor, seen[2][name]) for name, tensor in optimizer.state_tensors().items())
    assert not torch.equal(seen[2]["exp_avg_8bit/large"], seen[1]["exp_avg_8bit/large"])


@pytest.mark.parametrize("key", ["guard.classes", "pipeline.layout"])
def test_bytes_that_would_not_be_the_same_everywhere_are_refused(key):
    run = tiny_run(4, optimizer=FEW_BITS)
    section, name = key.split(".")
    value = PartyLayout(dp=2) if name == "layout" else "mixed"
    changed = getattr(run, section).model_copy(update={name: value})

    _check_few_bits(run)
    with pytest.raises(ConfigError, match=rf'optimizer.kind = "adamw8bit" with {key}.*or use "adamw"'):
        _check_few_bits(run.model_copy(update={section: changed}))
