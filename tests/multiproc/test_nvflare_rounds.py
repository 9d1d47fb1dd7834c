"""NVFlare's proof-of-concept kit carries the rounds of three site processes, to the bits of the loopback carrier."""

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from real_runs import Place

from phalanx.cli import run
from tiny_run_file import tiny_run_file

SITES = ("north", "south", "east")
NVFLARE = shutil.which(os.environ.get("PHALANX_NVFLARE", "nvflare"))
SECTION = """
[federated]
sites = ["north", "south", "east"]
min_cohort = 3
local_steps = 2
deadline_s = 600.0
"""


@pytest.fixture
def kit():
    """NVFlare's server and three clients as processes; a short path, for sockets."""
    home = Path(tempfile.mkdtemp(prefix="phx-"))
    folder = str(Path(NVFLARE).parent)
    # the kit calls python by its name; nothing of this environment is to reach it
    environment = {"HOME": str(home), "PATH": f"{folder}:/usr/bin:/bin", "NVFLARE_POC_WORKSPACE": str(home / "kit")}

    def nvflare(*words: str) -> None:
        with (home / "nvflare.log").open("ab") as log:
            options = {"stdout": log, "stderr": log, "stdin": subprocess.DEVNULL, "timeout": 400}
            done = subprocess.run([NVFLARE, *words], env=environment, check=False, **options)
        assert done.returncode == 0, (home / "nvflare.log").read_text()[-2000:]

    nvflare("poc", "prepare", "-c", *SITES, "--force")
    nvflare("poc", "start")
    yield home, nvflare
    with contextlib.suppress(AssertionError, subprocess.TimeoutExpired):
        nvflare("poc", "stop")
    shutil.rmtree(home, ignore_errors=True)


def phalanx(*words: str) -> None:
    assert run(list(words)) == 0


def site_files(home: Path, run_file: Path) -> None:
    """Keys made at each site, certificates by request, and a file for each."""
    keys = home / "keys"
    phalanx("pki", "init", str(keys))
    phalanx("pki", "issue", str(keys), "owner")
    for site in SITES:
        own = home / site
        phalanx("pki", "request", site, "--dir", str(own))
        phalanx("pki", "sign", str(keys), str(own / "request.csr"), "--name", site)
        for name in (keys / site / "certificate.pem", keys / "authority.pem"):
            shutil.copy(name, own)
        words = {"run": run_file, "identity": own, "certificates": keys, "socket": home / "sockets" / site / "s"}
        (home / f"{site}.toml").write_text("".join(f'{name} = "{value}"\n' for name, value in words.items()))


@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.skipif(NVFLARE is None, reason="nvflare is not installed")
def test_nvflare_carries_rounds_to_the_bits_of_the_loopback_carrier(kit, tmp_path):
    home, nvflare = kit
    loop, run_file = tmp_path / "loop.toml", home / "run.toml"
    loop.write_text(tiny_run_file(SECTION, steps=3, validate_every=3))
    bridged = f'{SECTION}carrier = "bridge"\npki = "{home / "keys"}"\n'
    run_file.write_text(tiny_run_file(bridged, steps=3, validate_every=3))
    expected = Place(tmp_path, loop).finish(anew=True)
    site_files(home, run_file)
    place = Place(home, run_file)
    phalanx(
        *("nvflare-job", str(run_file), str(home / "job"), "--run-dir", str(home / "run")),
        *("--site-socket", f"{home}/sockets/{{site}}/s"),
    )

    owner = place.train(anew=True)
    sites = [place.start_program(sys.executable, "-m", "phalanx", "site", str(home / f"{site}.toml")) for site in SITES]
    try:
        place.wait_for(owner, (home / "run" / "bridge" / "owner.sock").exists)
        nvflare("job", "submit", "-j", str(home / "job"))
        assert owner.wait() == 0, owner.text
        ended = [site.wait() for site in sites]
    finally:
        for process in (owner, *sites):
            process.kill()

    assert place.summary()["final_weights_digest"] == expected["final_weights_digest"]
    assert ended == [0, 0, 0]
