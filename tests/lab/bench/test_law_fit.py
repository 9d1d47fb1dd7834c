"""The parts of a guard's cost add up, and a law that made the figures is fitted again."""

from dataclasses import replace

import pytest

from phalanx.lab.bench.overhead import overhead_law
from phalanx.lab.bench.overhead.law_fit import LawCell, fit_costs, fit_price_law, part_seconds
from phalanx.lab.bench.overhead.overhead_law import LAW_GUARDS, law_plans, price_rows
from phalanx.pipeline import PRESETS
from phalanx.planner.guard.price_law import AuditLoad, PriceLaw, StepSize, extra_bytes_share, measured_law

LAW = PriceLaw(
    base_step_s=0.1,
    base_parameter_s=2e-9,
    base_work_s=1e-10,
    step_s=0.01,
    parameter_s=1e-8,
    number_s=1e-9,
    audit_s=0.005,
    audited_share=0.8,
    screened_share=1.1,
    owner_share=1.05,
    owner_parameter_s=6e-8,
    memory_number_bytes=40.0,
    source="made.json",
)
SIZES = [
    StepSize(parameters, watched, 0.65, 2, 4, 8, tokens, width)
    for parameters, watched, width in ((3e6, 1.6e6, 160), (1e7, 5.6e6, 288))
    for tokens in (2048, 8192, 32768)
]


def cell_of(size, *, noise=1.0):
    """What a machine that obeys the law would measure."""
    work = size.parameters * size.tokens * LAW.base_work_s

    def extra(microbatches, owner=0.0, screened=False):
        load = AuditLoad(microbatches, owner, screened)
        return sum(LAW.extra_parts(size, load).values()) * noise

    arms = {
        "economy": extra(0.125),
        "light": extra(1.0),
        "standard": extra(1.0, screened=True),
        "strict": extra(2.0, screened=True),
        "owner": extra(0.125, owner=1.0),
    }
    audits = {"economy": 0.25, "light": 2.0, "standard": 2.0, "strict": 4.0, "owner": 16.25}
    return LawCell(size, LAW.base_seconds(size), work, arms, audits, 40.0 * size.watched_parameters)


def test_a_law_is_fitted_to_the_figures_that_it_made():
    law = fit_price_law([cell_of(size) for size in SIZES], "made.json")

    for name, value in LAW.__dict__.items():
        assert getattr(law, name) == (value if name == "source" else pytest.approx(value, rel=1e-3)), name


def test_two_sizes_without_an_arm_for_strict_are_fitted_as_well():
    cells = [cell_of(size) for size in SIZES]
    cells = [replace(cell, extra_s={arm: s for arm, s in cell.extra_s.items() if arm != "strict"}) for cell in cells]

    assert fit_price_law(cells, "made.json").screened_share == pytest.approx(1.1)


def test_the_law_predicts_each_preset_as_it_was_measured():
    law = fit_price_law([cell_of(size) for size in SIZES], "made.json")
    plan = next(plan for plan in law_plans(quick=False) if plan.tokens == 8192)

    rows = price_rows(plan, cell_of(SIZES[4]), law)

    assert [row["preset"] for row in rows] == list(PRESETS)
    for row in rows:
        # the states on the disk are in the law and fall outside of a few measured steps
        assert row["extra_cpu_by_law"] == pytest.approx(row["extra_cpu"], rel=2e-2)
        laws = [value for name, value in row.items() if name.startswith("law_") and name != "law_error"]
        assert sum(laws) == pytest.approx(row["extra_cpu_by_law"], rel=1e-3)


def test_no_cost_is_below_zero():
    step, number = fit_costs([[1.0, 1.0], [1.0, 2.0], [1.0, 3.0]], [3.0, 2.0, 1.0])

    assert (step > 0.0, number) == (True, 0.0)


def test_parts_add_up_to_the_whole_process():
    usage = {
        "process": 10.0,
        "other_threads": 2.0,
        "busy_wall": 99.0,
        "hashing": 0.5,
        "signing": 0.25,
        "compute": 5.0,
        "audit": 1.0,
        "optimizer": 0.5,
        "shadow_send": 0.25,
        "wait": 0.125,
    }

    parts = part_seconds(usage)

    assert sum(parts.values()) == pytest.approx(10.0)
    assert (parts["coordination"], parts["transport"], parts["messages"]) == (1.125, 2.0, 0.125)


def test_coins_are_left_out_of_the_arms_and_the_owner_redoes_every_step_in_one():
    rates = {name: (guard.step_audit_rate, guard.owner_audit_rate) for name, guard in LAW_GUARDS.items()}

    assert {rates[name] for name in PRESETS} == {(0.0, 0.0)}
    assert rates["owner"] == (0.0, 1.0)
    assert {arm for plan in law_plans(quick=False) for group in plan.groups for arm in group} >= {*PRESETS, "owner"}


def test_what_an_interrupted_bench_has_measured_is_kept_and_not_measured_again(monkeypatch, tmp_path):
    measured, plans = [], law_plans(quick=True)

    def measure_group(plan, group, directory):
        if len(measured) == 4:
            raise KeyboardInterrupt
        measured.append((plan.tokens, group))
        return {arm: {"arm": arm, "cpu_s": 1.0} for arm in group}, SIZES[0]

    monkeypatch.setattr(overhead_law, "_measure_group", measure_group)
    monkeypatch.setattr(overhead_law, "cache_directory", lambda: tmp_path)
    with pytest.raises(KeyboardInterrupt):
        overhead_law.bench_overhead_law(quick=True)
    before = list(measured)

    finished = overhead_law.bench_overhead_law(quick=True, only_finished=True)

    assert before == [(plan.tokens, group) for plan in plans[:2] for group in plan.groups]
    assert measured == before
    assert (finished["missing"], finished["law"]) == (1, None)
    assert {row["tokens"] for row in finished["rows"]} == {plan.tokens for plan in plans[:2]}


@pytest.mark.parametrize("tokens", [2048, 32768])
def test_bytes_of_an_upkeep_weigh_less_with_more_tokens(tokens):
    size = replace(SIZES[3], tokens=tokens)
    quiet = AuditLoad(0.0, 0.0, screened=False)

    assert extra_bytes_share(size, quiet, 4.0) == pytest.approx(4 * 5.6e6 / (4 * 6 * tokens * 288))
    # an owner's audit of every step fetches the state and both messages of each microbatch
    more = extra_bytes_share(size, AuditLoad(0.0, 1.0, screened=False), 4.0) - extra_bytes_share(size, quiet, 4.0)
    assert more == pytest.approx((12 * 5.6e6 + 2 * 2 * 4 * tokens * 288) / (4 * 6 * tokens * 288))


def test_the_shipped_law_falls_with_the_size_of_the_step():
    law, load = measured_law(), AuditLoad(0.125, 1 / 256, screened=False)

    shares = [law.extra_share(size, load) for size in SIZES[3:]]

    assert shares == sorted(shares, reverse=True)
