"""The modes that Phalanx is compared with: the paper's duplicated block, and statistics alone."""

import re

import pytest

from phalanx.errors import ConfigError
from phalanx.pipeline import GuardConfig
from phalanx.testing import Actor, tampering, tiny_run
from phalanx.train import load_run
from tiny_run_file import tiny_run_file

PAPER = GuardConfig(mode="paper")
STATISTICS = GuardConfig(mode="statistics")


def lying_from(step, lie):
    return Actor(tampering(lambda direction, at, microbatch, tensor: lie(tensor) if at >= step else tensor))


def test_the_papers_mode_recomputes_everything(make_company, honest_digest):
    run = tiny_run(guard=PAPER)
    company = make_company(run)

    (result,) = company.run(1)

    assert result.guard.num_audits == 2 * run.train.microbatches
    assert company.weights_digest() == honest_digest(run, 1)


def test_the_papers_mode_finds_a_lie_about_one_microbatch(make_company, honest_digest):
    run = tiny_run(guard=PAPER)
    lie = tampering(lambda direction, step, microbatch, tensor: tensor * 1.001 if microbatch == 2 else tensor)
    company = make_company(run, {1: Actor(lie)})

    company.run(2)

    assert company.evicted == ["worker-1"]
    assert company.weights_digest() == honest_digest(run, 2)


def test_statistics_condemn_a_gross_liar_without_recomputing(make_company):
    company = make_company(tiny_run(guard=STATISTICS), {1: lying_from(6, lambda tensor: 1000.0 * tensor)})

    results = company.run(8)

    assert [(verdict.offence, verdict.party) for verdict in company.verdicts] == [("statistics", "worker-1")]
    assert {result.guard.num_audits for result in results} == {0}


def test_statistics_condemn_what_is_not_finite_at_once(make_company, honest_digest):
    run = tiny_run(guard=STATISTICS)
    company = make_company(run, {2: lying_from(1, lambda tensor: tensor * float("nan"))})

    company.run(2)

    assert company.evicted == ["worker-2"]
    assert company.weights_digest() == honest_digest(run, 2)


@pytest.mark.slow
def test_statistics_do_not_see_a_small_lie(make_company, honest_digest):
    run = tiny_run(guard=STATISTICS)
    company = make_company(run, {1: lying_from(0, lambda tensor: 1.01 * tensor)})

    company.run(8)

    assert company.verdicts == []
    assert company.weights_digest() != honest_digest(run, 8)


@pytest.mark.parametrize("change", [{"audit_rate": 0.5}, {"shadow": "gradient"}, {"screen": True}])
def test_what_a_baseline_fixes_cannot_be_chosen(change):
    with pytest.raises(ValueError, match="mode = 'paper' fixes"):
        GuardConfig(mode="paper", **change)


def test_all_that_a_baseline_fixes_is_said_at_once_and_how_to_take_it_out(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text(tiny_run_file("[guard]\naudit_rate = 0.25\nstep_audit_rate = 0.5\n"))

    with pytest.raises(ConfigError) as refusal:
        load_run(path, ["guard.mode=paper"])

    said = str(refusal.value)
    assert "fixes audit_rate = 1.0 (found 0.25), step_audit_rate = 0.0 (found 0.5);" in said
    removed = re.findall(r"--unset (\S+)", said)
    guard = load_run(path, [*(f"{key}-" for key in removed), "guard.mode=paper"]).guard
    assert (guard.mode, guard.audit_rate, guard.step_audit_rate) == ("paper", 1.0, 0.0)
