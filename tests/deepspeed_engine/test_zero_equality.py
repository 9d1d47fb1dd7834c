"""DeepSpeed's ranks give the loss curve of one process, wherever they keep their shares."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from zero_cases import CASES, STEPS

from machine_patience import patience_s
from phalanx.parallel.deepspeed.extra import why_no_extra

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
PATIENCE_S = 1500.0
"""Of all cases, kernels that are compiled first among them: minutes of a processor for a machine's first run."""
PATIENT_S = 7200
LACKING = why_no_extra()
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(PATIENT_S),
    pytest.mark.xdist_group("cases of deepspeed"),
    pytest.mark.skipif(LACKING is not None, reason=str(LACKING)),
]


@pytest.fixture(scope="module")
def played(tmp_path_factory):
    """Where the results of all cases are."""
    home = tmp_path_factory.mktemp("played")
    paths = [ROOT / "src", ROOT / "tests" / "parallel", HERE, *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(map(str, paths))}
    command = [sys.executable, str(HERE / "zero_player.py"), str(home)]
    with (home / "log").open("wb") as log:
        subprocess.run(command, check=True, env=environment, timeout=patience_s(PATIENCE_S), stdout=log, stderr=log)
    return home


def result_of(home, case):
    texts = [path.read_text() for path in sorted(home.glob(f"result-{CASES.index(case)}-*.json"))]
    errors = [text for text in texts if "error" in text]
    assert not errors, errors[0].replace("\\n", "\n")
    result = json.loads(texts[0])
    if "lacking" in result:
        pytest.skip(result["lacking"])
    return result


@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_deepspeeds_ranks_give_the_curve_of_one_process(played, case):
    result = result_of(played, case)
    found = result["curve"]
    expected = json.loads((played / "references.json").read_text())[case.reference][-len(found) :]

    loss, norm = (
        max(abs(mine[n] - theirs[n]) / abs(theirs[n]) for mine, theirs in zip(found, expected, strict=True))
        for n in (0, 1)
    )

    assert len(found) == (STEPS // 2 if case.loads else STEPS)
    assert loss <= case.allowed
    # what is lossy on purpose must differ, or it does nothing
    assert norm <= 1e-4 if case.allowed == 1e-5 else loss > 1e-7
    # what is said to be on disk was there
    assert all(any(part in name for name in result["files"]) for part in case.files)
    assert bool(result["files"]) == bool(case.files)
    assert result["kinds"] == ["exp_avg", "exp_avg_sq", "weight"]
    if not case.loads and case.adapted is None:
        assert found[-1][0] < 0.996 * found[0][0]


@pytest.mark.parametrize("case", [case for case in CASES if case.engine == "deepspeed"], ids=lambda case: case.name)
def test_a_step_that_is_not_finite_on_one_rank_changes_nothing_on_any(played, case):
    """Before the third step from the end one was made that failed; the curve shows that nothing was updated."""
    assert "loss nan" in result_of(played, case)["failed"]


def test_ranks_leave_nothing_on_the_disk(played):
    assert json.loads((played / "left.json").read_text()) == []
