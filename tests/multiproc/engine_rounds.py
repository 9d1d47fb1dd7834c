"""Rounds of three `phalanx site` processes over a real engine, beside the same over the loopback carrier."""

import shutil
import sys
from collections.abc import Callable
from pathlib import Path

from real_runs import Place

from phalanx.cli import run_command
from tiny_run_file import tiny_run_file

SITES = ("north", "south", "east")
SECTION = """
[federated]
sites = ["north", "south", "east"]
min_cohort = 3
local_steps = 2
deadline_s = 600.0
"""


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
