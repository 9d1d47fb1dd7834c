"""Rounds of sites that bring noise: what the owner sees, what it is charged, and what a site does not believe it."""

import json
import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from pydantic import ValidationError
from rounds_scene import IDENTITIES, OWNER, Parabola, Scene

from phalanx.errors import ConfigError, FailedBatchError, FailedRoundError, PrivacyBudgetError, RollbackError
from phalanx.federated.carriers import messages as m
from phalanx.federated.config import FederatedConfig
from phalanx.federated.rounds.site import Site
from phalanx.federated.rounds.terms import SiteBudget
from phalanx.security.audit import AuditLog
from phalanx.security.audit.line import read_entries
from phalanx.security.privacy import BudgetLedger, NoisyRounds, NoisySum, PastCharges, epsilon_of_rho
from seeded_entropy import seed_noise

LENGTH, NUM_SITES, NOISE, DELTA = 60, 5, 0.5, 1e-3
SUMS = NoisyRounds(4, NUM_SITES, 4, LENGTH, NOISE)


def pays_for(rounds: int) -> float:
    return (SUMS.epsilon_after(rounds, DELTA) + SUMS.epsilon_after(rounds + 1, DELTA)) / 2


class PrivateScene(Scene):
    """A scene with a signed log that its owner charges, and an owner that may forget it."""

    def __init__(self, home, trainers=None, *, rounds=3, **section) -> None:
        home.mkdir(exist_ok=True)
        self.log = AuditLog(home / "events.jsonl", OWNER, "run")
        privacy = {"epsilon": pays_for(rounds), "delta": DELTA, "noise_multiplier": NOISE}
        keys = {"secure": True, "min_cohort": 4, "max_norm": 1.0, "privacy": privacy}
        targets = [torch.full((LENGTH,), 0.01 * number) for number in range(1, NUM_SITES + 1)]
        super().__init__(home, trainers or [Parabola(one) for one in targets], **(keys | section))

    def budget(self) -> BudgetLedger:
        past, wanted = PastCharges(), self.config.privacy
        with (self.home / "events.jsonl").open("rb") as file:
            for line in read_entries(file, self.home / "events.jsonl", OWNER.public, "run"):
                past.read_entry(line.kind, line.body)
        return BudgetLedger(self.log, self.terms.noisy_rounds(LENGTH), wanted.epsilon, wanted.delta, {}, past, 100)

    @property
    def charges(self) -> int:
        return self.owner._budget.num_charges


def test_the_owner_sees_the_mean_with_the_noise_of_all_and_nothing_else_of_a_site(tmp_path, monkeypatch):
    seed_noise(monkeypatch, 1)
    scene = PrivateScene(tmp_path)

    record = scene.owner.run_round(1, 1.0)

    plan = NoisySum(NUM_SITES, 4, LENGTH, NOISE)
    deviation = math.sqrt(NUM_SITES * float(plan.noise_variance)) / plan.ring_encoding.max_level / NUM_SITES
    away = scene.w - 0.03
    # 60 values of a normal distribution: of 1000 seeds one is further than a third from its deviation
    assert 0.66 * deviation < float(away.std()) < 1.34 * deviation
    assert len(record.shares) == NUM_SITES and record.charge == 0
    told = [json.dumps(one.body) for one in scene.carrier.replies if one.kind == "trained"]
    assert {(one.loss, one.num_targets, one.norm, one.scaled) for one in record.shares.values()} == {
        (None, 0, None, None)
    }
    assert math.isnan(record.mean_loss) and all('"loss": null' in one for one in told)
    assert scene.owner.measure_at_sites() == {}
    order = m.MeasureOrder(ticket=1)
    assert scene.carrier.sites["site-0"](order, scene.owner._weights_payload())[0] == m.SiteFault(
        ticket=1, reason="failed"
    )


