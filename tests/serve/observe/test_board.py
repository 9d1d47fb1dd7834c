"""The board and the rules that are shipped: every metric and label that they name exists."""

import json
import re
import shutil
import subprocess
from importlib.resources import files
from types import SimpleNamespace

import pytest
import yaml

from phalanx.serve.gateway import GatewayConfig
from phalanx.serve.gateway.app import _describe_engines
from phalanx.serve.observe import ServerWatch, WatchConfig
from phalanx.serve.observe.metrics import RequestOutcome
from phalanx.serve.server import ServerPlan, _describe_pool

BOARD = files("phalanx.serve.observe").joinpath("board")
RULES = BOARD.joinpath("alert_rules.yml")
OF_PROMETHEUS = {"up"}
LABELS = {"instance", "job", "le", "severity"}


@pytest.fixture(scope="module")
def metrics(tmp_path_factory):
    """Names of all series of servers and gateways, and names of their labels."""
    directory = tmp_path_factory.mktemp("access")
    card = SimpleNamespace(id="m", digest="d")
    engine = SimpleNamespace(served=SimpleNamespace(name="m"), num_running=0, num_waiting=0)
    pool = SimpleNamespace(cards=[card], engines=[engine])
    backend = SimpleNamespace(config=SimpleNamespace(name="b"), num_open=0, is_healthy=True)
    backends = SimpleNamespace(backends=[backend], model_names=lambda: ["m"])
    config = GatewayConfig.model_validate_json(
        json.dumps({"backends": [{"name": "b", "url": "http://127.0.0.1:1", "models": {"m": "m"}}]})
    )
    names, labels = set(), set()
    for server in (
        _describe_pool(pool, ServerPlan(models={}, access=directory)),
        _describe_engines(config, backends),
    ):
        watch = ServerWatch(WatchConfig(), server, None)
        watch.metrics.count_request(
            RequestOutcome(
                "/v1/chat/completions",
                "m",
                429,
                1.0,
                first_token_s=0.5,
                prompt_tokens=1,
                completion_tokens=3,
                verdicts=("links:x",),
                filter_name="secrets",
                mark="gumbel",
            )
        )
        watch.metrics.count_alert("errors")
        names |= watch.metrics.names()
        labels |= set(re.findall(r'(\w+)="', watch.metrics.render().decode()))
    return names, labels | {"model"}


def expressions():
    board = json.loads(BOARD.joinpath("grafana.json").read_text())
    yield from ((panel["title"], target["expr"]) for panel in board["panels"] for target in panel["targets"])
    for group in yaml.safe_load(RULES.read_text())["groups"]:
        yield from ((rule["alert"], rule["expr"]) for rule in group["rules"])


@pytest.mark.parametrize(("title", "expression"), list(expressions()))
def test_every_metric_and_label_exists(metrics, title, expression):
    names, labels = metrics

    plain = re.sub(r'"[^"]*"', '""', expression)
    used = set(re.findall(r"\b(?:phalanx|gen_ai|process)_\w+|\bup\b", plain))
    grouped = {name.strip() for part in re.findall(r"by \(([^)]*)\)", plain) for name in part.split(",")}
    chosen = set(re.findall(r"(\w+)(?:=~|!=|=)\"", plain))
    used_labels = {name for name in (grouped | chosen) if name}
    assert used - used_labels <= names | OF_PROMETHEUS, title
    assert used - used_labels, title
    assert used_labels <= labels | LABELS, title


def test_every_rule_says_what_to_do():
    for group in yaml.safe_load(RULES.read_text())["groups"]:
        for rule in group["rules"]:
            assert rule["annotations"]["action"].endswith("."), rule["alert"]


def test_the_board_has_whole_panels():
    board = json.loads(BOARD.joinpath("grafana.json").read_text())

    assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"])
    places = [(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in board["panels"]]
    assert len(set(places)) == len(places)


def test_promtool_takes_the_rules():
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("promtool is not installed")
    result = subprocess.run([promtool, "check", "rules", str(RULES)], check=False, capture_output=True, text=True)

    assert result.returncode == 0, result.stderr
