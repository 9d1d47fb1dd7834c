import contextlib
import json
import math
import os
import resource

import pytest

from phalanx.config import canonical_json
from phalanx.errors import AuditLogError, DiskError
from phalanx.security.audit import AuditLog, LogHead, verify_log
from phalanx.security.audit.leaves import LeafFile
from phalanx.security.crypto import Identity

NUM_EVENTS = 6
OWNER = Identity.without_certificate("owner")


@pytest.fixture
def path(tmp_path):
    return tmp_path / "run" / "events.jsonl"


@pytest.fixture
def lines(path):
    """The lines of an honest log that lies at `path`."""
    with AuditLog(path, OWNER, "run-1") as log:
        for step in range(NUM_EVENTS):
            log.append_event("verdict" if step % 2 else "audit", {"step": step, "share": 0.5, "who": "wörker"})
    return path.read_bytes().splitlines(keepends=True)


def broken_line(path, expected=None):
    with pytest.raises(AuditLogError) as caught:
        verify_log(path, OWNER.public, expected)
    text = str(caught.value)
    assert str(path) in text
    return int(text.split(": line ")[1].split(maxsplit=1)[0])


@pytest.mark.usefixtures("lines")
def test_an_honest_log_passes_and_is_summed_up(path):
    summary = verify_log(path, OWNER.public)

    assert summary.num_events == NUM_EVENTS
    assert summary.kinds == {"audit": 3, "verdict": 3}
    assert summary.run == "run-1"
    assert summary.first_time <= summary.last_time
    assert summary.first_time.endswith("Z")
    assert verify_log(path, OWNER.public, summary.head, "run-1") == summary


def test_an_empty_log_passes_and_has_no_times(path):
    AuditLog(path, OWNER, "run-1").close()

    assert verify_log(path, OWNER.public).first_time is None


def test_a_line_is_canonical_json_with_all_fields(lines):
    event = json.loads(lines[0])

    assert canonical_json(event) == lines[0].rstrip(b"\n")
    assert sorted(event) == ["body", "kind", "previous", "run", "sequence", "signature", "time"]


@pytest.mark.parametrize("number", range(1, NUM_EVENTS + 1))
@pytest.mark.parametrize("field", ["body", "kind", "previous", "run", "sequence", "signature", "time"])
def test_every_altered_field_of_every_line_is_found_with_its_number(path, lines, number, field):
    event = json.loads(lines[number - 1])
    event[field] = {
        "body": {"step": 99},
        "kind": "other",
        "previous": "0" * 64,
        "run": "run-2",
        "sequence": 77,
        "signature": event["signature"][::-1],
        "time": "2020-01-01T00:00:00Z",
    }[field]
    lines[number - 1] = canonical_json(event) + b"\n"
    path.write_bytes(b"".join(lines))

    # a first line of another run is only seen by its signature, which is checked last
    assert broken_line(path) == number


@pytest.mark.parametrize("number", range(1, NUM_EVENTS + 1))
def test_every_flipped_byte_of_a_line_is_found_with_its_number(path, lines, number):
    whole = list(lines)
    for position in range(0, len(lines[number - 1]) - 1, 7):
        damaged = bytearray(whole[number - 1])
        damaged[position] ^= 0x02
        path.write_bytes(b"".join([*whole[: number - 1], bytes(damaged), *whole[number:]]))

        assert broken_line(path) == number


@pytest.mark.parametrize("number", range(1, NUM_EVENTS))
def test_every_dropped_line_is_found_where_it_is_missing(path, lines, number):
    del lines[number - 1]
    path.write_bytes(b"".join(lines))

    assert broken_line(path) == number


@pytest.mark.parametrize("number", range(1, NUM_EVENTS))
def test_every_swap_of_neighbours_is_found_at_the_first(path, lines, number):
    lines[number - 1], lines[number] = lines[number], lines[number - 1]
    path.write_bytes(b"".join(lines))

    assert broken_line(path) == number


