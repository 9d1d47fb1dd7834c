"""A stage on several ranks of one worker: trains as on one, is audited as any other, and dies as a whole."""

import functools
import json
import os
import signal

import pytest
from real_runs import descendant, end_all, free_port, make_keys, make_place

from phalanx.pipeline.evidence.explain import explain_evidence

ANY_CLASS = ("guard.audit_rate=1.0", "guard.classes='mixed'", "pipeline.transport.keepalive_s=1.0")


PROVED = "holds: north signed a message that does not follow from its signed inputs"
PROVED_GRADIENT = (
    "holds: north signed a weight gradient that is further than rounding from the one that its signed inputs lead to"
)
ALIKE = ("dp = 2, zero = 2", "dp = 2, zero = 2")


def events(place, kind):
    lines = (place.path / "run" / "events.jsonl").read_text().splitlines()
    return [event["body"] for event in map(json.loads, lines) if event["kind"] == kind]


def start_company(place, *settings, attack=None, layouts=("dp = 2, zero = 2", "")):
    """Start an owner and two remote workers of these layouts; an attack is the first one's."""
    port, keys = free_port(), make_keys(place, "owner", "north", "south")
    workers = {}
    for name, layout in zip(("north", "south"), layouts, strict=True):
        file = place.path / f"{name}.toml"
        file.write_text(f"identity = '{keys / name}'\nowner = '127.0.0.1:{port}'\nparallel = {{ {layout} }}\n")
        workers[name] = place.start_worker(file, attack if name == "north" else None)
    owner = place.train(
        "pipeline.remote_workers=['north','south']",
        f"pipeline.pki='{keys}'",
        f"pipeline.transport.port={port}",
        *ANY_CLASS,
        *settings,
    )
    return owner, workers


@pytest.fixture
def company(place):
    """Starts two remote workers, of which the first has two ranks; returns the run's settings and both workers."""
    return functools.partial(start_company, place)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """Summary of a run in which both workers have two ranks of one layout, without a liar."""
    place = make_place(tmp_path_factory.mktemp("undisturbed"))
    owner, _ = start_company(place, layouts=ALIKE)
    assert owner.wait() == 0, owner.text
    yield place.summary()
    end_all(place)


# without the owner's processes `test_party_layouts.py` is the quick one of this kind
@pytest.mark.slow
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
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("attack", "settings", "rank", "offence", "conclusion"),
    [
        # the party's voice, one rank's rows, and the gradient sums that one rank keeps
        ("kind = 'forward_sign_flip'", (), 0, "message", PROVED),
        ("kind = 'forward_sign_flip'", (), 1, "message", PROVED),
        ("kind = 'gradient_sign'", ("guard.step_audit_rate=1.0",), 1, "gradient", PROVED_GRADIENT),
    ],
)
def test_a_lying_rank_has_its_party_named_and_the_bits_are_those_of_honest_ones(
    place, undisturbed, company, attack, settings, rank, offence, conclusion
):
    plan = f"{attack}\nrate = 1.0\nfrom_step = 4\n[ranks]\nnorth = {rank}\n"
    owner, workers = company(*settings, attack=plan, layouts=ALIKE)

    assert owner.wait() == 0, owner.text + workers["north"].text
    summary = place.summary()
    assert (summary["steps"], summary["evicted"]) == (8, ["north"])
    assert summary["final_weights_digest"] == undisturbed["final_weights_digest"]
    (evidence,) = (place.path / "run" / "evidence").glob("*.json")
    facts = explain_evidence(evidence, place.path / "keys" / "authority.pem")
    assert (facts["verdict"], facts["conclusion"]) == (f"north is guilty: {offence}", conclusion)
    workers["south"].kill()


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_lying_rank_beside_an_adapter_has_its_party_named_and_the_bits_are_those_of_honest_ones(company, place):
    adapter = ("model.adapter.rank=4",)
    honest, _ = company(*adapter, layouts=ALIKE)
    assert honest.wait() == 0, honest.text
    expected = place.summary()["final_weights_digest"]
    (place.path / "run").rename(place.path / "honest")
    (place.path / "keys").rename(place.path / "honest-keys")

    owner, workers = company(
        *adapter, attack="kind = 'forward_sign_flip'\nrate = 1.0\nfrom_step = 4\n[ranks]\nnorth = 1\n", layouts=ALIKE
    )

    assert owner.wait() == 0, owner.text + workers["north"].text
    summary = place.summary()
    assert (summary["steps"], summary["evicted"], summary["final_weights_digest"]) == (8, ["north"], expected)
    workers["south"].kill()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("blow", "end"),
    [
        (signal.SIGKILL, "rank 1 ended with signal 9"),
        (signal.SIGSTOP, "rank 1 ended with signal 9, after"),
    ],
)
def test_a_rank_that_ends_or_stands_still_takes_its_worker_with_it_and_the_shadow_takes_over(place, company, blow, end):
    owner, workers = company(
        *("train.steps=60", "train.validate_every=100", "checkpoint.every=0"),
        layouts=("dp = 2, zero = 1, silence_s = 15.0", ""),
    )
    place.wait_for(owner, lambda: place.has_line("metrics.jsonl", '"step": 3,'))

    os.kill(descendant(workers["north"], "worker"), blow)

    assert owner.wait() == 0, owner.text
    assert workers["north"].wait() == 4, workers["north"].text
    assert end in workers["north"].text
    assert [body["party"] for body in events(place, "lost")] == ["north"]
    summary = place.summary()
    assert (summary["steps"], summary["verdicts"], summary["steps_lost"]) == (60, [], 0)
