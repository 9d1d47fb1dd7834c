import io

import pytest
from rich.console import Console

from phalanx.telemetry import ProgressDisplay, ShownProgress, StepReading

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

    with ProgressDisplay(20, every=10, console=console, clock=FakeClock(0.0)) as progress:
        for step in range(1, 21):
            progress.show_step(step, READING)

    lines = console.file.getvalue().splitlines()
    assert [line.split("  ")[0] for line in lines] == ["step 1/20", "step 10/20", "step 20/20"]
    assert "loss 2.5000  1,234 tokens/s  audits 7  alarms 1" in lines[0]


def times_left(total, start, ends):
    """What is shown of the time left as the steps of a session end at these times."""
    console, clock = plain(), FakeClock(*ends)
    with ProgressDisplay(total, start, every=1, console=console, clock=clock) as progress:
        for number, _ in enumerate(ends, start=start + 1):
            progress.show_step(number, READING)
    found = console.file.getvalue().splitlines()
    return [line.rpartition("  ")[2].removesuffix(" left") for line in found]


def test_the_first_step_of_a_session_tells_nothing_of_the_others():
    # processes start for 100 s, then a step takes one
    assert times_left(50, 0, [100.0, 101.0, 102.0]) == ["", "0:48", "0:47"]


def test_a_resumed_run_is_timed_by_what_it_does_now():
    assert times_left(4000, 34, [90.0, 92.0]) == ["", "2:12:08"]


def test_the_time_left_follows_the_pace_of_the_last_steps():
    slow = [10.0 * number for number in range(30)]
    fast = [slow[-1] + number for number in range(1, 31)]

    shown = times_left(100, 0, slow + fast)

    assert shown[29] == "11:40"
    assert shown[-1] == "0:40"


def test_a_run_that_goes_back_is_timed_anew():
    console, clock = plain(), FakeClock(0.0, 1.0, 500.0, 502.0)
    with ProgressDisplay(10, every=1, console=console, clock=clock) as progress:
        for step in (1, 2, 1, 2):
            progress.show_step(step, READING)

    assert [line.rpartition("  ")[2] for line in console.file.getvalue().splitlines()] == [
        "",
        "0:08 left",
        "",
        "0:16 left",
    ]


def test_a_run_that_is_done_has_no_time_left():
    assert times_left(3, 0, [5.0, 6.0, 7.0]) == ["", "0:01", ""]


def test_on_a_terminal_the_bar_shows_the_reading_and_messages_above_it():
    console = terminal()

    with ProgressDisplay(2, console=console) as progress:
        progress.show_step(1, READING)
        progress.print_message("worker-1 (stage 1) evicted", "eviction")
        progress.show_step(2, READING)

    shown = console.file.getvalue()
    assert "2/2" in shown
    assert "loss 2.5000" in shown
    assert "\x1b[1;31mworker-1 (stage 1) evicted" in shown


@pytest.mark.parametrize("make_console", [plain, terminal])
def test_a_hostile_name_cannot_move_the_cursor_or_write_markup(make_console):
    console = make_console()

    with ProgressDisplay(1, console=console) as progress:
        progress.print_message("\x1b]0;owned\x07[red]worker\u202e\nstep 9/9\x9b2J", "alarm")

    shown = console.file.getvalue()
    assert "?]0;owned?[red]worker??step 9/9?2J" in shown


def test_a_step_that_was_not_finite_is_shown_as_such():
    console = plain()

    with ProgressDisplay(1, console=console) as progress:
        progress.show_step(1, StepReading(loss=float("nan"), tokens_per_s=0.0))

    assert "loss nan" in console.file.getvalue()


@pytest.mark.parametrize("width", [60, 80, 120])
def test_no_figure_is_cut_on_a_narrow_terminal(width):
    text = io.StringIO()
    console = Console(file=text, force_terminal=True, width=width, color_system=None)
    reading = StepReading(loss=2.5, tokens_per_s=123456.0, audits=1234, alarms=12, epsilon=1.25)

    with ProgressDisplay(20_000, console=console) as display:
        display.show_step(12_345, reading)

    drawn = text.getvalue()
    assert "…" not in drawn
    for figure in ("12345/20000", "loss 2.5000", "123,456 tokens/s", "epsilon 1.250", "audits 1234", "alarms 12"):
        assert figure in " ".join(drawn.split())


def test_a_run_without_a_guard_speaks_of_no_audits_and_a_federated_one_of_rounds():
    text = io.StringIO()
    shown = ShownProgress("round", has_guard=False)

    with ProgressDisplay(3, shown=shown, console=Console(file=text, width=120)) as display:
        display.show_step(1, READING)

    assert text.getvalue().startswith("round 1/3  loss 2.5000  1,234 tokens/s")
    assert "audits" not in text.getvalue() and "alarms" not in text.getvalue()


class NoParties:
    def party_rows(self):
        return []

    def changed_rows(self):
        return []


def test_a_terminal_shows_what_the_guard_has_decided_and_no_name_steers_it():
    console = terminal()

    with ProgressDisplay(9, console=console) as progress:
        progress.show_parties(NoParties())
        for kind, party in [("verdict", "worker-1"), ("evicted", "worker-1"), ("step", None), ("lost", "w\x1b[2J2")]:
            progress.count_decision(kind, party)
        progress.show_step(1, READING)

    text = console.file.getvalue()
    assert "guard: 1 verdicts  out: worker-1 evicted, w?[2J2 lost" in text
    assert "\x1b[2J2" not in text


def test_a_run_without_a_guard_or_without_a_terminal_has_no_line_of_it():
    for console, shown in ((terminal(), ShownProgress(has_guard=False)), (plain(), ShownProgress())):
        with ProgressDisplay(9, console=console, shown=shown) as progress:
            progress.show_parties(NoParties())
            progress.count_decision("verdict", "worker-1")
            progress.show_step(1, READING)
        assert "guard:" not in console.file.getvalue()
