"""A run needs nothing outside: it trains and reports in a network that has a loopback and nothing else."""

import pytest


@pytest.mark.slow
def test_a_run_trains_and_reports_without_a_network(place, clean):
    if not place.can_have("no_network"):
        pytest.skip("this system lets nobody make a network namespace")

    process = place.train(restriction="no_network")

    assert process.wait() == 0, process.text
    again = place.summary()
    assert again["final_weights_digest"] == clean["final_weights_digest"]
    assert (again["evicted"], again["false_accusations"], again["takeovers"]) == ([], 0, 0)
    assert again["audits"] == clean["audits"] > 0
    page = (place.path / "run" / "report.html").read_text()
    assert 'src="http' not in page and 'href="http' not in page
