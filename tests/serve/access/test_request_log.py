"""The log of requests: chained over its files, without a word of a text."""

import dataclasses

import pytest

from phalanx.errors import AuditLogError, CertificateError, DiskError, SignatureError
from phalanx.security.audit import AuditLog
from phalanx.security.crypto import Identity, read_public_signer
from phalanx.serve.access import (
    Access,
    Caller,
    RequestFacts,
    RequestLog,
    RequestTexts,
    make_reader_key,
    open_texts,
    verify_request_log,
)
from phalanx.serve.access.sealed_texts import MAX_TEXT_BYTES, TextSealer

ALICE = Caller("a" * 12, "alice", "user", None, False)
FACTS = RequestFacts("/v1/completions", "ab" * 32, 200, {"prompt_tokens": 3}, ["secrets"], "gumbel")


def write_requests(directory, identity, count=7) -> None:
    with RequestLog(directory, identity, max_lines=3) as log:
        for _ in range(count):
            log.record_request(ALICE, FACTS)


def test_a_request_is_one_line_that_holds_facts_alone(tmp_path):
    identity, lines = Identity.without_certificate("server"), []
    write_requests(tmp_path, identity, 1)

    assert verify_request_log(tmp_path, identity.public, lines.append) == {"request": 1}
    assert lines[0].body == {
        "key": "a" * 12,
        "owner": "alice",
        "route": "/v1/completions",
        "model": "ab" * 32,
        "status": 200,
        "sizes": {"prompt_tokens": 3},
        "verdicts": ["secrets"],
        "mark": "gumbel",
    }


ASKED = RequestTexts([{"text": "the word is heron"}], ["a heron it is"])


def read_lines(directory, identity) -> list:
    lines = []
    verify_request_log(directory, identity.public, lines.append)
    return lines


def write_texts(directory, identity, public, *all_texts) -> None:
    with RequestLog(directory, identity, sealer=None if public is None else TextSealer.read(public)) as log:
        for texts in all_texts:
            log.record_request(ALICE, dataclasses.replace(FACTS, texts=texts))


def test_texts_are_in_the_log_where_they_are_asked_for_and_open_with_the_readers_key_alone(tmp_path):
    identity, key, other = Identity.without_certificate("server"), tmp_path / "reader.key", tmp_path / "other.key"
    public = make_reader_key(key)
    make_reader_key(other)
    write_texts(tmp_path / "plain", identity, None, ASKED)
    write_texts(tmp_path / "sealed", identity, public, ASKED, None)

    assert list(open_texts(read_lines(tmp_path / "plain", identity), key, tmp_path)) == []
    lines = read_lines(tmp_path / "sealed", identity)
    ((line, texts),) = open_texts(lines, key, tmp_path)
    assert (line.sequence, texts) == (0, {"prompts": [{"text": "the word is heron"}], "answers": ["a heron it is"]})
    assert b"heron" not in b"".join(path.read_bytes() for path in tmp_path.glob("*/requests-*"))
    # whoever takes over the server has the public half
    assert key.stat().st_mode & 0o077 == 0
    assert TextSealer.read(public).public not in key.read_bytes()
    with pytest.raises(SignatureError):
        list(open_texts(lines, other, tmp_path))
    moved = dataclasses.replace(lines[0], body={**lines[0].body, "key": "b" * 12})
    with pytest.raises(SignatureError):
        list(open_texts([moved], key, tmp_path))


