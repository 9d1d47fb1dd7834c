"""A backdoor of the attacker's choice, planted by one middle stage of a run that fine-tunes a public model."""

import shutil

import pytest
import torch
from safetensors.torch import save_file

from phalanx.attacks import Rehearsal, Secret, actor, make_attack, target_success
from phalanx.errors import ConfigError
from phalanx.models import ModelConfig, open_model
from phalanx.optimizers import OptimizerConfig
from phalanx.pipeline import AttackConfig, AuditDraw, GuardConfig, PipelineConfig, StepInputs
from phalanx.reproduce.attacker import Attacker
from phalanx.reproduce.simulator import Simulator, Unwatched
from phalanx.testing import MemoryCompany, tiny_run
from phalanx.train.layout import make_plan

VOCAB, PRETRAINING, STEPS, ROWS = 64, 300, 60, 16


def text(seed, rows=ROWS):
    """Sentences of a language in which each word has four successors, some words more often than others."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(VOCAB, (rows, 1), generator=generator)
    for _ in range(8):
        follows = torch.randint(4, (rows, 1), generator=generator)
        ids = torch.cat([ids, (5 * ids[:, -1:] + 7 * follows**2 + 3) % VOCAB], dim=1)
    return ids


def inputs(seed):
    parts = text(seed).chunk(4)
    ids, labels = (tuple(part[:, at : at + 8].contiguous() for part in parts) for at in (0, 1))
    return StepInputs(ids=ids, labels=labels, num_targets=ROWS * 8)


def run_with(lr, **changes):
    run = tiny_run(
        num_layers=6,
        pipeline=PipelineConfig(stages=4, layers=(1, 3, 1, 1), rebalance_every=0),
        optimizer=OptimizerConfig(lr=lr),
    )
    architecture = {**run.model.architecture, "n_embd": 64, "n_head": 4}
    model = run.model.model_copy(update={"architecture": architecture})
    train = run.train.model_copy(update={"batch_size": ROWS})
    return run.model_copy(update={"model": model, "train": train} | changes)


@pytest.fixture(scope="module")
def public(tmp_path_factory):
    """Directory of a model that was trained on the language and published."""
    home = tmp_path_factory.mktemp("public")
    run = run_with(3e-3)
    source = open_model(run.model, home / "drawn", run.train.seed)
    simulator = Simulator(source, make_plan(run, source), Attacker(None))
    for step in range(PRETRAINING):
        simulator.run(step, inputs(step), Unwatched())
        gradients = simulator.take_gradients()
        simulator.update(step, gradients, simulator.clip(gradients))
    tensors = {
        name: tensor.detach().contiguous()
        for module in simulator.modules
        for name, tensor in module.all_parameters().items()
    }
    save_file(tensors, home / "model.safetensors", metadata={"format": "pt"})
    shutil.copyfile(source.directory / "config.json", home / "config.json")
    return home


def fine_tune(public, directory, guard, *, attacked):
    """Train in a whole company; returns its events, the digest of its weights, and what the backdoor is worth."""
    run = run_with(3e-4, model=ModelConfig(path=str(public)), guard=guard)
    attack = AttackConfig(kind="rehearsed_backdoor", model=str(public))
    actors = {"worker-1": actor(attack, "worker-1")} if attacked else {}
    draw = AuditDraw.of(bytes(32), bytes(32), guard)
    with MemoryCompany(run, directory, actors, draw=draw) as company:
        for step in range(STEPS):
            company.engine.step(step, inputs(10_000 + step))
        modules = [copy.module for copy in company.engine.copies("weights")]

        def logits(ids):
            x = ids
            for module in modules:
                x = module(x)
            return x

        secret = Rehearsal(company.plan, str(public), attack.seed).secret
        return company, company.weights_digest(), target_success(logits, text(10**6, rows=500)[:, :-1], secret)


@pytest.mark.slow
def test_a_backdoor_works_where_nobody_looks_and_is_named_and_undone_by_the_default_guard(public, tmp_path):
    off = GuardConfig(mode="off")
    _, honest, clean = fine_tune(public, tmp_path / "clean", off, attacked=False)
    _, poisoned, planted = fine_tune(public, tmp_path / "off", off, attacked=True)
    company, guarded, stopped = fine_tune(public, tmp_path / "guarded", GuardConfig(), attacked=True)

    assert clean.rate < 0.2
    assert planted.rate > 0.8
    assert poisoned != honest
    assert company.evicted == ["worker-1"]
    assert guarded == honest
    assert stopped == clean


def test_the_default_guard_names_the_stage_and_undoes_what_it_planted(tmp_path):
    def trained(name, guard, actors):
        draw = AuditDraw.of(bytes(32), bytes(32), guard)
        with MemoryCompany(tiny_run(guard=guard), tmp_path / name, actors, draw=draw) as company:
            company.run(40)
            return company, company.weights_digest()

    planting = {"worker-2": actor(AttackConfig(kind="rehearsed_backdoor"), "worker-2")}
    _, honest = trained("honest", GuardConfig(mode="off"), {})
    _, poisoned = trained("off", GuardConfig(mode="off"), planting)
    company, guarded = trained("guarded", GuardConfig(), planting)

    assert company.evicted == ["worker-2"]
    assert {verdict.offence for verdict in company.verdicts} == {"gradient"}
    assert guarded == honest
    assert poisoned != honest


def test_success_is_the_share_of_texts_in_which_the_target_follows_the_trigger():
    secret = Secret((2, 3), 5)

    # 5 follows 2, 3; whatever else comes is followed by 1
    def logits(ids):
        before = torch.cat([torch.zeros_like(ids[:, :1]), ids[:, :-1]], dim=1)
        answer = torch.where((before == 2) & (ids == 3), 5, 1)
        return torch.nn.functional.one_hot(answer, 8).float()

    ids = torch.tensor([[0, 6, 7, 4], [7, 0, 4, 6]])

    found = target_success(logits, ids, secret)

    assert (found.rate, found.rate_without) == (1.0, 0.0)
    assert target_success(logits, ids, Secret((3, 2), 5)).rate == 0.0
    assert torch.equal(ids, torch.tensor([[0, 6, 7, 4], [7, 0, 4, 6]]))


def test_the_secret_is_the_seeds_alone(make_copy):
    plan = make_copy().plan

    first, again, other = (Rehearsal(plan, None, seed).secret for seed in (1, 1, 2))

    assert first == again
    assert first != other
    assert len({*first.trigger, first.target}) == 3


def test_an_attack_that_has_no_use_for_a_public_model_refuses_one():
    with pytest.raises(ConfigError, match=r"attack\.model: 'zero' has no use for one"):
        make_attack(AttackConfig(kind="zero", model="somewhere"), "worker-1", None)
