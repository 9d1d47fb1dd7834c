"""The processes of tier "process": each in a sandbox that reaches its own directory, the model and one pipe."""

import contextlib
import socket
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Self

from phalanx.config import dump_toml
from phalanx.errors import IsolationError, PeerLostError
from phalanx.security.crypto import make_private_directory
from phalanx.security.isolation import IsolatedProcess, Program, Sandbox, start_isolated
from phalanx.split.masked.remote import PipedWorkerConfig
from phalanx.split.processes.local_enclave import EnclaveConfig

_SECONDS_TO_END = 5.0
_SECONDS_TO_CLOSE = 60.0


class ConfinedEnclave:
    """A child process behind namespaces, Landlock and seccomp; a context manager that ends it.

    Args:
        end: Its end of the pipe; handed over.
        workers: Its ends of pipes to masked workers; handed over.
    """

    def __init__(
        self,
        directory: Path,
        config: EnclaveConfig,
        end: socket.socket,
        workers: Mapping[str, socket.socket] | None = None,
    ) -> None:
        self._directory, self._config, self._end = directory, config, end
        self._workers = dict(workers or {})
        self._process: IsolatedProcess | None = None

    def start(self) -> None:
        """Start it, and return once it is confined; its output goes to the starter's."""
        self._directory.mkdir(parents=True, exist_ok=True)
        path, enclave_directory = self._directory / "enclave.toml", Path(self._config.directory)
        path.write_text(dump_toml(self._config), encoding="utf-8")
        make_private_directory(enclave_directory)
        model = self._config.model.path
        readable = (str(path.resolve()), self._config.identity, self._config.cache, *((model,) if model else ()))
        handed_over = (self._end, *self._workers.values())
        named = tuple(f"{name}={pipe_end.fileno()}" for name, pipe_end in self._workers.items())
        program = Program(
            "phalanx.split",
            (str(path.resolve()), str(self._end.fileno()), *named),
            tuple(pipe_end.fileno() for pipe_end in handed_over),
            {
                "OMP_NUM_THREADS": str(self._config.threads),
                "HOME": str(enclave_directory),
                "TMPDIR": str(enclave_directory),
            },
        )
        self._process = start_isolated(program, Sandbox(readable, (str(enclave_directory),)), _SECONDS_TO_CLOSE)
        # the enclave has them now, and must see this side close
        for pipe_end in handed_over:
            pipe_end.close()

    def poll(self) -> int | None:
        """Its exit code; None while it runs."""
        return None if self._process is None else self._process.poll()

    def check_running(self) -> None:
        """Return while it runs."""
        if (code := self.poll()) is None:
            return
        how = f"signal {code - 128}" if code > 128 else f"exit code {code}"
        raise PeerLostError(f"the enclave ended with {how}; its last lines are above; continue with --resume")

    def close(self) -> None:
        """It was told to end: give it a moment, then end it."""
        if self._process is not None:
            with contextlib.suppress(IsolationError):
                self._process.wait(_SECONDS_TO_END)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._end.close()
        if self._process is not None:
            self._process.close()


@contextlib.contextmanager
def confined_workers(
    directory: Path, configs: Mapping[str, PipedWorkerConfig], threads: int
) -> Iterator[dict[str, socket.socket]]:
    """Start workers, give the enclave's end of each one's pipe, and end them whatever happens.

    Args:
        threads: Threads of tensor kernels in each worker.
    """
    directory.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as stack:
        ends: dict[str, socket.socket] = {}
        for name, config in configs.items():
            near, far = socket.socketpair()
            stack.callback(near.close)
            ends[name] = near
            stack.callback(_start_worker(directory / f"{name}.toml", config, far, threads).close)
        yield ends


def _start_worker(path: Path, config: PipedWorkerConfig, end: socket.socket, threads: int) -> IsolatedProcess:
    path.write_text(dump_toml(config), encoding="utf-8")
    program = Program(
        "phalanx.split.masked",
        (str(path.resolve()), str(end.fileno())),
        (end.fileno(),),
        {"OMP_NUM_THREADS": str(threads)},
    )
    try:
        return start_isolated(program, Sandbox((str(path.resolve()), config.identity)), _SECONDS_TO_CLOSE)
    finally:
        # the worker has it now, and the enclave must see it close
        end.close()
