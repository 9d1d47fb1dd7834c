"""What a worker says of itself, and how it comes back to an owner that was gone."""

from types import SimpleNamespace

import pytest

from phalanx.errors import PeerLostError, PeerRefusedError
from phalanx.pipeline import WorkerOutcome, keep_serving
from phalanx.pipeline.assignment.assignment import Assignment
from phalanx.pipeline.worker.console import WorkerConsole


def test_a_whole_part_in_a_run_is_told_in_order():
    said = []
    worker_console = WorkerConsole(said.append, clock=lambda: 0.0)

    worker_console.print_looking("host:1", "me:2")
    worker_console.print_connected("host:1", "alice", "run")
    worker_console.print_admitted(4)
    worker_console.print_roles({2}, {1, 3}, 0)
    worker_console.print_step(0)
    worker_console.print_roles({2}, {3, 1}, 1)
    worker_console.print_end(WorkerOutcome.COMPLETE, "the run is complete")

    assert said == [
        "looking for the owner at host:1; other parties reach this worker at me:2",
        "connected to the owner at host:1 as alice, run run; waiting to be admitted",
        "admitted to a run of 4 stages; waiting for a role",
        "from step 0 on this worker serves stage 2, shadows stage 1 3",
        "step 0 begins",
        "the run is complete after step 0",
    ]


def test_steps_are_told_four_times_a_minute_at_most_and_each_once():
    said, now = [], [0.0]
    worker_console = WorkerConsole(said.append, clock=lambda: now[0])

    for step in range(61):
        now[0] = float(step)
        worker_console.print_step(step)
        worker_console.print_step(step)

    assert said == [f"step {step} begins" for step in (0, 15, 30, 45, 60)]


def test_what_another_party_chose_cannot_steer_the_terminal():
    said = []

    WorkerConsole(said.append).print_end(WorkerOutcome.LEFT, "\x1b[2Jgone")

    assert said == ["this worker left (?[2Jgone)"]


def test_an_owner_that_is_gone_is_looked_for_again_ever_more_slowly():
    said, pauses = [], []
    outcomes = iter([PeerLostError("gone")] * 8 + [WorkerOutcome.COMPLETE])

    def serve():
        outcome = next(outcomes)
        if isinstance(outcome, PeerLostError):
            raise outcome
        return outcome

    assert keep_serving(serve, said.append, pauses.append) is WorkerOutcome.COMPLETE
    assert pauses == [1, 2, 4, 8, 16, 32, 60, 60]
    assert said[0] == "gone; looking for the owner again in 1 s; Ctrl-C stops"


def test_an_owner_that_refuses_is_not_asked_again():
    def serve():
        raise PeerRefusedError("alice was excluded and may not come back")

    with pytest.raises(PeerRefusedError):
        keep_serving(serve, lambda line: None, pytest.fail)


def test_the_row_of_a_worker_says_what_it_does_and_what_crossed_its_links():
    worker_console = WorkerConsole()
    assert (worker_console.own_row().state, worker_console.own_row().bytes_from) == ("waiting", 0)

    worker_console.print_connected("owner:7070", "alice", "run-1")
    worker_console.watch_links(SimpleNamespace(bytes_sent={"owner": 3, "bob": 4}, bytes_received={"owner": 5}))
    worker_console.print_roles([2], [1, 3], 7)
    for step in (7, 8, 9, 9):
        worker_console.print_step(step)

    row = worker_console.own_row()
    assert (row.name, row.state_text, row.since_step, row.steps) == ("alice", "serving 2, shadowing 1 3", 7, 2)
    assert (row.bytes_from, row.bytes_to) == (7, 5)
    worker_console.print_roles([], [], 10)
    assert worker_console.own_row().state_text == "connected"


def test_a_worker_shows_the_table_of_all_parties_as_far_as_it_knows_of_them():
    now, received = [100.0], {"owner": 5}
    worker_console = WorkerConsole(now=lambda: now[0])
    assert [row.state for row in worker_console.table_rows()] == ["waiting"]

    worker_console.print_connected("owner:7070", "bob", "run-1")
    worker_console.watch_links(SimpleNamespace(bytes_sent={"owner": 3, "alice": 4}, bytes_received=received))
    worker_console.print_roles([2], [1], 7)
    holders, shadows = {0: "owner", 1: "alice.2", 2: "bob", 3: "owner"}, {1: "bob", 2: "alice.2"}
    worker_console.note_assignment(Assignment(holders, shadows), 7)
    for step in (7, 8, 9):
        worker_console.print_step(step)
    received["alice.2"] = 9
    alice, bob = worker_console.table_rows()

    assert (alice.name, alice.state_text, alice.since_step, alice.steps) == ("alice", "serving 1, shadowing 2", 7, 2)
    assert (alice.bytes_from, alice.bytes_to, alice.heard) == (9, 4, 100)
    assert (bob.name, bob.state_text, bob.bytes_from, bob.bytes_to) == ("bob", "serving 2, shadowing 1", 7, 14)
    now[0] = 130.0
    assert worker_console.table_rows()[0].heard == 100

    # of a party without a stage its worker neighbours are not told why
    worker_console.note_assignment(Assignment({0: "owner", 1: "bob", 2: "bob", 3: "owner"}, {}), 10)
    assert [row.name for row in worker_console.table_rows()] == ["bob"]


def test_what_stays_in_the_same_hands_is_not_counted_from_anew():
    worker_console = WorkerConsole()
    worker_console.print_connected("owner:7070", "bob", "run-1")

    for step in (4, 5, 6):
        worker_console.note_assignment(Assignment({1: "alice", 2: "bob"}, {}), step)
        worker_console.print_step(step)

    assert [(row.name, row.since_step, row.steps) for row in worker_console.table_rows()] == [
        ("alice", 4, 2),
        ("bob", None, 2),
    ]
