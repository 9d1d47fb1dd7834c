"""Real runs: an owner and workers as processes of their own, over TLS on loopback; the model is tiny."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from forked_commands import ForkedCommand, ForkedCommands
from machine_patience import patience_s
from phalanx.lab.bench.chaos.run_process import descendant_pids
from tiny_run_file import tiny_run_file

TINY = tiny_run_file(
    steps=8,
    validate_every=4,
    sections="""
[pipeline]
stages = 4
step_timeout_s = 60.0

[guard]
audit_rate = 0.25
# without the audits that a coin or a statistic decides: two runs then have as many
keep_states = 0
step_audit_rate = 0.0
owner_audit_rate = 0.0
gradient_screen = false

[checkpoint]
every = 3
# a killed owner goes on from its checkpoint, unless a test says otherwise
journal = false
""",
)
JOURNAL = "checkpoint.journal=true"
FORWARD_LIAR = ("attack.kind='forward_sign_flip'", "attack.stages=[1]", "attack.rate=1.0", "attack.from_step=4")
PATIENCE_S = 250.0
FORKED: list[ForkedCommands] = []
"""What commands are forked from; while it is empty they all start from nothing."""
_RESTRICTED = str(Path(__file__).with_name("restricted.py"))


def worker_program(file: Path, attack: str | None = None) -> tuple[str, ...]:
    """What Python runs for a worker file; see `Place.start_worker`."""
    if attack is None:
        return "-m", "phalanx", "worker", str(file)
    plan = file.with_name(f"{file.stem}-attack.toml")
    plan.write_text(f"[attackers.{file.stem}]\n{attack}")
    return "-m", "phalanx.lab.attacks.worker", str(plan), str(file)


@dataclass
class Process:
    """One ``phalanx`` command in a process of its own."""

    popen: subprocess.Popen[bytes] | ForkedCommand
    output: Path

    def wait(self) -> int:
        """Exit code; what it printed is in `text`."""
        return self.popen.wait(patience_s(PATIENCE_S))

    def kill(self) -> None:
        """SIGKILL, to this process only."""
        self.popen.send_signal(signal.SIGKILL)
        self.popen.wait(patience_s(PATIENCE_S))

    @property
    def text(self) -> str:
        return self.output.read_text(encoding="utf-8", errors="replace")


@dataclass
class Place:
    """A directory with a run file, where runs happen."""

    path: Path
    run_file: Path
    processes: list[Process] = field(default_factory=list)

    def start(
        self, *arguments: str, restriction: str | None = None, inside: Sequence[str] = (), anew: bool = False
    ) -> Process:
        """Start ``phalanx`` with arguments, behind `inside`; with a restriction of `restricted.py`, under it.

        With one of these, or `anew`, it starts from nothing as a user's command does; others have the imports done.
        """
        if FORKED and not (restriction or inside or anew):
            return self._fork("phalanx", arguments)
        command = [*inside, sys.executable, "-m", "phalanx", *arguments]
        if restriction is not None:
            command = [sys.executable, _RESTRICTED, restriction, *command]
        return self.start_program(*command)

    def _fork(self, module: str, arguments: Sequence[str]) -> Process:
        output = self._next_output()
        output.touch()
        self.processes.append(Process(FORKED[0].start(module, arguments, output), output))
        return self.processes[-1]

    def _next_output(self) -> Path:
        return self.path / f"output-{len(self.processes)}.txt"

    def start_program(self, *command: str) -> Process:
        """Start any program; what it prints is kept."""
        output = self._next_output()
        with output.open("wb") as stream:
            popen = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=stream,
                stderr=subprocess.STDOUT,
                # a group of its own, so that a test can press Ctrl-C for all of it
                process_group=0,
            )
        self.processes.append(Process(popen, output))
        return self.processes[-1]

    def start_worker(self, file: Path, attack: str | None = None) -> Process:
        """Start the worker of a file; with an attack, as keys of ``[attack]`` in TOML, the laboratory's worker."""
        _, module, *arguments = worker_program(file, attack)
        if FORKED:
            return self._fork(module, arguments)
        return self.start_program(sys.executable, "-m", module, *arguments)

    def train(
        self,
        *overrides: str,
        resume: bool = False,
        run_dir: str = "run",
        restriction: str | None = None,
        inside: Sequence[str] = (),
        anew: bool = False,
        options: Sequence[str] = (),
    ) -> Process:
        """Start ``phalanx train`` on the run file."""
        options = [*options, *(word for override in overrides for word in ("--set", override))]
        if resume:
            options.append("--resume")
        where = ("--run-dir", str(self.path / run_dir))
        command = ("train", str(self.run_file), *where, *options)
        return self.start(*command, restriction=restriction, inside=inside, anew=anew)

    def can_have(self, restriction: str) -> bool:
        """Whether this system lets us restrict a process so."""
        return subprocess.run([sys.executable, _RESTRICTED, restriction], check=False).returncode == 0

    def summary(self, run_dir: str = "run") -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.path / run_dir / "summary.json").read_text())
        return found

    def finish(self, *overrides: str, resume: bool = False, run_dir: str = "run", anew: bool = False) -> dict[str, Any]:
        """Train to the end and return the summary."""
        process = self.train(*overrides, resume=resume, run_dir=run_dir, anew=anew)
        assert process.wait() == 0, process.text
        return self.summary(run_dir)

    def wait_for(self, process: Process, condition: Callable[[], bool]) -> None:
        """Poll until something has happened in a run that goes on; fail when the run ends before."""
        deadline = time.monotonic() + patience_s(PATIENCE_S)
        while not condition():
            assert process.popen.poll() is None, process.text
            assert time.monotonic() < deadline, process.text
            time.sleep(0.002)

    def wait_until(self, condition: Callable[[], bool]) -> None:
        """Poll until something has happened that no process of this place says."""
        deadline = time.monotonic() + patience_s(PATIENCE_S)
        while not condition():
            assert time.monotonic() < deadline
            time.sleep(0.002)

    def has_line(self, name: str, words: str, run_dir: str = "run", after: str = "") -> bool:
        """Whether a file has these words, after the first occurrence of others."""
        path = self.path / run_dir / name
        text = path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""
        return words in text[text.find(after) :] if after in text else False


