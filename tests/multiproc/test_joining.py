"""Machines join by a token, and come back by themselves when their owner does."""

import json
import os
import re
import signal
import socket

import pytest
from real_runs import events

from phalanx.security.crypto import load_identity

HASTY = "keepalive_s = 1.0\ntimeout_s = 8.0\n"


@pytest.fixture
def remote_place(place):
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    remote = f"[pipeline]\npki = '{place.path / 'keys'}'\nremote_workers = ['north', 'south']\n"
    text = place.run_file.read_text().replace("[pipeline]\n", remote)
    place.run_file.write_text(f"{text}\n[pipeline.transport]\nport = {port}\nkeepalive_s = 1.0\n")
    return place


def invited(place, *names):
    """The endpoint of an owner that has invited parties, and the tokens that it printed."""
    chosen = [word for name in names for word in ("--name", name)]
    owner = place.start("invite", str(place.run_file), *chosen, "--host", "127.0.0.1", anew=True)
    place.wait_for(owner, lambda: "waiting for all to join" in owner.text)
    return owner, re.findall(r"phalanx join (\S+)", owner.text)


@pytest.mark.slow
def test_a_killed_owner_that_is_resumed_finds_its_workers_back_though_nobody_touched_them(remote_place, clean):
    place, names = remote_place, ("north", "south")
    owner, tokens = invited(place, *names)
    commands = [("join", token, "--dir", str(place.path / name)) for name, token in zip(names, tokens, strict=True)]
    for command, name in zip(commands, names, strict=True):
        prepared = place.start(*command, "--port", "0", "--no-serve", anew=True)
        assert prepared.wait() == 0, prepared.text
        assert "your task: serve or shadow some of 4 stages" in prepared.text
        with (place.path / name / "worker.toml").open("a") as file:
            file.write(HASTY)
    assert owner.wait() == 0, owner.text
    assert load_identity(place.path / "north").name == "north"
    assert not list((place.path / "keys").glob("[ns]o*th/*.key"))

    workers = [place.start(*command, anew=True) for command in commands]
    settings = ("checkpoint.journal=true", "checkpoint.every=0")
    killed = place.train(*settings)
    place.wait_for(killed, lambda: place.has_line("metrics.jsonl", '"step": 3,'))
    killed.kill()
    summary = place.finish(*settings, resume=True)

    assert [worker.wait() for worker in workers] == [0, 0], [worker.text for worker in workers]
    assert summary["final_weights_digest"] == clean["final_weights_digest"]
    assert summary["resumed_from"] >= 3
    for name, worker in zip(names, workers, strict=True):
        for said in (f"as {name}, run", "admitted to a run of 4 stages", "serves stage", "again in 1 s", "is complete"):
            assert said in worker.text, worker.text
        assert f"{name} has called" in killed.text
        assert "Traceback" not in worker.text


@pytest.mark.slow
def test_a_machine_that_comes_for_good_gets_a_stage_that_is_cut_for_it(remote_place):
    place, names = remote_place, ("north", "south", "east")
    text = place.run_file.read_text()
    place.run_file.write_text(text.replace("[pipeline]\n", "[pipeline]\nmay_join = ['east']\n"))
    owner, tokens = invited(place, *names)
    commands = {
        name: ("join", token, "--dir", str(place.path / name), "--port", "0")
        for name, token in zip(names, tokens, strict=True)
    }
    for name, command in commands.items():
        prepared = place.start(*command, "--no-serve", anew=True)
        assert prepared.wait() == 0, prepared.text
        with (place.path / name / "worker.toml").open("a") as file:
            file.write(HASTY)
    assert owner.wait() == 0, owner.text
    settings = ("model.architecture.n_layer=5", "train.steps=60", "train.validate_every=5", "checkpoint.journal=true")
    local = [word for key in ("pki", "remote_workers", "may_join") for word in ("--unset", f"pipeline.{key}")]
    clean = place.train(*settings, "guard.mode='off'", run_dir="clean", options=local)
    assert clean.wait() == 0, clean.text

    workers = [place.start(*commands[name]) for name in ("north", "south")]
    run = place.train(*settings, options=("--recut",))
    place.wait_for(run, lambda: place.has_line("metrics.jsonl", '"step": 3,'))
    workers.append(place.start(*commands["east"]))

    assert run.wait() == 0, run.text
    assert [worker.wait() for worker in workers] == [0, 0, 0], [worker.text for worker in workers]
    assert "3 workers for 2 stages since step " in run.text
    ((_, changed),) = events(place, "config_changed")
    assert changed["keys"]["pipeline.stages"] == [4, 5]
    assert changed["keys"]["pipeline.remote_workers"][1] == ["north", "south", "east"]
    assert all("admitted to a run of 5 stages" in worker.text for worker in workers)
    assert place.summary()["final_weights_digest"] == place.summary("clean")["final_weights_digest"]


