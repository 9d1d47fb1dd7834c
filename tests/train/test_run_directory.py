"""A run directory is made whole or not at all, keeps secrets to its owner, and never eats other files."""

import stat

import pytest

from phalanx.errors import CheckpointError, ConfigError
from phalanx.security.audit import AuditLog
from phalanx.security.crypto import create_authority, issue_certificate, load_identity
from phalanx.train.records import run_directory
from phalanx.train.records.run_directory import RunDirectory, holds_run


def test_a_new_run_gets_an_identity_for_everybody(make_run, tmp_path):
    run = make_run("pipeline.stages=4", "pipeline.spares=1")

    home = RunDirectory(tmp_path / "run", run, resume=False)

    assert home.owner.name == "owner"
    for name in ("worker-1", "worker-2", "worker-3"):
        assert "BEGIN CERTIFICATE" in home.read_certificate(name)
    with pytest.raises(ConfigError, match="worker-4"):
        home.read_certificate("worker-4")


def test_private_keys_are_for_their_owner_only(make_run, tmp_path):
    home = RunDirectory(tmp_path / "run", make_run(), resume=False)
    home.audit_key()

    secret = [path for path in home.path.rglob("*") if path.is_file() and path.suffix in (".key", ".pem")]
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in secret if b"PRIVATE" in path.read_bytes()}
    assert modes and set(modes.values()) == {0o600}
    assert stat.S_IMODE((home.path / "secrets" / "audit.key").stat().st_mode) == 0o600


def test_a_resumed_run_keeps_its_name_and_its_secret(make_run, tmp_path):
    first = RunDirectory(tmp_path / "run", make_run(), resume=False)
    key = first.audit_key()

    again = RunDirectory(tmp_path / "run", make_run(), resume=True)

    assert (again.run_id, again.audit_key(), again.owner.public) == (first.run_id, key, first.owner.public)


def test_a_start_without_a_finished_step_is_begun_anew_by_the_corrected_run_file(make_run, tmp_path):
    first = RunDirectory(tmp_path / "run", make_run(), resume=False)
    (first.path / "events.jsonl").write_text(
        '{"kind":"run_started"}\n{"kind":"party_joined"}\n{"kind":"run_stopped"}\n'
    )
    (first.path / "summary.json").write_text("{}")
    (first.path / "metrics.jsonl").touch()
    (first.path / "notes.txt").write_text("mine")
    first.audit_key()
    first.close()

    with pytest.raises(ConfigError, match=r"its run finished no step.* without --resume to begin again"):
        RunDirectory(first.path, make_run("train.seed=9"), resume=True)
    again = RunDirectory(first.path, make_run("train.steps=9"), resume=False)

    assert again.begun_anew and not first.begun_anew
    assert again.run_id != first.run_id and again.owner.public != first.owner.public
    assert "steps = 9" in (again.path / "config.toml").read_text()
    assert sorted(path.name for path in again.path.iterdir()) == [
        ".lock", "config.toml", "notes.txt", "owner.pem", "pki", "run.json"
    ]  # fmt: skip
    assert load_identity(again.pki_directory / "owner").public == again.owner.public


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("metrics.jsonl", "{"),
        ("steps.jsonl", "x"),
        ("checkpoints/step-00000001/manifest.json", "{}"),
        ("evidence/verdict.json", "{}"),
        ("journal/entry.json", "{}"),
        ("events.jsonl", '{"kind":"run_started"}\n{"kind":"verdict"}\n'),
        ("events.jsonl", '{"kind":"evicted"}\n'),
        ("events.jsonl", '{"kind":"step"}\n'),
        ("events.jsonl", '{"kind":"checkpoint"}\n'),
        ("events.jsonl", '{"kind":"never heard of"}\n'),
        ("events.jsonl", '{"kind":"run_started"}\n{"kind":"run_st'),
        ("events.jsonl", "[1]\n"),
        ("events.jsonl", '{"kind":"run_started"}\n' * 50_000),
    ],
)
def test_a_run_with_a_step_a_checkpoint_or_a_decision_is_never_overwritten(make_run, tmp_path, name, content):
    first = RunDirectory(tmp_path / "run", make_run(), resume=False)
    path = first.path / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content)
    first.close()
    before = {path: path.read_bytes() for path in first.path.rglob("*") if path.is_file()}

    with pytest.raises(ConfigError, match="already has a run; add --resume"):
        RunDirectory(first.path, make_run("train.steps=9"), resume=False)
    with pytest.raises(ConfigError, match="holds another run"):
        RunDirectory(first.path, make_run("train.seed=9"), resume=True)

    assert {path: path.read_bytes() for path in first.path.rglob("*") if path.is_file()} == before
    assert holds_run(first.path)


