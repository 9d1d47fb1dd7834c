"""Sites with private rows: what leaves, what is charged first, and what happens when a budget is spent."""

import json
import os
import signal
from dataclasses import replace

import pytest
import torch
from rounds_scene import IDENTITIES, Parabola, Scene
from test_site_trainer import ARCHITECTURE, SGD, data_of

from forked_child import run_in_fork
from late_imports import need_module
from phalanx.data import DOCUMENTS
from phalanx.errors import AuditLogError, ConfigError, FailedRoundError, PrivacyBudgetError
from phalanx.federated.algorithms import PlainRule
from phalanx.federated.carriers import messages as m
from phalanx.federated.local import SpentRows
from phalanx.federated.private_rows import PrivateSteps, SiteRows, open_site_ledger
from phalanx.federated.rounds.coordinator import BUDGET_SPENT
from phalanx.federated.site_trainer import Learning, SiteSchedule, SiteTrainer, WholeModel
from phalanx.models import LoraConfig, ModelConfig, open_model
from phalanx.security.privacy import BudgetLedger, PoissonGaussian, PrivacyConfig
from phalanx.train.engines.federated_engine import SiteBudgets

need_module("opacus", "needs the extra `dp`")

CLIP, SIZE, STEPS, KEY = 0.005, 4, 2, b"k" * 32
ADAPTER = LoraConfig(rank=2, alpha=4.0, dropout=0.0)


class LinearStep:
    """A mechanism of which each step spends one."""

    def __init__(self, noise_multiplier=1.0):
        self.noise_multiplier, self.rate = noise_multiplier, 0.1

    def epsilon_after(self, steps, delta):
        return float(steps)

    def affordable_steps(self, epsilon, delta, at_most):
        return min(int(epsilon), at_most)


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    config = ModelConfig(from_scratch=True, architecture=ARCHITECTURE)
    return open_model(config, tmp_path_factory.mktemp("models"), 3)


def model_of(source, adapter=ADAPTER):
    config = ModelConfig(from_scratch=True, architecture=ARCHITECTURE, adapter=adapter)
    model = WholeModel(source, config, 3, Learning(), frozen_a=False)
    draw = torch.Generator().manual_seed(9)
    # the gradient of one factor is zero while the other one is
    model.load_weights(
        {name: torch.randn(one.shape, generator=draw) * 0.2 for name, one in model.copy_weights().items()}
    )
    return model


def settings(epsilon=100.0, **more):
    return PrivacyConfig(epsilon=epsilon, delta=1e-5, clip_norm=CLIP, **more)


def rows_of(directory, wanted=None, *, site="site-0", step=None, keep=lambda numbers: numbers):
    """The rows of one site; every draw goes through `keep`."""
    wanted = wanted or settings()
    log, past = open_site_ledger(directory, IDENTITIES[site])
    ledger = BudgetLedger(log, step or LinearStep(), wanted.epsilon, wanted.delta, {"rows": 12}, past, 1000)
    data = data_of(site, (0, 1), SIZE)
    return SiteRows(replace(data, pick=lambda numbers: data.pick(keep(numbers))), wanted, ledger, KEY)


def schedule(steps=STEPS):
    return SiteSchedule(SGD, steps, SIZE, 2, 7)


def trainer_of(source, rows, steps=STEPS, adapter=ADAPTER):
    model = model_of(source, adapter)
    plan = schedule(steps)
    return SiteTrainer(model, data_of("site-0", (0, 1), SIZE), plan, None, PrivateSteps(model, rows, plan))


def moved(trainer, number=1):
    weights = model_of_weights(trainer)
    return trainer.train_round(number, weights, 1.0, PlainRule(None, weights))


def model_of_weights(trainer):
    return trainer._model.copy_weights()


def norm(delta):
    return float(torch.cat([one.flatten() for one in delta.values()]).norm())


