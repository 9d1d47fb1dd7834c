import json
import os

import pytest

from phalanx.errors import IsolationError
from phalanx.security.isolation import Program, Sandbox, start_isolated


@pytest.fixture(scope="session")
def sandbox_works():
    """Skips where the machine cannot give the whole tier, and says what is lacking."""
    try:
        with start_isolated(Program("isolation_guest", ("exit", "0")), Sandbox()) as running:
            running.wait(30)
    except IsolationError as exc:
        pytest.skip(str(exc))


class Pipe:
    """One pipe: the child's end is a number, what came is JSON."""

    def __init__(self) -> None:
        self.reading, self.writing = os.pipe()

    def close_writing(self) -> None:
        if self.writing >= 0:
            os.close(self.writing)
            self.writing = -1

    def everything(self) -> bytes:
        """What was written until the last holder of the other end has gone."""
        self.close_writing()
        data = b""
        while chunk := os.read(self.reading, 65536):
            data += chunk
        return data

    def line(self):
        """The next line, as JSON."""
        data = b""
        while not data.endswith(b"\n"):
            chunk = os.read(self.reading, 1)
            if not chunk:
                raise EOFError("the other end closed without a word")
            data += chunk
        return json.loads(data)

    def close(self) -> None:
        self.close_writing()
        if self.reading >= 0:
            os.close(self.reading)
            self.reading = -1


@pytest.fixture
def pipe():
    made = Pipe()
    yield made
    made.close()


@pytest.fixture
def hold():
    """A pipe that keeps a victim alive while it is open."""
    made = Pipe()
    yield made
    made.close()
