"""lm-eval's own adapter over the API gives what its adapter of transformers gives here, to a millionth."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1200),
    pytest.mark.skipif(
        "PHALANX_LM_EVAL" not in os.environ and importlib.util.find_spec("lm_eval") is None,
        reason="needs lm_eval, or its folder in PHALANX_LM_EVAL",
    ),
]
SCRIPT = Path(__file__).with_name("lm_eval_scores.py")


def flatten(value) -> list:
    """Return the numbers and texts of nested lists."""
    return [part for item in value for part in flatten(item)] if isinstance(value, list | tuple) else [value]


@pytest.fixture(scope="module")
def scores(server, tmp_path_factory):
    folder = tmp_path_factory.mktemp("lm_eval")
    environment = {**os.environ, "OPENAI_API_KEY": server.secrets["alice"], "HF_HOME": str(folder / "hf")}
    environment |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
    result = subprocess.run(
        [sys.executable, SCRIPT, server.url, server.directory, folder],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr[-3000:]
    return json.loads(result.stdout.splitlines()[-1])["scores"]


@pytest.mark.parametrize("way", ["api, one by one", "api, eight at once"])
@pytest.mark.parametrize("task", ["tiny_choices", "tiny_rolling", "tiny_written"])
def test_scores_over_the_api_equal_local_ones(scores, way, task):
    expected, actual = (flatten(scores[name]["samples"][task]) for name in ("here", way))

    assert len(expected) >= 50
    assert [value for value in actual if not isinstance(value, float)] == [
        value for value in expected if not isinstance(value, float)
    ]
    numbers = [[value for value in values if isinstance(value, float)] for values in (expected, actual)]
    assert numbers[1] == pytest.approx(numbers[0], rel=1e-6)
    assert scores[way]["results"][task] == pytest.approx(scores["here"]["results"][task], rel=1e-6)


def test_the_scores_are_not_all_the_same(scores):
    values = [value for value in flatten(scores["here"]["samples"]["tiny_choices"]) if isinstance(value, float)]

    assert len(set(values)) > 90
