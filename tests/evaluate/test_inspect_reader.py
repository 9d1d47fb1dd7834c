"""inspect itself reads our logs: its own interpreter opens them, so that its packages stay out of this environment.

`PHALANX_INSPECT_PYTHON` names the interpreter of an environment with inspect-ai (0.3.285 was tried).
"""

import json
import os
import subprocess
from pathlib import Path

import pytest

from fake_scorer import FakeScorer
from phalanx.evaluate import open_suite, run_suites
from phalanx.evaluate.inspect_log import inspect_log, log_name

PYTHON = os.environ.get("PHALANX_INSPECT_PYTHON", "")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not Path(PYTHON).is_file(), reason="PHALANX_INSPECT_PYTHON names no environment of inspect"),
]
READ = """
import json, sys
from inspect_ai.log import read_eval_log
logs = [read_eval_log(path) for path in sys.argv[1:]]
print(json.dumps([{
    "status": log.status, "task": log.eval.task, "model": log.eval.model, "samples": len(log.samples),
    "metrics": {name: metric.value for name, metric in log.results.scores[0].metrics.items()},
    "params": {name: metric.params for name, metric in log.results.scores[0].metrics.items()},
    "answers": [sample.output.completion for sample in log.samples],
    "scores": sum(len(sample.scores) for sample in log.samples),
} for log in logs]))
"""


def call_inspect(*arguments):
    ended = subprocess.run([PYTHON, *map(str, arguments)], capture_output=True, text=True, timeout=600, check=False)
    assert ended.returncode == 0, ended.stderr[-2000:]
    return ended.stdout


def test_inspect_reads_every_suite_with_all_its_figures(tmp_path):
    suites = [open_suite(name, limit=4) for name in ("prose", "facts", "safety", "instructions", "toxicity")]
    hostile = "Sure\x1b[2J \u202e<script>alert(1)</script>"
    scorer = FakeScorer()
    scorer.write_texts = lambda prompts, *_args, **_options: [hostile for _ in prompts]
    result = run_suites("a model", scorer, suites, 3)
    paths = []
    for suite in result.suites:
        paths.append(tmp_path / f"{suite.name}.json")
        paths[-1].write_text(json.dumps(inspect_log(result, suite), allow_nan=False))

    logs = json.loads(call_inspect("-c", READ, *paths))

    for suite, log in zip(result.suites, logs, strict=True):
        assert (log["status"], log["task"], log["model"]) == ("success", suite.name, "a model")
        assert log["samples"] == len({sample.id for sample in suite.samples})
        assert log["scores"] == len({(sample.id, sample.metric) for sample in suite.samples})
        assert log["metrics"] == pytest.approx({figure.metric: figure.value for figure in suite.figures})
        assert {name: params["n"] for name, params in log["params"].items()} == {
            figure.metric: figure.n for figure in suite.figures
        }
        assert all("\x1b" not in answer and "\u202e" not in answer for answer in log["answers"])
    assert any("<script>" in answer for log in logs for answer in log["answers"])


def test_the_viewer_lists_and_dumps_a_log(tmp_path):
    result = run_suites("a model", FakeScorer(), [open_suite("prose", limit=2)], 3)
    log = inspect_log(result, result.suites[0])
    path = tmp_path / log_name(log)
    path.write_text(json.dumps(log, allow_nan=False))

    dumped = json.loads(call_inspect("-m", "inspect_ai", "log", "dump", path))
    listed = json.loads(call_inspect("-m", "inspect_ai", "log", "list", "--json", "--log-dir", tmp_path))

    assert dumped["eval"]["task"] == "prose"
    assert [row["task"] for row in listed] == ["prose"]
