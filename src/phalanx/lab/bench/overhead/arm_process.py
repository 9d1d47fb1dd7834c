"""The bench's side of its arms: start their processes, let them step in turn, measure each from outside."""

import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from phalanx.errors import TrainingError
from phalanx.lab.bench.measure.line_process import LineProcess
from phalanx.lab.bench.measure.process_clock import cpu_seconds, process_tree, wait_until_quiet
from phalanx.lab.bench.overhead.arm import ArmSpec, Report, StepsRequest

_QUIET_TIMEOUT_S = 120.0


@dataclass(frozen=True)
class Block:
    """A few steps of one arm, measured from their start until all its processes are idle again.

    Attributes:
        cpu_s: CPU seconds of all processes of the arm together.
        report: Report of the arm itself.
    """

    steps: int
    wall_s: float
    cpu_s: float
    report: Report


class ArmProcess(LineProcess):
    """One arm's process with its workers; idle between blocks."""

    def __init__(self, spec: ArmSpec, environment: Mapping[str, str]) -> None:
        directory = Path(spec.directory)
        directory.parent.mkdir(parents=True, exist_ok=True)
        path, log = directory.parent / f"{spec.arm}.json", directory.parent / f"{spec.arm}.log"
        path.write_text(spec.model_dump_json(), encoding="utf-8")
        super().__init__(f"arm {spec.arm!r}", ("phalanx.lab.bench.overhead.arm", str(path)), environment, log)
        try:
            self.answer()
        except TrainingError:
            self.close()
            raise
        self.pids = process_tree(self.pid)

    def run(self, steps: int, threads: int = 1) -> Block:
        """Run some steps and wait until everything that they started has ended.

        Raises:
            TrainingError: The arm failed; the message holds the last line of its log.
        """
        cpu, started = cpu_seconds(self.pids), time.perf_counter()
        report = self._order(StepsRequest(steps=steps, threads=threads))
        ended = wait_until_quiet(self.pids, _QUIET_TIMEOUT_S)
        return Block(steps, ended - started, cpu_seconds(self.pids) - cpu, report)

    def lose(self, worker: str) -> Report:
        """Kill one of the arm's workers, and run a step without it.

        Returns:
            What happened, with the seconds from the loss to the end of the step. Nothing can be measured from outside
            afterwards.

        Raises:
            TrainingError: The arm failed.
        """
        return self._order(StepsRequest(steps=1, threads=1, lose=worker))

    def _order(self, order: StepsRequest) -> Report:
        self.tell(order.model_dump_json())
        return Report.model_validate_json(self.answer())