@pytest.mark.parametrize("clipping", ["hooks", "ghost"])
def test_a_step_without_noise_is_the_sum_of_rows_that_are_clipped_one_by_one(source, tmp_path, clipping):
    drawn = []
    rows = rows_of(
        tmp_path,
        settings(clipping=clipping),
        step=LinearStep(0.0),
        keep=lambda numbers: drawn.extend(numbers) or numbers,
    )

    found = moved(trainer_of(source, rows, steps=1)).delta

    model, data = model_of(source), data_of("site-0", (0, 1), SIZE)
    total = {name: torch.zeros_like(one) for name, one in model.trained.items()}
    norms = []
    for row in drawn:
        batch = data.pick([row])
        given = torch.autograd.grad(model.row_losses(batch.input_ids, batch.labels).sum(), list(model.trained.values()))
        norms.append(norm(dict(zip(total, given, strict=True))))
        for name, one in zip(total, given, strict=True):
            total[name] += one * min(1.0, CLIP / norms[-1])
    assert drawn and max(norms) > CLIP
    for name, one in total.items():
        torch.testing.assert_close(found[name], -one / SIZE, rtol=1e-4, atol=1e-7)


def test_rows_that_attend_inside_documents_are_clipped_one_by_one(source, tmp_path):
    documents = (torch.rand((12, 8), generator=torch.Generator().manual_seed(8)) < 0.4).cumsum(1)
    drawn, rows = [], rows_of(tmp_path, settings(), step=LinearStep(0.0))
    plain = rows._data.pick

    def pick(numbers):
        drawn.extend(numbers)
        return replace(plain(numbers), extras={DOCUMENTS: documents[list(numbers)]})

    rows._data = replace(rows._data, pick=pick)
    config = ModelConfig(from_scratch=True, architecture=ARCHITECTURE, adapter=ADAPTER)
    model, alone = (WholeModel(source, config, 3, Learning(attends="documents"), frozen_a=False) for _ in range(2))
    for one in (model, alone):
        one.load_weights(model_of(source).copy_weights())
    plan = schedule(1)
    trainer = SiteTrainer(model, data_of("site-0", (0, 1), SIZE), plan, None, PrivateSteps(model, rows, plan))

    found = moved(trainer).delta

    total = {name: torch.zeros_like(one) for name, one in alone.trained.items()}
    for row in list(drawn):
        batch = pick([row])
        loss = alone.row_losses(batch.input_ids, batch.labels, batch.extras).sum()
        given = torch.autograd.grad(loss, list(alone.trained.values()))
        length = norm(dict(zip(total, given, strict=True)))
        for name, one in zip(total, given, strict=True):
            total[name] += one * min(1.0, CLIP / length)
    assert drawn
    for name, one in total.items():
        torch.testing.assert_close(found[name], -one / SIZE, rtol=1e-4, atol=1e-7)


def test_one_row_more_moves_a_private_step_within_the_clip_and_a_plain_one_by_far_more(source, tmp_path):
    without = moved(trainer_of(source, rows_of(tmp_path / "a", step=LinearStep(0.0), keep=lambda all_: all_[1:]), 1))
    with_it = moved(trainer_of(source, rows_of(tmp_path / "b", step=LinearStep(0.0)), 1))
    away = norm({name: with_it.delta[name] - one for name, one in without.delta.items()})

    loose = settings().model_copy(update={"clip_norm": 1e6})
    undefended = [
        moved(trainer_of(source, rows_of(tmp_path / name, loose, step=LinearStep(0.0), keep=keep), 1)).delta
        for name, keep in (("c", lambda all_: all_[1:]), ("d", lambda all_: all_))
    ]
    told = norm({name: undefended[1][name] - one for name, one in undefended[0].items()})

    assert away <= CLIP / SIZE * (1 + 1e-5)
    assert told > 10 * CLIP / SIZE


