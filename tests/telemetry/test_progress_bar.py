import io

import pytest
from rich.console import Console

from phalanx.telemetry import ProgressDisplay, StepReading

READING = StepReading(loss=2.5, tokens_per_s=1234.0, audits=7, alarms=1)


class FakeClock:
    """Gives the next of the times that it was made with."""

    def __init__(self, *times):
        self.times = list(times)

    def __call__(self):
        return self.times.pop(0) if len(self.times) > 1 else self.times[0]


def plain():
    return Console(file=io.StringIO(), force_terminal=False, width=100)


def terminal():
    return Console(file=io.StringIO(), force_terminal=True, width=120, color_system="truecolor")


def test_without_a_terminal_every_nth_step_is_one_plain_line():
    console = plain()

    with ProgressDisplay(20, every=10, console=console, clock=FakeClock(0.0, 0.0, 5.0)) as progress:
        for step in range(1, 21):
            progress.update(step, READING)

    lines = console.file.getvalue().splitlines()
    assert [line.split("  ")[0] for line in lines] == ["step 1/20", "step 10/20", "step 20/20"]
    assert "loss 2.5000  1,234 tokens/s  audits 7  alarms 1" in lines[0]


def test_time_left_follows_the_speed_of_this_session_only():
    console = plain()

    with ProgressDisplay(100, 50, every=10, console=console, clock=FakeClock(0.0, 0.0, 10.0)) as progress:
        progress.update(60, READING)

    assert console.file.getvalue().rstrip().endswith("0:40 left")


def test_on_a_terminal_the_bar_shows_the_reading_and_messages_above_it():
    console = terminal()

    with ProgressDisplay(2, console=console) as progress:
        progress.update(1, READING)
        progress.message("worker-1 (stage 1) evicted", "eviction")
        progress.update(2, READING)

    shown = console.file.getvalue()
    assert "2/2" in shown
    assert "loss 2.5000" in shown
    assert "\x1b[1;31mworker-1 (stage 1) evicted" in shown


@pytest.mark.parametrize("make_console", [plain, terminal])
def test_a_hostile_name_cannot_move_the_cursor_or_write_markup(make_console):
    console = make_console()

    with ProgressDisplay(1, console=console) as progress:
        progress.message("\x1b]0;owned\x07[red]worker\u202e\nstep 9/9\x9b2J", "alarm")

    shown = console.file.getvalue()
    assert "?]0;owned?[red]worker??step 9/9?2J" in shown


def test_a_step_that_was_not_finite_is_shown_as_such():
    console = plain()

    with ProgressDisplay(1, console=console) as progress:
        progress.update(1, StepReading(loss=float("nan"), tokens_per_s=0.0))

    assert "loss nan" in console.file.getvalue()