def test_sums_are_charged_before_they_are_asked_for_and_end_with_the_budget(tmp_path):
    scene = PrivateScene(tmp_path, rounds=3)
    asked = []

    def lines():
        return (tmp_path / "events.jsonl").read_bytes().count(b'"privacy_charged"')

    answer = scene.carrier.sites["site-0"]
    scene.carrier.sites["site-0"] = lambda order, payload: (
        asked.append(lines()) if order.kind == "sum" else None,
        answer(order, payload),
    )[1]

    for number in (1, 2, 3):
        scene.owner.run_round(number, 0.1)

    assert asked == [1] * 5 + [2] * 5 + [3] * 5
    assert scene.owner._budget.is_spent
    with pytest.raises(PrivacyBudgetError, match="3 steps have spent"):
        scene.owner.run_round(4, 0.1)


def test_a_sum_that_fails_is_paid_for_and_so_is_the_one_after_a_crash(tmp_path):
    scene = PrivateScene(tmp_path, rounds=3)
    scene.carrier.deadly = {"site-3": "mask", "site-4": "mask"}
    with pytest.raises(FailedRoundError):
        scene.owner.run_round(1, 1.0)
    scene.carrier.deadly = {}

    # another process, which knows what the log says
    scene.begin_owner()
    assert scene.charges == 1
    scene.owner.run_round(1, 0.1)
    scene.owner.run_round(2, 0.1)

    with pytest.raises(PrivacyBudgetError):
        scene.owner.run_round(3, 0.1)


def noise_averaged_away(scene, tries) -> float:
    """An owner forgets its ledger, and asks for sums of one round; return how far their mean is from the true one."""
    seen = []
    for _ in range(tries):
        scene.log.close()
        (scene.home / "events.jsonl").unlink(missing_ok=True)
        scene.log = AuditLog(scene.home / "events.jsonl", OWNER, "run")
        kept = {name: one for name, one in scene.carrier.sites.items()}
        scene.begin_owner()
        scene.carrier.sites.update(kept)
        try:
            scene.owner.run_round(1, 1.0)
        except FailedRoundError:
            break
        seen.append(scene.w)
    return float((torch.stack(seen).mean(0) - 0.03).norm())


def test_an_owner_without_a_ledger_cannot_average_the_noise_away_for_sites_keep_budgets_of_their_own(
    tmp_path, monkeypatch
):
    seed_noise(monkeypatch, 2)
    defended = noise_averaged_away(PrivateScene(tmp_path / "defended", rounds=2), 14)

    # the attacker wins where sites draw noise and count nothing
    monkeypatch.setattr(
        SiteBudget, "charge_noise", lambda own, terms: own._sums.noisy_sum(len(terms.cohort)).draw_noise()
    )
    undefended = noise_averaged_away(PrivateScene(tmp_path / "undefended", rounds=2), 14)

    # two sums instead of fourteen: the error is about the root of seven times as large
    assert defended > 1.7 * undefended


def test_a_site_that_begins_anew_remembers_what_it_has_spent(tmp_path):
    scene = PrivateScene(tmp_path, rounds=2)
    scene.owner.run_round(1, 0.1)
    scene.begin_site("site-0")
    scene.owner.run_round(2, 0.1)
    book = json.loads((tmp_path / "site-0" / "noisy-sums.json").read_text())

    assert book == {"spent_pico_rho": 2 * math.ceil(SUMS.rho_per_sum * 10**12)}


def sums_of(budget: SiteBudget, sums: NoisyRounds) -> int:
    """Have a site bring noise until it refuses; return how often it did."""
    terms = SimpleNamespace(cohort=range(NUM_SITES), max_weight=sums.noisy_sum(NUM_SITES).max_weight)
    for count in range(100):
        try:
            budget.charge_noise(terms)
        except PrivacyBudgetError:
            return count
    raise AssertionError("the budget never ends")


def test_runs_of_different_noise_spend_one_budget_of_a_sites_directory(tmp_path):
    less = replace(SUMS, noise_multiplier=2.0)
    config = PrivateScene(tmp_path / "scene", rounds=4).config.privacy
    fresh = sums_of(SiteBudget(tmp_path, less, config), less)
    (tmp_path / "noisy-sums.json").unlink()

    # a run with much noise after one with little: what both tell of the site adds up
    assert sums_of(SiteBudget(tmp_path, SUMS, config.model_copy(update={"epsilon": pays_for(3)})), SUMS) == 3
    rest = sums_of(SiteBudget(tmp_path, less, config), less)

    spent = [3 * SUMS.rho_per_sum + count * less.rho_per_sum for count in (rest, rest + 1)]
    assert epsilon_of_rho(spent[0], DELTA) <= config.epsilon < epsilon_of_rho(spent[1], DELTA)
    assert 0 < rest < fresh
    # and no other run of the directory gets a sum more
    assert sums_of(SiteBudget(tmp_path, SUMS, config), SUMS) == 0


