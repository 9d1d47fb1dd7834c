"""A split between two machines: costs of attestation, sealing and pads on a line of 100 Mbit/s.

``python -m phalanx.lab.bench.alone.split_line OUT.json [--steps 8] [--turns 3] [--mbit 100]``; Linux and root.

Two network namespaces with addresses of their own stand for the machines; the line between them is a pair of virtual
Ethernet devices, each of which a token bucket slows down. Owner and three clients are on the first, the enclave on the
second. A masked worker is beside the enclave ("masked"), or at the other end of the line ("masked-far"), without TLS
there. Rows hold medians over all steps but the first two of each turn. `step_s` is wall time; `line_bytes` are the
bytes that the first machine's device has sent and received, packets' headers included; CPU times are as in ``phalanx
bench split``.
`appraise_s` is the wall time in which all four parties get new evidence and appraise it, one after the other.
`line_mbit` is the speed of the line, by a plain TCP transfer.
"""

import contextlib
import ctypes
import itertools
import json
import os
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import psutil
import torch

from phalanx.child import PythonProcess
from phalanx.config import dump_toml, load_config
from phalanx.engine import StepInputs
from phalanx.errors import ConfigError
from phalanx.lab.bench.measure.harness import cache_directory, print_progress, run_program, scratch_directory
from phalanx.lab.bench.overhead.split import SplitArm, SplitSize, make_split_run
from phalanx.models import open_model
from phalanx.split import ENCLAVE, SplitDriver
from phalanx.split.masked.remote import PipedWorkerConfig, serve_pipe
from phalanx.split.processes.local_enclave import EnclaveConfig, LocalEnclave
from phalanx.split.processes.offload import masked_session
from phalanx.split.roles.serving import serve_enclave
from phalanx.train.config import SplitRun
from phalanx.train.records.run_directory import RunDirectory
from phalanx.train.sessions.split_cluster import split_company
from phalanx.train.setup.process import deterministic_kernels

_CLONE_NEWNET = 0x40000000
_NEAR, _FAR = "10.77.1.1", "10.77.1.2"
_WORKER_PORT, _PROBE_PORT, _PROBE_BYTES = 7099, 7098, 12_500_000
_WARM_UP = 2
_SMALL, _LARGE = SplitSize(256, 4, 8, 64), SplitSize(576, 8, 9, 128, "bf16")
ARMS: Mapping[str, SplitArm] = MappingProxyType(
    {
        "plaintext": SplitArm("plaintext", _SMALL),
        "sealed": SplitArm("sealed", _SMALL),
        "masked": SplitArm("masked", _SMALL),
        "masked-far": SplitArm("masked", _SMALL),
        "plaintext-large": SplitArm("plaintext", _LARGE),
        "sealed-large": SplitArm("sealed", _LARGE),
    }
)
_PARTS = ("cpu_s", "cipher_s", "digest_s", "framing_s", "signing_s", "meeting_s")


def measure_line(steps: int = 8, turns: int = 3, mbit: int = 100) -> dict[str, Any]:
    """Run every arm once a turn, each in processes of its own."""
    os.environ["PHALANX_CACHE"] = str(cache_directory().resolve())
    results: dict[str, list[dict[str, Any]]] = {name: [] for name in ARMS}
    with scratch_directory() as directory, open_line(mbit) as (near, far):
        line_mbit = _probe_line(near, far)
        print_progress(f"the line passes {line_mbit:.1f} Mbit/s")
        for turn in range(turns):
            for name in ARMS:
                out = directory / f"{name}-{turn}.json"
                _run_inside(near, "arm", name, far, str(steps), str(out))
                results[name].append(json.loads(out.read_text()))
                print_progress(f"{name}, turn {turn + 1} of {turns}: {results[name][-1]['step_s']:.3f} s a step")
    rows = [summarise_arm(name, ARMS[name], measured) for name, measured in results.items()]
    return {"steps": steps, "turns": turns, "mbit": mbit, "line_mbit": line_mbit, "rows": rows}


