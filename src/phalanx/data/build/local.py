"""The local engine: processes of this machine that are sent their tasks; they end with their starter."""

import itertools
import os
import queue
import threading
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any, Protocol, Self

from phalanx.child import AskedProcess, Message, answer_orders, die_with_parent
from phalanx.closing import Closeable
from phalanx.data.build.work import BuildWorker, Task
from phalanx.errors import ConfigError, DataError, DiskError, InputError, PhalanxError

_ERRORS = {error.__name__: error for error in (ConfigError, DataError, DiskError, InputError)}
_AHEAD = 4
"""Tasks that wait for each process, so that it never waits for its starter."""


class BuildEngine(Protocol):
    """Something that performs tasks, wherever and however many at a time."""

    def perform_tasks(self, tasks: Iterable[Task]) -> Iterator[dict[str, Any]]:
        """Yield the result of each task, in the order of the tasks."""

    def __enter__(self) -> Self:
        """Begin."""

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End all processes."""


def default_workers() -> int:
    """Return how many processes a build has: one for each core that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def open_local(worker: BuildWorker, workers: int = 1) -> AbstractContextManager[BuildEngine]:
    """Return the engine of this machine; one worker works in this process."""
    return OneProcess(worker) if workers == 1 else LocalProcesses(worker, workers)


class OneProcess(Closeable):
    """Performs tasks here, one after the other."""

    def __init__(self, worker: BuildWorker) -> None:
        self._worker = worker

    def perform_tasks(self, tasks: Iterable[Task]) -> Iterator[dict[str, Any]]:
        """Yield the result of each task."""
        return map(self._worker.perform_task, tasks)

    def close(self) -> None:
        """Nothing is held."""


class LocalProcesses(Closeable):
    """Performs tasks in processes of this machine."""

    def __init__(self, worker: BuildWorker, workers: int) -> None:
        self._job = worker.to_job()
        self._threads = ThreadPoolExecutor(workers)
        self._idle: queue.LifoQueue[_WorkerProcess | None] = queue.LifoQueue()
        self._children: list[_WorkerProcess] = []
        self._lock = threading.Lock()
        self._workers = workers
        for _ in range(workers):
            self._idle.put(None)

    def perform_tasks(self, tasks: Iterable[Task]) -> Iterator[dict[str, Any]]:
        """Yield the result of each task, in the order of the tasks."""
        waiting: deque[Future[dict[str, Any]]] = deque()
        more = iter(tasks)
        while True:
            for task in itertools.islice(more, self._workers * _AHEAD - len(waiting)):
                waiting.append(self._threads.submit(self._delegate_task, task))
            if not waiting:
                return
            yield waiting.popleft().result()

    def _delegate_task(self, task: Task) -> dict[str, Any]:
        child = self._idle.get()
        try:
            # inside: where a process cannot be started, its place must not be lost to the other threads
            child = child or self._start_child()
            return child.request_task(task)
        finally:
            self._idle.put(child)

    def _start_child(self) -> "_WorkerProcess":
        child = _WorkerProcess(self._job)
        with self._lock:
            self._children.append(child)
        return child

    def close(self) -> None:
        # the threads wait for children, so these go first
        with self._lock:
            for child in self._children:
                child.kill_process()
        self._threads.shutdown(cancel_futures=True)


class _WorkerProcess:
    """One process; the first task is sent with the job."""

    def __init__(self, job: dict[str, Any]) -> None:
        self._process = AskedProcess(["phalanx.data.build.local"], {"TOKENIZERS_PARALLELISM": "false"})
        self._job: dict[str, Any] | None = job

    def request_task(self, task: Task) -> dict[str, Any]:
        job, self._job = self._job, None
        try:
            answer, _ = self._process.ask({"job": job, "task": task})
        except EOFError as exc:
            raise DataError(
                f"a process of the build ended ({exc}) at {_describe_task(task)}; repeat the command to continue the "
                "build, with fewer --workers if memory was short"
            ) from exc
        if "error" in answer:
            raise error_from_json(answer["error"])
        return answer

    def kill_process(self) -> None:
        """End it at once: its unfinished files are never read."""
        self._process.close()


def _describe_task(task: Task) -> str:
    names = task.get("piece", {}).get("names")
    return f"{task['act']} of {names[0]!r}" if names else str(task["act"])


def error_to_json(exc: PhalanxError) -> dict[str, Any]:
    """Return an error as plain data."""
    return {"kind": type(exc).__name__, "message": str(exc), "facts": exc.error_facts}


def error_from_json(value: dict[str, Any]) -> PhalanxError:
    """Return the error that another process met."""
    return _ERRORS.get(value["kind"], DataError)(value["message"]).with_facts(**value["facts"])


def answer_task(worker: BuildWorker, task: Task) -> dict[str, Any]:
    """Perform a task; an error of ours is an answer."""
    try:
        return worker.perform_task(task)
    except PhalanxError as exc:
        return {"error": error_to_json(exc)}


def main() -> None:
    """Perform tasks until there are no more; the first one comes with the job."""
    die_with_parent()
    worker: BuildWorker | None = None

    def perform(order: dict[str, Any], _: bytes) -> Iterator[Message]:
        nonlocal worker
        worker = worker or BuildWorker.from_job(order["job"])
        yield answer_task(worker, order["task"]), b""

    answer_orders(perform)


if __name__ == "__main__":
    main()
