"""Commands of phalanx as real processes, forked from one server that has imported what they need.

``python -m forked_commands -`` is the server; a request's file names what to run, as `ForkedCommands` writes it.
"""

import itertools
import json
import os
import signal
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

import pytest

from phalanx.pipeline.processes.fork_server import await_request
from phalanx.pipeline.processes.fork_server_client import ForkedWorker, ForkServer, fork_here, start_fork_server

_MODULES = (
    "forked_workers",
    "phalanx.cli.app",
    "phalanx.lab.attacks.worker",
    "phalanx.report",
    "phalanx.train.entry",
    "phalanx.train.sessions.domain",
    "phalanx.train.sessions.split",
    "transformers.models.gpt2.modeling_gpt2",
)
_NO_MORE: Mapping[str, str] = MappingProxyType({})


class _Server(ForkServer):
    """A fork server that several threads listen to, as those of `LocalRanks` do."""

    def __init__(self, server: ForkServer) -> None:
        self.__dict__ = server.__dict__
        self._listening = threading.Lock()

    def read_events(self, timeout_s: float) -> None:
        """As `ForkServer.read_events`, in short turns."""
        with self._listening:
            super().read_events(min(timeout_s, 0.05))


class ForkedCommand:
    """One command, with the methods of `subprocess.Popen` that tests need."""

    def __init__(self, server: ForkServer, worker: ForkedWorker) -> None:
        self._worker = worker
        while (pid := worker.pid) is None and worker.poll() is None:
            server.read_events(1.0)
        self.pid = pid or 0

    @property
    def returncode(self) -> int | None:
        return self.poll()

    def poll(self) -> int | None:
        return self._worker.poll()

    def wait(self, timeout: float) -> int:
        return self._worker.wait(timeout)

    def kill(self) -> None:
        self._worker.kill()

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)


class ForkedCommands:
    """Starts commands of the modules ``phalanx`` and ``phalanx.lab.attacks.worker`` without their imports."""

    def __init__(self, directory: Path, server: ForkServer | None = None) -> None:
        self._directory = directory
        self._numbers = itertools.count()
        self._server = server

    def start(
        self, module: str, arguments: Sequence[str], output: Path, environment: Mapping[str, str] = _NO_MORE
    ) -> ForkedCommand:
        """Start one command with the environment of this process, and more of it; it is a group of its own."""
        worker = self.start_worker(module, arguments, output, environment)
        return ForkedCommand(self._opened(), worker)

    def start_worker(
        self, module: str, arguments: Sequence[str], output: Path, environment: Mapping[str, str] = _NO_MORE
    ) -> ForkedWorker:
        """Start one command without waiting until it runs."""
        name = f"command-{next(self._numbers)}"
        request = self._directory / f"{name}.json"
        known = {**os.environ, **environment}
        request.write_text(json.dumps([module, list(arguments), known, str(Path.cwd())]))
        return self._opened().start_worker(name, request, output)

    def _opened(self) -> ForkServer:
        if self._server is None or not self._server.is_open:
            self.close()
            paths = [str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
            with pytest.MonkeyPatch.context() as patch:
                patch.setenv("PYTHONPATH", os.pathsep.join(filter(None, paths)))
                log = self._directory / "forked_commands.log"
                self._server = _Server(start_fork_server(("forked_commands",), log, 1, _MODULES))
        return self._server

    def close(self) -> None:
        if self._server is not None:
            self._server.close()


def _serve(request: Path) -> int:
    module, arguments, environment, directory = json.loads(request.read_text())
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(directory)
    if "worker" in (arguments[0], module.rpartition(".")[2]):
        # the name that forked workers have, by which tests find them
        Path("/proc/self/comm").write_text(Path(arguments[-1]).stem)
    if module == "phalanx":
        return _run(request, arguments)
    from phalanx.lab.attacks.worker import main

    return main(arguments)


def _run(request: Path, arguments: Sequence[str]) -> int:
    """Run a command; its attackers are forked from this process as it is now."""
    from forked_workers import forked_workers
    from phalanx.cli import run_command

    server = fork_here(("forked_commands",), 1, _serve) if any("attack." in word for word in arguments) else None
    if server is None:
        return run_command(arguments)
    directory = request.with_suffix("")
    directory.mkdir()
    with forked_workers(ForkedCommands(directory, server)):
        return run_command(arguments)


if __name__ == "__main__":
    from phalanx.cli.outcome import build_command

    # every command that is forked from here finds its tree built
    build_command()
    asked = await_request(os.environ["PHALANX_PRELOAD"].split(","))
    sys.exit(0 if asked is None else _serve(asked))
