"""What workers remember of the audit log: it is missed when it is gone, and a lie about it stops no run."""

import json
import shutil

import pytest

from phalanx.errors import CutLogError
from phalanx.pipeline import OWNER, LogHeadExchange
from phalanx.pipeline.protocol.greetings import Hello
from phalanx.pipeline.protocol.log_memory import LogMemory
from phalanx.pipeline.protocol.signed import StatementReader
from phalanx.security.audit import AuditLog, PublicEntries
from phalanx.security.crypto import Identity, create_authority, issue_certificate, load_identity
from phalanx.testing import Actor, CompanySession, MemoryCompany, rewrite_only, tiny_run

RUN, OTHER = "ab" * 16, "cd" * 16
FIRST, SECOND = f"{RUN}-{'1' * 32}", f"{RUN}-{'2' * 32}"
OWNERS = Identity.without_certificate("owner")
STRANGER = Identity.without_certificate("owner")


def lines(*digests, run=RUN, owner=OWNERS):
    """A log on the disk, by one digit for each line's digest."""
    found = PublicEntries(owner, run)
    for digest in digests:
        found.count_entry("step", digest * 64)
    found.note_forced(len(digests))
    return found


def told(*digests, run=RUN, owner=OWNERS):
    return lines(*digests, run=run, owner=owner).signed_public_head()


def heed(log, known):
    """What the owner notes when a worker says what it knows."""
    noted = []
    LogHeadExchange(log, OWNERS.public).check_remembered_head(
        "worker-1", known, SECOND, lambda kind, body: noted.append((kind, body))
    )
    return noted


def memory(directory, session=FIRST, owner=OWNERS):
    return LogMemory(directory, StatementReader(session, lambda name: owner.public), owner.public)


# --- the owner's side ---------------------------------------------------------------------------------------------


def test_an_old_head_is_harmless():
    assert heed(lines(*"1234"), told(*"12")) == []
    assert heed(lines(*"1234"), told(*"1234")) == []


def test_the_owner_does_not_go_on_without_a_line_that_a_worker_knows():
    with pytest.raises(CutLogError, match=r"has 2 of the 4 lines .* that worker-1 knows of.*--from"):
        heed(lines(*"12"), told(*"1234"))


@pytest.mark.parametrize(
    ("known", "error", "reason"),
    [
        (told(*"1234", owner=STRANGER), "SignatureError", "does not match"),
        (told("1").model_copy(update={"last": told(*"1234").last}), "SignatureError", "does not match"),
        (told(*"1234", run=OTHER), "FrameError", f"belongs to run '{OTHER}'"),
    ],
    ids=["forged", "altered", "of another run"],
)
def test_a_head_that_the_owner_did_not_tell_in_this_run_stops_nobody_and_is_noted(known, error, reason):
    (noted,) = heed(lines(*"12"), known)

    assert noted[0] == "log_head_ignored"
    assert (noted[1]["party"], noted[1]["error"]) == ("worker-1", error)
    assert reason in noted[1]["reason"]


def test_nobody_is_heeded_where_nobody_is_told():
    noted = []

    LogHeadExchange().check_remembered_head("worker-1", told(*"1234"), SECOND, lambda *event: noted.append(event))

    assert noted == []
    assert LogHeadExchange().current_head() is None


# --- a worker's side ----------------------------------------------------------------------------------------------


def test_what_was_told_last_is_known_to_the_next_process(tmp_path):
    before = memory(tmp_path / "heads")
    assert before.known_head is None
    before.compare_head(told("1"))
    before.take_head(told(*"12"))
    before.take_head(told(*"123"))
    before.write_head()

    assert memory(tmp_path / "heads", SECOND).known_head == told(*"123")
    (path,) = (tmp_path / "heads").iterdir()
    assert path.stat().st_size < 1000


def test_another_run_and_another_owner_are_not_told_what_is_known_and_write_over_nothing(tmp_path):
    mine = memory(tmp_path)
    mine.compare_head(told(*"12"))
    mine.write_head()

    for session, owner in ((f"{OTHER}-{'1' * 32}", OWNERS), (FIRST, STRANGER)):
        other = memory(tmp_path, session, owner)
        assert other.known_head is None
        other.compare_head(told("9", run=session[:32], owner=owner))
        other.write_head()

    assert memory(tmp_path).known_head == told(*"12")


