"""A site that owns a pipeline gives the update of one process; liars and the dead among its workers change no bit."""

from contextlib import ExitStack

import pytest
import torch

from phalanx.data import BatchLoader
from phalanx.errors import ConfigError
from phalanx.federated.algorithms import PlainRule
from phalanx.federated.site_trainer import Learning, SiteData, SiteSchedule, SiteTrainer, WholeModel
from phalanx.lab.attacks import make_actor
from phalanx.models import LoraConfig
from phalanx.optimizers import OptimizerConfig
from phalanx.pipeline import AttackConfig, GuardConfig
from phalanx.pipeline.assignment.assignment import Assignment
from phalanx.pipeline.evidence.explain import explain_evidence
from phalanx.testing import MemoryCompany, random_batch, tiny_run
from phalanx.train.engines.staged_rounds import StagedTrainer
from phalanx.train.setup.stage_source import RoundModules

STEPS, ROUNDS = 3, 3
RATE = 1e-2
# AdamW's first steps turn rounding into signs where eps is small
ADAMW = OptimizerConfig(lr=RATE, schedule="constant", clip_norm=0.5, eps=1e-3)
GUARD = {"step_audit_rate": 0.0, "owner_audit_rate": 0.0, "gradient_screen": False}


def run_of(stages=4, adapter=None, **guard):
    return tiny_run(stages, optimizer=ADAMW, adapter=adapter, guard=GuardConfig(**{**GUARD, **guard}))


class Rows:
    """Made sequences; batches of eight are those of `random_batch`."""

    digest = "0" * 64
    num_train_sequences = 32

    def __init__(self, run):
        batches = [random_batch(run, 64, number) for number in range(4)]
        self.ids, self.labels = (torch.cat([getattr(one, name) for one in batches]) for name in ("input_ids", "labels"))
        self.kind = type(batches[0])

    def train_batch(self, indices):
        rows = list(indices)
        return self.kind(self.ids[rows], self.labels[rows], tuple(rows))


def data_of(run):
    rows = Rows(run)
    loader = BatchLoader(rows, run.train.batch_size, 1)
    return SiteData("north", loader, 32, lambda: [rows.train_batch(range(16))], rows.train_batch, rows.digest)


SCHEDULE = SiteSchedule(ADAMW, STEPS, 8, 4, 7)


class CompanyStages:
    """The stages of a trainer, in a company of this process; `events` are told of each round that begins."""

    def __init__(self, company):
        self.company, self.begun, self.before_step = company, [], {}

    def begin_phase(self, number, library, lost):
        engine, guarded = self.company.engine, self.company.run_config.guard.is_enabled
        # the company has begun with the untouched model
        engine.fall_back(library, (number - 1) * STEPS, library.stage_digests() if guarded else {})
        self.begun.append((number, lost))
        return engine


class Site:
    """A site with a company of its own."""

    def __init__(self, company):
        self.company, run = company, company.run_config
        self.stages = CompanyStages(company)
        self.modules = RoundModules(company.source, company.plan, run.model.adapter_directory)
        self.first = {name: one.detach().clone() for name, one in self.modules.trained_parameters.items()}
        self.trainer = StagedTrainer(self.modules, self.stages, data_of(run), SCHEDULE, lambda number: RATE)


@pytest.fixture
def make_site(tmp_path_factory):
    with ExitStack() as stack:
        cache = tmp_path_factory.mktemp("models")

        def make(run, actors=None):
            named = {f"worker-{stage}": one for stage, one in (actors or {}).items()}
            company = MemoryCompany(run, tmp_path_factory.mktemp("site"), named, cache=cache)
            company.plan = company.plan.model_copy(update={"steps_a_round": STEPS})
            return Site(stack.enter_context(company))

        yield make


def one_process(site):
    run = site.company.run_config
    model = WholeModel(site.company.source, run.model, run.train.seed, Learning(), frozen_a=False)
    return SiteTrainer(model, data_of(run), SCHEDULE)


