"""Every objective of preferences on a guarded pipeline: liars are named, and the weights are those of a clean run."""

import pytest
import torch

from phalanx.data import IGNORE, Batch
from phalanx.lab.attacks import make_actor
from phalanx.models import ModelConfig
from phalanx.objectives import OBJECTIVES, objective_of
from phalanx.pipeline import AttackConfig
from phalanx.testing import MemoryCompany, random_batch, tiny_run
from phalanx.train import step_inputs

PREFERENCES = [name for name, one in OBJECTIVES.items() if one.target == "pair"]
STEPS = 4
ATTACKERS = ("sign_flip", "gaussian")


def run_of(kind):
    run = tiny_run(4)
    objective = OBJECTIVES[kind]
    chosen = kind if objective.settings is None else objective.settings()
    model = ModelConfig(**{**run.model.model_dump(exclude_none=True), "head": objective.head})
    return run.model_copy(update={"model": model, "train": run.train.model_copy(update={"objective": chosen})})


def pairs(run, kind, step):
    """A batch of pairs with everything that the objective reads; answers of different lengths."""
    plain = random_batch(run, 64, step)
    labels = plain.labels.clone()
    for row in range(len(labels)):
        labels[row, : 1 + row % 3] = IGNORE
        labels[row, 5 + row % 2 :] = IGNORE
    draw = torch.Generator().manual_seed(step)
    rows = {
        "reference": -10 - torch.rand(len(labels), generator=draw),
        "wanted": torch.tensor([1, 1, 0, 0] * (len(labels) // 4)),
        "margin": torch.zeros(len(labels)),
    }
    extras = {name: rows[name] for name in OBJECTIVES[kind].extras}
    return Batch(plain.input_ids, labels, plain.indices, extras)


def trained(run, kind, directory, cache, actors=None):
    objective = objective_of(run.train.objective)
    with MemoryCompany(run, directory, actors or {}, cache=cache) as company:
        results = [
            company.engine.train_turn(step, step_inputs(pairs(run, kind, step), run.train.microbatches, objective))
            for step in range(STEPS)
        ]
        return company.weights_digest(), results, company.verdicts, company.evicted


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="module")
def clean(cache, tmp_path_factory):
    known = {}

    def of(kind):
        if kind not in known:
            run = run_of(kind)
            known[kind] = trained(run, kind, tmp_path_factory.mktemp("clean"), cache)
        return known[kind]

    return of


@pytest.mark.parametrize("kind", PREFERENCES)
def test_a_clean_run_is_audited_and_nobody_is_accused(clean, kind):
    _, results, verdicts, evicted = clean(kind)

    assert (verdicts, evicted) == ([], [])
    assert all(result.guard.num_audits for result in results)
    assert {result.num_targets for result in results} == {4}


PAIRS = [
    # each loss and each attack quickly, their other pairs among the slow tests
    pytest.param(attack, kind, marks=() if at % 2 == number % 2 else pytest.mark.slow)
    for at, attack in enumerate(ATTACKERS)
    for number, kind in enumerate(PREFERENCES)
]


@pytest.mark.parametrize(("attack", "kind"), PAIRS)
def test_a_stage_that_lies_in_three_steps_of_ten_is_named_and_no_bit_is_lost(clean, cache, tmp_path, kind, attack):
    run = run_of(kind)
    config = AttackConfig(kind=attack, stages=(2,), rate=0.3, seed=1)

    digest, results, verdicts, evicted = trained(
        run, kind, tmp_path / "attacked", cache, {"worker-2": make_actor(config, "worker-2")}
    )

    assert evicted == ["worker-2"]
    assert {(verdict.party, verdict.stage, verdict.offence) for verdict in verdicts} == {("worker-2", 2, "message")}
    attempts = [result.guard.attempts for result in results]
    # the step with the first lie was redone, and behind it there is no liar left
    assert sorted(attempts) == [1, 1, 1, 2]
    assert verdicts[0].step == attempts.index(2)
    assert digest == clean(kind)[0]


@pytest.mark.slow
def test_without_the_guard_the_same_liar_has_its_way(clean, cache, tmp_path):
    run = run_of("dpo")
    unguarded = run.model_copy(update={"guard": run.guard.model_copy(update={"mode": "off"})})
    config = AttackConfig(kind=ATTACKERS[0], stages=(2,), rate=0.3, seed=1)

    digest, _, verdicts, evicted = trained(
        unguarded, "dpo", tmp_path / "attacked", cache, {"worker-2": make_actor(config, "worker-2")}
    )

    assert (verdicts, evicted) == ([], [])
    assert digest != clean("dpo")[0]