@pytest.mark.parametrize("book", ['{"spent_pico_rho":-1}', '{"sums_with_noise_0.5":1}', '{"spent_pico_rho":'])
def test_a_damaged_budget_of_a_site_is_refused(tmp_path, book):
    config = PrivateScene(tmp_path / "scene").config.privacy
    (tmp_path / "noisy-sums.json").write_text(book)

    with pytest.raises(RollbackError, match="no number is guessed"):
        SiteBudget(tmp_path, SUMS, config)


def test_terms_with_less_noise_in_their_ring_are_not_taken(tmp_path, monkeypatch):
    scene = PrivateScene(tmp_path)
    monkeypatch.setattr(scene.owner._sums, "_max_weight", lambda clients: 1)

    with pytest.raises(FailedRoundError, match="clients"):
        scene.owner.run_round(1, 0.1)

    assert not (tmp_path / "site-0" / "noisy-sums.json").exists()


class Failing(Parabola):
    """A trainer with a loss that is not finite, or an update that is not."""

    error = FailedBatchError("loss nan")

    def train_round(self, number, start, rate, rule):
        found = super().train_round(number, start, rate, rule)
        if self.curve == 2.0:
            raise self.error
        found.delta["w"].fill_(math.nan)
        return found


@pytest.mark.parametrize("curve", [1.0, 2.0])
def test_a_site_that_fails_to_train_brings_noise_alone_and_nobody_is_told(tmp_path, curve):
    trainers = [Parabola(torch.full((LENGTH,), 0.01)) for _ in range(NUM_SITES - 1)]
    scene = PrivateScene(tmp_path, [*trainers, Failing(torch.zeros(LENGTH), curve)])

    record = scene.owner.run_round(1, 1.0)

    assert record.left_out == {} and torch.isfinite(scene.w).all()


def test_as_many_drop_out_as_may_and_the_noise_that_counts_is_there(tmp_path):
    scene = PrivateScene(tmp_path)
    scene.carrier.deadly = {"site-4": "mask"}

    record = scene.owner.run_round(1, 1.0)

    plan = NoisySum(NUM_SITES, 4, LENGTH, NOISE)
    # four of five: one that may collude is not counted, and the other three bring what was promised
    assert len(record.shares) == 4 and plan.num_honest == 3
    assert math.sqrt(plan.num_honest * float(plan.noise_variance)) >= NOISE * plan.norm_bound


def test_the_least_noise_that_keeps_rounds_within_a_budget_is_found():
    found = SUMS.with_noise_for(20, 8.0, DELTA)

    assert (
        found.epsilon_after(20, DELTA)
        <= 8.0
        < SUMS.with_noise_for(20, 8.0, DELTA)
        ._with_multiplier(round(found.noise_multiplier * 1000) - 1)
        .epsilon_after(20, DELTA)
    )
    assert found.affordable_steps(8.0, DELTA, 100) == 20 == found.affordable_steps(8.0, DELTA, 20)
    # each size of a cohort spends no more than is charged
    assert all(found.noisy_sum(n).epsilon_after(20, DELTA) <= found.epsilon_after(20, DELTA) for n in (4, 5))
    with pytest.raises(ConfigError, match="no noise keeps 20 rounds within it"):
        SUMS.with_noise_for(20, 1e-4, DELTA)


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"secure": False}, "so that the owner sees no single update"),
        ({"weights": "samples"}, "a weight would raise the influence of a site"),
        ({"min_cohort": 3, "sites": [f"s{n}" for n in range(13)]}, "4 may collude"),
        ({"privacy": {"epsilon": 8.0, "delta": 0.09}, "sites": [f"s{n}" for n in range(12)]}, "drawn at random"),
        ({"algorithm": {"kind": "fedbuff", "buffer": 3}}, 'algorithm.kind = "fedbuff"'),
        ({"algorithm": {"kind": "scaffold"}}, 'algorithm.kind = "scaffold"'),
        ({"exchange": "product"}, 'exchange = "product" needs the factors of each site'),
        ({"aggregator": "median", "byzantine": 1}, "needs single updates"),
    ],
)
def test_what_noise_in_sums_does_not_cover_is_refused_by_name(changed, words):
    written = {
        "sites": ["a", "b", "c", "d", "e"],
        "secure": True,
        "min_cohort": 4,
        "max_norm": 1.0,
        "privacy": {"epsilon": 8.0, "delta": DELTA},
    }

    assert FederatedConfig.model_validate_json(json.dumps(written)).privacy is not None
    with pytest.raises(ValidationError, match=words):
        FederatedConfig.model_validate_json(json.dumps(written | changed))