def rounds_of(trainer, weights, numbers=range(1, ROUNDS + 1)):
    """Weights after rounds of this site alone."""
    for number in numbers:
        update = trainer.train_round(number, weights, RATE, PlainRule(None, weights))
        assert update.delta.keys() == weights.keys() and update.steps == STEPS
        weights = {name: one + update.delta[name] for name, one in weights.items()}
    return weights


def assert_same_bits(found, expected):
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], one) for name, one in expected.items())


@pytest.mark.parametrize("adapter", [None, pytest.param(LoraConfig(rank=2, dropout=0.0), marks=pytest.mark.slow)])
def test_weights_losses_and_measurements_are_those_of_a_site_of_one_process(make_site, adapter):
    site = make_site(run_of(adapter=adapter))
    alone = one_process(site)
    assert site.trainer.trained_shapes() == alone.trained_shapes()
    weights = other = site.first

    for number in range(1, ROUNDS + 1):
        staged, plain = (one.train_round(number, other, RATE, PlainRule(None, other)) for one in (site.trainer, alone))
        weights = {name: one + staged.delta[name] for name, one in weights.items()}
        other = {name: one + plain.delta[name] for name, one in other.items()}

        assert staged.loss == pytest.approx(plain.loss, rel=1e-6)
        assert (staged.samples, staged.num_targets) == (plain.samples, plain.num_targets)
        assert all((weights[name] - one).abs().max() <= 1e-6 for name, one in other.items())
        found, expected = site.trainer.measure_weights(other), alone.measure_weights(other)
        assert found.loss == pytest.approx(expected.loss, rel=1e-6) and found.num_targets == expected.num_targets
    assert max((other[name] - one).abs().max() for name, one in site.first.items()) > 1e-2


def liar(kind="forward_sign_flip", stage=2, from_step=4, **more):
    """Lies from the second step of round 2 on."""
    return make_actor(AttackConfig(kind=kind, stages=(stage,), from_step=from_step, **more), f"worker-{stage}")


@pytest.mark.parametrize("kind", ["forward_sign_flip", pytest.param("backward_gaussian", marks=pytest.mark.slow)])
def test_a_lying_worker_is_named_with_evidence_and_the_updates_have_the_bits_of_an_honest_site(make_site, kind):
    run = run_of(audit_rate=1.0)
    honest = make_site(run)
    expected = rounds_of(honest.trainer, honest.first)
    site = make_site(run, {2: liar(kind)})

    assert_same_bits(rounds_of(site.trainer, site.first), expected)

    (verdict,) = site.company.verdicts
    assert (verdict.party, verdict.stage, verdict.step, verdict.offence) == ("worker-2", 2, 4, "message")
    assert site.company.evicted == ["worker-2"]
    (file,) = (site.company.run_dir / "evidence").glob("*.json")
    conclusion = explain_evidence(file, site.company.run_dir / "pki" / "authority.pem")["conclusion"]
    assert "worker-2" in conclusion
    # and it has no part in the round after
    assert "worker-2" not in {*site.company.engine.stage_holders.values(), *site.company.engine.stage_shadows.values()}


def test_without_the_guard_the_lie_is_in_the_update(make_site):
    run = run_of(mode="off")
    honest = make_site(run)
    expected = rounds_of(honest.trainer, honest.first)
    site = make_site(run, {2: liar()})

    found = rounds_of(site.trainer, site.first)

    assert site.company.verdicts == []
    assert max((found[name] - one).abs().max() for name, one in expected.items()) > 1e-3


