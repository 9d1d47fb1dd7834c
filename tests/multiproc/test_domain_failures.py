"""Ranks of a domain that die or hang: the run goes on by itself, and its losses are those of an undisturbed one."""

import os
import signal

import pytest
from domain_lab import (
    ALONE,
    check_continued,
    end_of,
    finish,
    launch_domain,
    losses,
    rank_pid,
    seconds_until_gone,
    train_domain,
    wait_for_step,
)
from real_runs import end_all, events, exists, make_place

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]
STARTS = ("run_started", "run_resumed", "run_completed")


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """The curve of two ranks that nothing happens to."""
    place = make_place(tmp_path_factory.mktemp("undisturbed"))
    finish(train_domain(place, *ALONE))
    yield losses(place)
    end_all(place)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_killed_rank_of_train_comes_back_by_itself(place, undisturbed, rank):
    process = train_domain(place)
    wait_for_step(place, process, 7)
    pids = [rank_pid(process, 0), rank_pid(process, 1)]

    os.kill(pids[rank], signal.SIGKILL)
    finish(process)

    check_continued(place, undisturbed)
    assert [kind for kind, _ in events(place, *STARTS)] == list(STARTS)
    assert place.summary()["resumed_from"] >= 5
    assert not any(exists(pid) for pid in pids)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_of_train_that_hangs_is_ended_within_seconds(place, undisturbed, rank):
    process = train_domain(place)
    wait_for_step(place, process, 7)
    pid = rank_pid(process, rank)

    os.kill(pid, signal.SIGSTOP)
    seconds = seconds_until_gone(process, pid)
    finish(process)

    check_continued(place, undisturbed)
    assert seconds < 40
    assert [kind for kind, _ in events(place, *STARTS)] == list(STARTS)


def test_it_is_started_again_only_as_often_as_the_run_file_says(place):
    process = train_domain(place, "--set", "parallel.restarts=1")
    for step in (7, 17):
        wait_for_step(place, process, step)
        os.kill(rank_pid(process, 1), signal.SIGKILL)

    assert end_of(process) == 4, process.text

    assert "rank 1 ended with signal 9" in process.text
    assert place.summary()["status"] == "failed"


def test_ctrl_c_ends_all_ranks_and_nothing_is_started_again(place):
    process = train_domain(place)
    wait_for_step(place, process, 7)
    pids = [rank_pid(process, 0), rank_pid(process, 1)]

    process.popen.send_signal(signal.SIGINT)

    assert end_of(process) == 130, process.text
    assert not any(exists(pid) for pid in pids)
    assert place.summary()["status"] == "interrupted"


@pytest.mark.parametrize("rank", [0, 1])
def test_a_killed_worker_of_torchrun_comes_back_by_itself(place, undisturbed, rank):
    process = launch_domain(place)
    wait_for_step(place, process, 7)
    pid = rank_pid(process, rank)

    os.kill(pid, signal.SIGKILL)
    finish(process)

    check_continued(place, undisturbed)
    assert [kind for kind, _ in events(place, *STARTS)] == list(STARTS)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_worker_of_torchrun_that_hangs_is_started_again(place, undisturbed, rank):
    process = launch_domain(place)
    wait_for_step(place, process, 7)
    pid = rank_pid(process, rank)

    os.kill(pid, signal.SIGSTOP)
    seconds = seconds_until_gone(process, pid)
    finish(process)

    check_continued(place, undisturbed)
    # torchrun gives a process 30 s to end before it kills it
    assert seconds < 80
    assert "gave no sign of life" in process.text


def test_more_and_then_fewer_ranks_go_on_with_the_same_curve(place, undisturbed):
    for ranks, step in ((2, 12), (3, 32)):
        go_on = ("--resume",) if ranks == 3 else ()
        process = train_domain(place, "--ranks", str(ranks), *go_on)
        wait_for_step(place, process, step)
        process.popen.send_signal(signal.SIGINT)
        assert end_of(process) == 130, process.text

    finish(train_domain(place, "--ranks", "2", "--resume"))

    check_continued(place, undisturbed, exact=False)
    found = [body["layout"]["dp"] for _, body in events(place, "run_started", "run_resumed")]
    assert found == [2, 3, 2]


def test_a_rank_for_which_the_batch_has_no_equal_share_stands_by(place):
    process = launch_domain(place, "--set", "parallel.dp=3", "--set", "train.batch_size=8")

    finish(process)

    assert place.summary()["world"]["dp"] == 2
    assert place.summary()["status"] == "completed"


def test_checkpoints_beside_the_training_change_nothing_and_are_gone_on_from(place, undisturbed):
    beside = ("--set", "checkpoint.asynchronous=true", "--set", "parallel.zero=3")
    process = train_domain(place, *beside)
    wait_for_step(place, process, 17)

    os.kill(rank_pid(process, 1), signal.SIGKILL)
    finish(process)

    check_continued(place, undisturbed, exact=False)
    assert place.summary()["resumed_from"] >= 5
    # one may have been under way when the rank was killed, and says so
    assert all("rank 1 was lost" in body["reason"] for _, body in events(place, "checkpoint_failed"))
