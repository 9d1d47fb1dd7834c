"""Each rule calls somebody when it should, once, and ends; each alert says what to do."""

import dataclasses
import time
from types import SimpleNamespace

import pytest

from phalanx.watch.config import RunAlertRules
from phalanx.watch.machine import GpuReading, MachineMeter, MachineReading
from phalanx.watch.run_view import RunView
from phalanx.watch.training_alerts import TRAINING_ACTIONS, TrainingAlerts, make_training_alert
from watched_run import VERDICT, append_rows, event_row, metric_row, party_row, write_peers, write_run

HEALTHY = MachineReading(0.5, 0.5, 1 << 30, 100 << 30, 0.1, 0.0, 0.0)
NOW = 2_000_000_000.0


class Case:
    """One run, its rules, and a clock that stands still until it is moved."""

    def __init__(self, path, monkeypatch, rules=None, **changes):
        self.path = write_run(path / "run", **changes)
        self.view = RunView(self.path)
        monkeypatch.setattr(RunView, "status", "running")
        self.alerts = TrainingAlerts(rules or RunAlertRules(), self.view, NOW)
        self.now = NOW
        self.look()

    def add_steps(self, *rows):
        append_rows(self.path / "metrics.jsonl", rows)

    def look(self, machine=HEALTHY):
        self.view.read_new()
        begun, over = self.alerts.check_rules(self.now, machine)
        return [(alert.rule, alert.subject) for alert in begun], [(alert.rule, alert.subject) for alert in over]


@pytest.fixture
def case(tmp_path, monkeypatch):
    return Case(tmp_path, monkeypatch)


def test_a_healthy_run_calls_nobody(case):
    case.add_steps(*(metric_row(step, time=NOW + step) for step in range(120, 160)))
    case.now += 40

    assert case.look() == ([], [])


def test_a_loss_that_is_no_number_calls_once_and_ends(case):
    case.add_steps(metric_row(120, time=NOW, loss=None, non_finite=["loss"]))

    assert case.look() == ([("non_finite", "loss")], [])
    assert case.look() == ([], [])
    case.now += 601
    case.add_steps(metric_row(121, time=case.now))
    assert case.look() == ([], [("non_finite", "loss")])


@pytest.mark.parametrize(
    ("figure", "value", "is_spike"),
    [
        ("loss", 40.0, True),
        ("loss", 2.3, False),
        ("grad_norm", 50.0, True),
        ("grad_norm", 1.4, False),
        ("loss", 0.01, False),
    ],
)
def test_a_spike_is_far_above_the_last_steps(case, figure, value, is_spike):
    case.add_steps(metric_row(120, time=NOW, **{figure: value}))

    assert case.look()[0] == ([("spike", figure)] if is_spike else [])


def test_a_run_that_begins_has_no_spikes(tmp_path, monkeypatch):
    case = Case(tmp_path, monkeypatch, num_steps=5)
    case.add_steps(metric_row(5, time=NOW, loss=400.0))

    assert case.look() == ([], [])


def test_a_flat_curve_has_no_spike_in_its_last_digit(tmp_path, monkeypatch):
    case = Case(tmp_path, monkeypatch, num_steps=0)
    case.add_steps(
        *(metric_row(step, time=NOW, loss=2.0) for step in range(100)), metric_row(100, time=NOW, loss=2.0001)
    )

    assert case.look() == ([], [])


def test_a_stall_is_measured_from_the_last_step_and_ends_with_the_next(case):
    case.add_steps(metric_row(120, time=NOW))
    case.now += 599
    assert case.look() == ([], [])
    case.now += 2
    assert case.look() == ([("stall", "run")], [])
    case.add_steps(metric_row(121, time=case.now))
    assert case.look() == ([], [("stall", "run")])


def test_slow_steps_are_no_stall(case):
    case.add_steps(*(metric_row(step, time=NOW, wall_s=300.0) for step in range(120, 240)))
    case.now += 2900

    assert case.look() == ([], [])
    case.now += 200
    assert case.look()[0] == [("stall", "run")]


def test_a_party_is_slow_beside_the_others_alone(case):
    now = int(time.time())
    write_peers(case.path, party_row("worker-1", heard=now), party_row("worker-2", heard=now - 121))
    assert case.look()[0] == [("slow_party", "worker-2")]
    write_peers(case.path, party_row("worker-1", heard=now - 500), party_row("worker-2", heard=now - 500))
    assert case.look() == ([], [("slow_party", "worker-2")])
    write_peers(case.path, party_row("worker-1", heard=now), party_row("w2", state="lost", heard=now - 900))
    assert case.look() == ([], [])


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"disk_free_bytes": 1 << 30}, ("disk", "run directory")),
        ({"disk_free_bytes": 2 << 30}, None),
        ({"memory_share": 0.96}, ("memory", "this machine")),
        ({"memory_share": 0.95}, None),
    ],
)
def test_disk_and_memory_have_a_bound(case, changes, expected):
    found = case.look(dataclasses.replace(HEALTHY, **changes))[0]

    assert found == ([] if expected is None else [expected])