@pytest.mark.parametrize("announced", [None, told("1"), told(*"13")], ids=["nothing", "too little", "another line"])
def test_a_worker_does_not_serve_a_log_that_lacks_what_it_knows(tmp_path, announced):
    known = memory(tmp_path)
    known.compare_head(told(*"12"))
    known.write_head()

    with pytest.raises(CutLogError, match=r"owner: its audit log has .* signature for number 2"):
        memory(tmp_path, SECOND).compare_head(announced)

    assert memory(tmp_path).known_head == told(*"12")


def test_a_worker_serves_where_only_lines_are_gone_that_were_not_on_the_disk_of_another_boot(tmp_path):
    log = lines(*"1234")
    log.note_forced(2)
    known = memory(tmp_path)
    known.compare_head(log.signed_public_head())
    known.write_head()
    after = PublicEntries(OWNERS, RUN)
    after._boot = "9" * 64
    for digest in "12":
        after.count_entry("step", digest * 64)

    again = memory(tmp_path, SECOND)
    again.compare_head(after.signed_public_head())
    again.write_head()

    assert memory(tmp_path).known_head == after.signed_public_head()


@pytest.mark.parametrize("said", [told("9", owner=STRANGER), told(*"999", run=OTHER), told("1")])
def test_what_is_forged_foreign_or_older_is_not_remembered(tmp_path, said):
    known = memory(tmp_path)
    known.compare_head(told(*"12"))

    known.take_head(said)
    known.write_head()

    assert memory(tmp_path).known_head == told(*"12")


@pytest.mark.parametrize("junk", [b"", b"{}", b"\xff" * 10_000, b'{"run":"' + b"ab" * 16 + b'"}'])
def test_a_damaged_file_knows_nothing_and_says_so(tmp_path, capsys, junk):
    known = memory(tmp_path)
    known.compare_head(told("1"))
    known.write_head()
    next(tmp_path.iterdir()).write_bytes(junk)

    assert memory(tmp_path).known_head is None
    assert "cannot be read" in capsys.readouterr().err


def test_a_directory_that_cannot_be_written_ends_nobody(tmp_path, capsys):
    (tmp_path / "heads").write_text("no directory")
    known = memory(tmp_path / "heads")
    for digits in ("1", "12", "123"):
        known.take_head(told(*digits))
        known.write_head()

    assert known.known_head == told(*"123")
    assert capsys.readouterr().err.count("cannot be written") == 1


@pytest.mark.parametrize("session", ["simulation-1", "../../x-y", f"{RUN}/{'1' * 32}", RUN])
def test_a_session_whose_name_is_none_writes_no_file(tmp_path, session):
    known = memory(tmp_path / "heads", session)
    known.take_head(told("1"))
    known.write_head()

    assert not (tmp_path / "heads").exists()


# --- a company ----------------------------------------------------------------------------------------------------


@pytest.fixture
def keys(tmp_path):
    create_authority(tmp_path / "pki")
    for name in (OWNER, "worker-1", "worker-2"):
        issue_certificate(tmp_path / "pki", name)
    return tmp_path / "pki"


@pytest.fixture
def sessions(tmp_path, keys, model_cache):
    """Run a session of the same run with the log at its place, and so many steps; tells the company."""
    run = tiny_run()
    run = run.model_copy(update={"pipeline": run.pipeline.model_copy(update={"pki": str(keys)})})
    seen = []

    def play(num_steps, actors=None, then=lambda company: None):
        seen.append(None)
        path = tmp_path / f"session-{len(seen)}"
        path.mkdir()
        with AuditLog(tmp_path / "events.jsonl", load_identity(keys / OWNER), RUN) as log:
            session = f"{RUN}-{len(seen):032x}"
            with MemoryCompany(run, path, actors, cache=model_cache, session=CompanySession(session, log)) as company:
                log.append_event("run_resumed" if len(seen) > 1 else "run_started", {})
                company.run(num_steps)
                then(company)
                company.final = company.weights_digest()
        return company

    return play


def cut(tmp_path, keep):
    path = tmp_path / "events.jsonl"
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:keep]))


def forget(keys):
    for found in keys.glob("*/log_heads"):
        shutil.rmtree(found)


