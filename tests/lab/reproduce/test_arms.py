"""Each arm does what its name says, and nothing else."""

import pytest

from phalanx.errors import TrainingError
from phalanx.lab.reproduce.arms import OracleDrop, RestartArm
from phalanx.lab.reproduce.arms.skip_layer import SkipLayerArm, skipped_and_frozen
from phalanx.lab.reproduce.arms.statistics import StatisticsArm
from phalanx.lab.reproduce.arms.undefended import UndefendedArm
from phalanx.lab.reproduce.arms.verified import VerifiedArm
from phalanx.lab.reproduce.attacker import LieSchedule

ALWAYS_2 = LieSchedule("forward", 1.0, (2,), seed=0)
DIRECTIONS = pytest.mark.parametrize("direction", ["forward", "backward"])
EITHER = pytest.mark.parametrize("direction", ["backward", pytest.param("forward", marks=pytest.mark.slow)])


def states(arm):
    return [copy.compute_digest() for copy in arm.simulator.copies]


def digest_after(arm, tiny, steps):
    with arm:
        for step in range(steps):
            arm.step_arm(step, tiny.inputs(step))
        return arm.simulator.weights_digest()


class Calls:
    """Notes which stages compute; otherwise the runner itself."""

    def __init__(self, arm, monkeypatch):
        self.forward, self.backward = [], []
        for stage, copy in enumerate(arm.simulator.copies):
            self._note(monkeypatch, copy.runner, "forward", self.forward, stage)
            self._note(monkeypatch, copy.runner, "backward", self.backward, stage)

    @staticmethod
    def _note(monkeypatch, runner, name, calls, stage):
        real = getattr(runner, name)

        def noted(step, microbatch, x):
            calls.append((stage, microbatch))
            return real(step, microbatch, x)

        monkeypatch.setattr(runner, name, noted)


@DIRECTIONS
def test_skip_layer_freezes_exactly_three_stages_and_bypasses_exactly_two(tiny, monkeypatch, direction):
    arm = SkipLayerArm(tiny.setting(LieSchedule(direction, 1.0, (2,), seed=0)))
    before, calls = states(arm), Calls(arm, monkeypatch)

    arm.step_arm(0, tiny.inputs(0))

    frozen = [stage for stage, (old, new) in enumerate(zip(before, states(arm), strict=True)) if old == new]
    last_pass = calls.forward[-4 * 4 :]
    assert frozen == [1, 2, 3]
    assert last_pass == [(stage, m) for m in range(4) for stage in (0, 1, 4, 5)]
    assert calls.backward[-4 * 4 :] == [(stage, m) for m in range(4) for stage in (5, 4, 1, 0)]
    assert (arm.event_counts.alarms, arm.event_counts.honest_accused, arm.event_counts.redone_steps) == (1, 0, 1)


def test_skip_layer_leaves_an_honest_step_alone(tiny):
    arm, plain = SkipLayerArm(tiny.setting()), UndefendedArm(tiny.setting())

    assert digest_after(arm, tiny, 2) == digest_after(plain, tiny, 2)
    assert (arm.event_counts.alarms, arm.event_counts.redone_steps) == (0, 0)


def test_duplicates_stay_twins_of_their_stages_through_skipped_steps(tiny):
    arm = SkipLayerArm(tiny.setting(LieSchedule("forward", 0.5, (1, 2, 3, 4), seed=1)))

    digest_after(arm, tiny, 4)

    assert 0 < arm.event_counts.redone_steps < 4
    for stage, block in arm.duplicates.blocks.items():
        assert block.has_state_of(arm.simulator.copies[stage])


@pytest.mark.parametrize(
    ("suspect", "bypassed", "frozen"), [(1, {1, 2}, {0, 1, 2}), (3, {3, 4}, {2, 3, 4}), (4, {4}, {3, 4})]
)
def test_the_last_stage_is_never_skipped(suspect, bypassed, frozen):
    assert skipped_and_frozen(suspect, 6) == (bypassed, frozen)


@EITHER
def test_restart_repeats_until_nobody_lies_and_ends_with_the_clean_bits(tiny, direction):
    plan = LieSchedule(direction, 0.5, (1, 2, 3, 4), seed=1)
    arm = RestartArm(tiny.setting(plan))

    digest = digest_after(arm, tiny, 3)

    expected = [next(n for n in range(99) if plan.lying_stage(step, n) is None) for step in range(3)]
    assert arm.event_counts.redone_steps == sum(expected) > 0
    assert (arm.event_counts.alarms, arm.event_counts.honest_accused, arm.event_counts.lies_missed) == (
        sum(expected),
        0,
        0,
    )
    assert digest == digest_after(UndefendedArm(tiny.setting()), tiny, 3)


def test_restart_gives_up_when_somebody_always_lies(tiny, monkeypatch):
    monkeypatch.setattr("phalanx.lab.reproduce.arms.MAX_ATTEMPTS", 3)

    with pytest.raises(TrainingError, match="attacked in 3 attempts in a row"):
        RestartArm(tiny.setting(ALWAYS_2)).step_arm(0, tiny.inputs(0))


def test_oracle_drop_leaves_every_weight_as_it_was(tiny):
    arm = OracleDrop(tiny.setting(ALWAYS_2))
    before = states(arm)

    arm.step_arm(0, tiny.inputs(0))

    assert states(arm) == before
    assert arm.event_counts.dropped_steps == 1


def test_the_undefended_arm_takes_every_lie(tiny):
    arm = UndefendedArm(tiny.setting(ALWAYS_2))

    assert digest_after(arm, tiny, 2) != digest_after(UndefendedArm(tiny.setting()), tiny, 2)
    assert len(arm.attacker.lies) == 2 * 4


def test_statistics_drops_gaussian_gradients_and_bans_who_is_flagged_in_three_steps(tiny):
    arm = StatisticsArm(tiny.setting(LieSchedule("backward", 1.0, (2,), seed=0), warm_up=20))

    before = states(arm)

    arm.step_arm(0, tiny.inputs(0))

    # frozen is only who got no gradient
    assert [old == new for old, new in zip(before, states(arm), strict=True)] == [True, True, *[False] * 4]
    for step in range(1, 5):
        arm.step_arm(step, tiny.inputs(step))
    assert arm.event_counts.lies_missed == 0
    # right or wrong: with these weights it is the honest neighbour, whose messages change when those of stage 2 are
    # dropped, so the liar stays
    assert arm.event_counts.evicted == ("stage-3",)
    assert arm.event_counts.honest_accused == 14
    assert arm.attacker.attacked_steps == {0, 4}


@EITHER
def test_the_real_guard_evicts_each_liar_once_and_ends_with_the_clean_bits(make_tiny, direction):
    tiny = make_tiny(4)
    setting = tiny.setting(LieSchedule(direction, 0.8, (1, 2), seed=2))

    with VerifiedArm(setting) as arm:
        for step in range(6):
            arm.step_arm(step, tiny.inputs(step))
        counts, digest = arm.event_counts, arm.weights_digest()

    assert sorted(counts.evicted) == ["worker-1", "worker-2"]
    assert (counts.alarms, counts.honest_accused, counts.lies_missed) == (2, 0, 0)
    assert digest == digest_after(UndefendedArm(make_tiny(4).setting()), tiny, 6)