def test_noise_is_of_the_promised_size_and_never_the_same_again(source, tmp_path):
    rows = rows_of(tmp_path, step=LinearStep(3.0), keep=lambda numbers: numbers[:0] or numbers[:1])
    trainer = trainer_of(source, rows, steps=1)
    weights = trainer._model.copy_weights()

    one, other = (trainer.train_round(1, weights, 1.0, PlainRule(None, weights)).delta for _ in range(2))

    # the same round of the same weights: what both say differs by the noise of both
    away = torch.cat([(one[name] - other[name]).flatten() for name in weights])
    assert float(away.std()) == pytest.approx(2**0.5 * 3.0 * CLIP / SIZE, rel=0.2)


def test_dropout_does_not_follow_from_what_others_know(source, tmp_path):
    rows = rows_of(tmp_path, settings(sampling="order"), step=LinearStep(0.0))
    trainer = trainer_of(source, rows, steps=1, adapter=ADAPTER.model_copy(update={"dropout": 0.5}))
    weights = trainer._model.copy_weights()

    # the same rows of the same weights, without noise
    one, other = (trainer.train_round(1, weights, 1.0, PlainRule(None, weights)).delta for _ in range(2))

    assert not all(torch.equal(one[name], other[name]) for name in weights)


def test_no_loss_no_count_of_targets_and_no_drawn_row_leaves_a_site(source, tmp_path):
    sites = {name: rows_of(tmp_path / name / "privacy", site=name) for name in ("site-0", "site-1")}
    scene = Scene.of_trainers(
        tmp_path, [trainer_of(source, one) for one in sites.values()], model_of(source).copy_weights(), rows=settings()
    )

    record = scene.owner.run_round(1, 0.1)

    told = [one.body for one in scene.carrier.replies]
    assert {(one["loss"], one["num_targets"], one["samples"]) for one in told} == {(None, 0, 1)}
    assert {name: one["epsilon"] for name, one in record.metrics_row().items()} == {"site-0": 3.0, "site-1": 3.0}
    assert [one.num_charges for one in (rows.ledger for rows in sites.values())] == [STEPS, STEPS]


def lines_of(directory):
    found = [json.loads(line) for line in (directory / "events.jsonl").read_bytes().splitlines()]
    return [line["body"]["number"] for line in found if line["kind"] == "privacy_charged"]


def test_a_round_is_charged_on_the_disk_before_its_first_row_is_drawn(source, tmp_path):
    seen = []
    rows = rows_of(tmp_path, keep=lambda numbers: seen.append(lines_of(tmp_path)) or numbers)

    moved(trainer_of(source, rows))

    assert seen == [[0, 1], [0, 1]]


def test_what_a_killed_site_has_drawn_is_spent_and_no_draw_comes_twice(source, tmp_path):
    def end_at_the_first_row():
        ends = rows_of(tmp_path, settings(epsilon=4.0), keep=lambda numbers: os.kill(os.getpid(), signal.SIGKILL))
        moved(trainer_of(source, ends))

    assert run_in_fork(end_at_the_first_row) == -signal.SIGKILL
    assert lines_of(tmp_path) == [0, 1]

    drawn = []
    rows = rows_of(tmp_path, settings(epsilon=4.0), keep=lambda numbers: drawn.append(list(numbers)) or numbers)
    found = moved(trainer_of(source, rows))

    assert lines_of(tmp_path) == [0, 1, 2, 3]
    assert found.spent == SpentRows(4.0, 0)
    with pytest.raises(PrivacyBudgetError, match=r"4 steps have spent epsilon 4.000 of 4.0"):
        moved(trainer_of(source, rows))
    assert lines_of(tmp_path) == [0, 1, 2, 3] and len(drawn) == 2


def test_a_round_of_which_the_budget_pays_for_a_part_is_not_begun(source, tmp_path):
    drawn = []
    rows = rows_of(tmp_path, settings(epsilon=3.0), keep=lambda numbers: drawn.append(1) or numbers)
    trainer = trainer_of(source, rows)
    moved(trainer)

    with pytest.raises(PrivacyBudgetError, match="2 more would spend more"):
        moved(trainer)

    assert lines_of(tmp_path) == [0, 1] and len(drawn) == 2


