"""A stage on several ranks of one worker: trains as on one, is audited as any other, and dies as a whole."""

import json
import os
import signal

import pytest
from real_runs import descendant, free_port, make_keys

ANY_CLASS = ("guard.audit_rate=1.0", "guard.classes='mixed'", "pipeline.transport.keepalive_s=1.0")


def events(place, kind):
    lines = (place.path / "run" / "events.jsonl").read_text().splitlines()
    return [event["body"] for event in map(json.loads, lines) if event["kind"] == kind]


@pytest.fixture
def company(place):
    """Starts two remote workers, of which the first has two ranks; returns the run's settings and both workers."""

    def start(*settings, attack=None, layout="dp = 2, zero = 2"):
        port, keys = free_port(), make_keys(place, "owner", "north", "south")
        workers = {}
        for name, more in (("north", f"parallel = {{ {layout} }}\n"), ("south", "")):
            file = place.path / f"{name}.toml"
            file.write_text(f"identity = '{keys / name}'\nowner = '127.0.0.1:{port}'\n{more}")
            workers[name] = place.start_worker(file, attack if name == "north" else None)
        owner = place.train(
            "pipeline.remote_workers=['north','south']",
            f"pipeline.pki='{keys}'",
            f"pipeline.transport.port={port}",
            *ANY_CLASS,
            *settings,
        )
        return owner, workers

    return start


def test_a_stage_on_two_ranks_trains_as_on_one_and_nobody_is_accused(place, clean, company):
    owner, workers = company()

    assert owner.wait() == 0, owner.text + workers["north"].text
    assert [worker.wait() for worker in workers.values()] == [0, 0]
    summary = place.summary()
    assert summary["audits"] > 0
    assert (summary["verdicts"], summary["evicted"], summary["takeovers"]) == ([], [], 0)
    # two ranks add up in another order: close, and not the same bits
    assert summary["loss_last"] == pytest.approx(clean["loss_last"], rel=1e-5)
    assert summary["final_weights_digest"] != clean["final_weights_digest"]


@pytest.mark.slow
def test_a_liar_with_two_ranks_is_named(place, company):
    owner, workers = company(attack="kind = 'forward_sign_flip'\nrate = 1.0\nfrom_step = 4\n")

    assert owner.wait() == 0, owner.text + workers["north"].text
    summary = place.summary()
    assert summary["evicted"] == ["north"]
    assert summary["steps"] == 8
    workers["south"].kill()


@pytest.mark.slow
def test_a_killed_rank_takes_its_worker_with_it_and_the_shadow_takes_over(place, company):
    owner, workers = company("train.steps=60", "train.validate_every=100", "checkpoint.every=0")
    place.wait_for(owner, lambda: place.has_line("metrics.jsonl", '"step": 3,'))

    os.kill(descendant(workers["north"], "worker"), signal.SIGKILL)

    assert owner.wait() == 0, owner.text
    assert workers["north"].wait() == 4, workers["north"].text
    assert "rank 1 ended with signal 9" in workers["north"].text
    assert [body["party"] for body in events(place, "lost")] == ["north"]
    summary = place.summary()
    assert (summary["steps"], summary["verdicts"], summary["steps_lost"]) == (60, [], 0)
