"""The ranks of a bench: torch is imported once, then this process is forked into them, crew by crew.

Messages come as lines of JSON. Each is for one crew; the answers of its ranks go back as one line.
"""

import contextlib
import importlib
import json
import os
import selectors
import signal
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from phalanx.child import PARENT, die_with_parent
from phalanx.parallel import RankEnv

Act = Callable[[dict[str, Any]], dict[str, Any]]
"""From an order to an answer."""
Task = Callable[[dict[str, Any], RankEnv], contextlib.AbstractContextManager[Act]]

TASKS = {
    "train": "phalanx.lab.bench.parallel.rank_training:open_training",
    "exchange": "phalanx.lab.bench.parallel.rank_exchange:open_exchange",
    "probe": "phalanx.lab.bench.parallel.rank_probe:open_probe",
    "save": "phalanx.lab.bench.parallel.rank_saves:open_saves",
    "stream": "phalanx.lab.bench.parallel.rank_stream:open_stream",
}
"""Where the tasks are; only those that are wanted are imported."""

_SECONDS_TO_END = 2.0
_LOOK_EVERY_S = 0.01


@dataclass(frozen=True)
class _RankPipes:
    """One rank: its process and the pipes to and from it."""

    pid: int
    orders: IO[str]
    answers: IO[str]


def main(messages: IO[str], answers: IO[str]) -> None:
    """Serve messages until there are no more."""
    die_with_parent()
    os.environ[PARENT] = str(os.getpid())
    crews: dict[int, list[_RankPipes]] = {}
    for message_line in messages:
        message = json.loads(message_line)
        number = message["crew"]
        if "start" in message:
            crews[number] = _start_ranks(message["start"])
            answer = _read_answers(crews[number])
        elif "order" in message:
            answer = _ask_ranks(crews[number], message["order"])
        else:
            _end_ranks(crews.pop(number, []))
            answer = []
        answers.write(json.dumps(answer) + "\n")
        answers.flush()
    for seats in crews.values():
        _end_ranks(seats)


def _start_ranks(spec: dict[str, Any]) -> list[_RankPipes]:
    module, _, name = TASKS[spec["task"]].partition(":")
    task: Task = getattr(importlib.import_module(module), name)
    world, meeting = int(spec["world"]), Path(spec["directory"]) / "meeting"
    return [_fork_rank(task, spec["body"], RankEnv(rank, world, rank, world, meeting)) for rank in range(world)]


def _fork_rank(task: Task, body: dict[str, Any], place: RankEnv) -> _RankPipes:
    down, up = os.pipe(), os.pipe()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            die_with_parent()
            os.close(down[1])
            os.close(up[0])
            # what libraries print must not be taken for an answer
            os.dup2(2, 1)
            os.environ.update(place.to_environment())
            _serve_orders(task, body, place, os.fdopen(down[0]), os.fdopen(up[1], "w"))
            code = 0
        finally:
            # groups would wait for each other to be closed, and there is nothing to keep
            os._exit(code)
    os.close(down[0])
    os.close(up[1])
    return _RankPipes(child, os.fdopen(down[1], "w"), os.fdopen(up[0]))


def _serve_orders(task: Task, body: dict[str, Any], place: RankEnv, orders: IO[str], answers: IO[str]) -> None:
    try:
        with task(body, place) as act:
            _write_answer(answers, {})
            for order_line in orders:
                _write_answer(answers, act(json.loads(order_line)))
            os._exit(0)
    except Exception as exc:  # noqa: BLE001 - whatever it is, the bench says it
        traceback.print_exc()
        _write_answer(answers, {"error": f"{type(exc).__name__}: {exc}"})


def _ask_ranks(seats: list[_RankPipes], order: dict[str, Any]) -> list[dict[str, Any]]:
    for seat in seats:
        # one that has ended says so when it is heard
        with contextlib.suppress(BrokenPipeError):
            _write_answer(seat.orders, order)
    return _read_answers(seats)


def _read_answers(seats: list[_RankPipes]) -> list[dict[str, Any]]:
    """One answer of every rank; as soon as one has failed the others are not waited for: they may wait for it."""
    answers: list[dict[str, Any]] = [{} for _ in seats]
    with selectors.DefaultSelector() as selector:
        for rank, seat in enumerate(seats):
            selector.register(seat.answers, selectors.EVENT_READ, rank)
        while selector.get_map():
            for key, _ in selector.select():
                reply = seats[key.data].answers.readline()
                answers[key.data] = json.loads(reply) if reply else {"error": "it has ended"}
                selector.unregister(key.fileobj)
                if "error" in answers[key.data]:
                    return answers
    return answers


def _end_ranks(seats: list[_RankPipes]) -> None:
    for seat in seats:
        with contextlib.suppress(BrokenPipeError):
            seat.orders.close()
        seat.answers.close()
    deadline = time.monotonic() + _SECONDS_TO_END
    for seat in seats:
        while os.waitpid(seat.pid, os.WNOHANG)[0] == 0:
            if time.monotonic() > deadline:
                os.kill(seat.pid, signal.SIGKILL)
                os.waitpid(seat.pid, 0)
                break
            time.sleep(_LOOK_EVERY_S)


def _write_answer(answers: IO[str], what: object) -> None:
    answers.write(json.dumps(what) + "\n")
    answers.flush()


if __name__ == "__main__":
    for preloaded in sys.argv[1:]:
        importlib.import_module(preloaded)
    main(sys.stdin, sys.stdout)