@pytest.mark.parametrize("cut", ["charges", "all", "head"])
def test_a_ledger_from_which_charges_are_cut_is_refused(tmp_path, cut):
    rows = rows_of(tmp_path)
    rows.ledger.charge_batches(3)
    rows.close()
    log = tmp_path / "events.jsonl"
    if cut == "head":
        (tmp_path / "audit.head").write_bytes(b"{")
    else:
        lines = log.read_bytes().splitlines(keepends=True)
        log.write_bytes(b"".join(lines[:-1] if cut == "charges" else ()))

    with pytest.raises(AuditLogError, match=r"missing|cannot be read"):
        rows_of(tmp_path)


def test_another_run_of_the_directory_goes_on_with_its_budget_and_one_of_other_terms_is_refused(tmp_path):
    first = rows_of(tmp_path, settings(epsilon=5.0))
    first.ledger.charge_batches(3)
    first.close()

    second = rows_of(tmp_path, settings(epsilon=5.0))
    assert second.ledger.num_left == 2
    second.close()

    with pytest.raises(ConfigError, match=r"epsilon is 9.0, earlier steps of this run were charged for 5.0"):
        rows_of(tmp_path, settings(epsilon=9.0))


def test_two_processes_of_one_site_do_not_draw_from_one_ledger(tmp_path):
    rows_of(tmp_path)

    with pytest.raises(AuditLogError):
        rows_of(tmp_path)


class Spending(Parabola):
    """A site with a budget for so many rounds, which says so."""

    def __init__(self, target, rounds, *, warns=True):
        super().__init__(torch.tensor([target]))
        self.left, self.warns = rounds, warns

    def train_round(self, number, start, rate, rule):
        if not self.left:
            raise PrivacyBudgetError("spent")
        self.left -= 1
        found = super().train_round(number, start, rate, rule)
        return replace(found, loss=None, num_targets=0, spent=SpentRows(1.0, self.left if self.warns else 9))


def spending(home, rounds, *, warns=True, **section):
    trainers = [Spending(float(number), left, warns=warns) for number, left in enumerate(rounds, 1)]
    return Scene(home, trainers, settings(), **section)


@pytest.mark.parametrize("secure", [False, True])
@pytest.mark.parametrize("warns", [False, True])
def test_a_site_with_a_spent_budget_is_asked_no_more_and_the_others_go_on(tmp_path, warns, secure):
    scene = spending(tmp_path, [9, 9, 9, 9, 2], warns=warns, secure=secure, min_cohort=3)

    records = [scene.owner.run_round(number, 0.1) for number in range(1, 5)]

    assert scene.owner.excluded_sites == {"site-4": BUDGET_SPENT}
    assert [len(one.shares) for one in records] == [5, 5, 4, 4]
    assert [one.left_out for one in records] == [{}, {}, {} if warns else {"site-4": "budget_spent"}, {}]
    trained = [one for one in scene.carrier.replies if one.site == "site-4" and one.kind == "trained"]
    assert len(trained) == 2 and not scene.owner.is_spent
    # it is measured still: held-out rows cost no budget
    assert "site-4" in scene.owner.measure_at_sites()
    # another owner process remembers it
    scene.begin_owner(scene.w)
    scene.owner.resume_rounds(4)
    assert scene.owner.excluded_sites == {"site-4": BUDGET_SPENT}
    assert scene.owner.spent == dict.fromkeys((f"site-{number}" for number in range(5)), 1.0)


def test_rounds_end_when_too_few_sites_have_a_budget_left(tmp_path):
    scene = spending(tmp_path, [3, 1, 1])
    budgets = SiteBudgets(scene.owner, settings())
    assert not budgets.is_spent

    scene.owner.run_round(1, 0.1)

    assert budgets.is_spent
    assert budgets.summary_fields()["sites"] == {"site-0": 1.0, "site-1": 1.0, "site-2": 1.0}
    with pytest.raises(FailedRoundError):
        scene.owner.run_round(2, 0.1)