def children_of(pid: int) -> dict[int, str]:
    """Process ids and command lines of the direct children of a process."""
    found = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
        except (OSError, IndexError, ValueError):
            continue
        if parent == pid:
            found[int(entry.name)] = command
    return found


def descendant(process: Process, *words: str) -> int:
    """Process id of the process below a process that has all of these words in its command line."""
    waiting = [process.popen.pid]
    while waiting:
        for pid, command in children_of(waiting.pop()).items():
            if all(word in command for word in words):
                return pid
            waiting.append(pid)
    raise AssertionError(f"nobody below {process.popen.pid} runs {words}")


def free_port() -> int:
    """A port that no process uses at the moment."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
    return port


def make_keys(place: Place, *names: str) -> Path:
    """Certificates made with the command that users have."""
    for arguments in (["init"], *(["issue", name] for name in names)):
        process = place.start("pki", arguments[0], str(place.path / "keys"), *arguments[1:])
        assert process.wait() == 0, process.text
    return place.path / "keys"


def events(place: Place, *kinds: str) -> list[tuple[str, dict[str, Any]]]:
    """Kinds and bodies of the events of these kinds, in order."""
    lines = (place.path / "run" / "events.jsonl").read_text(encoding="utf-8").splitlines()
    found = [json.loads(line) for line in lines]
    return [(event["kind"], event["body"]) for event in found if event["kind"] in kinds]


def local_workers(owner: Process) -> dict[str, int]:
    """Names and process ids of the workers below an owner."""
    found = {}
    for pid in descendant_pids(owner.popen.pid):
        try:
            name = Path(f"/proc/{pid}/comm").read_text().strip()
            last = Path(f"/proc/{pid}/cmdline").read_bytes().decode().split("\0")[-2:-1]
        except OSError:
            continue
        # one that is forked has its name, one that is started from nothing its file; ranks are below their worker
        for word in (f"{name}.toml", *last):
            if Path(word).name.startswith("worker-"):
                found.setdefault(Path(word).stem, pid)
    return found


def worker_pid(owner: Process, name: str) -> int:
    workers = local_workers(owner)
    assert name in workers, f"{name} does not run, but {workers}"
    return workers[name]


def peak_bytes(pid: int) -> int:
    """Largest resident set of a process so far."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))


def exists(pid: int) -> bool:
    """Whether a process still runs; a zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def make_place(path: Path) -> Place:
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        # whoever starts the tests in the background has Ctrl-C ignored, and children inherit that
        signal.signal(signal.SIGINT, signal.default_int_handler)
    (path / "tiny.toml").write_text(TINY)
    return Place(path, path / "tiny.toml")


def end_all(place: Place) -> None:
    for process in place.processes:
        if process.popen.poll() is None:
            os.killpg(process.popen.pid, signal.SIGKILL)
            process.popen.wait(patience_s(PATIENCE_S))