@pytest.mark.parametrize("number", range(1, NUM_EVENTS + 2))
def test_every_inserted_line_is_found_with_its_number(path, lines, number):
    lines.insert(number - 1, lines[0] if number > 1 else lines[1])
    path.write_bytes(b"".join(lines))

    assert broken_line(path) == number


def test_a_line_forged_by_another_key_is_found(path, lines, tmp_path):
    with AuditLog(tmp_path / "other.jsonl", Identity.without_certificate("owner"), "run-1") as forger:
        forger.append_event("audit", {"step": 0})
    path.write_bytes((tmp_path / "other.jsonl").read_bytes() + b"".join(lines[1:]))

    assert broken_line(path) == 1


def test_capital_letters_in_a_signature_are_found_on_their_own_line(path, lines):
    event = json.loads(lines[-1])
    event["signature"] = event["signature"].upper()
    lines[-1] = canonical_json(event) + b"\n"
    path.write_bytes(b"".join(lines))

    assert broken_line(path) == NUM_EVENTS


@pytest.mark.parametrize("keep", range(NUM_EVENTS))
def test_a_cut_off_tail_is_found_by_the_expected_head(path, lines, keep):
    head = verify_log(path, OWNER.public).head
    path.write_bytes(b"".join(lines[:keep]))

    assert verify_log(path, OWNER.public).num_events == keep
    assert broken_line(path, head) == keep + 1


def test_lines_after_the_expected_head_are_found(path, lines):
    head = verify_log(path, OWNER.public).head
    with AuditLog(path, OWNER, "run-1") as log:
        log.append_event("late", {})

    assert broken_line(path, head) == NUM_EVENTS + 1


def test_another_log_of_the_same_length_and_key_is_found_by_the_expected_head(path, lines):
    assert broken_line(path, LogHead(NUM_EVENTS, "0" * 64)) == NUM_EVENTS


def test_half_a_last_line_is_a_broken_line_to_a_reader(path, lines):
    path.write_bytes(b"".join(lines)[:-20])

    assert broken_line(path) == NUM_EVENTS


@pytest.mark.parametrize(
    "junk",
    [b"\n", b"{}\n", b"null\n", b"\xff\xfe\n", b'{"a":NaN}\n', b"[" * 100_000 + b"\n", b"\0" * 50 + b"\n"],
)
def test_junk_is_a_broken_line_whatever_it_is(path, lines, junk):
    path.write_bytes(b"".join(lines) + junk)

    assert broken_line(path) == NUM_EVENTS + 1


def test_a_missing_log_is_our_error(path):
    with pytest.raises(AuditLogError, match="cannot be read"):
        verify_log(path, OWNER.public)


@pytest.mark.parametrize("cut", [1, 2, 100, 10_000])
def test_a_crash_in_the_middle_of_a_line_is_healed_and_recorded(path, lines, cut):
    whole = b"".join(lines)
    partial = lines[-1][: max(1, len(lines[-1]) - cut)]
    path.write_bytes(whole[: -len(lines[-1])] + partial)

    with AuditLog(path, OWNER, "run-1") as log:
        log.append_event("resumed", {})
        head = log.current_head

    summary = verify_log(path, OWNER.public, head)
    assert summary.kinds["log_healed"] == 1
    assert summary.num_events == NUM_EVENTS + 1
    healed = json.loads(path.read_bytes().splitlines()[NUM_EVENTS - 1])
    assert healed["body"]["removed_bytes"] == len(partial)


def test_reopening_a_whole_log_continues_its_chain(path, lines):
    with AuditLog(path, OWNER, "run-1") as log:
        log.append_event("resumed", {})

    assert "log_healed" not in verify_log(path, OWNER.public).kinds


