"""Lines that were taken away from an audit log are missed by whatever else has seen its end."""

import json
import shutil

import pytest

from phalanx.errors import AuditLogError, SignatureError
from phalanx.security.audit import AuditLog, PublicEntries, read_head, verify_log
from phalanx.security.crypto import Identity, load_identity
from phalanx.train.records.log_heads import known_heads
from phalanx.train.records.proof import verify_run
from phalanx.train.records.run_directory import HEAD_FILE
from phalanx.train.sessions import hooks

# what else has seen the end, in a run that was stopped
WITNESSES = ("summary.json", str(HEAD_FILE), "checkpoints")


@pytest.fixture(scope="module")
def stopped_once(cache, tmp_path_factory):
    """A run that was stopped before its third checkpoint; not to be changed."""
    return {"home": tmp_path_factory.mktemp("stopped")}


@pytest.fixture
def stopped(stopped_once, make_run, quietly, tmp_path, monkeypatch):
    if "run" not in stopped_once:
        save = hooks.RunHooks.save_if_due

        def stop(self, at):
            if at == 5:
                raise KeyboardInterrupt
            save(self, at)

        with monkeypatch.context() as patch:
            patch.setattr(hooks.RunHooks, "save_if_due", stop)
            quietly(make_run(), stopped_once["home"] / "run")
        stopped_once["run"] = stopped_once["home"] / "run"
    shutil.copytree(stopped_once["run"], tmp_path / "run")
    return tmp_path / "run"


def lines_of(run_dir):
    return (run_dir / "events.jsonl").read_bytes().splitlines(keepends=True)


def cut(run_dir, keep, tail=b""):
    (run_dir / "events.jsonl").write_bytes(b"".join(lines_of(run_dir)[:keep]) + tail)


def leave(run_dir, *witnesses):
    """Remove everything that has seen the end but these."""
    for name in set(WITNESSES) - set(witnesses):
        path = run_dir / name
        shutil.rmtree(path) if path.is_dir() else path.unlink()


def refused(quietly, make_run, run_dir):
    before = (run_dir / "events.jsonl").read_bytes()
    with pytest.raises(AuditLogError) as caught:
        quietly(make_run(), run_dir, resume=True)
    assert (run_dir / "events.jsonl").read_bytes() == before
    with pytest.raises(AuditLogError):
        verify_run(run_dir)
    return str(caught.value)


@pytest.mark.parametrize("witness", WITNESSES)
def test_a_log_of_which_half_was_cut_away_is_not_gone_on_with(quietly, make_run, stopped, witness):
    whole = len(lines_of(stopped))
    leave(stopped, witness)
    cut(stopped, 3)

    message = refused(quietly, make_run, stopped)

    known = max(
        known_heads(stopped, load_identity(stopped / "pki" / "owner").public), key=lambda one: one.head.num_events
    )
    assert f"lines 4 to {known.head.num_events} are missing: the log ends after 3 events" in message
    assert known.head.num_events == (whole if witness != "checkpoints" else known.head.num_events) > 4


@pytest.mark.parametrize("witness", WITNESSES[:2])
def test_the_last_line_alone_is_missed(quietly, make_run, stopped, witness):
    whole = len(lines_of(stopped))
    leave(stopped, witness, "checkpoints")
    cut(stopped, whole - 1)

    assert f"line {whole} is missing" in refused(quietly, make_run, stopped)


def test_a_conviction_that_was_cut_off_lets_nobody_back_in(quietly, make_run, stopped):
    leave(stopped, str(HEAD_FILE))
    home = load_identity(stopped / "pki" / "owner")
    run = json.loads((stopped / "run.json").read_text())["run"]
    with AuditLog(stopped / "events.jsonl", home, run, kept_at=stopped / HEAD_FILE) as log:
        log.append_event("evicted", {"party": "worker-1", "stages": [1], "step": 5})
        log.sync_events()
    cut(stopped, len(lines_of(stopped)) - 1)

    assert "is missing" in refused(quietly, make_run, stopped)


def test_a_torn_last_line_that_somebody_has_seen_whole_does_not_heal(quietly, make_run, stopped):
    last = lines_of(stopped)[-1]
    cut(stopped, len(lines_of(stopped)) - 1, last[:-20])

    assert "missing" in refused(quietly, make_run, stopped)


def test_a_log_that_is_gone_is_not_begun_anew(quietly, make_run, stopped):
    (stopped / "events.jsonl").unlink()

    with pytest.raises(AuditLogError, match="the log ends after 0 events"):
        quietly(make_run(), stopped, resume=True)


def test_a_head_of_another_owner_or_run_is_refused(stopped, make_run, quietly, tmp_path):
    other = quietly(make_run("train.seed=9"), tmp_path / "other")
    shutil.copyfile(tmp_path / "other" / HEAD_FILE, stopped / HEAD_FILE)

    assert other["status"] == "completed"
    assert "signed" in refused(quietly, make_run, stopped)


@pytest.mark.parametrize("junk", [b"", b"{}", b'{"num_events":0}'])
def test_a_damaged_file_with_the_head_is_refused(quietly, make_run, stopped, junk):
    (stopped / HEAD_FILE).write_bytes(junk)

    assert str(stopped / HEAD_FILE) in refused(quietly, make_run, stopped)


def test_what_nobody_has_seen_whole_still_heals(quietly, make_run, stopped):
    with (stopped / "events.jsonl").open("ab") as file:
        file.write(b'{"body":{')

    summary = quietly(make_run(), stopped, resume=True)

    assert summary["status"] == "completed"
    assert verify_run(stopped).log.kinds["log_healed"] == 1


