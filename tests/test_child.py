"""A helper process answers orders, and whatever it does, its starter gets an answer or an exception."""

import os
import sys
import threading

import pytest

from phalanx.child import AskedProcess, PythonProcess, request_stacks

HELPER = """
import os, signal, sys
from phalanx.child import answer_orders

def answer(order, content):
    match order["act"]:
        case "echo":
            print("a library prints")
            os.write(1, b"below Python too")
            yield {"number": order["number"]}, content[::-1]
        case "count":
            for number in range(order["number"]):
                yield {"number": number}, b"x" * number
            yield {"end": True}, b""
        case "fail":
            yield {"number": 0}, b""
            yield {"error": "no"}, b""
        case "exit":
            sys.stderr.write("last words")
            sys.stderr.flush()
            os._exit(3)
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "hang":
            signal.pause()
        case "grow":
            yield {"size": len(bytearray(order["bytes"]))}, b""
        case "raw":
            # what a library may have kept of standard output from before
            os.write(ANSWERS, content)
            signal.pause()

ANSWERS = os.dup(1)
answer_orders(answer, 256 << 20)
"""


@pytest.fixture
def child(tmp_path, monkeypatch):
    (tmp_path / "helper_of_a_test.py").write_text(HELPER)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *sys.path]))
    process = AskedProcess(["helper_of_a_test"], log=tmp_path / "log")
    yield process
    process.close()


def assert_nothing_is_left(child):
    assert child.exit_code is not None
    assert child._process.popen.stdin.closed
    assert child._process.popen.stdout.closed


@pytest.mark.parametrize("size", [0, 1, 65_537, 3 << 20])
def test_an_order_and_its_content_come_back(child, size, tmp_path):
    content = os.urandom(size)

    for number in range(2):
        assert child.ask({"act": "echo", "number": number}, content, 60.0) == ({"number": number}, content[::-1])
    assert child.exit_code is None
    assert "a library prints" in (tmp_path / "log").read_text()


def test_all_answers_of_an_order_come_until_the_last(child):
    for num_answers in (0, 3):
        answers = [content for _, content in child.ask_all({"act": "count", "number": num_answers})]
        assert answers == [*(b"x" * number for number in range(num_answers)), b""]
    assert [answer for answer, _ in child.ask_all({"act": "fail"})] == [{"number": 0}, {"error": "no"}]


@pytest.mark.parametrize(("act", "description"), [("exit", "exit code 3; last words"), ("kill", "signal 9; ")])
def test_the_end_of_a_child_is_described_and_leaves_nothing(child, act, description):
    with pytest.raises(EOFError, match=description):
        child.ask({"act": act})

    assert_nothing_is_left(child)
    with pytest.raises(EOFError, match=description):
        child.ask({"act": "echo", "number": 1})


def test_a_child_that_hangs_is_ended(child):
    child.ask({"act": "echo", "number": 1})
    with pytest.raises(TimeoutError):
        child.ask({"act": "hang"}, timeout_s=0.1)

    assert_nothing_is_left(child)


def test_a_child_that_reads_no_further_does_not_hold_its_starter(child):
    child.ask({"act": "echo", "number": 1})
    child._send({"act": "hang"}, b"", None)
    with pytest.raises(TimeoutError):
        child.ask({"act": "echo", "number": 2}, bytes(8 << 20), timeout_s=0.1)

    assert_nothing_is_left(child)


def test_memory_beyond_the_bound_is_refused_in_the_child(child):
    assert child.ask({"act": "grow", "bytes": 32 << 20})[0] == {"size": 32 << 20}
    with pytest.raises(EOFError, match="MemoryError"):
        child.ask({"act": "grow", "bytes": 1 << 30})


@pytest.mark.parametrize(
    "frame",
    [
        b"printed by a library\n",
        b"[]\n",
        b'{"found": 1}\n',
        b"[1, 2]\n",
        b"[{}, -1]\n",
        b"[{}, true]\n",
        b"[{}, 1e3]\n",
        b'[{}, "5"]\n',
        b"[{}, 99999999999999]\n",
        b"[" * 100_000 + b"\n",
        b"\xff\xfe\n",
    ],
)
def test_a_frame_that_is_none_ends_the_child(child, frame):
    """A library in the child, or who took it over by the bytes that it reads, writes what it likes."""
    with pytest.raises(EOFError, match="sent a malformed answer"):
        child.ask({"act": "raw"}, frame)

    assert_nothing_is_left(child)


def test_a_thread_that_waits_hears_of_the_close(child):
    child.ask({"act": "echo", "number": 1})
    endings = []

    def wait():
        try:
            child.ask({"act": "hang"})
        except EOFError as exc:
            endings.append(str(exc))

    thread = threading.Thread(target=wait)
    thread.start()
    child.close()
    thread.join(60.0)

    assert not thread.is_alive()
    assert len(endings) == 1
    assert_nothing_is_left(child)


HANGING = """
import sys, threading
from phalanx.child import write_stacks_on_request

def wait_for_ever():
    print("ready", flush=True)
    threading.Event().wait()

if sys.argv[1] == "writes":
    write_stacks_on_request()
wait_for_ever()
"""


@pytest.mark.parametrize("kind", ["writes", "dies"])
def test_a_child_that_hangs_leaves_its_stacks_before_it_is_killed(tmp_path, kind):
    log = tmp_path / "child.log"
    process = PythonProcess((HANGING, kind), {}, log, piped=True, program=(sys.executable, "-c"))
    with process.popen.stdout, process.popen.stdin:
        assert process.popen.stdout.readline() == "ready\n"

        request_stacks(process.pid, log)
        process.kill()

    assert ("wait_for_ever" in log.read_text()) == (kind == "writes")


def test_stacks_of_a_process_that_is_gone_are_not_waited_for(tmp_path):
    process = PythonProcess(("pass",), {}, tmp_path / "child.log", program=(sys.executable, "-c"))
    process.wait(30)

    before = (tmp_path / "child.log").read_bytes()
    request_stacks(process.pid, tmp_path / "child.log")
    request_stacks(process.pid, tmp_path / "none.log")

    assert (tmp_path / "child.log").read_bytes() == before
    assert not (tmp_path / "none.log").exists()
