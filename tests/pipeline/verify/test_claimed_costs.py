"""What a worker says that it has cost: names that exist, figures that can be, and what the owner itself has seen."""

import time

import pytest

from phalanx.pipeline.protocol.messages import UpdateReport
from phalanx.testing import Actor, rewrite_only, tiny_run


def claiming(**claims):
    return Actor(rewrite=rewrite_only(UpdateReport, lambda outgoing, applied: [outgoing.with_fields(claims)]))


def test_made_up_costs_do_not_reach_the_metrics(make_company, honest_digest):
    bytes_sent = {"owner": 2**52, "mars": 10**9, "worker-2": 7}
    company = make_company(tiny_run(), {1: claiming(usage={"busy_wall": 1e9, "compute": 3.0}, bytes_sent=bytes_sent)})
    started = time.monotonic()

    results = company.run(3)

    links = {link for result in results for link in result.bytes_by_link}
    parties = ("owner", "worker-1", "worker-2")
    # what the owner sees neither end of is marked
    assert {link for result in results for link in result.claimed_links} == {"worker-1>worker-2", "worker-2>worker-1"}
    assert links <= {f"{one}>{other}" for one in parties for other in parties}
    moved = sum(result.bytes_by_link.get("worker-1>owner", 0) for result in results)
    assert 0 < moved <= company.engine._context.endpoint.bytes_received["worker-1"] < 10**7
    # nobody can have worked longer than the run has lasted
    assert company.engine._context.coordinator.busy["worker-1"] <= time.monotonic() - started + 60
    assert company.engine.party_usage["worker-1"] == {"compute": 3.0}
    assert (company.verdicts, company.weights_digest()) == ([], honest_digest(tiny_run(), 3))


def test_workers_report_the_phases_of_each_step_once(make_company):
    company = make_company(tiny_run(), {2: claiming(usage={"compute_wall": 1e9, "compute": 2.0})})

    results = company.run(3)
    company.engine.settle_last_step()
    last = company.engine.take_party_phases()

    assert results[0].party_phases == {}
    for number, reports in enumerate([*(result.party_phases for result in results[1:]), last]):
        assert {party: report["step"] for party, report in reports.items()} == {"worker-1": number, "worker-2": number}
        assert {"compute", "optimizer"} <= reports["worker-1"]["seconds"].keys()
        assert reports["worker-2"]["seconds"] == {"compute": 1e9}
    assert company.engine.take_party_phases() == {}
    assert company.engine.party_usage["worker-2"] == {"compute": 2.0}
    assert not any(name.endswith("_wall") for name in company.engine.party_usage["owner"])


@pytest.mark.slow
def test_totals_that_fall_are_no_refund(make_company):
    def fall(outgoing, applied):
        return [outgoing.with_fields({"bytes_sent": {"worker-2": 10**6 if applied.step == 1 else 5}})]

    company = make_company(tiny_run(), {1: Actor(rewrite=rewrite_only(UpdateReport, fall))})

    results = company.run(4)

    moved = [result.bytes_by_link.get("worker-1>worker-2", 0) for result in results]
    assert min(moved) >= 0
    assert sum(moved) == 10**6


def test_a_phase_that_does_not_exist_is_refused_and_a_negative_time_convicts(make_company, honest_digest):
    company = make_company(tiny_run(), {1: claiming(usage={"\x1b[2J": 1.0}), 2: claiming(usage={"compute": -1.0})})

    company.run(1)
    company.engine.settle_last_step()

    assert "worker-2" in company.evicted
    assert all("\x1b" not in str(body) for _, body in company.events)
    assert company.weights_digest() == honest_digest(tiny_run(), 1)