def told_by(scene, name, run):
    """Run with a site that tells its people, and return its lines."""
    lines = []
    directory = scene.home / name
    site = Site(IDENTITIES[name], scene.terms, scene.trainers[name], scene.books[name], directory, lines.append)
    scene.carrier.sites[name] = site.answer_order
    run()
    return lines


def test_a_site_sees_in_its_own_log_each_round_its_loss_and_what_its_sums_have_spent(tmp_path):
    scene = PrivateScene(tmp_path)

    lines = told_by(scene, "site-0", lambda: [scene.owner.run_round(number, 1.0) for number in (1, 2)])

    spent = [f"{SUMS.epsilon_after(number, DELTA):.3f}" for number in (1, 2)]
    assert [line for line in lines if "adds noise" in line] == [
        f"round {number}/10: adds noise to its sum  epsilon {spent[number - 1]} of "
        f"{scene.config.privacy.epsilon:g} spent of this site"
        for number in (1, 2)
    ]
    trained = [line for line in lines if "loss" in line]
    assert [line.split(":")[0] for line in trained] == ["round 1/10", "round 2/10"]
    # none of it leaves the site
    assert all('"loss": null' in json.dumps(one.body) for one in scene.carrier.replies if one.kind == "trained")


def test_a_site_whose_budget_is_spent_says_so_to_its_people_and_one_word_to_the_owner(tmp_path):
    scene = PrivateScene(tmp_path, rounds=1)

    lines = told_by(scene, "site-0", lambda: noise_averaged_away(scene, 3))

    assert any(
        line.startswith("round 1/10: not done: privacy: the sums of this directory have spent epsilon")
        for line in lines
    )
    faults = [one.body for one in scene.carrier.replies if one.kind == "fault"]
    assert not [one for one in faults if "epsilon" in json.dumps(one)]


def test_noise_without_a_bound_that_it_is_measured_in_is_refused_and_a_config_that_was_written_down_has_one():
    section = {"sites": ["a", "b", "c"], "secure": True, "min_cohort": 3, "privacy": {"epsilon": 8.0, "delta": DELTA}}

    with pytest.raises(ValidationError, match="max_norm: missing; the noise is scaled by it"):
        FederatedConfig.model_validate_json(json.dumps(section))

    config = FederatedConfig.model_validate_json(json.dumps({**section, "max_norm": 10.0}))
    assert FederatedConfig.model_validate_json(config.model_dump_json()) == config
    # without noise the default stays: it is a bound, and nothing is measured in it
    assert FederatedConfig.model_validate_json(json.dumps({"sites": ["a", "b"]})).max_norm == 10.0


def test_a_rule_over_buckets_of_noisy_sums_is_charged_once_a_round(tmp_path):
    trainers = [Parabola(torch.full((LENGTH,), 0.01)) for _ in range(9)]
    scene = PrivateScene(tmp_path, trainers, min_cohort=3, bucket=3, aggregator="median", byzantine=1)

    record = scene.owner.run_round(1, 1.0)

    # a site is in one of the three sums
    assert len(record.sums) == 3 and scene.charges == 1
