"""The tier keeps its word: what is asked for holds or nothing is run, and an honest program works."""

import errno
import os
import socket
import sys
from pathlib import Path

import pytest

from phalanx.errors import IsolationError
from phalanx.security.isolation import (
    IsolationReport,
    Measure,
    Program,
    Sandbox,
    kernel,
    landlock,
    namespaces,
    start_isolated,
)
from phalanx.security.isolation.memory import SecretMemory
from phalanx.security.isolation.report import MeasureFinding

works = pytest.mark.usefixtures("sandbox_works")


@works
def test_a_program_answers_over_the_socket_that_it_was_given():
    ours, theirs = socket.socketpair()
    program = Program("isolation_guest", ("echo", str(theirs.fileno())), (theirs.fileno(),))

    with ours, theirs, start_isolated(program, Sandbox()) as running:
        ours.sendall(b"hello")

        assert ours.recv(64) == b"HELLO"
        assert running.wait(60) == 0


@works
def test_a_program_reads_and_writes_where_it_may(tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "state").mkdir()
    (tmp_path / "model" / "weights").write_bytes(b"there")
    arguments = ("files", str(tmp_path / "model" / "weights"), str(tmp_path / "state" / "out"))
    sandbox = Sandbox(readable=(str(tmp_path / "model"),), writable=(str(tmp_path / "state"),))

    with start_isolated(Program("isolation_guest", arguments), sandbox) as running:
        assert running.wait(60) == 0

    assert (tmp_path / "state" / "out").read_bytes() == b"there and back"


@works
def test_what_may_be_read_may_not_be_written(tmp_path, capfd):
    (tmp_path / "weights").write_bytes(b"there")
    arguments = ("files", str(tmp_path / "weights"), str(tmp_path / "weights"))

    with start_isolated(Program("isolation_guest", arguments), Sandbox(readable=(str(tmp_path),))) as running:
        assert running.wait(60) == 1

    assert "PermissionError" in capfd.readouterr().err
    assert (tmp_path / "weights").read_bytes() == b"there"


@works
def test_temporary_files_lie_in_memory_that_is_gone_afterwards(capfd):
    with start_isolated(Program("isolation_guest", ("scratch",)), Sandbox()) as running:
        assert running.wait(60) == 0

    made = Path(capfd.readouterr().out)
    assert made.name.startswith("tmp")
    assert made.parent.name.startswith("phalanx-sandbox-")
    assert not made.parent.exists()


@works
def test_a_directory_for_temporary_files_can_be_named(tmp_path, capfd):
    program = Program("isolation_guest", ("scratch",), environment={"TMPDIR": str(tmp_path)})

    with start_isolated(program, Sandbox(writable=(str(tmp_path),))) as running:
        assert running.wait(60) == 0

    assert Path(capfd.readouterr().out).parent == tmp_path


@works
def test_packages_load_and_exit_codes_come_out():
    with start_isolated(Program("isolation_guest", ("numbers",)), Sandbox()) as running:
        assert running.wait(120) == 6


@works
def test_every_measure_is_reported_to_hold():
    with start_isolated(Program("isolation_guest", ("exit", "0")), Sandbox()) as running:
        assert {one.measure for one in running.report.findings if one.holds} == set(Measure)
        assert "not secret from root" in running.report.to_json()["tier"]


@works
def test_without_the_library_nothing_is_run_and_the_message_says_what_to_install(tmp_path):
    (tmp_path / "pyseccomp.py").write_text("raise ImportError('not installed')")
    (tmp_path / "state").mkdir()
    path = os.pathsep.join((str(tmp_path), *(one for one in sys.path if one)))
    arguments = ("files", str(tmp_path / "pyseccomp.py"), str(tmp_path / "state" / "out"))
    program = Program("isolation_guest", arguments, environment={"PYTHONPATH": path})
    sandbox = Sandbox(readable=(str(tmp_path),), writable=(str(tmp_path / "state"),))

    with pytest.raises(IsolationError, match=r"system_calls: .*phalanx-train\[sandbox\]"):
        start_isolated(program, sandbox)

    assert list((tmp_path / "state").iterdir()) == []


@works
def test_a_measure_that_was_waived_may_be_lacking_and_the_report_says_so(tmp_path):
    (tmp_path / "pyseccomp.py").write_text("raise ImportError('not installed')")
    path = os.pathsep.join((str(tmp_path), *(one for one in sys.path if one)))
    program = Program("isolation_guest", ("exit", "3"), environment={"PYTHONPATH": path})

    with start_isolated(program, Sandbox(unsafe_without=(Measure.SYSTEM_CALLS,))) as running:
        assert running.wait(60) == 3
        (lacking,) = running.report.missing_measures([Measure.SYSTEM_CALLS])
        assert lacking.measure == Measure.SYSTEM_CALLS


@works
def test_a_path_that_does_not_exist_opens_nothing_by_mistake(tmp_path):
    with pytest.raises(IsolationError, match=r"files: .*absent"):
        start_isolated(Program("isolation_guest", ("exit", "0")), Sandbox(readable=(str(tmp_path / "absent"),)))


def test_a_measure_that_nobody_reported_does_not_hold():
    report = IsolationReport((MeasureFinding(Measure.FILES, True, ""), MeasureFinding(Measure.NO_SWAP, False, "swaps")))

    lacking = report.missing_measures((Measure.FILES, Measure.NO_SWAP, Measure.UNREADABLE))

    assert [one.measure for one in lacking] == [Measure.NO_SWAP, Measure.UNREADABLE]


def test_an_old_landlock_is_not_enough(monkeypatch):
    monkeypatch.setattr(kernel, "system_call", lambda *_: 2)

    found = landlock.restrict_files((), (), ())

    assert not found.holds
    assert "Linux 6.2" in found.detail


def test_a_kernel_without_landlock_is_named(monkeypatch):
    def refuses(*_):
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(kernel, "system_call", refuses)

    assert not landlock.restrict_files((), (), ()).holds


def test_where_user_namespaces_are_forbidden_the_setting_is_named(monkeypatch):
    def refuses(_):
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(namespaces, "unshare_namespaces", refuses)

    found = namespaces.enter_namespaces()

    assert not found.holds
    assert "user.max_user_namespaces" in found.detail


def test_secret_memory_is_not_even_read_by_its_own_process_through_the_kernel():
    try:
        memory = SecretMemory(64)
    except OSError as exc:
        pytest.skip(f"no memfd_secret here: {exc.strerror}")
    ordinary = bytearray(b"\x05" * 64)
    import ctypes

    with memory, open("/proc/self/mem", "rb", buffering=0) as own:
        memory.writable_view[:] = b"\x05" * 64
        own.seek(ctypes.addressof(ctypes.c_char.from_buffer(ordinary)))
        assert own.read(64) == ordinary
        own.seek(memory.memory_address)
        with pytest.raises(OSError, match="Input/output error"):
            own.read(64)
        assert bytes(memory.writable_view) == b"\x05" * 64


def test_secret_memory_is_closed_twice_without_harm():
    try:
        memory = SecretMemory(64)
    except OSError as exc:
        pytest.skip(f"no memfd_secret here: {exc.strerror}")

    view = memory.writable_view
    memory.close()
    memory.close()

    with pytest.raises(ValueError, match="released"):
        view.tobytes()
