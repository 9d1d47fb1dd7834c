"""Flower's SuperLink and SuperNodes carry the rounds of three site processes, to the bits of the loopback carrier."""

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import tempfile
from pathlib import Path

import pytest
from engine_rounds import SITES, assert_rounds_as_over_loopback, find_engine, phalanx

_CONFIG = '[superlink]\ndefault = "here"\n[superlink.here]\naddress = "127.0.0.1:{port}"\ninsecure = true\n'


class Deployment:
    """A SuperLink and a SuperNode for each site, as processes; a short path, for sockets."""

    def __init__(self) -> None:
        self.program = find_engine("flwr", "flwr==1.41.0", "PHALANX_FLWR")
        self.home = Path(tempfile.mkdtemp(prefix="phx-"))
        folder = str(Path(self.program).parent)
        # nothing of this environment is to reach Flower's
        self.environment = {"HOME": str(self.home), "PATH": f"{folder}:/usr/bin:/bin", "FLWR_TELEMETRY_ENABLED": "0"}
        self.environment["FLWR_HOME"] = str(self.home / "flwr")
        self.started: list[subprocess.Popen[bytes]] = []
        port, *nodes = (free_port() for _ in range(1 + len(SITES)))
        (self.home / "flwr").mkdir()
        (self.home / "flwr" / "config.toml").write_text(_CONFIG.format(port=port))
        self.start("flower-superlink", "--insecure", "--disable-runtime-dependency-installation", "--port", str(port))
        for site, own in zip(SITES, nodes, strict=True):
            self.start(
                *("flower-supernode", "--insecure", "--superlink", f"127.0.0.1:{port}", "--port", str(own)),
                *("--node-config", f'site="{site}"'),
            )

    def start(self, program: str, *words: str) -> None:
        with (self.home / f"{len(self.started)}.log").open("wb") as log:
            command = [str(Path(self.program).parent / program), *words]
            options = {"stdout": log, "stderr": log, "stdin": subprocess.DEVNULL, "start_new_session": True}
            self.started.append(subprocess.Popen(command, env=self.environment, cwd=self.home, **options))

    def submit(self, run_file: Path) -> None:
        app = self.home / "app"
        phalanx(
            *("flower-app", str(run_file), str(app), "--run-dir", str(self.home / "run")),
            *("--site-socket", f"{self.home}/sockets/{{site}}/s"),
        )
        done = subprocess.run(
            [self.program, "run", str(app), "here"], env=self.environment, check=False, capture_output=True, timeout=400
        )
        assert done.returncode == 0, done.stdout.decode() + done.stderr.decode()

    def close(self) -> None:
        for number in (signal.SIGTERM, signal.SIGKILL):
            for one in self.started:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(one.pid, number)
            for one in self.started:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    one.wait(10)
        shutil.rmtree(self.home, ignore_errors=True)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as found:
        return found.getsockname()[1]


@pytest.fixture
def deployment():
    made = Deployment()
    yield made
    made.close()


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_flower_carries_rounds_to_the_bits_of_the_loopback_carrier(deployment, tmp_path):
    assert_rounds_as_over_loopback(deployment.home, tmp_path, deployment.submit)
