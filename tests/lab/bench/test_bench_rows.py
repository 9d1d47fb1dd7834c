"""Rows are computed from blocks with known numbers."""

import pytest

from phalanx.lab.bench.overhead.arm import Block, Report
from phalanx.lab.bench.overhead.rows import PARTS, ArmMeasurement, model_rows

TOKENS = 2048


def usage(**seconds: float) -> dict[str, dict[str, float]]:
    return {"owner": {"compute": 10.0}, "worker-1": seconds}


def arm(wall_s: float, cpu_s: float, *, rounds: int = 3, **spent: float) -> ArmMeasurement:
    """An arm that takes the same time for every step; `spent` is its usage over all rounds of 2 steps."""
    before = usage(**dict.fromkeys(spent, 1.0))
    after = usage(**{name: 1.0 + seconds for name, seconds in spent.items()})
    report = Report(
        losses=(3.0, 2.5),
        audits=4,
        wall_by_phase={"compute": wall_s, "wait": 0.5 * wall_s},
        bytes_by_link={"owner>worker-1": 200, "worker-1>owner": 100},
        usage=after,
    )
    return ArmMeasurement([Block(2, 2 * wall_s, 2 * cpu_s, report) for _ in range(rounds)], before)


def plain(wall_s: float) -> ArmMeasurement:
    return ArmMeasurement([Block(2, 2 * wall_s, 2 * wall_s, Report(losses=(2.5,))) for _ in range(3)])


@pytest.fixture
def rows() -> dict[str, dict[str, object]]:
    arms = {
        "unguarded": arm(1.0, 1.6, hashing=0.06, signing=0.06),
        "guarded_light": arm(
            1.1, 1.8, hashing=0.12, signing=0.09, audit=0.6, screen=0.03, shadow_send=0.1, state_digest=0.15
        ),
        "guarded_full": arm(1.6, 2.6, hashing=0.12, signing=0.09, audit=4.8),
    }
    found = model_rows("toy", arms, {1: plain(1.4), 2: plain(0.9)}, TOKENS)
    return {str(row["arm"]): row for row in found}


def test_the_faster_number_of_threads_is_the_baseline_and_both_are_told(rows) -> None:
    assert rows["plain"]["threads"] == 2
    assert rows["plain"]["tokens_per_s"] == pytest.approx(TOKENS / 0.9)
    assert rows["plain"]["tokens_per_s_1_threads"] == pytest.approx(TOKENS / 1.4)
    assert rows["unguarded"]["tokens_ratio_to_plain"] == pytest.approx(0.9)


def test_a_number_of_threads_that_was_not_measured_is_null() -> None:
    arms = {"unguarded": arm(1.0, 1.6)}

    (row, _) = model_rows("toy", arms, {1: plain(1.4), 2: ArmMeasurement()}, TOKENS)

    assert row["threads"] == 1
    assert row["tokens_per_s_2_threads"] is None


def test_every_row_has_the_same_keys(rows) -> None:
    assert {frozenset(row) for row in rows.values()} == {frozenset(rows["plain"])}


def test_what_an_arm_does_not_have_is_null(rows) -> None:
    assert rows["plain"]["wall_share_compute"] is None
    assert rows["plain"]["bytes_per_step"] is None
    assert rows["unguarded"]["extra_compute"] is None
    assert rows["unguarded"]["audits_per_step"] is None


@pytest.mark.parametrize("name", ["unguarded", "guarded_light", "guarded_full"])
def test_wall_shares_add_up_to_one(rows, name: str) -> None:
    shares = [value for key, value in rows[name].items() if key.startswith("wall_share_")]

    assert sum(shares) == pytest.approx(1.0)
    assert rows[name]["wall_share_compute"] == pytest.approx(0.5)


@pytest.mark.parametrize("name", ["guarded_light", "guarded_full"])
def test_the_parts_of_a_guard_add_up_to_its_cost(rows, name: str) -> None:
    parts = [rows[name][f"part_{part}"] for part in PARTS]

    assert sum(parts) == pytest.approx(rows[name]["extra_over_unguarded"])


def test_the_headline_is_the_conservative_figure(rows) -> None:
    light = rows["guarded_light"]

    assert light["extra_over_unguarded"] == pytest.approx(1.8 / 1.6 - 1)
    # the transport hashes and signs with the guard off as well: 0.12 s over 6 steps are taken off
    assert light["extra_compute"] == pytest.approx(1.8 / (1.6 - 0.02) - 1)


def test_bytes_are_told_per_link_and_step(rows) -> None:
    assert rows["unguarded"]["bytes_per_step_owner>worker-1"] == pytest.approx(100)
    assert rows["unguarded"]["bytes_per_step"] == pytest.approx(150)
