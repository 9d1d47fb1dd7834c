"""A worker process that dies by SIGKILL at a chosen point of its work, and has just written down where it is."""

import contextlib
import functools
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from phalanx.child import die_with_parent
from phalanx.config import load_config
from phalanx.lab.attacks.copies import AttackedCopy, AttackedRunner, honest_part
from phalanx.lab.bench.chaos.kill_plan import KillPlan, PlannedKill, Point
from phalanx.pipeline import StageCopy, StageRunner, WorkerConfig, requested_file, run_worker
from phalanx.pipeline.protocol.messages import Apply, Bulk, Commit, FetchBulk
from phalanx.transport import CheckedFrame, Endpoint, LinkFault, SignedHeader

_FIRST_GUESS_S = 0.02
_FLUSH_S = 5.0
_STATES = ("state", "duplicate")


class KillSwitch:
    """A trap that kills this process by SIGKILL at a planned point of its work.

    It fires after a drawn share of the time that the point took last; should the point end before that, it fires at the
    point's end, before any result leaves: so the place in the record is the place where the process died.

    Args:
        kill: Point at which the process dies; None lets it live.
        deaths: File that gets the record, one JSON object a line.
    """

    def __init__(self, kill: PlannedKill | None, deaths: Path, die: Callable[[], None]) -> None:
        self._kill = kill
        self._deaths = deaths
        self._die = die
        self._begun: dict[Point, float] = {}
        self._usual: dict[Point, float] = {}
        self._armed: Point | None = None
        self._place: dict[str, Any] = {}
        self._lock = threading.Lock()

    def begin_work(
        self, point: Point, step: int, microbatch: int | None = None, first: Callable[[], None] | None = None
    ) -> None:
        """Mark the beginning of the work at a point.

        Args:
            microbatch: Microbatch of the step, where the point has one.
            first: Blocks until the process may die; it is called in another thread.
        """
        self._begun[point] = time.monotonic()
        kill = self._kill
        if kill is None or self._armed is not None or kill.point != point or step < kill.step:
            return
        if microbatch is not None and kill.microbatch not in (None, microbatch):
            return
        self._place = {"step": step, "microbatch": microbatch}
        self._armed = point
        delay_s = kill.moment * self._usual.get(point, _FIRST_GUESS_S)
        threading.Thread(target=self._kill_self_after, args=(delay_s, first), daemon=True).start()

    def end_work(self, point: Point) -> None:
        """Mark the end of the work at a point; its result has not left the process yet."""
        if self._armed == point:
            self._kill_self()
        if point in self._begun:
            self._usual[point] = time.monotonic() - self._begun.pop(point)

    @contextlib.contextmanager
    def working_at(self, point: Point, step: int, microbatch: int) -> Iterator[None]:
        """Mark beginning and end of the work on one microbatch."""
        self.begin_work(point, step, microbatch)
        yield
        self.end_work(point)

    def _kill_self_after(self, delay_s: float, first: Callable[[], None] | None) -> None:
        if first is not None:
            first()
        time.sleep(delay_s)
        self._kill_self()

    def _kill_self(self) -> None:
        with self._lock:
            kill, self._kill = self._kill, None
            if kill is None:
                return
            record = {"worker": kill.worker, "point": kill.point, **self._place, "planned_step": kill.step}
            with self._deaths.open("a", encoding="utf-8") as file:
                file.write(json.dumps({**record, "pid": os.getpid(), "time": time.time()}) + "\n")
            self._die()


class WatchedRunner(AttackedRunner):
    """A runner that computes honestly and reports each point of the work to the kill switch."""

    def __init__(self, honest: StageRunner, executioner: KillSwitch) -> None:
        super().__init__(honest)
        self._executioner = executioner

    def forward(self, step: int, microbatch: int, x: Tensor) -> Tensor:
        with self._executioner.working_at("forward", step, microbatch):
            return super().forward(step, microbatch, x)

    def backward(self, step: int, microbatch: int, gradient: Tensor | None) -> Tensor | None:
        with self._executioner.working_at("backward", step, microbatch):
            return super().backward(step, microbatch, gradient)

    def recompute_microbatch(
        self, step: int, microbatch: int, x: Tensor, gradient: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        with self._executioner.working_at("audit", step, microbatch):
            return super().recompute_microbatch(step, microbatch, x, gradient)

    def redo_microbatch(
        self, step: int, microbatch: int, x: Tensor, gradient: Tensor, names: Collection[str] | None = None
    ) -> tuple[Tensor, Tensor | None, dict[str, Tensor]]:
        with self._executioner.working_at("audit", step, microbatch):
            return self._honest.redo_microbatch(step, microbatch, x, gradient, names)


class WatchedEndpoint(Endpoint):
    """An endpoint that tells the kill switch when a commitment or a state has left, and when an answer has come."""

    def __init__(self, *arguments: Any, executioner: KillSwitch) -> None:
        # before anything can arrive
        self._executioner = executioner
        super().__init__(*arguments)

    def send_frame(
        self, receiver: str, kind: str, body: dict[str, Any], payload: Sequence[bytes | memoryview] = ()
    ) -> SignedHeader:
        if kind == Bulk.kind and body["purpose"] in _STATES:
            size = sum(memoryview(part).nbytes for part in payload)
            if body["offset"] + size >= body["total"]:
                self._executioner.end_work("checkpoint")
        header = super().send_frame(receiver, kind, body, payload)
        if kind == Commit.kind:
            # a commitment counts once it has arrived at the owner
            self._executioner.begin_work("commit", body["step"], first=self._flush_frames)
        return header

    def receive_item(self, timeout_s: float) -> CheckedFrame | LinkFault | None:
        frame = super().receive_item(timeout_s)
        if isinstance(frame, CheckedFrame):
            if frame.kind == Apply.kind:
                self._executioner.end_work("commit")
            elif frame.kind == FetchBulk.kind and frame.body["purpose"] in _STATES:
                self._executioner.begin_work("checkpoint", frame.body["step"])
        return frame

    def _flush_frames(self) -> None:
        self.flush_frames(_FLUSH_S)


def main(plan_file: Path, deaths: Path, worker_file: Path) -> None:
    """Run one worker, or a fork server of such workers."""
    die_with_parent()
    file = requested_file(worker_file)
    if file is None:
        return
    config = load_config(file, WorkerConfig)
    plan = KillPlan.model_validate_json(plan_file.read_text(encoding="utf-8"))
    name = Path(config.identity).name
    kill = next((kill for kill in plan.kills if kill.worker == name), None)
    executioner = KillSwitch(kill, deaths, lambda: os.kill(os.getpid(), signal.SIGKILL))

    def wrap(copy: StageCopy, held: bool) -> StageCopy:
        del held
        honest = honest_part(copy)
        return AttackedCopy(honest, WatchedRunner(honest.runner, executioner))

    opener = functools.partial(WatchedEndpoint, executioner=executioner)
    run_worker(config, open_endpoint=opener, wrap_copy=wrap)


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:4]))
