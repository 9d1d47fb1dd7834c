"""The slow tests, with plain types checked at run time as well, can be collected; CI lists no more than failures."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
def test_slow_tests_are_collected_with_all_types_checked():
    call = [sys.executable, "-m", "pytest", "-m", "slow", "--collect-only", "-q", "-p", "no:cacheprovider"]

    found = subprocess.run(
        [*call, "tests/stage_group/test_party_layouts.py"],
        cwd=ROOT,
        env={**os.environ, "PHALANX_TEST_TYPES": "all"},
        capture_output=True,
        text=True,
        check=False,
    )

    assert found.returncode == 0, found.stdout[-3000:]
