"""Metrics sinks of a real run that hang, die, or lose their server change no bit of it.

`PHALANX_MLFLOW_PYTHON` names the interpreter of an environment with the whole of mlflow, whose server is started here
(3.17.2 was tried); the client is that of the extra `mlflow`.
"""

import contextlib
import importlib.util
import json
import os
import signal
import socket
import subprocess
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from machine_patience import patience_s

pytestmark = pytest.mark.slow
SERVER_PYTHON = os.environ.get("PHALANX_MLFLOW_PYTHON", "")


def needs_mlflow(test):
    has_client = importlib.util.find_spec("mlflow") is not None
    test = pytest.mark.skipif(not has_client, reason="the extra `mlflow` is not installed")(test)
    has_server = Path(SERVER_PYTHON).is_file()
    return pytest.mark.skipif(not has_server, reason="PHALANX_MLFLOW_PYTHON names no environment")(test)


SINKS = """
import os, time


class Stuck:
    def begin(self, run):
        pass

    def scalars(self, values, step):
        time.sleep(1000)

    def end(self, status):
        time.sleep(1000)


class Dying(Stuck):
    def scalars(self, values, step):
        os._exit(9)
"""
EQUAL = ("final_weights_digest", "loss_first", "loss_last", "audits", "status", "validation_perplexity")


class MlflowServer:
    """A real tracking server over HTTP, with a database; every answer here is one of its own."""

    def __init__(self, folder: Path) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            self._port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{self._port}"
        store = ("--backend-store-uri", f"sqlite:///{folder / 'mlflow.db'}", "--default-artifact-root", str(folder))
        listen = ("--host", "127.0.0.1", "--port", str(self._port), "--workers", "1")
        quiet = {"MLFLOW_DISABLE_TELEMETRY": "true", "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
        with (folder / "server.log").open("wb") as log:
            self._popen = subprocess.Popen(
                (SERVER_PYTHON, "-m", "mlflow", "server", *listen, *store),
                stdout=log,
                stderr=log,
                process_group=0,
                env={**os.environ, **quiet},
            )

    def is_up(self) -> bool:
        assert self._popen.poll() is None
        with contextlib.suppress(OSError), urllib.request.urlopen(f"{self.url}/health", timeout=5) as answer:
            return answer.status == 200
        return False

    def send_signal(self, number: int) -> None:
        os.killpg(self._popen.pid, number)

    def ask(self, path: str, **question):
        request = urllib.request.Request(f"{self.url}/api/2.0/mlflow/{path}")
        if question:
            request.data = json.dumps(question).encode()
            request.add_header("content-type", "application/json")
        with urllib.request.urlopen(request, timeout=patience_s(60)) as answer:
            return json.load(answer)

    def runs(self):
        experiment = self.ask("experiments/get-by-name?experiment_name=shields")["experiment"]["experiment_id"]
        return self.ask("runs/search", experiment_ids=[experiment])["runs"]

    def curve(self, run: str, name: str):
        rows = self.ask(f"metrics/get-history?run_id={run}&metric_key={name}")["metrics"]
        return [(row["step"], row["value"]) for row in rows]

    def close(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self.send_signal(signal.SIGKILL)
        self._popen.wait()


@pytest.fixture
def server(place):
    folder = place.path / "mlflow"
    folder.mkdir()
    server = MlflowServer(folder)
    try:
        place.wait_until(server.is_up)
        yield server
    finally:
        server.close()


def track_to(place, *sections):
    place.run_file.write_text(place.run_file.read_text() + "\n".join(("", *sections)))


def check_equal(summary, clean):
    for key in EQUAL:
        assert summary[key] == clean[key], key


def test_sinks_that_hang_and_die_change_no_bit_of_a_run(place, clean):
    (place.path / "mine.py").write_text(SINKS)
    track_to(place, *(f'[[tracking]]\nkind = "mine.py:{name}"\nflush_s = 1.0\n' for name in ("Stuck", "Dying")))

    summary = place.finish()

    check_equal(summary, clean)
    stuck, dying = summary["tracking"]
    assert "had not taken everything after 1 s" in stuck["error"]
    assert (stuck["taken"], dying["taken"]) == (None, None)
    assert dying["error"]


@needs_mlflow
def test_an_mlflow_server_has_the_curves_of_a_run_and_of_its_continuation(place, clean, server):
    track_to(place, f'[[tracking]]\nkind = "mlflow"\nuri = "{server.url}"\nexperiment = "shields"\nflush_s = 600.0\n')

    summary = place.finish()

    check_equal(summary, clean)
    (line,) = summary["tracking"]
    assert (line["dropped"], line["error"]) == (0, None)
    (run,) = server.runs()
    assert run["info"]["status"] == "FINISHED"
    curve = server.curve(run["info"]["run_id"], "train/loss")
    rows = [json.loads(row) for row in (place.path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert curve == [(row["step"], pytest.approx(row["loss"])) for row in rows]
    parameters = {row["key"]: row["value"] for row in run["data"]["params"]}
    assert parameters["train.steps"] == "8"


@needs_mlflow
@pytest.mark.parametrize("case", ["stopped", "killed"])
def test_an_mlflow_server_that_hangs_or_dies_changes_no_bit_of_a_run(place, clean, server, case):
    track_to(place, f'[[tracking]]\nkind = "mlflow"\nuri = "{server.url}"\nexperiment = "shields"\nflush_s = 2.0\n')
    process = place.train()
    place.wait_for(process, lambda: place.has_line("metrics.jsonl", '"step": 1,'))

    server.send_signal(signal.SIGSTOP if case == "stopped" else signal.SIGKILL)

    assert process.wait() == 0, process.text
    summary = place.summary()
    check_equal(summary, clean)
    (line,) = summary["tracking"]
    assert line["taken"] is None
    assert "tracking: mlflow has ended, the run goes on" in process.text
