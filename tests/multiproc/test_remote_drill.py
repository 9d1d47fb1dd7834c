"""``phalanx attack`` with remote workers: it says how liars are started, and judges what it found."""

import json
import os
import re
import signal
import socket
import sys
import tomllib

import pytest

HOW = "south with `python -m phalanx.lab.attacks.worker"
PARTIES = ("owner", "north", "south")


@pytest.mark.slow
def test_a_drill_with_remote_workers_says_what_to_write_and_finds_who_does_so(place):
    keys = place.path / "keys"
    for arguments in (["init"], *(["issue", name] for name in PARTIES)):
        process = place.start("pki", arguments[0], str(keys), *arguments[1:])
        assert process.wait() == 0, process.text
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    settings = (
        "pipeline.remote_workers=['north','south']",
        f"pipeline.pki='{keys}'",
        f"pipeline.transport.port={port}",
    )
    options = [word for setting in settings for word in ("--set", setting)]
    drill = ("--attack", "scale:stages=[2]:strength=3:direction=forward", "--steps", "6", "--from-step", "2", "--json")

    def start_worker(name):
        path = place.path / f"{name}.toml"
        path.write_text(f"identity = '{keys / name}'\nowner = '127.0.0.1:{port}'\n")
        return place.start("worker", str(path))

    owner = place.start("attack", str(place.run_file), *options, *drill, "--run-dir", str(place.path / "drill"))
    place.wait_for(owner, lambda: "nobody attacks" in owner.text)
    honest = [start_worker(name) for name in ("north", "south")]
    place.wait_for(owner, lambda: HOW in owner.text and "listening" in owner.text.partition(HOW)[2])
    assert [worker.wait() for worker in honest] == [0, 0], [worker.text for worker in honest]
    told = owner.text.partition(HOW)[2].partition("\n")[2].partition("preparing")[0]
    assert tomllib.loads(told)["attackers"]["south"]["strength"] == 3.0
    plan = place.path / "attack.toml"
    plan.write_text(told)
    honest_again = start_worker("north")
    place.start_program(sys.executable, "-m", "phalanx.lab.attacks.worker", str(plan), str(place.path / "south.toml"))

    assert owner.wait() == 0, owner.text
    honest_again.wait()

    clean, attacked = json.loads(owner.text[owner.text.rindex('{"run"') :])["rows"]
    assert (clean["attack"], clean["false_accusations"]) == ("none", 0)
    assert (attacked["attack"], attacked["blamed"], attacked["planned_steps"]) == ("scale@2", ["south"], 4)
    assert (attacked["detected"], attacked["attacked_steps"], attacked["steps_to_detection"]) == (True, None, 0)
    assert attacked["bit_identical"] is True


@pytest.mark.slow
def test_a_worker_that_joined_with_stay_serves_every_run_of_a_drill_and_leaves_when_told(place):
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    remote = f"[pipeline]\npki = '{place.path / 'keys'}'\nremote_workers = ['north', 'south']\n"
    text = place.run_file.read_text().replace("[pipeline]\n", remote)
    place.run_file.write_text(f"{text}\n[pipeline.transport]\nport = {port}\nkeepalive_s = 1.0\n")
    invited = place.start(
        *("invite", str(place.run_file), "--name", "north", "--name", "south", "--host", "127.0.0.1"), anew=True
    )
    place.wait_for(invited, lambda: "waiting for all to join" in invited.text)
    of_north, of_south = re.findall(r"phalanx join (\S+)", invited.text)
    north = place.start("join", of_north, "--dir", str(place.path / "north"), "--port", "0", "--stay", anew=True)
    joined = ("join", of_south, "--dir", str(place.path / "south"), "--port", "0")
    prepared = place.start(*joined, "--no-serve", anew=True)
    assert (prepared.wait(), invited.wait()) == (0, 0), prepared.text + invited.text
    south = place.start(*joined, anew=True)
    drill = ("--attack", "scale:stages=[2]:strength=3:direction=forward", "--steps", "6", "--from-step", "2", "--json")

    owner = place.start("attack", str(place.run_file), *drill, "--run-dir", str(place.path / "drill"))
    place.wait_for(owner, lambda: HOW in owner.text and "listening" in owner.text.partition(HOW)[2])
    # who does not stay ends with the first run, and who stays waits for the next one
    assert south.wait() == 0, south.text
    plan = place.path / "attack.toml"
    plan.write_text(owner.text.partition(HOW)[2].partition("\n")[2].partition("preparing")[0])
    liar = ("-m", "phalanx.lab.attacks.worker", str(plan), str(place.path / "south" / "worker.toml"))
    place.start_program(sys.executable, *liar)

    assert owner.wait() == 0, owner.text
    clean, attacked = json.loads(owner.text[owner.text.rindex('{"run"') :])["rows"]
    assert (clean["attack"], clean["false_accusations"]) == ("none", 0)
    assert (attacked["blamed"], attacked["detected"], attacked["bit_identical"]) == (["south"], True, True)
    waiting = "waiting for the next run of this owner; Ctrl-C stops"
    place.wait_for(north, lambda: north.text.count(waiting) == 2)
    os.kill(north.popen.pid, signal.SIGTERM)
    assert north.wait() == 0, north.text
    assert north.text.count("is complete") == 2 and "Traceback" not in north.text