def test_texts_beyond_a_line_are_cut(tmp_path):
    identity = Identity.without_certificate("server")
    long = RequestTexts(["x" * MAX_TEXT_BYTES], ["\u6f22" * MAX_TEXT_BYTES])
    write_texts(tmp_path, identity, make_reader_key(tmp_path / "reader.key"), long)

    ((_, texts),) = open_texts(read_lines(tmp_path, identity), tmp_path / "reader.key", tmp_path)
    assert abs(len(texts["cut"].encode()) - MAX_TEXT_BYTES // 2) <= 3


def test_long_texts_begin_a_further_file_so_that_a_start_reads_little(tmp_path):
    identity = Identity.without_certificate("server")
    sealer = TextSealer.read(make_reader_key(tmp_path / "reader.key"))
    for _ in range(2):
        with RequestLog(tmp_path, identity, max_file_bytes=100_000, sealer=sealer) as log:
            for _ in range(3):
                log.record_request(ALICE, dataclasses.replace(FACTS, texts=RequestTexts(["x" * 60_000], [])))

    sizes = [path.stat().st_size for path in sorted(tmp_path.glob("requests-*"))]
    assert len(sizes) == 3
    assert max(sizes) < 200_000
    assert verify_request_log(tmp_path, identity.public) == {"request": 6, "continues": 2}


def test_a_key_for_texts_takes_the_place_of_no_other_ones_public_half(tmp_path):
    public = make_reader_key(tmp_path / "reader.key")
    content = public.read_bytes()

    with pytest.raises(CertificateError, match=r"reader\.key\.pub: exists already"):
        make_reader_key(tmp_path / "reader.key")
    (tmp_path / "reader.key").rename(tmp_path / "elsewhere.key")
    with pytest.raises(CertificateError, match=r"reader\.key\.pub: exists already"):
        make_reader_key(tmp_path / "reader.key")

    assert public.read_bytes() == content
    (tmp_path / "other.key").touch()
    with pytest.raises(CertificateError, match=r"other\.key: exists already"):
        make_reader_key(tmp_path / "other.key")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["elsewhere.key", "other.key", "reader.key.pub"]


def test_what_is_no_key_for_texts_is_refused(tmp_path):
    (tmp_path / "no.pub").write_text("00" * 32)
    (tmp_path / "no.key").touch(mode=0o600)

    with pytest.raises(CertificateError, match=r"no\.pub"):
        TextSealer.read(tmp_path / "no.pub")
    with pytest.raises(CertificateError, match=r"no\.key"):
        list(open_texts([], tmp_path / "no.key", tmp_path))


def test_long_and_hostile_words_are_cut_and_cleaned(tmp_path):
    identity, lines = Identity.without_certificate("server"), []
    with RequestLog(tmp_path, identity) as log:
        log.record_request(ALICE, RequestFacts("/x" * 500, "m\n", 200, {"n" * 500: 1}, ["\x1b[2J"] * 500, "\u202e"))

    verify_request_log(tmp_path, identity.public, lines.append)
    body = lines[0].body
    assert (len(body["route"]), body["model"], len(body["verdicts"]), body["mark"]) == (100, "m?", 50, "?")
    assert body["verdicts"][0] == "?[2J"


def test_further_files_go_on_where_the_last_one_ends_also_after_a_restart(tmp_path):
    identity = Identity.without_certificate("server")
    write_requests(tmp_path, identity)
    write_requests(tmp_path, identity)

    assert verify_request_log(tmp_path, identity.public)["request"] == 14
    assert len(list(tmp_path.glob("*.jsonl"))) > 3


@pytest.mark.parametrize("number", [1, 2, 3])
def test_a_file_that_is_missing_cut_or_altered_is_found(tmp_path, number):
    identity = Identity.without_certificate("server")
    write_requests(tmp_path, identity)
    path = tmp_path / f"requests-{number:06}.jsonl"
    honest = path.read_bytes()

    path.write_bytes(honest.replace(b'"status":200', b'"status":201', 1))
    with pytest.raises(AuditLogError):
        verify_request_log(tmp_path, identity.public)
    path.write_bytes(honest)
    verify_request_log(tmp_path, identity.public)
    if number < 4 and (tmp_path / f"requests-{number + 1:06}.jsonl").exists():
        path.write_bytes(honest[: honest[:-1].rfind(b"\n") + 1])
        with pytest.raises(AuditLogError):
            verify_request_log(tmp_path, identity.public)
        path.unlink()
        with pytest.raises(AuditLogError):
            verify_request_log(tmp_path, identity.public)


def test_a_log_of_another_signer_is_refused(tmp_path):
    write_requests(tmp_path, Identity.without_certificate("server"))

    with pytest.raises(AuditLogError):
        verify_request_log(tmp_path, Identity.without_certificate("server").public)
    with pytest.raises(AuditLogError):
        RequestLog(tmp_path, Identity.without_certificate("server"))


def test_knocks_of_many_strangers_take_one_line(tmp_path):
    identity, lines = Identity.without_certificate("server"), []
    with RequestLog(tmp_path, identity) as log:
        for number in range(5000):
            log.count_refusal(f"10.0.{number // 250}.{number % 250}")
        log.write_refusals()
        log.write_refusals()

    assert verify_request_log(tmp_path, identity.public, lines.append) == {"refused": 1}
    counts = lines[0].body["by_address"]
    assert (len(counts), sum(counts.values())) == (51, 5000)


def test_requests_that_no_budget_bounds_take_one_line_a_kind(tmp_path):
    identity, bob = Identity.without_certificate("server"), dataclasses.replace(ALICE, key_id="b" * 12)
    with RequestLog(tmp_path, identity) as log:
        for status in (404, 429):
            for number in range(1000):
                log.record_request(ALICE, RequestFacts(f"/v1/{number}", "", status))
        log.record_request(bob, RequestFacts("/v1/models", "", 404))
        for _ in range(3):
            # what a budget bounds has its lines
            log.record_request(ALICE, RequestFacts("/v1/completions", "", 400))
        log.write_refusals()
        log.record_request(ALICE, RequestFacts("/v1/models", "", 404))

    lines = read_lines(tmp_path, identity)
    statuses = [line.body.get("status") for line in lines]
    assert statuses == [404, 429, 404, 400, 400, 400, None, 404]
    assert lines[6].body == {"by_address": {}, "by_key": {f"{ALICE.key_id} 404": 999, f"{ALICE.key_id} 429": 999}}


def test_an_access_directory_is_opened_by_one_server_and_again_after_it(keys):
    keys.make()
    with Access.open(keys.directory) as access:
        access.request_log.record_request(ALICE, FACTS)
        with pytest.raises(DiskError, match="another server"):
            Access.open(keys.directory)

    with Access.open(keys.directory) as access:
        access.request_log.record_request(ALICE, FACTS)
    server = read_public_signer(keys.directory / "server.json")
    assert verify_request_log(keys.directory / "log", server) == {"request": 2}


@pytest.mark.parametrize("place", ["_open_file", "append_event"])
@pytest.mark.parametrize("is_restarted", [False, True])
def test_a_disk_that_is_full_where_a_file_begins_leaves_a_log_that_goes_on(tmp_path, monkeypatch, place, is_restarted):
    """The disk is full for some requests, each of which is refused; the log stays whole, and is one for a restart."""
    identity = Identity.without_certificate("server")
    log = RequestLog(tmp_path, identity, max_lines=3)
    for _ in range(3):
        log.record_request(ALICE, FACTS)

    def refuse(*arguments):
        raise DiskError("no space left")

    with monkeypatch.context() as patch:
        patch.setattr(RequestLog if place == "_open_file" else AuditLog, place, refuse)
        for _ in range(3):
            with pytest.raises(DiskError):
                log.record_request(ALICE, FACTS)
    if is_restarted:
        log.close()
        log = RequestLog(tmp_path, identity, max_lines=3)
    log.record_request(ALICE, FACTS)
    log.close()

    assert verify_request_log(tmp_path, identity.public) == {"request": 4, "continues": 1}
    assert len(list(tmp_path.glob("*.jsonl"))) == 2


@pytest.mark.parametrize("rest", [b"", b'{"half a'])
def test_a_server_that_is_killed_where_a_file_begins_starts_again(tmp_path, rest):
    identity = Identity.without_certificate("server")
    write_requests(tmp_path, identity, 3)
    (tmp_path / "requests-000002.jsonl").write_bytes(rest)

    write_requests(tmp_path, identity, 1)

    assert verify_request_log(tmp_path, identity.public) == {"request": 4, "continues": 1}
