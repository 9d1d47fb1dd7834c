"""Whatever an insider does to its messages: no honest party pays for it, and the weights are those of an honest run.

`PHALANX_FUZZ_MINUTES` says how long the long share goes on, `PHALANX_FUZZ_SEED` with which seed it begins, and
`PHALANX_FUZZ_LOG` where it writes a line for every seed.
"""

import os
import time
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, given, note, seed, settings
from play import COMPANIES
from schedule import Schedule
from strategies import schedules

QUICK, PER_SEED = 4, 200
SETTINGS = settings(deadline=None, database=None, print_blob=False, suppress_health_check=list(HealthCheck))


def played(stage, schedule):
    """What came of a schedule, and which invariants do not hold; hypothesis prints the first with a failure."""
    outcome = stage.play(schedule)
    note(f"{outcome}")
    return outcome, stage.faults(schedule, outcome)


# no time for shrinking here: the schedule that is printed goes into the long share, which does
@settings(SETTINGS, max_examples=QUICK, derandomize=True, phases=[Phase.explicit, Phase.generate])
@given(schedules())
def test_a_hostile_insider_harms_nobody_honest(stage, schedule):
    _, faults = played(stage, schedule)

    assert faults == []


# what differs from another kind in its rates or in who waits alone, and has honest runs of its own elsewhere
ALIKE = {"default rates", "spare", "league"}


@pytest.mark.parametrize(
    "company", [pytest.param(one, marks=pytest.mark.slow) if one in ALIKE else one for one in COMPANIES]
)
def test_an_honest_company_of_each_kind_meets_every_bound(stage, company):
    outcome = stage.play(Schedule(company, {}))

    assert stage.faults(Schedule(company, {}), outcome) == []
    assert (outcome.evicted, outcome.lost) == ([], [])
    # nobody waits for anything but another's work, which takes no time of the simulation's
    assert outcome.passed_s == 0.0


@pytest.mark.slow
@pytest.mark.timeout(0)
def test_a_hostile_insider_harms_nobody_honest_for_as_long_as_is_asked(stage):
    until = time.monotonic() + 60 * float(os.environ.get("PHALANX_FUZZ_MINUTES", "5"))
    number = int(os.environ.get("PHALANX_FUZZ_SEED", "1"))
    while time.monotonic() < until:
        began, report = time.process_time(), f"seed {number}: stopped"
        try:
            outcomes = play_seed(stage, number)
            report = f"seed {number}: {summary(outcomes, time.process_time() - began)}"
        finally:
            if "PHALANX_FUZZ_LOG" in os.environ:
                with Path(os.environ["PHALANX_FUZZ_LOG"]).open("a", encoding="utf-8") as log:
                    log.write(f"{time.strftime('%H:%M:%S')} {report}\n")
        assert outcomes
        number += 1


def play_seed(stage, number):
    """Play the schedules that one seed draws; the first in which an invariant does not hold fails."""
    outcomes = []

    @seed(number)
    @settings(SETTINGS, max_examples=PER_SEED)
    @given(schedules())
    def play(schedule):
        outcome, faults = played(stage, schedule)
        outcomes.append(outcome)
        assert faults == []

    play()
    return outcomes


def summary(outcomes, cpu_s):
    evicting = sum(bool(outcome.evicted) for outcome in outcomes)
    acts = sum(outcome.num_acts for outcome in outcomes)
    return (
        f"{len(outcomes)} schedules, {sum(outcome.fired for outcome in outcomes)} of {acts} acts done, "
        f"{evicting} with a conviction, most: {max(outcome.event_bytes for outcome in outcomes)} bytes of events, "
        f"{max(outcome.queued_bytes for outcome in outcomes)} queued, "
        f"{max(outcome.turns for outcome in outcomes)} turns, "
        f"{max(outcome.passed_s for outcome in outcomes):.0f} s passed; {cpu_s:.0f} s of CPU"
    )
