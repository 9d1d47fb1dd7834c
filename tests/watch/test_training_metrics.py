"""The metrics of training, read by Prometheus' own parser; board, rules and the page of names have no other names."""

import json
import re
import threading
import urllib.error
import urllib.request
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from phalanx.errors import ConfigError
from phalanx.watch.config import RunAlertRules
from phalanx.watch.run_view import RunView
from phalanx.watch.security_events import SECURITY_CLASSES
from phalanx.watch.training_alerts import TRAINING_ACTIONS, TrainingAlerts
from phalanx.watch.training_metrics import (
    TRAINING_METRICS,
    MetricsServer,
    RunCollector,
    is_loopback_name,
    metric_table,
)
from watched_run import DIGEST, RUN_ID, VERDICT, event_row, write_run

ROOT = Path(__file__).parents[2]
BOARD = ROOT / "src" / "phalanx" / "watch" / "board"


@pytest.fixture
def server(tmp_path):
    view = RunView(write_run(tmp_path / "run\x1b", events=[event_row("verdict", VERDICT)]))
    view.read_new()
    alerts = TrainingAlerts(RunAlertRules(), view, 0.0)
    alerts.check_rules(0.0, None)
    with MetricsServer(RunCollector([(view, alerts)], threading.Lock()), 0) as running:
        yield running


def scrape(server, host=None):
    request = urllib.request.Request(f"http://127.0.0.1:{server.port}/metrics", headers={"host": host} if host else {})
    with urllib.request.urlopen(request, timeout=30) as answer:
        return {
            (sample.name, *sorted(sample.labels.items())): sample.value
            for family in text_string_to_metric_families(answer.read().decode())
            for sample in family.samples
        }


def test_prometheus_reads_every_figure(server):
    found = scrape(server)
    run = ("run", "run?")

    assert found["phalanx_run_info", ("config_digest", DIGEST), run, ("run_id", RUN_ID)] == 1
    assert found["phalanx_step", run] == 119
    assert found["phalanx_audits_total", run] == 360
    assert found["phalanx_link_bytes_total", ("link", "owner>worker-1"), run] == 120 * 1_840_353
    assert found["phalanx_run_events_total", ("kind", "verdict"), run] == 1
    assert found["phalanx_security_events_total", ("class", "verdict"), run] == 1
    assert found["phalanx_security_events_total", ("class", "quota"), run] == 0
    assert found["phalanx_training_alerts_total", ("rule", "verdict"), run] == 1
    assert found["phalanx_last_step_timestamp_seconds", run] > 1.7e9
    assert {name for name, *_ in found} <= {metric.query_name for metric in TRAINING_METRICS}


def test_a_name_that_is_let_point_here_reads_nothing(server):
    with pytest.raises(urllib.error.HTTPError, match="421"):
        scrape(server, "attacker.example.org")
    assert scrape(server, "localhost:9000")


@pytest.mark.parametrize(
    ("host", "is_own"),
    [("127.0.0.1:80", True), ("[::1]:80", True), ("LOCALHOST", True), ("", False), ("localhost.evil.org", False)],
)
def test_names_of_this_machine(host, is_own):
    assert is_loopback_name(host) == is_own


def test_a_port_that_is_taken_is_refused_by_its_option(server):
    with pytest.raises(ConfigError, match="--prometheus: port"):
        MetricsServer(RunCollector([], threading.Lock()), server.port)


def test_a_run_before_its_first_step_has_no_figures_and_no_fault(tmp_path):
    view = RunView(write_run(tmp_path / "run", num_steps=0, parties=False))
    families = list(RunCollector([(view, TrainingAlerts(RunAlertRules(), view, 0.0))], threading.Lock()).collect())

    assert len(families) == len(TRAINING_METRICS)
    assert not [sample for family in families if family.name == "phalanx_loss" for sample in family.samples]


def names_in(text):
    return set(re.findall(r"\bphalanx_\w+", text))


def test_board_and_rules_ask_for_metrics_and_labels_that_there_are():
    known = {metric.query_name for metric in TRAINING_METRICS}
    board = json.loads((BOARD / "grafana.json").read_text())
    queries = " ".join(target["expr"] for panel in board["panels"] for target in panel["targets"])
    rules = (BOARD / "alert_rules.yml").read_text()

    assert names_in(queries) <= known
    assert names_in(rules) <= known
    assert names_in(rules) >= {"phalanx_last_step_timestamp_seconds", "phalanx_security_events_total"}
    labels = {label for metric in TRAINING_METRICS for label in metric.labels} | {"run", "instance", "job"}
    grouped = re.findall(r"\b(?:by|on) \(([\w, ]+)\)", queries + rules)
    assert {label for names in grouped for label in names.split(", ")} <= labels
    assert set(re.findall(r"\$labels\.(\w+)", rules)) <= labels
    assert set(re.findall(r"{{(\w+)}}", (BOARD / "grafana.json").read_text())) <= labels


def test_the_page_of_names_is_that_of_the_classes():
    page = (ROOT / "docs" / "watching.md").read_text()

    assert metric_table() in page
    assert len({metric.name for metric in TRAINING_METRICS}) == len(TRAINING_METRICS)
    for name in (*SECURITY_CLASSES, *TRAINING_ACTIONS):
        assert f"`{name}`" in page
