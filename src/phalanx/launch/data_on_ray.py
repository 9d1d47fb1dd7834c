"""A data build on a Ray cluster: the same pieces of work as tasks, and so the same bytes."""

import itertools
import json
import os
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self

from phalanx.data.build.local import answer_task, default_workers, error_from_json, error_to_json
from phalanx.data.build.work import BuildWorker, Task
from phalanx.errors import DataError, PhalanxError
from phalanx.launch.on_ray import connect_ray

_AHEAD = 4


class RayTasks:
    """Performs tasks on a cluster; its machines share the current directory, the sources and the dataset's directory.

    Args:
        workers: Tasks at a time; None: as many as the cluster has cores for.
        address: Address of a running cluster; None starts one on this machine.
    """

    def __init__(self, worker: BuildWorker, workers: int | None = None, address: str | None = None) -> None:
        self._job = json.dumps({**worker.to_job(), "directory": str(Path.cwd())})
        self._workers, self._address = workers, address
        self._stack = ExitStack()
        self._ray: Any = None

    def __enter__(self) -> Self:
        self._ray = self._stack.enter_context(connect_ray(self._address, self._workers or default_workers()))
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def perform_tasks(self, tasks: Iterable[Task]) -> Iterator[dict[str, Any]]:
        """Yield the result of each task, in the order of the tasks."""
        ray = self._ray
        perform = ray.remote(num_cpus=1, max_retries=3)(perform_task)
        slots = self._workers or max(1, int(ray.cluster_resources().get("CPU", 1)))
        waiting: deque[Any] = deque()
        more = iter(tasks)
        while True:
            for task in itertools.islice(more, slots * (1 if self._workers else _AHEAD) - len(waiting)):
                waiting.append(perform.remote(self._job, json.dumps(task)))
            if not waiting:
                return
            yield self._task_result(ray, waiting.popleft())

    def _task_result(self, ray: Any, waiting: Any) -> dict[str, Any]:
        try:
            result: dict[str, Any] = json.loads(ray.get(waiting))
        except ray.exceptions.RayError as exc:
            raise DataError(
                f"--engine ray: a task failed ({str(exc)[:500]}); repeat the command to continue the build"
            ) from exc
        if "error" in result:
            raise error_from_json(result["error"])
        return result


def perform_task(job: str, task: str) -> str:
    """Perform one task in a process of Ray's, which keeps its worker for the next one."""
    request = json.loads(job)
    try:
        worker = _WORKERS.get(job)
        if worker is None:
            # paths of a recipe are taken from where the build was started
            os.chdir(request["directory"])
            worker = _WORKERS[job] = BuildWorker.from_job(request)
    except OSError as exc:
        lost = DataError(
            f"{request['directory']}: some machine of the cluster cannot reach it ({exc.strerror}); share it"
        )
        return json.dumps({"error": error_to_json(lost)})
    except PhalanxError as exc:
        return json.dumps({"error": error_to_json(exc)})
    return json.dumps(answer_task(worker, json.loads(task)))


_WORKERS: dict[str, BuildWorker] = {}
"""The worker of the build that this process serves."""
