"""Real workers that remember an earlier session, run under the same certificates, and use it against this one."""

import sys
from pathlib import Path

import pytest
from real_runs import events, free_port, make_keys

from phalanx.pipeline.evidence.explain import explain_evidence

# two sessions of three processes each, after one another
pytestmark = pytest.mark.timeout(900)

HOSTILE = str(Path(__file__).with_name("hostile_worker.py"))
SHORT = ("train.validate_every=0", "checkpoint.every=0")
ALWAYS = (*SHORT, "guard.audit_rate=1.0", "train.steps=4")
ONCE = (*SHORT, "guard.audit_rate=0.25", "guard.screen=false", "train.steps=12")


FULL = ("guard.audit_rate=1.0", *SHORT)
THREE = ("pipeline.stages=5", "model.architecture.n_layer=5", "pipeline.patience_s=3.0", *FULL)
OTHER_SHAPE = ("train.batch_size=4",)


class Insiders:
    """Remote workers with certificates for good, and an owner that is started again and again."""

    def __init__(self, place, names=("north", "south")):
        self.place, self.port, self.names = place, free_port(), names
        self.keys = make_keys(place, "owner", *names)
        self.book = place.path / "book.jsonl"

    def worker(self, name, plan=None):
        """Start a worker; one with a plan is hostile."""
        path = self.place.path / f"{name}.toml"
        path.write_text(f"identity = '{self.keys / name}'\nowner = '127.0.0.1:{self.port}'\n")
        if plan is None:
            return self.place.start("worker", str(path))
        return self.place.start_program(sys.executable, HOSTILE, str(path), str(self.book), plan)

    def settings(self, *more):
        return (
            f"pipeline.remote_workers={list(self.names)}",
            f"pipeline.pki='{self.keys}'",
            f"pipeline.transport.port={self.port}",
            "pipeline.transport.keepalive_s=1.0",
            *more,
        )


@pytest.fixture
def insiders(place):
    return Insiders(place)


def summary_of(insiders, north, south, *settings, run_dir="run", resume=False):
    """Run to the end with these workers."""
    workers = [insiders.worker("north", north), insiders.worker("south", south)]
    found = insiders.place.finish(*insiders.settings(*settings), run_dir=run_dir, resume=resume)
    for worker in workers:
        worker.wait()
    return found


@pytest.fixture
def three_insiders(place):
    return Insiders(place, ("north", "south", "east"))


def with_one(insiders, liar, plan, *settings, run_dir="run"):
    """Run to the end with one worker that has a plan."""
    workers = [insiders.worker(name, plan if name == liar else None) for name in insiders.names]
    found = insiders.place.finish(*insiders.settings(*settings), run_dir=run_dir)
    for worker in workers:
        worker.kill()
    return found


@pytest.mark.slow
@pytest.mark.parametrize(("plan", "before"), [("report", ()), ("fault", OTHER_SHAPE)])
def test_a_header_of_an_earlier_run_in_a_report_or_a_complaint_convicts_who_shows_it(insiders, clean, plan, before):
    with_one(insiders, "south", "remember", *FULL, *before, "train.seed=5", "train.steps=4", run_dir="before")

    summary = with_one(insiders, "south", plan, *FULL)

    assert (summary["status"], summary["evicted"], summary["lost"]) == ("completed", ["south"], [])
    assert {(verdict["party"], verdict["offence"]) for verdict in summary["verdicts"]} == {("south", "forgery")}
    assert summary["final_weights_digest"] == clean["final_weights_digest"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("plan", "lost"),
    [("fetched", []), ("withhold", ["north"]), ("relay", [])],
)
def test_a_header_of_an_earlier_run_that_is_shown_to_another_party_convicts_nobody(three_insiders, plan, lost):
    liar = "north"
    with_one(three_insiders, liar, "remember", *THREE, "train.seed=5", "train.steps=4", run_dir="before")

    summary = with_one(three_insiders, liar, plan, *THREE)

    assert (summary["status"], summary["evicted"], summary["lost"]) == ("completed", [], lost)
    assert summary["verdicts"] == []
    if plan == "relay":
        # who was shown it says so, and goes on
        assert liar in {body["about"] for _, body in events(three_insiders.place, "fault")}
    assert events(three_insiders.place, "relayed") == []
    honest = three_insiders.place.finish(*THREE, "guard.mode='off'", run_dir="honest")
    assert summary["final_weights_digest"] == honest["final_weights_digest"]


# in one process `test_foreign_sessions.py` is the quick one of this kind
@pytest.mark.slow
def test_headers_of_an_earlier_run_convict_the_worker_that_shows_them(insiders):
    summary_of(insiders, None, "remember", *ALWAYS, "train.seed=5", run_dir="before")

    summary = summary_of(insiders, None, "inputs", *ALWAYS)

    assert (summary["evicted"], summary["status"], summary["steps_lost"]) == (["south"], "completed", 0)
    ((_, verdict),) = events(insiders.place, "verdict")
    assert (verdict["party"], verdict["offence"], verdict["step"]) == ("south", "forgery", 2)
    assert "another session" in verdict["reason"]
    ((_, opening),) = events(insiders.place, "run_started")
    facts = explain_evidence(
        insiders.place.path / "run" / verdict["evidence"], insiders.keys / "authority.pem", opening["session"]
    )
    assert str(facts["conclusion"]).startswith("holds: south")


# in one process `test_foreign_sessions.py` has parts of a gradient quickly
@pytest.mark.slow
def test_a_gradient_of_an_earlier_run_after_a_resume_convicts_the_shadow_that_shows_it(insiders):
    summary_of(insiders, None, "remember", *ALWAYS, "train.seed=5", run_dir="before")
    workers = [insiders.worker("north"), insiders.worker("south")]
    owner = insiders.place.train(*insiders.settings(*ALWAYS))
    insiders.place.wait_for(owner, lambda: insiders.place.has_line("metrics.jsonl", '"step": 1,'))
    # left alone they would look for their owner for minutes
    for process in (owner, *workers):
        process.kill()

    summary = summary_of(insiders, None, "gradient", *ALWAYS, resume=True)

    assert (summary["evicted"], summary["status"]) == (["south"], "completed")
    assert [body["offence"] for _, body in events(insiders.place, "verdict")] == ["gradient"]


# in one process `test_session_draws.py` is the quick one of this kind
@pytest.mark.slow
def test_who_knows_the_draws_of_the_session_that_was_killed_is_met_in_the_resumed_one(insiders):
    settings = ONCE
    workers = [insiders.worker("north"), insiders.worker("south", "remember")]
    owner = insiders.place.train(*insiders.settings(*settings))
    insiders.place.wait_for(owner, lambda: insiders.place.has_line("metrics.jsonl", '"step": 8,'))
    # left alone they would look for their owner for minutes
    for process in (owner, *workers):
        process.kill()

    # south, which audits the stage of north, has told it what was audited
    summary = summary_of(insiders, "avoid", None, *settings, resume=True)

    assert (summary["resumed_from"], summary["evicted"]) == (0, ["north"])
    assert [body["offence"] for _, body in events(insiders.place, "verdict")] == ["message"]