def summarise_arm(name: str, arm: SplitArm, results: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the row of an arm: medians over its turns, and the digest of its weights where all turns have one."""
    figures = [key for key in results[0] if key != "weights_digest"]
    digests = {result["weights_digest"] for result in results}
    return {
        "arm": name,
        **arm.as_row(),
        **{key: statistics.median(result[key] for result in results) for key in figures},
        "step_s_least": min(result["step_s"] for result in results),
        "step_s_most": max(result["step_s"] for result in results),
        # one and the same in every turn, or none
        "weights_digest": digests.pop() if len(digests) == 1 else None,
    }


# --- the line ------------------------------------------------------------------------------------------


@contextlib.contextmanager
def open_line(mbit: int) -> Iterator[tuple[str, str]]:
    """Make two namespaces with a line between them, and remove both; yield their names."""
    near, far = (f"phalanx-{os.getpid()}-{side}" for side in ("near", "far"))
    with contextlib.ExitStack() as stack:
        for name in (near, far):
            _call("ip", "netns", "add", name)
            stack.callback(_call, "ip", "netns", "del", name)
        _call("ip", "-n", near, "link", "add", "line", "type", "veth", "peer", "name", "line", "netns", far)
        for name, address in ((near, _NEAR), (far, _FAR)):
            _call("ip", "-n", name, "addr", "add", f"{address}/24", "dev", "line")
            for device in ("lo", "line"):
                _call("ip", "-n", name, "link", "set", device, "up")
            # without offloads a packet is what a network card would send
            bucket = ("tbf", "rate", f"{mbit}mbit", "burst", "64kb", "latency", "200ms")
            _call("tc", "-n", name, "qdisc", "add", "dev", "line", "root", *bucket)
        yield near, far


def _call(*command: str) -> None:
    try:
        subprocess.run(command, check=True, capture_output=True, text=True)  # noqa: S603 - our own commands
    except (OSError, subprocess.CalledProcessError) as exc:
        detail = exc.stderr if isinstance(exc, subprocess.CalledProcessError) else exc
        raise ConfigError(f"{' '.join(command)}: {detail}; this bench needs Linux, root, ip and tc") from exc


def _enter(namespace: str) -> None:
    """Have this process and its later children in a namespace; before it opens a socket or starts a thread."""
    with Path("/var/run/netns", namespace).open("rb") as file:
        if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), _CLONE_NEWNET):
            raise ConfigError(f"{namespace}: {os.strerror(ctypes.get_errno())}; this bench needs root")


def _run_inside(namespace: str, *arguments: str) -> None:
    command = [sys.executable, "-m", __spec__.name if __spec__ else __name__, *arguments]
    subprocess.run(["ip", "netns", "exec", namespace, *command], check=True)  # noqa: S603, S607


def _probe_line(near: str, far: str) -> float:
    """Return the megabits a second of one plain TCP transfer from the second machine to the first."""
    seconds: list[float] = []

    def receive() -> None:
        _enter(near)
        with socket.create_server((_NEAR, _PROBE_PORT)) as server:
            is_listening.set()
            taken, _ = server.accept()
            with taken:
                size, started = len(taken.recv(1 << 16)), time.perf_counter()
                while data := taken.recv(1 << 16):
                    size += len(data)
                seconds.append((time.perf_counter() - started) / size)

    def send() -> None:
        _enter(far)
        with socket.create_connection((_NEAR, _PROBE_PORT)) as sender:
            sender.sendall(bytes(_PROBE_BYTES))

    is_listening = threading.Event()
    # setns is of one thread
    threads = [threading.Thread(target=work) for work in (receive, send)]
    threads[0].start()
    is_listening.wait()
    threads[1].start()
    for thread in threads:
        thread.join()
    return 8e-6 / seconds[0]


# --- the first machine ---------------------------------------------------------------------------------


def run_arm(name: str, far: str, steps: str, out: str) -> None:
    """Be owner and clients of an arm, and write its figures."""
    arm, count = ARMS[name], _WARM_UP + int(steps)
    run = make_split_run(arm, count)
    source = open_model(run.model, cache_directory() / "models", run.train.seed)
    with (
        scratch_directory() as directory,
        RunDirectory(directory / "run", run, resume=False) as home,
        deterministic_kernels(1),
    ):

        def open_enclave(place: Path, config: EnclaveConfig, threads: int) -> LocalEnclave:
            return _FarEnclave(place, config, threads, far, home if name == "masked-far" else None)

        # a simulated enclave listens on its own machine only; here both machines are one
        transport = run.split.transport.model_copy(update={"bind": _NEAR})
        with split_company(run, home, source, open_enclave=open_enclave, transport=transport) as lead:
            figures = _measure_steps(lead, run, arm, count)
            figures["weights_digest"] = lead.request_weights_digest()
    Path(out).write_text(json.dumps(figures))


def _measure_steps(lead: SplitDriver, run: SplitRun, arm: SplitArm, steps: int) -> dict[str, Any]:
    rows, costs, walls, sizes = (
        run.train.batch_size // run.train.microbatches,
        [lead.process_costs],
        [],
        [_line_bytes()],
    )
    generator = torch.Generator().manual_seed(0)
    for step in range(steps):
        tokens = torch.randint(0, 2048, (run.train.microbatches, rows, arm.size.seq + 1), generator=generator)
        ids, labels = tokens[:, :, :-1].contiguous(), tokens[:, :, 1:].contiguous()
        started = time.perf_counter()
        lead.train_step(step, StepInputs(tuple(ids), tuple(labels), labels.numel()))
        walls.append(time.perf_counter() - started)
        costs.append(lead.process_costs)
        sizes.append(_line_bytes())
    started = time.perf_counter()
    for party in lead.enclave_peers:
        party.appraise_again()
    appraise_s = time.perf_counter() - started
    of_steps = [later.subtract_costs(before) for before, later in itertools.pairwise(costs)][_WARM_UP:]
    return {
        "step_s": statistics.median(walls[_WARM_UP:]),
        "line_bytes": statistics.median(b - a for a, b in itertools.pairwise(sizes)),
        **{part: statistics.median(getattr(one, part) for one in of_steps) for part in _PARTS},
        "meetings_s": costs[0].meeting_s,
        "appraise_s": appraise_s,
    }


def _line_bytes() -> int:
    counters = psutil.net_io_counters(pernic=True)["line"]
    return counters.bytes_sent + counters.bytes_recv


class _FarEnclave(LocalEnclave):
    """An enclave in another namespace, with a masked worker in this one where a directory of the run is given."""

    def __init__(
        self, directory: Path, config: EnclaveConfig, threads: int, far: str, home: RunDirectory | None
    ) -> None:
        self._workers: list[PythonProcess] = []
        self._files: list[Path] = []
        if home is not None:
            certificates = {name: home.read_certificate(name) for name in config.split.masked_workers}
            config = config.model_copy(update={"workers": certificates})
            directory.mkdir(parents=True, exist_ok=True)
            for name in certificates:
                worker = PipedWorkerConfig(
                    identity=str((home.pki_directory / name).resolve()),
                    owner_certificate=home.read_certificate(ENCLAVE),
                    session=masked_session(config.session),
                    transport=config.split.transport,
                )
                self._files.append(directory / f"{name}.toml")
                self._files[-1].write_text(dump_toml(worker), encoding="utf-8")
        program = __spec__.name if __spec__ else __name__
        super().__init__(directory, config, threads, (program, "enclave", far))

    def start(self) -> None:
        super().start()
        program = __spec__.name if __spec__ else __name__
        self._workers = [
            PythonProcess((program, "worker", str(file)), {"OMP_NUM_THREADS": "1"}) for file in self._files
        ]

    def close(self) -> None:
        super().close()
        for worker in self._workers:
            worker.end_or_kill()


def run_worker(file: str) -> None:
    """Be a masked worker of an enclave at the other end of the line."""
    while True:
        with contextlib.suppress(ConnectionRefusedError):
            connection = socket.create_connection((_FAR, _WORKER_PORT))
            break
        time.sleep(0.1)
    serve_pipe(load_config(Path(file), PipedWorkerConfig), connection)


# --- the second machine --------------------------------------------------------------------------------


def run_enclave(namespace: str, file: str) -> None:
    """Be the enclave; masked workers that the file has certificates of are awaited."""
    _enter(namespace)
    config = load_config(Path(file), EnclaveConfig)
    far = config.split.transport.model_copy(update={"bind": _FAR})
    config = config.model_copy(update={"split": config.split.model_copy(update={"transport": far})})
    ends = {}
    if config.workers:
        with socket.create_server((_FAR, _WORKER_PORT)) as server:
            ends = {name: server.accept()[0] for name in config.workers}
    serve_enclave(config, None, ends)


_ROLES: Mapping[str, Callable[..., None]] = MappingProxyType(
    {"arm": run_arm, "enclave": run_enclave, "worker": run_worker}
)

if __name__ == "__main__":
    if sys.argv[1:2] and sys.argv[1] in _ROLES:
        _ROLES[sys.argv[1]](*sys.argv[2:])
    else:
        run_program("split-line", measure_line)
