"""Arms that train the same model side by side and take turns, so that what slows the machine down slows all of them."""

import contextlib
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from phalanx.errors import TrainingError
from phalanx.lab.bench.parallel.layouts import layout_name, with_layout
from phalanx.lab.bench.parallel.rank_training import TrainingSpec
from phalanx.lab.bench.parallel.ranks import ArmRanks, RankForkServer
from phalanx.parallel import ParallelConfig
from phalanx.parallel.deepspeed import DeepSpeedConfig
from phalanx.train import PipelineRun

_WARM_UP = 2
"""First steps of an arm, which are not timed."""


@dataclass(frozen=True)
class TurnSpec:
    """An arm that takes turns with others.

    Attributes:
        arm: One of `phalanx.lab.bench.parallel.arms.ARMS`.
        config: The layout; that which a peer stands beside.
        deepspeed: The section ``[deepspeed]`` of the engine's run file; None for torch's own means.
    """

    arm: str
    config: ParallelConfig
    steps: int
    deepspeed: DeepSpeedConfig | None = None


@dataclass
class LayoutTurns:
    """The measured turns of one arm.

    Attributes:
        walls: Wall seconds of the steps of each turn, measured at the first rank.
        cpus: CPU seconds of all ranks together, likewise.
        waits: Share of the ranks' time in which they waited for anything but a core; empty where the system does not
            measure it.
        sent_bytes: Bytes that all ranks sent in each turn; empty where the system does not count them.
        reason: Why it did not run; None where it did.
    """

    spec: TurnSpec
    losses: list[float] = field(default_factory=list)
    walls: list[list[float]] = field(default_factory=list)
    cpus: list[list[float]] = field(default_factory=list)
    waits: list[list[float]] = field(default_factory=list)
    sent_bytes: list[int] = field(default_factory=list)
    reason: str | None = None

    def step_s(self) -> float:
        """Median wall seconds of a step."""
        return statistics.median(self._timed_steps(self.walls))

    def cpu_s(self) -> float:
        """Median CPU seconds of a step."""
        return statistics.median(self._timed_steps(self.cpus))

    def waiting_share(self) -> float | None:
        """Median share of the ranks' time in which they waited; None where the system does not tell."""
        return statistics.median(self._timed_steps(self.waits)) if self.waits else None

    def sent_bytes_per_step(self) -> float | None:
        """Return the bytes of all ranks in a step of the last turn; None where none are counted."""
        return self.sent_bytes[-1] / self.spec.steps if self.sent_bytes else None

    def faster_than(self, other: "LayoutTurns") -> float:
        """How many times as many steps a second, by the median over turns: neighbours in time are compared."""
        pairs = list(zip(self.walls, other.walls, strict=False))
        # the first turn warms up where there are others
        pairs = pairs[1:] if len(pairs) > 1 else pairs
        return statistics.median(statistics.median(theirs) / statistics.median(mine) for mine, theirs in pairs)

    @staticmethod
    def _timed_steps(turns: Sequence[Sequence[float]]) -> list[float]:
        steps = [step for turn in turns for step in turn]
        return steps[_WARM_UP:] if len(steps) > _WARM_UP else steps


def take_turns(
    host: RankForkServer, specs: Sequence[TurnSpec], run: PipelineRun, cache: Path, turns: int
) -> list[LayoutTurns]:
    """Let arms train side by side, one at a time.

    An arm that fails is left out from then on, and says why.

    Args:
        cache: Directory of models and tokens.
    """
    done = [LayoutTurns(spec) for spec in specs]
    with contextlib.ExitStack() as stack:
        crews: dict[int, ArmRanks] = {}
        for turn in range(turns):
            for position in range(len(specs)):
                # each is first in some turn
                number = (position + turn) % len(specs)
                training = done[number]
                if training.reason is not None:
                    continue
                try:
                    if number not in crews:
                        crews[number] = stack.enter_context(train_crew(host, training.spec, run, cache))
                    _take_turn(training, crews[number])
                except TrainingError as exc:
                    training.reason = str(exc)
    return done


def train_crew(
    host: RankForkServer, turn: TurnSpec, run: PipelineRun, cache: Path, *, measures_memory: bool = False
) -> ArmRanks:
    """Ranks of one arm."""
    spec = TrainingSpec(
        arm=turn.arm,
        run=with_layout(run, turn.config, turn.deepspeed),
        cache=str(cache.resolve()),
        measures_memory=measures_memory,
    )
    name = f"{turn.arm}, {layout_name(turn.config)}"
    return host.make_crew(name, "train", turn.config.num_ranks, {"spec": spec.model_dump_json()})


def _take_turn(one: LayoutTurns, crew: ArmRanks) -> None:
    answers = crew.ask_all(steps=one.spec.steps)
    one.losses += answers[0]["losses"]
    one.walls.append(answers[0]["wall_s"])
    one.cpus.append([sum(step) for step in zip(*(answer["cpu_s"] for answer in answers), strict=True)])
    waits = [
        [_waited_share(*pair) for pair in zip(answer["waited_s"], answer["wall_s"], strict=True)] for answer in answers
    ]
    sent_bytes = [answer["sent_bytes"] for answer in answers]
    if None not in sent_bytes:
        one.sent_bytes.append(sum(sent_bytes))
    known_shares = [share for rank in waits for share in rank if share is not None]
    if len(known_shares) == len(waits) * one.spec.steps:
        one.waits.append([statistics.fmean(step) for step in zip(*waits, strict=True)])


def _waited_share(waited_s: float | None, wall_s: float) -> float | None:
    return None if waited_s is None else waited_s / wall_s
