"""A peer as an arm of the bench: ``PYTHON fl_peer.py SPEC.json ENGINE``, orders in, answers out.

It starts the engine and passes lines on through two named pipes, which the server of the engine reads and writes.
"""

import contextlib
import importlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

_HERE = Path(__file__).parent
_APP = """[project]
name = "rounds"
version = "1.0.0"
dependencies = []
[tool.flwr.app]
publisher = "phalanx"
[tool.flwr.app.components]
serverapp = "fl_flower:server_app"
clientapp = "fl_flower:client_app"
[tool.flwr.app.config]
"""


_ENDED = threading.Event()


def main(path: str, engine: str, orders: IO[str], answers: IO[str]) -> None:
    """Pass orders and answers on until there are no more."""
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(1))
    spec = json.loads(Path(path).read_text(encoding="utf-8"))
    home = Path(spec["directory"])
    os.environ.update(
        PHALANX_FL_SPEC=path,
        PYTHONPATH=str(_HERE),
        PATH=f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}",
        FLWR_HOME=str(home / "flwr"),
        FLWR_TELEMETRY_ENABLED="0",
        RAY_DEDUP_LOGS="0",
        RAY_USAGE_STATS_ENABLED="0",
        OMP_NUM_THREADS="1",
    )
    for name in ("orders", "answers"):
        os.mkfifo(home / name)
    with (
        _engine_processes(engine, spec, home),
        # both wait until the server has opened its ends
        (home / "orders").open("w", encoding="utf-8") as order_file,
        (home / "answers").open(encoding="utf-8") as answer_file,
    ):
        package = "nvflare" if engine == "NVFlare simulator" else "flwr"
        what = {"version": importlib.import_module("importlib.metadata").version(package)}
        answers.write(json.dumps(what) + "\n")
        answers.flush()
        for order in orders:
            order_file.write(order)
            order_file.flush()
            answers.write(answer_file.readline())
            answers.flush()


@contextlib.contextmanager
def _engine_processes(engine: str, spec: dict[str, Any], home: Path) -> Iterator[None]:
    """Start the processes of an engine, and end those groups afterwards."""
    started: list[subprocess.Popen[bytes]] = []

    def start(*command: str, place: Path = home) -> subprocess.Popen[bytes]:
        log = (home / f"{len(started)}.log").open("wb")
        process = subprocess.Popen(command, cwd=place, stdout=log, stderr=log, start_new_session=True)  # noqa: S603
        started.append(process)
        return process

    try:
        if engine == "Flower deployment":
            _deploy_app(start, spec, home)
        else:
            program = "fl_flare.py" if engine == "NVFlare simulator" else "fl_flower.py"
            process = start(sys.executable, str(_HERE / program))
            threading.Thread(target=_end_with, args=(process,), daemon=True).start()
        yield
    finally:
        _ENDED.set()
        for process in reversed(started):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGTERM)
        for process in started:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(5)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def _deploy_app(start: Any, spec: dict[str, Any], home: Path) -> None:
    """Start a SuperLink and its SuperNodes, and give them the app."""
    app = home / "app"
    app.mkdir()
    (app / "pyproject.toml").write_text(_APP, encoding="utf-8")
    for name in ("fl_flower.py", "fl_training.py"):
        shutil.copy(_HERE / name, app / name)
    link, *nodes = (str(_free_port()) for _ in range(1 + len(spec["sites"])))
    (home / "flwr").mkdir()
    connection = f'[superlink]\ndefault = "here"\n[superlink.here]\naddress = "127.0.0.1:{link}"\ninsecure = true\n'
    (home / "flwr" / "config.toml").write_text(connection, encoding="utf-8")
    server = start("flower-superlink", "--insecure", "--disable-runtime-dependency-installation", "--port", link)
    threading.Thread(target=_end_with, args=(server,), daemon=True).start()
    _wait_for(int(link))
    for number, port in enumerate(nodes):
        node_config = f"partition-id={number} num-partitions={len(nodes)}"
        start(
            *("flower-supernode", "--insecure", "--superlink", f"127.0.0.1:{link}"),
            *("--port", port, "--node-config", node_config),
        )
    start("flwr", "run", str(app), "here", place=app)


def _wait_for(port: int) -> None:
    while True:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
            return
        threading.Event().wait(0.2)


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe_socket:
        port: int = probe_socket.getsockname()[1]
        return port


def _end_with(process: subprocess.Popen[bytes]) -> None:
    """End with the engine, for which pipes would wait for ever."""
    process.wait()
    if _ENDED.is_set():
        return
    sys.stderr.write(f"the engine ended with {process.returncode}; see the logs beside the order\n")
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    real, sys.stdout = sys.stdout, sys.stderr
    main(sys.argv[1], sys.argv[2], sys.stdin, real)
