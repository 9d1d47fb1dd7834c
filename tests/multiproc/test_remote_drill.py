"""``phalanx attack`` with remote workers: it says how liars are started, and judges what it found."""

import json
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
