"""Files of a run are read as they grow, and whatever else they are."""

import fcntl
import json
import os
from pathlib import Path

import pytest

from phalanx.watch.growing_files import GrowingRows, find_owner, read_object, read_tail
from watched_run import append_rows


@pytest.fixture
def path(tmp_path):
    return tmp_path / "metrics.jsonl"


def test_rows_come_once_each_and_half_a_line_waits(path):
    rows = GrowingRows(path)
    assert rows.read_new() == ([], False)
    append_rows(path, [{"step": 0}])
    with path.open("a") as file:
        file.write('{"step": 1')

    assert rows.read_new() == ([{"step": 0}], False)
    assert rows.read_new() == ([], False)

    with path.open("a") as file:
        file.write("}\n")
    assert rows.read_new() == ([{"step": 1}], False)


@pytest.mark.parametrize("max_bytes", [1, 2, 7, 4096])
def test_pieces_of_any_size_give_the_same_rows(path, max_bytes):
    expected = [{"step": step, "name": "ü" * step} for step in range(5)]
    append_rows(path, expected)
    rows, found = GrowingRows(path), []

    while piece := (path.stat().st_size - rows._offset):
        found += rows.read_new(min(max_bytes, piece))[0]

    assert found == expected


def test_a_file_that_a_resumed_run_replaces_begins_anew(path):
    rows = GrowingRows(path)
    append_rows(path, [{"step": step} for step in range(3)])
    rows.read_new()
    spare = path.with_name("spare")
    append_rows(spare, [{"step": 0}])
    spare.replace(path)

    assert rows.read_new() == ([{"step": 0}], True)


def test_a_file_that_is_cut_in_place_begins_anew(path):
    rows = GrowingRows(path)
    append_rows(path, [{"step": step} for step in range(3)])
    rows.read_new()
    path.write_text('{"step": 7}\n')

    assert rows.read_new() == ([{"step": 7}], True)


@pytest.mark.parametrize("text", ["nonsense", "[1]", '"text"', "NaN", "[" * 100_000, "\x00\xff"])
def test_a_line_that_is_no_object_is_counted_and_left_out(path, text):
    rows = GrowingRows(path)
    path.write_bytes(text.encode("latin-1") + b'\n{"step": 1}\n\n')

    assert rows.read_new()[0] == [{"step": 1}]
    assert rows.num_bad == 1


def test_a_pipe_in_the_place_of_a_file_delays_nobody(path):
    os.mkfifo(path)

    assert GrowingRows(path).read_new() == ([], False)
    assert read_object(path) is None
    assert read_tail(path, 3) == []


def test_the_last_lines_of_a_log_are_read_without_the_whole_of_it(tmp_path):
    log = tmp_path / "worker.log"
    log.write_text("".join(f"line {number}\n" for number in range(100_000)))

    assert read_tail(log, 2) == ["line 99998", "line 99999"]
    assert read_tail(tmp_path / "none.log", 2) == []


@pytest.mark.skipif(not Path("/proc/locks").exists(), reason="the kernel shows no locks")
def test_the_owner_is_found_by_the_lock_that_it_holds_and_the_lock_is_not_touched(tmp_path):
    log = tmp_path / "events.jsonl"
    log.touch()
    assert find_owner(log) is None
    with log.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert find_owner(log) == os.getpid()
    assert find_owner(log) is None
    assert find_owner(tmp_path / "none") is None


def test_locks_of_other_files_name_nobody(tmp_path):
    log, locks = tmp_path / "events.jsonl", tmp_path / "locks"
    log.touch()
    device, inode = log.stat().st_dev, log.stat().st_ino
    place = f"{os.major(device):02x}:{os.minor(device):02x}"
    locks.write_text(
        f"1: FLOCK  ADVISORY  WRITE 11 {place}:{inode + 1} 0 EOF\n"
        f"2: POSIX  ADVISORY  WRITE 12 {place}:{inode} 0 EOF\n"
        f"3: FLOCK  ADVISORY  READ 13 {place}:{inode} 0 EOF\n"
        f"nonsense\n4: FLOCK  ADVISORY  WRITE 14 {place}:{inode} 0 EOF\n"
    )

    assert find_owner(log, locks) == 14
    assert json.dumps(read_object(locks)) == "null"