def test_sites_that_were_shut_out_for_lies_end_no_run_as_if_budgets_were_spent(tmp_path):
    scene = spending(tmp_path, [9, 9, 9])
    for site in ("site-1", "site-2"):
        scene.owner._exclude_site(site, "refused again: not_finite")

    assert not scene.owner.is_spent
    assert set(scene.owner.measure_at_sites()) == {"site-0"}


@pytest.mark.parametrize(
    "changed", [{"epsilon": None, "rounds_left": None}, {"loss": 1.0, "num_targets": 3}, {"epsilon": 100.1}]
)
def test_a_reply_without_epsilon_beyond_the_budget_or_with_a_loss_is_not_taken_of_private_rows(tmp_path, changed):
    scene = spending(tmp_path, [9, 9, 9])
    answer = scene.carrier.sites["site-1"]

    def told(order, payload):
        reply, values = answer(order, payload)
        return reply.model_copy(update=changed), values

    scene.carrier.sites["site-1"] = told

    assert scene.owner.run_round(1, 0.1).left_out == {"site-1": "malformed"}


def test_a_site_may_have_spent_the_whole_of_its_budget(tmp_path):
    scene = spending(tmp_path, [9, 9, 9])
    answer = scene.carrier.sites["site-1"]

    def all_of_it(order, payload):
        reply, values = answer(order, payload)
        return reply.model_copy(update={"epsilon": settings().epsilon}), values

    scene.carrier.sites["site-1"] = all_of_it

    assert scene.owner.run_round(1, 0.1).left_out == {}


def test_what_a_site_says_that_it_has_spent_never_falls(tmp_path):
    scene = spending(tmp_path, [9, 9, 9])
    scene.owner.run_round(1, 0.1)
    answer = scene.carrier.sites["site-1"]

    def less(order, payload):
        reply, values = answer(order, payload)
        return reply.model_copy(update={"epsilon": 0.0}), values

    scene.carrier.sites["site-1"] = less
    scene.owner.run_round(2, 0.1)

    assert scene.owner.spent["site-1"] == 1.0


def test_an_epsilon_is_not_taken_where_no_rows_are_private(tmp_path):
    scene = Scene(tmp_path, [Parabola(torch.tensor([1.0])), Parabola(torch.tensor([2.0])), Spending(3.0, 9)])

    assert scene.owner.run_round(1, 0.1).left_out == {"site-2": "malformed"}


def test_epsilon_and_rounds_are_told_together():
    with pytest.raises(ValueError, match="expected together with the number of rounds left"):
        m.TrainedReply(ticket=1, loss=None, num_targets=0, samples=1, scaled=1.0, train_s=0.0, epsilon=1.0)


def test_in_a_public_order_a_row_at_the_edge_of_two_epochs_is_learned_once_in_a_step(tmp_path):
    rows = rows_of(tmp_path, settings(sampling="order"), step=LinearStep(0.0))

    wide = replace(rows._data, loader=data_of("site-0", (0, 1), 8).loader)
    rows._data = wide
    (plain,) = wide.round_batches(2, 1, 8)
    (charged,) = rows.draw_batches(2, 1, 8)

    # the loader itself repeats rows there, and each would count for two clips
    assert len(set(plain.indices)) < len(plain.indices) == len(charged.indices)
    learned = [index for index, labels in zip(charged.indices, charged.labels, strict=True) if (labels != -100).any()]
    assert sorted(learned) == sorted(set(charged.indices))


def test_a_real_budget_pays_for_the_rounds_that_its_noise_was_made_for(tmp_path):
    step = PoissonGaussian(1.0, 1.0)
    wanted = settings(epsilon=(step.epsilon_after(6, 1e-5) + step.epsilon_after(7, 1e-5)) / 2, sampling="order")
    rows = rows_of(tmp_path, wanted, step=step)

    for number in (1, 2, 3):
        assert sum(1 for _ in rows.draw_batches(number, STEPS, SIZE)) == STEPS
    with pytest.raises(PrivacyBudgetError):
        next(rows.draw_batches(4, STEPS, SIZE))
    assert step.epsilon_after(6, 1e-5) <= rows.ledger.epsilon_bound <= wanted.epsilon