def heads(keys):
    return sorted(path.parent.parent.name for path in keys.glob("*/log_heads/*.json"))


def test_every_worker_knows_each_step_but_the_last_and_the_end(sessions, keys, tmp_path):
    sessions(3)

    assert heads(keys) == ["worker-1", "worker-2"]
    kinds = [json.loads(line)["kind"] for line in (tmp_path / "events.jsonl").read_bytes().splitlines()]
    for path in keys.glob("*/log_heads/*.json"):
        # told with the good-bye, after the last step
        assert json.loads(path.read_bytes())["last"]["number"] == kinds.count("step") + 1 == 4


def test_a_log_that_was_cut_is_missed_by_the_workers_and_by_nobody_else(sessions, keys, tmp_path):
    sessions(3)
    cut(tmp_path, 4)

    with pytest.raises(CutLogError, match=r"of the 4 lines about sessions, steps and evictions that worker-\d knows"):
        sessions(1)
    # the attacker wins where workers have no memory
    forget(keys)
    assert sessions(1).evicted == []


def test_a_log_that_is_whole_is_gone_on_with(sessions, keys):
    sessions(2)

    assert sessions(2).event_bodies("log_head_ignored") == []


def forging(change):
    def rewrite(outgoing, hello):
        return [outgoing.with_fields({"log_head": change(hello.log_head)})]

    return Actor(rewrite=rewrite_only(Hello, rewrite))


@pytest.mark.quick_cases("of?another?run", "forged")
@pytest.mark.parametrize(
    "change",
    [
        lambda head: head.model_copy(update={"last": told(*"12345").last}),
        lambda head: told(*"123456789", owner=STRANGER),
        lambda head: told(*"123456789", run=OTHER, owner=STRANGER),
    ],
    ids=["altered", "forged", "of another run"],
)
def test_a_worker_that_lies_about_the_log_stops_nobody_and_is_noted(sessions, change):
    sessions(2)

    company = sessions(2, {"worker-1": forging(change)})

    assert [body["party"] for body in company.event_bodies("log_head_ignored")] == ["worker-1"]
    assert (company.verdicts, company.lost) == ([], [])


def test_a_worker_that_shows_an_old_head_or_none_stops_nobody(sessions, keys):
    sessions(1)
    old = {path: path.read_bytes() for path in keys.glob("worker-1/log_heads/*.json")}
    sessions(1)
    for path, data in old.items():
        path.write_bytes(data)
    shutil.rmtree(keys / "worker-2" / "log_heads")

    assert sessions(1).event_bodies("log_head_ignored") == []


@pytest.mark.slow
def test_what_is_told_changes_no_bit(sessions, model_cache, tmp_path):
    told_of = sessions(2).final
    run = tiny_run()
    with MemoryCompany(run, tmp_path / "bare", cache=model_cache) as bare:
        bare.run(2)

        assert bare.weights_digest() == told_of


def say(keys, name, head):
    """Let a worker's next process remember a head."""
    owner = load_identity(keys / OWNER).public
    known = LogMemory(keys / name / "log_heads", StatementReader(SECOND, lambda party: owner), owner)
    known.known_head, known._is_kept = head, False
    known.write_head()


@pytest.mark.parametrize("is_true", [True, False], ids=["by the owner's signature", "forged"])
def test_a_worker_that_comes_back_in_mid_run_is_heeded_as_well(sessions, keys, is_true):
    more = "123456789"
    actors = {} if is_true else {"worker-1.2": forging(lambda head: told(*more, owner=STRANGER))}

    def kill_and_return(company):
        company.run(1)
        company.kill_worker("worker-1")
        company.run(1)
        say(keys, "worker-1", told(*more, owner=load_identity(keys / OWNER)))
        assert company.come_back("worker-1") == "worker-1.2"
        for _ in range(40):
            company.run(1)
            if company.event_bodies("log_head_ignored"):
                return

    if is_true:
        with pytest.raises(CutLogError, match=r"of the 9 lines .* that worker-1\.2 knows of"):
            sessions(0, actors, then=kill_and_return)
    else:
        company = sessions(0, actors, then=kill_and_return)
        assert [body["party"] for body in company.event_bodies("log_head_ignored")] == ["worker-1.2"]
        assert company.verdicts == []
