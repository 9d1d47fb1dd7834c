import copy
import os
from concurrent.futures import ThreadPoolExecutor

import pytest

from pad_worlds import MASTER, RUN, Counter, Disk, ForgetfulDisk, PowerCutError, aes_pads, new_ledger, stuck
from phalanx.errors import PadError
from phalanx.security.mask import PadLedger, begin_ledger
from phalanx.security.mask.ledger import MAX_PADS


def numbers(ledger, count):
    return [ledger.take_ticket().number for _ in range(count)]


def identities(ledger, count):
    """What makes a pad: its key and its number."""
    pads = aes_pads(ledger)
    return [(pads.range_key(ticket), ticket.number) for ticket in (ledger.take_ticket() for _ in range(count))]


def test_numbers_are_given_out_once_and_in_order():
    ledger = new_ledger(range_size=3)

    assert numbers(ledger, 8) == list(range(8))


def test_threads_never_get_the_same_number():
    ledger = new_ledger(range_size=7)

    with ThreadPoolExecutor(4) as threads:
        found = list(threads.map(lambda _: ledger.take_ticket().number, range(400)))

    assert sorted(found) == list(range(400))


def test_a_range_is_written_down_before_its_first_number_is_given_out():
    disk = Disk()
    ledger = new_ledger(disk, range_size=3)
    disk.cut = "before"

    with pytest.raises(PowerCutError):
        ledger.take_ticket()
    assert numbers(ledger, 4) == [0, 1, 2, 3]
    assert len(disk.past) == 1 + 1 + 2


def test_a_restart_skips_the_rest_of_a_range_and_raises_the_epoch():
    disk = Disk()
    before = new_ledger(disk, range_size=10).take_ticket()

    after = PadLedger(disk, MASTER, RUN, range_size=10).take_ticket()

    assert (before.epoch, before.number) == (1, 0)
    assert (after.epoch, after.number) == (2, 10)


def test_a_ledger_that_was_put_back_repeats_numbers_and_no_pads():
    disk = Disk()
    new_ledger(disk)
    old = disk.data
    first = identities(PadLedger(disk, MASTER, RUN), 3)

    disk.data = old
    second = identities(PadLedger(disk, MASTER, RUN), 3)

    assert [number for _, number in first] == [number for _, number in second]
    assert not set(first) & set(second)


def test_without_fresh_random_bytes_a_ledger_that_was_put_back_repeats_its_pads():
    disk = Disk()
    new_ledger(disk)
    old = disk.data
    first = identities(PadLedger(disk, MASTER, RUN, fresh=stuck), 3)

    disk.data = old

    assert identities(PadLedger(disk, MASTER, RUN, fresh=stuck), 3) == first


def test_a_hardware_counter_shows_that_a_ledger_was_put_back():
    disk, counter = Disk(), Counter()
    new_ledger(disk, counter=counter).take_ticket()
    old = disk.data
    PadLedger(disk, MASTER, RUN, counter=counter).take_ticket()

    disk.data = old

    with pytest.raises(PadError, match="is of counter value 8, the counter is at 9: an older ledger was put back"):
        PadLedger(disk, MASTER, RUN, counter=counter)


def test_a_range_that_is_not_really_on_the_disk_is_given_out_twice():
    disk = ForgetfulDisk()
    first = identities(new_ledger(disk, fresh=stuck), 3)

    assert identities(PadLedger(disk, MASTER, RUN, fresh=stuck), 3) == first


def test_a_copy_of_the_memory_is_found_out_by_the_counter_at_its_next_range():
    disk, counter = Disk(), Counter()
    ledger = new_ledger(disk, counter=counter, range_size=1, fresh=stuck)
    ledger.take_ticket()
    copied = PadLedger.__new__(PadLedger)
    copied.__dict__.update(ledger.__dict__ | {"_last": copy.copy(ledger._last)})

    ledger.take_ticket()

    with pytest.raises(PadError, match="somebody else uses this ledger or its counter"):
        copied.take_ticket()
    with pytest.raises(PadError, match="somebody else"):
        ledger.take_ticket()
    with pytest.raises(PadError, match="open the ledger again"):
        ledger.take_ticket()


def test_a_counter_that_failed_costs_a_new_opening_and_no_more():
    disk, counter = Disk(), Counter()
    ledger = new_ledger(disk, counter=counter)
    counter.cut = "after"
    with pytest.raises(PowerCutError):
        ledger.take_ticket()

    with pytest.raises(PadError, match="its counter failed; open the ledger again"):
        ledger.take_ticket()
    assert PadLedger(disk, MASTER, RUN, counter=counter).take_ticket().number == 1024


def test_a_forked_process_gets_no_numbers(monkeypatch):
    ledger = new_ledger()
    ledger.take_ticket()
    monkeypatch.setattr(os, "getpid", lambda: -1)

    with pytest.raises(PadError, match="was opened before this process was forked"):
        ledger.take_ticket()


@pytest.mark.parametrize("cut", ["before", "after"])
@pytest.mark.parametrize("part", ["disk", "counter"])
def test_after_a_crash_anywhere_in_a_reservation_the_ledger_opens(part, cut):
    disk, counter = Disk(), Counter()
    ledger = new_ledger(disk, counter=counter, range_size=2)
    first = numbers(ledger, 2)
    {"disk": disk, "counter": counter}[part].cut = cut
    with pytest.raises(PowerCutError):
        ledger.take_ticket()

    second = numbers(PadLedger(disk, MASTER, RUN, counter=counter, range_size=2), 3)

    assert first == [0, 1]
    assert min(second) >= 2
    assert len(set(second)) == 3


def test_every_altered_byte_of_a_record_is_refused():
    disk = Disk()
    new_ledger(disk).take_ticket()
    honest = disk.data
    for index in range(len(honest)):
        disk.data = honest[:index] + bytes([honest[index] ^ 1]) + honest[index + 1 :]

        with pytest.raises(PadError):
            PadLedger(disk, MASTER, RUN)


@pytest.mark.parametrize("data", [b"", b"{}", b"[]", b"\xff", b'{"body":{},"mac":"zz"}', b'{"body":1,"mac":""}'])
def test_what_is_no_record_is_refused(data):
    with pytest.raises(PadError, match="pad ledger: "):
        PadLedger(Disk(data), MASTER, RUN)


@pytest.mark.parametrize(("master", "run"), [(bytes(32), RUN), (MASTER, "run-2")])
def test_another_key_or_run_does_not_open_a_ledger(master, run):
    disk = Disk()
    new_ledger(disk)

    with pytest.raises(PadError, match="of another run or master key"):
        PadLedger(disk, master, run)


def test_a_missing_ledger_is_not_a_new_one():
    with pytest.raises(PadError, match="is missing"):
        PadLedger(Disk(), MASTER, RUN)


def test_a_ledger_is_begun_once():
    disk = Disk()
    new_ledger(disk)

    with pytest.raises(PadError, match="exists already"):
        begin_ledger(disk, MASTER, RUN)


@pytest.mark.parametrize("size", [0, -1, MAX_PADS + 1])
def test_a_range_of_no_size_or_too_large_a_one_is_refused(size):
    with pytest.raises(PadError, match="expected 1 to"):
        new_ledger(range_size=size)


@pytest.mark.parametrize("master", [b"", bytes(16), bytes(33)])
def test_a_master_key_of_another_size_is_refused(master):
    with pytest.raises(PadError, match="expected 32"):
        begin_ledger(Disk(), master, RUN)