def test_a_run_that_another_process_begins_or_drives_is_left_alone(make_run, tmp_path):
    first = RunDirectory(tmp_path / "run", make_run(), resume=False)
    with pytest.raises(ConfigError, match="another process uses it"):
        RunDirectory(first.path, make_run(), resume=False)
    first.close()

    with (
        AuditLog(first.path / "events.jsonl", first.owner, first.run_id),
        pytest.raises(ConfigError, match="another process uses it"),
    ):
        RunDirectory(first.path, make_run(), resume=False)

    assert RunDirectory(first.path, make_run(), resume=True).run_id == first.run_id


def test_keys_that_were_not_made_for_the_run_are_never_removed(make_run, tmp_path):
    create_authority(tmp_path / "keys")
    issue_certificate(tmp_path / "keys", "owner")
    first = RunDirectory(tmp_path / "run", make_run(f'pipeline.pki="{tmp_path / "keys"}"'), resume=False)
    first.close()
    (tmp_path / "keys").rename(first.path / "pki")

    with pytest.raises(ConfigError, match=r"has pki but no run\.json"):
        RunDirectory(first.path, make_run(), resume=False)

    assert load_identity(first.path / "pki" / "owner").public == first.owner.public


@pytest.mark.parametrize("exists", [False, True])
def test_there_is_nothing_to_resume_where_no_run_began(make_run, tmp_path, exists):
    if exists:
        (tmp_path / "run").mkdir()

    with pytest.raises(CheckpointError, match="without --resume"):
        RunDirectory(tmp_path / "run", make_run(), resume=True)

    assert not (tmp_path / "run" / "run.json").exists()


@pytest.mark.parametrize("resume", [False, True])
def test_a_crash_while_the_directory_was_made_is_made_good(make_run, tmp_path, monkeypatch, resume):
    class Crash(BaseException):
        pass

    def crash(*_):
        raise Crash

    with monkeypatch.context() as patch:
        patch.setattr(run_directory, "issue_certificate", crash)
        with pytest.raises(Crash):
            RunDirectory(tmp_path / "run", make_run(), resume=False)

    home = RunDirectory(tmp_path / "run", make_run(), resume=resume)

    assert home.owner.name == "owner"
    assert RunDirectory(tmp_path / "run", make_run(), resume=True).run_id == home.run_id


def test_somebody_elses_keys_are_not_swept_away(make_run, tmp_path):
    (tmp_path / "pki").mkdir()
    (tmp_path / "pki" / "authority.key").write_text("precious")

    with pytest.raises(ConfigError, match="has pki"):
        RunDirectory(tmp_path, make_run(), resume=False)

    assert (tmp_path / "pki" / "authority.key").read_text() == "precious"


def test_a_name_that_no_record_could_hold_is_refused_before_anything_is_made(make_run, tmp_path):
    with pytest.raises(ConfigError, match=r"as a run directory \(its name is not UTF-8\); choose another --run-dir"):
        RunDirectory(tmp_path / "caf\udce9", make_run(), resume=False)

    assert not (tmp_path / "caf\udce9").exists()


def test_a_file_in_the_place_of_the_directory_is_an_error(make_run, tmp_path):
    (tmp_path / "run").write_text("a file")

    for path in (tmp_path / "run", tmp_path / "run" / "below"):
        with pytest.raises(ConfigError, match="choose another --run-dir"):
            RunDirectory(path, make_run(), resume=False)


@pytest.mark.parametrize("content", ["", "{", "[]", '{"run": "x"}', '"text"'])
def test_a_damaged_record_is_refused(make_run, tmp_path, content):
    RunDirectory(tmp_path / "run", make_run(), resume=False)
    (tmp_path / "run" / "run.json").write_text(content)

    with pytest.raises(CheckpointError, match="damaged"):
        RunDirectory(tmp_path / "run", make_run(), resume=True)


@pytest.mark.parametrize("content", ["", "{", "[]"])
def test_a_damaged_summary_counts_as_none(make_run, tmp_path, content):
    home = RunDirectory(tmp_path / "run", make_run(), resume=False)
    (home.path / "summary.json").write_text(content)

    assert home.read_summary() is None
