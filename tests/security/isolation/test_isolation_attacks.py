"""Real attackers on both sides of the sandbox: each wins where there is none, and fails where there is one."""

import hashlib
import json
import os
import resource
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path

import isolation_burglar
import pytest

from phalanx.security.isolation import Program, Sandbox, start_isolated

pytestmark = pytest.mark.usefixtures("sandbox_works")
YAMA = Path("/proc/sys/kernel/yama/ptrace_scope")


@pytest.fixture
def targets(tmp_path, monkeypatch):
    """What a burglar goes for, all of it real."""
    monkeypatch.setenv("PHALANX_TEST_SECRET", "hunter2")
    (tmp_path / "file").write_bytes(b"of the host")
    tcp, unix = socket.create_server(("127.0.0.1", 0)), socket.socket(socket.AF_UNIX)
    unix.bind(str(tmp_path / "socket"))
    unix.listen()
    other = subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE)
    yield {
        "file": str(tmp_path / "file"),
        "new_file": str(tmp_path / "new"),
        "port": tcp.getsockname()[1],
        "socket": str(tmp_path / "socket"),
        "program": "/bin/true",
        "pid": other.pid,
    }
    other.kill()
    other.communicate()
    tcp.close()
    unix.close()


def environment():
    return {**os.environ, "PYTHONPATH": os.pathsep.join(one for one in sys.path if one)}


def in_the_open(module, *arguments, keep=()):
    """Start a module without a sandbox."""
    return subprocess.Popen(
        [sys.executable, "-m", module, *map(str, arguments)], env=environment(), pass_fds=keep, stderr=subprocess.PIPE
    )


def is_not_kept_from_tracing():
    return not YAMA.exists() or YAMA.read_text().strip() == "0"


@pytest.mark.skipif(
    not is_not_kept_from_tracing(), reason="yama forbids tracing on this machine even without a sandbox"
)
def test_without_a_sandbox_a_burglar_gets_everything(targets, pipe):
    with in_the_open("isolation_burglar", pipe.writing, json.dumps(targets), keep=(pipe.writing,)) as burglar:
        told = json.loads(pipe.everything())
        burglar.communicate(timeout=60)

    assert told == {act.__name__: "done" for act in isolation_burglar.ACTS}


def test_in_the_sandbox_a_burglar_gets_nothing(targets, pipe):
    program = Program("isolation_burglar", (str(pipe.writing), json.dumps(targets)), (pipe.writing,))

    with start_isolated(program, Sandbox()):
        told = json.loads(pipe.everything())

    assert [name for name, outcome in told.items() if outcome == "done"] == []
    assert Path(targets["file"]).read_bytes() == b"of the host"


def stolen(victim: int, told: dict) -> list[str]:
    """Ways in which another process of the same user read the secret."""
    thief = subprocess.run(
        [sys.executable, Path(__file__).with_name("isolation_thief.py"), str(victim), str(told["address"]), "32"],
        capture_output=True, check=True, timeout=60,
    )  # fmt: skip
    found = json.loads(thief.stdout)
    return [
        way
        for way, value in found.items()
        if len(value) == 64 and hashlib.sha256(bytes.fromhex(value)).hexdigest() == told["digest"]
    ]


@pytest.mark.skipif(
    not is_not_kept_from_tracing(), reason="yama forbids tracing on this machine even without a sandbox"
)
def test_without_a_sandbox_another_process_of_the_user_reads_a_secret(pipe, hold):
    with in_the_open("isolation_victim", pipe.writing, hold.reading, keep=(pipe.writing, hold.reading)) as victim:
        told = pipe.line()
        ways = stolen(victim.pid, told)
        hold.close()
        victim.communicate(timeout=60)

    assert ways == ["through_proc", "through_the_system_call", "as_a_debugger"]


def test_in_the_sandbox_no_other_process_of_the_user_reads_a_secret(pipe, hold):
    program = Program("isolation_victim", (str(pipe.writing), str(hold.reading)), (pipe.writing, hold.reading))

    with start_isolated(program, Sandbox()) as running:
        told = pipe.line()
        ways = stolen(running.pid, told)

    assert told["pid"] == 1
    assert ways == []


@pytest.mark.skipif(shutil.which("unshare") is None, reason="unshare is not installed (util-linux)")
@pytest.mark.skipif(
    not is_not_kept_from_tracing(), reason="yama forbids tracing on this machine even without a sandbox"
)
def test_a_program_started_by_exec_in_a_user_namespace_would_be_read_although_it_is_not_dumpable(pipe, hold):
    """Why the sandbox runs modules and starts no programs."""
    ends = (pipe.writing, hold.reading)
    module = [sys.executable, "-m", "isolation_victim", *map(str, ends), "undumpable"]

    with subprocess.Popen(
        ["unshare", "--user", "--map-current-user", *module], env=environment(), pass_fds=ends
    ) as victim:
        ways = stolen(victim.pid, pipe.line())
        hold.close()
        victim.wait(60)

    # the file in /proc belongs to root then, which an ordinary user is not
    assert {"through_the_system_call", "as_a_debugger"} <= set(ways)


def test_outside_of_a_namespace_the_same_program_is_not_read(pipe, hold):
    ends = (pipe.writing, hold.reading)

    with in_the_open("isolation_victim", *ends, "undumpable", keep=ends) as victim:
        ways = stolen(victim.pid, pipe.line())
        hold.close()
        victim.communicate(timeout=60)

    assert ways == []


def leaves_core_dumps() -> bool:
    pattern = Path("/proc/sys/kernel/core_pattern").read_text().strip()
    return "/" not in pattern and not pattern.startswith("|") and resource.getrlimit(resource.RLIMIT_CORE)[1] != 0


def dumped(folder: Path, secret: str) -> bool:
    """Whether a core dump lies in a folder that holds a secret twice over, as only the process's memory did."""
    return any((secret * 2).encode() in one.read_bytes() for one in folder.glob("core*"))


@pytest.mark.skipif(not leaves_core_dumps(), reason="this machine writes no core dumps where a program crashes")
def test_a_crash_leaves_a_secret_in_a_core_dump_without_a_sandbox_and_none_with_one(tmp_path):
    inside, outside, secret = tmp_path / "inside", tmp_path / "outside", os.urandom(16).hex()
    inside.mkdir()
    outside.mkdir()

    with in_the_open("isolation_victim", "crash", outside, secret) as victim:
        victim.communicate(timeout=60)
    program = Program("isolation_victim", ("crash", str(inside), secret))
    with start_isolated(program, Sandbox(writable=(str(inside),))) as running:
        code = running.wait(60)

    assert dumped(outside, secret)
    assert code == 128 + signal.SIGSEGV
    assert list(inside.iterdir()) == []


def test_the_isolated_process_ends_with_its_starter(pipe, hold):
    with in_the_open("isolation_starter", pipe.writing, hold.reading, keep=(pipe.writing, hold.reading)) as starter:
        assert pipe.line()["pid"] == 1

        starter.kill()
        starter.communicate(timeout=60)

    # the victim, which waits for something else, held the last other end
    assert pipe.everything() == b""