def test_a_broken_earlier_line_is_not_healed(path, lines):
    lines[2] = lines[2].replace(b'"step":2', b'"step":3')
    damaged = b"".join(lines) + b'{"half'
    path.write_bytes(damaged)

    with pytest.raises(AuditLogError, match="line 3 is broken"):
        AuditLog(path, OWNER, "run-1")

    assert path.read_bytes() == damaged


@pytest.mark.parametrize(
    ("signer", "run"),
    [(OWNER, "run-2"), (Identity.without_certificate("owner"), "run-1")],
    ids=["run", "signer"],
)
@pytest.mark.usefixtures("lines")
def test_the_log_of_another_run_or_signer_is_not_continued(path, signer, run):
    with pytest.raises(AuditLogError, match="line 1 is broken"):
        AuditLog(path, signer, run)


def test_a_log_has_one_writer(path):
    with AuditLog(path, OWNER, "run-1"), pytest.raises(AuditLogError, match="one writer"):
        AuditLog(path, OWNER, "run-1")


@pytest.mark.parametrize(
    "body",
    [
        pytest.param({"x": math.nan}, id="nan"),
        pytest.param({"x": b"bytes"}, id="bytes"),
        pytest.param({"x": 2**64}, id="integer"),
        pytest.param({10: 1, 9: 2}, id="keys"),
        pytest.param({"x": "\ud800"}, id="surrogate"),
        pytest.param({"x": "a" * 5_000_000}, id="size"),
    ],
)
def test_a_body_that_no_reader_would_accept_is_refused_and_leaves_the_log_whole(path, body):
    with AuditLog(path, OWNER, "run-1") as log:
        with pytest.raises(AuditLogError, match="odd"):
            log.append_event("odd", body)
        log.append_event("next", {})

    assert verify_log(path, OWNER.public).num_events == 1


def test_an_event_is_in_the_file_once_append_returns(path):
    with AuditLog(path, OWNER, "run-1") as log:
        log.append_event("start", {})

        assert verify_log(path, OWNER.public, log.current_head).num_events == 1
        log.sync_events()


def test_a_closed_log_takes_no_more_events(path):
    log = AuditLog(path, OWNER, "run-1")
    log.close()
    log.close()

    with pytest.raises(AuditLogError, match="closed"):
        log.append_event("late", {})


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs a full device")
def test_a_full_disk_is_our_error(tmp_path):
    (tmp_path / "events.jsonl").symlink_to("/dev/full")

    with pytest.raises(DiskError):
        AuditLog(tmp_path / "events.jsonl", OWNER, "run-1").append_event("start", {})


@pytest.fixture
def almost_full():
    """Files may grow to 1,000 bytes and no further, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)

    @contextlib.contextmanager
    def limit():
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))

    return limit


def test_a_line_that_does_not_fit_on_the_disk_is_our_error_and_leaves_the_log_as_it_was(path, almost_full):
    with AuditLog(path, OWNER, "run-1") as log:
        log.append_event("start", {})
        with almost_full(), pytest.raises(DiskError, match=r"events\.jsonl: cannot be written") as caught:
            log.append_event("long", {"x": "1" * 2000})
        log.append_event("next", {})

    # something on disk is wrong, and no claim: not 5
    assert caught.value.exit_code == 3
    assert verify_log(path, OWNER.public).num_events == 2


def test_leaves_that_do_not_fit_on_the_disk_are_our_error_and_leave_the_file_as_it_was(tmp_path, almost_full):
    with LeafFile(tmp_path / "steps.jsonl", 0) as leaves:
        first = leaves.append_leaves([b"{}"])
        with almost_full(), pytest.raises(DiskError, match=r"steps\.jsonl: cannot be written") as caught:
            leaves.append_leaves([b"1" * 2000])
        assert caught.value.exit_code == 3
        assert (tmp_path / "steps.jsonl").stat().st_size == first.size_bytes
        assert leaves.append_leaves([b"[]"]).offset == first.size_bytes
