"""The log of requests: chained over its files, without a word of a text."""

import pytest

from phalanx.errors import AuditLogError, DiskError
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
