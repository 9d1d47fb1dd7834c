"""Peaks of memory as the kernel counts them."""

import mmap

import pytest

from phalanx.lab.bench.measure.resident import added_at_peak, read_resident, reset_peak

MEBIBYTE = 2**20


def touch(size: int) -> mmap.mmap:
    """Memory of its own that was written to, whatever an allocator has kept."""
    found = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    for place in range(0, size, mmap.PAGESIZE):
        found[place] = 1
    return found


def test_what_was_held_and_given_back_is_the_peak():
    before = read_resident()
    reset_peak()

    touch(64 * MEBIBYTE).close()

    assert added_at_peak(before) == pytest.approx(64 * MEBIBYTE, abs=4 * MEBIBYTE)


def test_a_peak_that_is_forgotten_does_not_come_back():
    before = read_resident()
    touch(64 * MEBIBYTE).close()

    reset_peak()

    assert added_at_peak(before) < 8 * MEBIBYTE


def test_memory_that_was_asked_for_and_never_written_to_is_not_there():
    before = read_resident()
    reset_peak()

    untouched = mmap.mmap(-1, 64 * MEBIBYTE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)

    assert added_at_peak(before) < 8 * MEBIBYTE
    untouched.close()