def test_a_worker_that_is_killed_in_a_round_costs_no_bit_and_the_next_round_goes_without_it(make_site):
    run = run_of()
    honest = make_site(run)
    expected = rounds_of(honest.trainer, honest.first)
    site = make_site(run)
    step = site.company.engine.train_turn

    def killing(number, inputs):
        if number == 4:
            site.company.kill_worker("worker-1")
        return step(number, inputs)

    site.company.engine.train_turn = killing

    assert_same_bits(rounds_of(site.trainer, site.first), expected)
    assert site.company.lost == ["worker-1"] and site.company.evicted == []
    assert [lost for _, lost in site.stages.begun] == [None] * ROUNDS


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["phalanx", pytest.param("off", marks=pytest.mark.slow)])
def test_where_all_workers_are_killed_the_round_begins_once_more_and_the_owner_trains_alone(make_site, mode):
    run = run_of(mode=mode)
    honest = make_site(run)
    expected = rounds_of(honest.trainer, honest.first)
    site = make_site(run)
    step = site.company.engine.train_turn

    def killing(number, inputs):
        if number == 4:
            for name in ("worker-1", "worker-2"):
                site.company.kill_worker(name)
        return step(number, inputs)

    site.company.engine.train_turn = killing

    assert_same_bits(rounds_of(site.trainer, site.first), expected)
    assert set(site.company.engine.stage_holders.values()) == {"owner"}


@pytest.mark.slow
def test_a_site_that_has_missed_rounds_and_one_that_is_asked_again_give_the_same_update(make_site):
    run = run_of()
    steady, late = make_site(run), make_site(run)
    weights = rounds_of(steady.trainer, steady.first, (1, 2))
    rule = PlainRule(None, weights)

    third = steady.trainer.train_round(3, weights, RATE, rule)

    assert_same_bits(late.trainer.train_round(3, weights, RATE, rule).delta, third.delta)
    late.trainer.measure_weights(late.first)
    assert_same_bits(late.trainer.train_round(3, weights, RATE, rule).delta, third.delta)


@pytest.mark.slow
@pytest.mark.parametrize(
    "guard",
    [
        {"shadow": "lockstep"},
        *(
            pytest.param(guard, marks=pytest.mark.slow)
            for guard in ({"commit_lag": 1}, {"keep_states": 4}, {"classes": "mixed"}, {"preset": "standard"})
        ),
    ],
    ids=str,
)
def test_whatever_a_shadow_is_sent_a_loss_in_a_round_changes_no_bit(make_site, guard):
    run = run_of(**guard) if "preset" not in guard else tiny_run(4, optimizer=ADAMW, guard=GuardConfig(**guard))
    honest = make_site(run)
    expected = rounds_of(honest.trainer, honest.first)
    site = make_site(run)
    step = site.company.engine.train_turn

    def killing(number, inputs):
        if number == 5:
            site.company.kill_worker("worker-2")
        return step(number, inputs)

    site.company.engine.train_turn = killing

    assert_same_bits(rounds_of(site.trainer, site.first), expected)


def test_steps_of_rounds_have_numbers_and_epochs_that_no_other_round_has(make_site):
    site = make_site(run_of())

    rounds_of(site.trainer, site.first)

    assert [record.step for record in site.company.records] == list(range(ROUNDS * STEPS))
    epochs = [record.epoch for record in site.company.records]
    assert len(set(epochs)) == ROUNDS and epochs == sorted(epochs)


def test_another_learning_rate_than_that_of_the_run_file_is_refused(make_site):
    site = make_site(run_of())

    with pytest.raises(
        ConfigError, match=r"round 1: the owner requested the learning rate 0.5, but the run file has 0.01"
    ):
        site.trainer.train_round(1, site.first, 0.5, PlainRule(None, site.first))

    assert site.stages.begun == []


@pytest.mark.slow
def test_a_stage_that_leaves_the_owner_between_two_rounds_begins_with_the_weights_of_the_second(make_site):
    run = run_of()
    honest = make_site(run)
    expected = rounds_of(honest.trainer, honest.first)
    site = make_site(run)
    placing = site.company.engine._failover.placement
    ordinary, alone = placing.assign_first, Assignment(dict.fromkeys(range(4), "owner"), {})
    placing.assign_first = lambda workers, may_exceed: alone
    weights = rounds_of(site.trainer, site.first, (1,))
    placing.assign_first = ordinary

    assert_same_bits(rounds_of(site.trainer, weights, (2, 3)), expected)
    assert set(site.company.engine.stage_holders.values()) == {"owner", "worker-1", "worker-2"}