@pytest.mark.slow
def test_who_joins_with_a_token_that_was_used_by_another_is_told_so_and_may_be_told_to_leave(remote_place):
    place = remote_place
    owner, (token, _) = invited(place, "north", "south")
    thief = place.start("join", token, "--dir", str(place.path / "thief"), "--port", "0", anew=True)
    place.wait_for(thief, lambda: "looking for the owner" in thief.text)

    honest = place.start("join", token, "--dir", str(place.path / "honest"), anew=True)

    assert honest.wait() == 4
    assert "was used already, with other keys than these" in honest.text
    assert "a caller at 127.0.0.1 is refused: the token of north was used already" in owner.text
    os.kill(thief.popen.pid, signal.SIGTERM)
    assert thief.wait() == 0, thief.text
    assert "stopped while no run was under way" in thief.text


def told_of(place):
    """What `phalanx peers --json` says of each party."""
    shown = place.start("peers", str(place.path / "run"), "--json")
    assert shown.wait() == 0, shown.text
    # the words for people are on stderr, which this process has in the same place
    answer = json.loads(next(line for line in reversed(shown.text.splitlines()) if line.startswith("{")))
    return {row["name"]: row for row in answer["parties"]}


@pytest.mark.slow
def test_a_revoked_worker_is_dropped_and_stays_out_with_its_old_certificate_also_after_a_resume(remote_place, clean):
    place = remote_place
    owner, tokens = invited(place, "north", "south")
    homes = {name: place.path / name for name in ("north", "south")}
    for token, home in zip(tokens, homes.values(), strict=True):
        assert place.start("join", token, "--dir", str(home), "--port", "0", "--no-serve", anew=True).wait() == 0
    assert owner.wait() == 0, owner.text
    settings = ("checkpoint.journal=true", "checkpoint.every=0")
    workers = {
        name: place.start("join", token, "--dir", str(homes[name])) for name, token in zip(homes, tokens, strict=True)
    }
    first = place.train(*settings)
    place.wait_for(first, lambda: place.has_line("metrics.jsonl", '"step": 1,'))
    # the run stands still, so that it does not end before the owner has decided
    os.kill(first.popen.pid, signal.SIGSTOP)
    assert set(told_of(place)) == {"north", "south"}

    revoked = place.start("peers", str(place.path / "run"), "--revoke", "north", "--reason", "the keys were copied")
    assert revoked.wait() == 0, revoked.text
    assert "the certificate of north is revoked" in revoked.text
    os.kill(first.popen.pid, signal.SIGCONT)
    place.wait_for(first, lambda: place.has_line("events.jsonl", '"kind":"takeover"', after='"kind":"revoked"'))
    first.kill()
    # north may have lost its owner before it was told; the next one waits for south until north has called again
    os.kill(workers["south"].popen.pid, signal.SIGSTOP)
    back = place.start("worker", str(homes["north"] / "worker.toml"))
    resumed = place.train(*settings, resume=True)
    assert (back.wait(), workers["north"].wait()) == (4, 4), workers["north"].text
    os.kill(workers["south"].popen.pid, signal.SIGCONT)
    assert resumed.wait() == 0, resumed.text
    summary = place.summary()

    assert (summary["status"], summary["lost"], summary["evicted"], summary["verdicts"]) == (
        "completed",
        ["north"],
        [],
        [],
    )
    assert summary["final_weights_digest"] == clean["final_weights_digest"]
    assert workers["south"].wait() == 0, workers["south"].text
    for process in (back, workers["north"]):
        assert "the certificate of north was revoked by the owner" in process.text
    log = (place.path / "run" / "events.jsonl").read_text()
    assert log.count('"kind":"revoked"') == 1
    assert '"reason":"the keys were copied"' in log
    rows = told_of(place)
    assert (rows["north"]["state"], rows["north"]["note"]) == ("revoked", "the keys were copied")
    assert rows["south"]["state"] == "certified"
    assert rows["south"]["steps"] >= 1
    verified = place.start("audit", "verify", str(place.path / "run"))
    assert verified.wait() == 0, verified.text
