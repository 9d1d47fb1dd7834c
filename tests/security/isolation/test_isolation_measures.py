"""Single measures of the sandbox: each says whether it holds, and a kernel that refuses is no success.

The kernel is a fake here; whole sandboxes, with real refusals, are in the other files of this folder.
"""

import os
import signal
from types import SimpleNamespace

import pytest

from forked_child import run_in_fork
from phalanx.security.isolation import inside, process, system_calls
from phalanx.security.isolation.report import Measure
from phalanx.security.isolation.sandbox import Program, Sandbox, SandboxArguments

BORN_UNREADABLE = {"TracerPid": "0", "CapEff": "0000000000000000", "NoNewPrivs": "1"}


@pytest.fixture
def kernel(monkeypatch):
    """A kernel that grants everything; a test may have it refuse, or show another status."""
    fake = SimpleNamespace(status=dict(BORN_UNREADABLE), dumpable=0, limit=(0, 0), error=None)

    def set_process_property(option, value=0):
        if fake.error is not None:
            raise fake.error
        return fake.dumpable if option == process.kernel.PR_GET_DUMPABLE else 0

    monkeypatch.setattr(process.kernel, "set_process_property", set_process_property)
    monkeypatch.setattr(process.kernel, "drop_capabilities", lambda: set_process_property(0))
    monkeypatch.setattr(process.resource, "getrlimit", lambda _: fake.limit)
    monkeypatch.setattr(process, "_read_status", lambda: fake.status)
    return fake


def test_a_process_that_was_born_unreadable_and_has_no_rights_says_so(kernel):
    findings = [process.find_unreadable(), *process.give_up_rights()]

    assert [finding.measure for finding in findings] == [
        Measure.UNREADABLE,
        Measure.NO_CAPABILITIES,
        Measure.NO_NEW_PRIVILEGES,
    ]
    assert all(finding.holds for finding in findings)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"dumpable": 1}, "core dumps"),
        ({"limit": (0, 1)}, "core dumps"),
        ({"status": BORN_UNREADABLE | {"TracerPid": "77"}}, "process 77 traces it"),
        ({"status": {}}, "traces it"),
        ({"error": OSError(1, "Operation not permitted")}, "Operation not permitted"),
    ],
    ids=["dumpable", "core files", "debugger", "no status", "refused"],
)
def test_a_process_that_can_be_read_is_not_called_unreadable(kernel, change, words):
    kernel.__dict__.update(change)

    finding = process.find_unreadable()

    assert not finding.holds
    assert words in finding.detail


@pytest.mark.parametrize(
    ("change", "holds"),
    [
        ({"status": BORN_UNREADABLE | {"CapEff": "1"}}, [False, True]),
        ({"status": BORN_UNREADABLE | {"NoNewPrivs": "0"}}, [True, False]),
        ({"status": {"CapEff": "none"}}, [False, False]),
        ({"error": OSError(1, "Operation not permitted")}, [False, False]),
    ],
    ids=["a capability is left", "privileges can be had", "no such lines", "refused"],
)
def test_rights_that_are_left_are_reported(kernel, change, holds):
    kernel.__dict__.update(change)

    assert [finding.holds for finding in process.give_up_rights()] == holds


def test_a_process_whose_starter_has_ended_already_does_not_die_with_it(kernel):
    reading, writing = os.pipe()
    try:
        # a pidfd can be read when its process has ended
        assert process.die_with_parent(reading).holds
        os.write(writing, b"ended")
        assert "has ended" in process.die_with_parent(reading).detail
        kernel.error = OSError(1, "Operation not permitted")
        assert not process.die_with_parent(reading).holds
    finally:
        os.close(reading)
        os.close(writing)


# system calls


class Seccomp:
    """Takes down the rules that are added; `error` is raised when they are loaded."""

    ALLOW, KILL_PROCESS, MASKED_EQ = "allow", "kill", "masked"
    Attr = SimpleNamespace(ACT_BADARCH="badarch")

    def __init__(self, error=None):
        self.error, self.rules, self.is_loaded, self.attributes = error, [], False, {}

    def ERRNO(self, number):
        return number

    def Arg(self, *words):
        return words

    def SyscallFilter(self, default):
        assert default == self.ALLOW
        return self

    def set_attr(self, name, value):
        self.attributes[name] = value

    def add_rule(self, action, name, *arguments):
        self.rules.append((action, name, arguments))

    def load(self):
        if self.error is not None:
            raise self.error
        self.is_loaded = True


def test_every_call_of_the_list_is_refused_and_ways_around_it_too():
    library = Seccomp()

    finding = system_calls.refuse_system_calls(library)

    assert finding.holds
    assert library.is_loaded
    assert library.attributes == {"badarch": "kill"}
    refused = {name for _, name, arguments in library.rules if not arguments}
    assert refused == {name for names in system_calls.REFUSED.values() for name in names} | {"clone3"}
    assert {"socket", "execve", "ptrace", "bpf", "mount", "process_vm_readv"} <= refused
    assert {name for _, name, arguments in library.rules if arguments} == {"prctl", "clone"}
    # a filter cannot look at the flags of clone3: the C library must fall back to clone
    assert ("clone3", 38) in {(name, action) for action, name, _ in library.rules}


def test_a_machine_without_the_library_or_with_an_old_kernel_is_reported(monkeypatch):
    assert "pip install" in system_calls.refuse_system_calls(None).detail
    finding = system_calls.refuse_system_calls(Seccomp(OSError(22, "Invalid argument")))
    assert (finding.holds, finding.measure) == (False, Measure.SYSTEM_CALLS)
    assert "Invalid argument" in finding.detail

    for error in (ImportError(), RuntimeError(), OSError()):

        def fail(name, error=error):
            raise error

        monkeypatch.setattr(system_calls.importlib, "import_module", fail)
        assert system_calls.load_library() is None


# the child's side


def test_every_file_but_the_named_ones_is_closed():
    reading, writing = os.pipe()

    def close_most():
        inside._keep_only(writing)
        for fd in range(3, 64):
            try:
                os.fstat(fd)
            except OSError:
                continue
            assert fd == writing
        os.write(writing, b"kept")

    assert run_in_fork(close_most) == 0
    os.close(writing)
    assert os.read(reading, 9) == b"kept"
    os.close(reading)


@pytest.mark.parametrize(
    ("end", "code"),
    [(lambda: os._exit(0), 0), (lambda: os._exit(7), 7), (lambda: os.kill(os.getpid(), signal.SIGKILL), 137)],
    ids=["success", "exit code", "signal"],
)
def test_the_waiting_process_ends_as_its_child_does(end, code):
    def watch():
        starter = os.pidfd_open(os.getpid())
        child = os.fork()
        if child == 0:
            end()
        os._exit(inside._watch_child(child, starter))

    assert run_in_fork(watch) == code


def test_a_child_is_ended_when_the_starter_ends():
    def watch():
        starter = os.fork()
        if starter == 0:
            os._exit(0)
        child = os.fork()
        if child == 0:
            signal.pause()
        os._exit(inside._watch_child(child, os.pidfd_open(starter)))

    assert run_in_fork(watch) == 128 + signal.SIGKILL


def test_a_program_whose_starter_is_gone_is_not_run():
    program = Program("isolation_guest", ())

    # this process is the fork's parent, and not its starter
    order = SandboxArguments(starter=os.getppid(), report_fd=1, program=program, sandbox=Sandbox())

    def start():
        with pytest.raises(SystemExit) as caught:
            inside.main(order)
        os._exit(caught.value.code)

    assert run_in_fork(start) == inside.REFUSED_TO_RUN
