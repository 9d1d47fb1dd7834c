"""The log of requests: chained over its files, without a word of a text."""

import pytest

from phalanx.errors import AuditLogError, DiskError
from phalanx.security.audit import AuditLog
from phalanx.security.crypto import Identity, read_public_signer
from phalanx.serve.access import Access, Caller, RequestFacts, RequestLog, verify_request_log

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
