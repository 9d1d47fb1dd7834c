"""`phalanx watch` on the command line: state and alerts for scripts, the card, and what it refuses."""

import json
import signal
import subprocess
import sys
import urllib.request

import pytest

from phalanx.cli import run_command
from watched_run import VERDICT, event_row, write_run


def ask(capsys, *arguments):
    code = run_command(["watch", *map(str, arguments), "--json"])
    lines = capsys.readouterr().out.splitlines()
    return code, json.loads(lines[-1]) if lines else None


def test_a_run_that_is_well_is_told_and_ends_with_zero(tmp_path, capsys):
    run = write_run(tmp_path / "run", summary={"status": "completed"})
    quiet = tmp_path / "watch.toml"
    quiet.write_text("[alerts]\ndisk = { on = false }\nmemory = { on = false }\n")

    code, state = ask(capsys, run, "--once", "--config", quiet)

    assert (code, state["runs"][0]["status"], state["runs"][0]["num_rows"]) == (0, "completed", 120)


def test_a_run_that_was_attacked_ends_with_seven_and_says_what_to_do(tmp_path, capsys):
    run = write_run(tmp_path / "run", events=[event_row("verdict", VERDICT)])

    code = run_command(["watch", str(run), "--once"])

    out = capsys.readouterr().out
    assert code == 7
    assert "run: alert verdict of worker-1: 1, limit 0. A party was convicted" in out
    assert "phalanx peers RUN --revoke NAME" in out


def test_the_card_is_printed_and_written(tmp_path, capsys):
    run = write_run(tmp_path / "run", events=[event_row("verdict", VERDICT)], summary={"status": "completed"})

    code, answer = ask(capsys, run, "--card")

    card = answer["cards"][str(run)]
    assert (code, card["cause"], card["party"]) == (0, "convicted_party", "worker-1")
    assert (run / "post_mortem.md").read_text().startswith("# Post-mortem of `run`")
    assert card["files"] == [str(run / "post_mortem.md"), str(run / "post_mortem.html")]


@pytest.mark.parametrize("arguments", [("--once",), ("--card",), ()])
def test_a_directory_without_a_run_is_refused(tmp_path, capsys, arguments):
    code, answer = ask(capsys, tmp_path, *arguments)

    assert (code, answer["error"]["code"]) == (3, "PHX-I051")


def test_a_file_with_an_unknown_rule_is_refused_by_its_key(tmp_path, capsys):
    file = tmp_path / "watch.toml"
    file.write_text("[alerts.spikes]\non = true\n")

    code, answer = ask(capsys, write_run(tmp_path / "run"), "--once", "--config", file)

    assert code == 2
    assert "alerts.spikes" in answer["error"]["message"]


@pytest.mark.slow
def test_a_watcher_serves_page_and_metrics_until_it_is_told_to_end_and_writes_nothing(tmp_path):
    run = write_run(tmp_path / "run")
    before = {path: path.stat().st_mtime_ns for path in run.rglob("*")}
    command = [sys.executable, "-m", "phalanx", "watch", str(run), "--prometheus", "0", "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as popen:
        ready = json.loads(popen.stdout.readline())
        with urllib.request.urlopen(ready["metrics_url"], timeout=30) as answer:
            assert b'phalanx_step{run="run"} 119.0' in answer.read()
        popen.send_signal(signal.SIGINT)
        assert json.loads(popen.stdout.readline()) == {"event": "stopped"}
        assert popen.wait(60) == 0

    assert {path: path.stat().st_mtime_ns for path in run.rglob("*")} == before
