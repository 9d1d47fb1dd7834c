"""What averages can see, and what they cannot."""

import pytest
import torch

from phalanx.lab.reproduce.arms.monitor import StatisticsMonitor

PATTERN = torch.randn(16, generator=torch.Generator().manual_seed(0))


def message(seed):
    """Activations as a residual stream has them: every token near one common direction."""
    return PATTERN + 0.3 * torch.randn(2, 8, 16, generator=torch.Generator().manual_seed(seed))


@pytest.fixture
def monitor():
    warm = StatisticsMonitor()
    for seed in range(1, 41):
        warm.learn_message(1, "forward", message(seed))
    return warm


def test_honest_messages_pass(monitor):
    assert [monitor.judge_message(1, "forward", message(seed)) for seed in range(100, 150)] == [None] * 50


@pytest.mark.parametrize(
    ("lie", "reason"),
    [
        (lambda x: -x, "direction"),
        (lambda x: 10 * x, "scale"),
        (lambda x: torch.randn(x.shape, generator=torch.Generator().manual_seed(9)), "direction"),
        (torch.zeros_like, "scale"),
        (lambda x: x * torch.tensor(float("nan")), "not finite"),
    ],
    ids=["sign flip", "scaled", "gaussian", "zero", "nan"],
)
def test_a_gross_lie_is_seen_after_the_warm_up(monitor, lie, reason):
    assert monitor.judge_message(1, "forward", lie(message(100))).startswith(reason)


def test_a_stale_message_is_not_seen(monitor):
    assert monitor.judge_message(1, "forward", message(40)) is None


def test_a_small_drift_is_not_seen(monitor):
    assert monitor.judge_message(1, "forward", 1.001 * message(100)) is None


def test_a_lie_does_not_move_the_average(monitor):
    for _ in range(50):
        monitor.judge_message(1, "forward", -message(100))

    assert monitor.judge_message(1, "forward", message(101)) is None
    assert monitor.judge_message(1, "forward", -message(100)) is not None


def test_a_kind_without_a_warm_up_is_only_asked_to_be_finite(monitor):
    assert [monitor.judge_message(2, "forward", sign * message(100)) for sign in (1, -1)] == [None, None]


def test_recentring_keeps_the_thresholds(monitor):
    monitor.reset_averages()
    for seed in range(1, 5):
        monitor.learn_message(1, "forward", 3 * message(seed))

    assert monitor.judge_message(1, "forward", 3 * message(100)) is None
    assert monitor.judge_message(1, "forward", message(100)).startswith("scale")