def test_leaves_that_were_cut_off_are_missed_by_the_log(quietly, make_run, stopped):
    leaves = stopped / "steps.jsonl"
    leaves.write_bytes(leaves.read_bytes()[:-1])

    assert "the audit log names" in refused(quietly, make_run, stopped)


def test_bytes_behind_the_leaves_are_the_trace_of_a_crash(quietly, make_run, stopped):
    with (stopped / "steps.jsonl").open("ab") as file:
        file.write(b'{"leaf":"attempt"')

    assert quietly(make_run(), stopped, resume=True)["status"] == "completed"
    assert verify_run(stopped).proven == 6


def test_a_stopped_session_tells_its_key_and_the_next_one_has_another(quietly, make_run, stopped):
    quietly(make_run(), stopped, resume=True)

    events = [json.loads(line) for line in lines_of(stopped)]
    openings = [e["body"] for e in events if e["kind"] in ("run_started", "run_resumed")]
    told = [e["body"]["commitment"] for e in events if e["kind"] == "audit_key_revealed"]
    assert told == [body["audit_key_commitment"] for body in openings]
    assert len(set(told)) == len({body["audit_nonce"] for body in openings}) == 2
    proof = verify_run(stopped)
    assert (proof.steps, proof.proven, proof.unproven) == (6, 6, ())


def test_a_key_that_was_told_right_before_a_crash_is_not_drawn_with_again(quietly, make_run, stopped):
    told = [json.loads(line)["body"] for line in lines_of(stopped) if b"audit_key_revealed" in line][-1]
    (stopped / "secrets" / "audit.key").write_bytes(bytes.fromhex(told["key"]))

    quietly(make_run(), stopped, resume=True)

    assert verify_run(stopped).proven == 6


def test_a_stopped_run_ends_where_its_signed_summary_says_and_nowhere_without_it(stopped):
    assert verify_run(stopped).unproven == ()

    (stopped / "summary.json").unlink()

    assert "no line follows" in verify_run(stopped).unproven[0]


def test_a_summary_whose_head_was_written_by_somebody_else_shows_no_end(stopped):
    summary = json.loads((stopped / "summary.json").read_text())
    leave(stopped, "summary.json")
    cut(stopped, 4)
    log = AuditLog(
        stopped / "events.jsonl", load_identity(stopped / "pki" / "owner"), summary["audit_log_head_signed"]["run"]
    )
    log.close()
    forged = {"num_events": log.current_head.num_events, "digest": log.current_head.digest}
    summary["audit_log_head"] = forged
    summary["audit_log_head_signed"] |= forged
    (stopped / "summary.json").write_text(json.dumps(summary))

    assert "no line follows" in verify_run(stopped).unproven[0]


def test_every_checkpoint_has_the_head_of_its_log(stopped):
    owner = load_identity(stopped / "pki" / "owner").public
    heads = {one.where: one.head.num_events for one in known_heads(stopped, owner)}

    assert sorted(heads) == [
        "secrets/audit.head",
        "summary.json",
        "the checkpoint of step 2",
        "the checkpoint of step 4",
    ]
    kept = read_head(json.loads((stopped / HEAD_FILE).read_bytes()), owner, None, "it")
    assert kept.num_events == len(lines_of(stopped))


@pytest.fixture
def keep(stopped, tmp_path):
    """Keep, as a worker does, what the owner tells of the log once these lines are on its disk as well."""
    owner = load_identity(stopped / "pki" / "owner")
    run = json.loads((stopped / "run.json").read_text())["run"]

    def write(*more, forced=True, signer=owner, run=run):
        lines = PublicEntries(signer, run)
        verify_log(
            stopped / "events.jsonl", owner.public, visit=lambda line: lines.count_entry(line.kind, line.head.digest)
        )
        for digest in more:
            lines.count_entry("evicted", digest)
        lines.note_forced(len(lines) if forced else len(lines) - len(more))
        path = tmp_path / "head.json"
        path.write_text(lines.signed_public_head().model_dump_json())
        return path

    return write


def test_an_owner_that_takes_a_conviction_back_is_found_out_by_what_a_worker_kept(stopped, keep):
    # the owner signs anew whatever knows the end, so the directory by itself is that of a run without an eviction
    assert verify_run(stopped).unproven == ()

    with pytest.raises(AuditLogError, match=r"lines about sessions, steps and evictions .* was truncated or replaced"):
        verify_run(stopped, heads=[keep("ab" * 32)])


def test_a_log_that_reaches_as_far_as_a_worker_knows_holds(stopped, keep):
    head = keep()

    assert verify_run(stopped, heads=[head, head]) == verify_run(stopped)


def test_what_a_crash_of_the_owners_machine_may_have_taken_is_not_called_a_lie(stopped, keep):
    (found,) = verify_run(stopped, heads=[keep("ab" * 32, forced=False)]).unproven

    assert "the only honest cause is a crash of the owner's machine" in found


def test_a_workers_head_that_proves_nothing_is_refused(stopped, keep):
    with pytest.raises(AuditLogError, match="belongs to the log of run 0000"):
        verify_run(stopped, heads=[keep(run="0" * 32)])
    with pytest.raises(SignatureError):
        verify_run(stopped, heads=[keep(signer=Identity.without_certificate("owner"))])
    with pytest.raises(AuditLogError, match="is not a head that a worker has kept"):
        verify_run(stopped, heads=[stopped / "summary.json"])
    with pytest.raises(AuditLogError, match="cannot be read"):
        verify_run(stopped, heads=[stopped / "nothing.json"])
