"""NVFlare's proof-of-concept kit carries the rounds of three site processes, to the bits of the loopback carrier."""

import contextlib
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest
from engine_rounds import SITES, assert_rounds_as_over_loopback, find_engine, phalanx


@pytest.fixture
def kit():
    """NVFlare's server and three clients as processes; a short path, for sockets."""
    program = find_engine("nvflare", "nvflare==2.9.0", "PHALANX_NVFLARE")
    home = Path(tempfile.mkdtemp(prefix="phx-"))
    folder = str(Path(program).parent)
    # the kit calls python by its name; nothing of this environment is to reach it
    environment = {"HOME": str(home), "PATH": f"{folder}:/usr/bin:/bin", "NVFLARE_POC_WORKSPACE": str(home / "kit")}

    def nvflare(*words: str) -> None:
        with (home / "nvflare.log").open("ab") as log:
            options = {"stdout": log, "stderr": log, "stdin": subprocess.DEVNULL, "timeout": 400}
            done = subprocess.run([program, *words], env=environment, check=False, **options)
        assert done.returncode == 0, (home / "nvflare.log").read_text()[-2000:]

    nvflare("poc", "prepare", "-c", *SITES, "--force")
    nvflare("poc", "start")
    yield home, nvflare
    with contextlib.suppress(AssertionError, subprocess.TimeoutExpired):
        nvflare("poc", "stop")
    shutil.rmtree(home, ignore_errors=True)


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_nvflare_carries_rounds_to_the_bits_of_the_loopback_carrier(kit, tmp_path):
    home, nvflare = kit

    def submit(run_file: Path) -> None:
        phalanx(
            *("nvflare-job", str(run_file), str(home / "job"), "--run-dir", str(home / "run")),
            *("--site-socket", f"{home}/sockets/{{site}}/s"),
        )
        nvflare("job", "submit", "-j", str(home / "job"))

    assert_rounds_as_over_loopback(home, tmp_path, submit)
