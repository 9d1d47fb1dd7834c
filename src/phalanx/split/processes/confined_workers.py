"""Masked workers of tier "process": each in a sandbox that reaches its own keys and one pipe to the enclave."""

import contextlib
import socket
from collections.abc import Iterator, Mapping
from pathlib import Path

from phalanx.config import dump_toml
from phalanx.security.isolation import IsolatedProcess, Program, Sandbox, start_isolated
from phalanx.split.masked.piped import PipedWorkerConfig

_SECONDS_TO_CLOSE = 60.0


@contextlib.contextmanager
def confined_workers(
    directory: Path, configs: Mapping[str, PipedWorkerConfig], threads: int
) -> Iterator[dict[str, socket.socket]]:
    """Start workers, give the enclave's end of each one's pipe, and end them whatever happens.

    Args:
        directory: Gets their files.
        configs: By worker.
        threads: Of tensor kernels, of each.

    Raises:
        IsolationError: The machine cannot give what the tier promises; nothing was run.
    """
    directory.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as stack:
        ends: dict[str, socket.socket] = {}
        for name, config in configs.items():
            near, far = socket.socketpair()
            stack.callback(near.close)
            ends[name] = near
            stack.callback(_start(directory / f"{name}.toml", config, far, threads).close)
        yield ends


def _start(path: Path, config: PipedWorkerConfig, end: socket.socket, threads: int) -> IsolatedProcess:
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
