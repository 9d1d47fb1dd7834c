"""A program that turned against its host: tries what a sandbox must prevent, and tells what worked.

``python -m isolation_burglar RESULT_FD TARGETS``: targets in JSON.
"""

import ctypes
import json
import os
import signal
import socket
import subprocess
import sys

_PTRACE_ATTACH, _PR_SET_DUMPABLE, _NEW_USERS = 16, 4, 0x10000000
_libc = ctypes.CDLL(None, use_errno=True)


def read_a_file(targets):
    with open(targets["file"], "rb") as file:
        return file.read()


def write_a_file(targets):
    with open(targets["file"], "ab") as file:
        file.write(b"!")


def make_a_file(targets):
    with open(targets["new_file"], "xb") as file:
        file.write(b"!")


def connect_over_tcp(targets):
    with socket.create_connection(("127.0.0.1", targets["port"]), timeout=5) as connection:
        connection.sendall(b"secret")


def connect_to_a_unix_socket(targets):
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(targets["socket"])


def start_a_program(targets):
    subprocess.run([targets["program"]], check=True)


def signal_another_process(targets):
    os.kill(targets["pid"], 0)


def read_the_memory_of_another_process(targets):
    with open(f"/proc/{targets['pid']}/mem", "rb"):
        pass


def see_what_another_process_was_started_with(targets):
    with open(f"/proc/{targets['pid']}/cmdline", "rb") as file:
        return file.read()


def trace_another_process(targets):
    _checked(_libc.ptrace(_PTRACE_ATTACH, targets["pid"], None, None))
    os.waitpid(targets["pid"], 0x40000000)
    _libc.ptrace(17, targets["pid"], None, None)


def make_itself_readable_again(targets):
    _checked(_libc.prctl(_PR_SET_DUMPABLE, 1, 0, 0, 0))


def gain_rights_in_a_new_namespace(targets):
    child = os.fork()
    if child == 0:
        os._exit(_libc.unshare(_NEW_USERS) and ctypes.get_errno())
    if code := os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]):
        raise OSError(code, os.strerror(code))


def see_the_starters_secrets(targets):
    return os.environ["PHALANX_TEST_SECRET"]


ACTS = (
    read_a_file, write_a_file, make_a_file, connect_over_tcp, connect_to_a_unix_socket, start_a_program,
    signal_another_process, read_the_memory_of_another_process, see_what_another_process_was_started_with,
    trace_another_process, make_itself_readable_again, gain_rights_in_a_new_namespace, see_the_starters_secrets,
)  # fmt: skip


def _checked(result):
    if result < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def main():
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    told = {}
    for act in ACTS:
        try:
            act(json.loads(sys.argv[2]))
            told[act.__name__] = "done"
        except (OSError, KeyError, subprocess.SubprocessError) as exc:
            told[act.__name__] = f"{type(exc).__name__}: {exc}"
    os.write(int(sys.argv[1]), json.dumps(told).encode())


if __name__ == "__main__":
    main()
