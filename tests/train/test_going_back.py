"""A resumed run that goes back says from which step to which, and its summary counts what that has cost."""

import json

import pytest

from phalanx.cli.parties.join_worker import worker_file
from phalanx.config import dump_toml
from phalanx.pipeline import PipelineConfig
from phalanx.pipeline.worker.worker_file import load_worker
from phalanx.telemetry import MetricsFile
from phalanx.train.sessions import hooks
from phalanx.train.sessions.cluster import worker_config


@pytest.fixture
def stop_at(make_run, quietly, tmp_path, monkeypatch):
    """Train until a step is done, and stop before anything of it is saved."""

    def stop_at(step, *overrides, resume=False):
        save = hooks.RunHooks.save_if_due

        def stop(self, at):
            if at == step:
                raise KeyboardInterrupt
            save(self, at)

        with monkeypatch.context() as patch:
            patch.setattr(hooks.RunHooks, "save_if_due", stop)
            summary = quietly(make_run(*overrides), tmp_path / "run", resume=resume)
        assert summary["status"] == "interrupted"
        return summary

    return stop_at


def losses(run_dir):
    events = [json.loads(line) for line in (run_dir / "events.jsonl").read_text().splitlines()]
    return [event["body"] for event in events if event["kind"] == "fell_back"]


@pytest.mark.parametrize(
    ("every", "to", "engine"),
    [
        (0, 0, ()),
        (2, 2, ()),
        pytest.param(2, 2, ("pipeline-", "parallel.dp=1"), marks=pytest.mark.slow),
        pytest.param(0, 0, ("pipeline.stages=3",), marks=pytest.mark.slow),
    ],
)
def test_steps_without_a_state_are_told_and_counted(
    stop_at, make_run, quietly, trained_once, tmp_path, every, to, engine
):
    settings = (f"checkpoint.every={every}", *engine)
    if "parallel.dp=1" in engine:
        settings = (*(one for one in settings if one != "pipeline-"), "checkpoint.journal-", "pipeline-")
    stop_at(3, *settings)

    summary = quietly(make_run(*settings), tmp_path / "run", resume=True)

    assert (summary["resumed_from"], summary["steps_lost"]) == (to, 3 - to)
    assert f"returns from step 3 to step {to}" in summary["shown"]
    assert [(body["from_step"], body["to_step"], body["steps_lost"]) for body in losses(tmp_path / "run")] == [
        (3, to, 3 - to)
    ]
    if not engine:
        assert summary["final_weights_digest"] == trained_once[0]["final_weights_digest"]


def test_what_two_stops_have_cost_is_added_up(stop_at, make_run, quietly, tmp_path):
    stop_at(3, "checkpoint.every=0")
    stop_at(2, "checkpoint.every=0", resume=True)

    summary = quietly(make_run("checkpoint.every=0"), tmp_path / "run", resume=True)

    assert (summary["steps"], summary["steps_lost"]) == (6, 3 + 2)


def test_a_cure_is_told_where_there_is_one(stop_at, make_run, quietly, tmp_path):
    stop_at(3, "checkpoint.every=0")

    assert "checkpoint.journal = true loses no steps" in quietly(
        make_run("checkpoint.every=0"), tmp_path / "run", resume=True
    )["shown"].replace("\n", " ")


def test_steps_that_the_user_gives_up_are_told_and_are_not_lost(make_run, quietly, tmp_path):
    quietly(make_run("train.steps=5", "checkpoint.keep=9"), tmp_path / "run")

    summary = quietly(make_run("train.steps=5", "checkpoint.keep=9"), tmp_path / "run", resume=True, from_step=2)

    assert "returns from step 5 to step 2, by --from-step" in summary["shown"]
    assert (summary["steps_lost"], losses(tmp_path / "run")) == (0, [])


def test_a_run_with_a_journal_loses_none(stop_at, make_run, quietly, trained_once, tmp_path):
    settings = ("checkpoint.every=0", "checkpoint.journal-")
    stop_at(3, *settings)

    summary = quietly(make_run(*settings), tmp_path / "run", resume=True)

    assert summary["resumed_from"] in (2, 3)
    assert (summary["steps_lost"], losses(tmp_path / "run")) == (0, [])
    assert summary["final_weights_digest"] == trained_once[0]["final_weights_digest"]


def test_a_run_that_goes_on_where_it_was_says_nothing(make_run, quietly, tmp_path):
    quietly(make_run("train.steps=4"), tmp_path / "run")

    summary = quietly(make_run("train.steps=6"), tmp_path / "run", resume=True)

    assert "returns" not in summary["shown"]
    assert summary["steps_lost"] == 0


REMOTE = ("pipeline.stages=4", "pipeline.remote_workers=['north','south']", "pipeline.pki='pki'")


@pytest.mark.parametrize(
    ("overrides", "journals"),
    [
        (("checkpoint.journal-",), True),
        (("checkpoint.journal-", *REMOTE), True),
        (("checkpoint.journal=false", *REMOTE), False),
        (("checkpoint.journal-", *REMOTE, "guard.mode='off'"), False),
        (("checkpoint.journal-", "checkpoint.encrypt=true", "checkpoint.key='env:KEY'"), False),
        (("checkpoint.journal-", "train.device='cuda'"), False),
    ],
)
def test_a_journal_is_kept_wherever_states_can_be(make_run, overrides, journals):
    assert make_run(*overrides).journals is journals


@pytest.mark.parametrize(
    ("line", "kept"),
    [("", "keys/state"), ("journal = 'elsewhere'\n", "elsewhere"), ("journal = false\n", False)],
)
def test_a_remote_worker_keeps_its_states_beside_its_keys(tmp_path, line, kept):
    path = tmp_path / "worker.toml"
    path.write_text(f"identity = 'keys'\nowner = 'there:7070'\n{line}")

    assert load_worker(path).journal == kept


def test_a_worker_on_a_gpu_keeps_none_unless_it_says_so(tmp_path):
    path = tmp_path / "worker.toml"
    path.write_text("identity = 'keys'\nowner = 'there:7070'\ndevice = 'cuda'\n")

    assert load_worker(path).journal is None


def test_the_file_that_join_writes_keeps_them_in_the_same_place(tmp_path):
    path = tmp_path / "worker.toml"
    path.write_text(worker_file(tmp_path, "there:7070", "here", 7171))

    written = load_worker(path).journal
    path.write_text("\n".join(line for line in path.read_text().splitlines() if not line.startswith("journal")))

    assert load_worker(path).journal == written


def test_a_local_worker_of_a_run_without_a_journal_keeps_none(make_run, tmp_path):
    class Home:
        pki_directory, journal_directory = tmp_path / "pki", tmp_path / "journal"

    path = tmp_path / "worker.toml"
    path.write_text(dump_toml(worker_config(make_run("checkpoint.journal=false"), Home, "worker-1", "here:1")))

    assert load_worker(path).journal is False
    assert PipelineConfig().remote_workers == ()


def test_the_next_step_is_that_after_the_last_line(tmp_path):
    metrics = MetricsFile(tmp_path / "metrics.jsonl")
    assert metrics.next_step == 0
    for step in (0, 1, 2):
        metrics.append_record({"step": step})
    assert metrics.next_step == 3
    metrics.truncate_after(0)
    assert metrics.next_step == 1