def test_a_machine_that_was_not_measured_calls_nobody(case):
    assert case.look(None) == ([], [])


def test_a_verdict_and_a_refused_certificate_call_and_older_ones_do_not(case):
    old = [event_row("verdict", VERDICT, NOW - 5), event_row("revoked", {"party": "x"}, NOW - 5)]
    append_rows(case.path / "events.jsonl", old)
    assert case.look() == ([], [])
    new = [
        event_row("verdict", VERDICT, NOW + 1),
        event_row("not_let_in", {"party": "m", "reason": "expired"}, NOW + 1),
    ]
    append_rows(case.path / "events.jsonl", [*new, event_row("drift", {"party": "worker-2"}, NOW + 1)])

    assert case.look()[0] == [("verdict", "worker-1"), ("security", "refused_certificate")]


def test_a_reader_without_a_session_is_a_security_event(case):
    case.alerts.add_intruder(NOW, "unexpected_reader")

    assert case.look()[0] == [("security", "unexpected_reader")]


@pytest.mark.parametrize(("exposure", "calls"), [(8.0, False), (8.1, True), (None, False)])
def test_a_canary_that_is_exposed_calls(case, exposure, calls):
    case.add_steps(metric_row(120, time=NOW, leak={"exposure": exposure}))

    assert case.look()[0] == ([("canary", "leak.exposure")] if calls else [])


@pytest.mark.parametrize(("spent", "calls"), [(7.2, False), (7.3, True)])
def test_a_budget_that_is_nearly_spent_calls(tmp_path, monkeypatch, spent, calls):
    case = Case(tmp_path, monkeypatch, config="[privacy]\nepsilon = 8.0\n")
    case.add_steps(metric_row(120, time=NOW, epsilon=spent))

    assert case.look()[0] == ([("budget", "epsilon")] if calls else [])


@pytest.mark.parametrize("status", ["failed", "gone"])
def test_a_run_that_failed_or_was_killed_calls(case, monkeypatch, status):
    monkeypatch.setattr(RunView, "status", status)

    assert case.look()[0] == [(status, "run")]


def test_a_rule_that_is_off_calls_nobody(tmp_path, monkeypatch):
    rules = RunAlertRules.model_validate(
        {name: {"on": False} for name in ("spike", "stall", "disk", "memory", "canary")}
    )
    case = Case(tmp_path, monkeypatch, rules)
    case.add_steps(metric_row(120, time=NOW, loss=500.0, leak={"exposure": 50.0}))
    case.now += 10_000

    assert case.look(dataclasses.replace(HEALTHY, disk_free_bytes=0, memory_share=1.0)) == ([], [])


@pytest.mark.parametrize("rule", TRAINING_ACTIONS)
def test_each_alert_says_what_to_do(rule):
    alert = make_training_alert(rule, "run", 1, 0)

    assert alert.action.endswith(".")
    assert alert.action in alert.describe()


def test_the_machine_is_measured(tmp_path):
    meter = MachineMeter()
    first, second = meter.read_machine(tmp_path, 1.0), meter.read_machine(tmp_path, 2.0)

    assert (first.sent_per_s, first.received_per_s) == (0.0, 0.0)
    assert second.sent_per_s >= 0
    assert 0 < second.memory_share <= 1
    assert second.disk_free_bytes > 0


class Driver:
    """NVIDIA's bindings with a driver that has two GPUs, until it loses them."""

    class NVMLError(Exception):
        pass

    def __init__(self):
        self.is_lost = False

    def nvmlInit(self):
        if self.is_lost:
            raise self.NVMLError("Driver Not Loaded")

    def nvmlDeviceGetCount(self):
        self.nvmlInit()
        return 2

    def nvmlDeviceGetHandleByIndex(self, index):
        return index

    def nvmlDeviceGetMemoryInfo(self, gpu):
        return SimpleNamespace(used=(gpu + 1) << 30, total=8 << 30)

    def nvmlDeviceGetUtilizationRates(self, gpu):
        return SimpleNamespace(gpu=40 + gpu)


def test_gpus_are_measured_where_a_driver_answers(tmp_path):
    driver = Driver()
    meter = MachineMeter(driver)

    first = meter.read_machine(tmp_path, 1.0)
    driver.is_lost = True
    second = meter.read_machine(tmp_path, 2.0)

    assert first.gpus == (GpuReading(0.4, 1 << 30, 0.125), GpuReading(0.41, 2 << 30, 0.25))
    assert second.gpus == ()
    assert second.memory_share > 0
    assert MachineMeter(driver).read_machine(tmp_path, 3.0).gpus == ()
