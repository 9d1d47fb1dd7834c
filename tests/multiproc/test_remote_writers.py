"""Workers of other machines write a run's texts: joined by a token, back by themselves, out for good after a lie."""

import re
import sys

import pytest
from real_runs import events, free_port, make_place
from test_rollout_runs import learned, of, written

from phalanx.rollouts.evidence import explain_any_evidence
from phalanx.telemetry import read_metrics

HASTY = "keepalive_s = 1.0\ntimeout_s = 8.0\n"
ROLLOUTS = """
[rollouts]
remote_workers = ["north", "south"]
pki = "PLACE/keys"
transport = {{ port = {port}, keepalive_s = 1.0 }}

[rollouts.check]
rate = 1.0
"""


@pytest.fixture
def place_of_writers(place):
    written(place)
    text = place.run_file.read_text() + ROLLOUTS.format(port=free_port()).replace("PLACE", str(place.path))
    place.run_file.write_text(text)
    return place


def join_writers(place, *names):
    """Invite workers and have them make keys and files; returns each one's command to serve."""
    chosen = [word for name in names for word in ("--name", name)]
    owner = place.start("invite", str(place.run_file), *chosen, "--host", "127.0.0.1", anew=True)
    place.wait_for(owner, lambda: "waiting for all to join" in owner.text)
    tokens = re.findall(r"phalanx join (\S+)", owner.text)
    commands = {
        name: ("join", token, "--writer", "--dir", str(place.path / name))
        for name, token in zip(names, tokens, strict=True)
    }
    for name, command in commands.items():
        prepared = place.start(*command, "--port", "0", "--no-serve", anew=True)
        assert prepared.wait() == 0, prepared.text
        assert "your task: write texts for 10 steps" in prepared.text
        with (place.path / name / "writer.toml").open("a") as file:
            file.write(HASTY)
    assert owner.wait() == 0, owner.text
    return commands


@pytest.mark.slow
def test_a_liar_among_remote_writers_is_named_and_stays_out_of_the_resumed_run(place_of_writers, tmp_path_factory):
    place = place_of_writers
    commands = join_writers(place, "north", "south")
    honest = place.start(*commands["north"], anew=True)
    lies = ("-m", "phalanx.lab.attacks.rollouts.worker", "best_of_several", str(place.path / "south" / "writer.toml"))
    liar = place.start_program(sys.executable, *lies)
    killed = place.train("checkpoint.journal=true")
    place.wait_for(killed, lambda: place.has_line("metrics.jsonl", '"step": 4,'))
    killed.kill()
    summary = place.finish("checkpoint.journal=true", resume=True)

    assert honest.wait() == 0, honest.text
    assert "again in 1 s" in honest.text
    assert "wrote 8 texts" in honest.text
    (verdict,) = [body for _, body in events(place, "rollout_verdict")]
    assert (verdict["party"], verdict["offence"]) == ("south", "draw")
    facts = explain_any_evidence(place.path / "run" / verdict["evidence"], place.path / "keys" / "authority.pem", None)
    assert facts["conclusion"].startswith("holds: south")
    assert summary["rollouts"] == {"convicted": {}, "left_out": {}, "unanswered": {}}
    first, second = [body["workers"] for _, body in events(place, "rollout_writers")]
    assert (first, second) == (["north", "south"], ["north"])
    assert "Traceback" not in liar.text + honest.text

    alone = written(make_place(tmp_path_factory.mktemp("alone")))
    plain = alone.finish()
    assert summary["final_weights_digest"] == plain["final_weights_digest"]
    assert learned(place) == of(read_metrics(alone.path / "run" / "metrics.jsonl"))
