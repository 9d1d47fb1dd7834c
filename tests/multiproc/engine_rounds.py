"""Rounds of three `phalanx site` processes over a real engine, beside the same over the loopback carrier."""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from real_runs import Place

from phalanx.cli import run_command
from tiny_run_file import tiny_run_file

ENGINES = "PHALANX_ENGINES"
"""Variable with a folder in which tests may make an environment for an engine; CI sets it."""
SITES = ("north", "south", "east")
SECTION = """
[federated]
sites = ["north", "south", "east"]
min_cohort = 3
local_steps = 2
deadline_s = 600.0
"""


def find_engine(program: str, requirement: str, variable: str) -> str:
    """Return the path of an engine's program, or skip the test.

    It is named by a variable, or is on the path, or is installed where CI lets tests make environments: each in one of
    its own, since the engines' pins clash with ours.
    """
    if path := shutil.which(os.environ.get(variable, program)):
        return path
    if ENGINES in os.environ:
        home = Path(os.environ[ENGINES]) / requirement
        if not (home / "bin" / program).exists():
            commands = ((sys.executable, "-m", "venv", home), (home / "bin" / "pip", "install", "-q", requirement))
            for command in commands:
                done = subprocess.run(command, check=False, capture_output=True, text=True, stdin=subprocess.DEVNULL)
                if done.returncode:
                    shutil.rmtree(home, ignore_errors=True)
                    break
        if (home / "bin" / program).exists():
            return str(home / "bin" / program)
    pytest.skip(f"{program} is not installed")


def phalanx(*words: str) -> None:
    assert run_command(list(words)) == 0


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


def assert_rounds_as_over_loopback(home: Path, tmp_path: Path, submit: Callable[[Path], None]) -> None:
    """Begin an owner and its sites, have the engine carry for them, and compare the weights in the end."""
    loop, run_file = tmp_path / "loop.toml", home / "run.toml"
    loop.write_text(tiny_run_file(SECTION, steps=3, validate_every=3))
    bridged = f'{SECTION}carrier = "bridge"\npki = "{home / "keys"}"\n'
    run_file.write_text(tiny_run_file(bridged, steps=3, validate_every=3))
    expected = Place(tmp_path, loop).finish(anew=True)
    site_files(home, run_file)
    place = Place(home, run_file)

    owner = place.train(anew=True)
    sites = [place.start_program(sys.executable, "-m", "phalanx", "site", str(home / f"{site}.toml")) for site in SITES]
    try:
        place.wait_for(owner, (home / "run" / "bridge" / "owner.sock").exists)
        submit(run_file)
        assert owner.wait() == 0, owner.text
        ended = [site.wait() for site in sites]
    finally:
        for process in (owner, *sites):
            process.kill()

    assert place.summary()["final_weights_digest"] == expected["final_weights_digest"]
    assert ended == [0, 0, 0]
