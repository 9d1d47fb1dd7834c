"""A worker's config file, and an owner's section about checks; reading it needs no torch."""

from typing import Annotated, Literal

from pydantic import Field

from phalanx.config import StrictModel
from phalanx.rollouts.verdict import RolloutTolerance
from phalanx.transport import JoiningWorkerConfig

BATCH_ROWS = 64

AttentionKernel = Literal["sdpa", "eager"]


class RolloutCheck(StrictModel):
    """Checks of workers' texts.

    Attributes:
        rate: The share of each answer that is read again, after it was signed; at least one text, unless it is 0.
        answer_timeout_s: A worker that has not answered by then is passed over, and convicted of nothing.
        max_unanswered: A worker that leaves more requests than this without an answer in time is left out from then on,
            and convicted of nothing; every 32 answers allow one more.
    """

    rate: float = Field(default=0.125, ge=0.0, le=1.0)
    tolerance: RolloutTolerance = RolloutTolerance()
    answer_timeout_s: Annotated[float, Field(gt=0, le=86400)] = 600.0
    max_unanswered: int = Field(default=2, ge=0, le=10**6)


class RolloutsConfig(StrictModel):
    """The section ``[rollouts]`` of a run file: workers that are not trusted write its texts.

    Attributes:
        workers: Number of processes on this machine.
        threads: Threads of tensor kernels per worker.
    """

    workers: int = Field(ge=1, le=256)
    threads: int = Field(default=1, ge=1, le=1024)
    check: RolloutCheck = RolloutCheck()


class RolloutWorkerConfig(JoiningWorkerConfig):
    """The config of one worker process: its identity, where the owner listens, and how it computes.

    Attributes:
        batch_rows: About so many texts at a time.
        tolerance: A request that is to be judged by a narrower one is refused: it could convict an honest worker.
    """

    device: str = Field(default="cpu", pattern=r"^(cpu|cuda(:\d+)?)$")
    threads: int = Field(default=1, ge=1, le=1024)
    attention: AttentionKernel = "sdpa"
    batch_rows: int = Field(default=BATCH_ROWS, ge=1, le=2**16)
    tolerance: RolloutTolerance = RolloutTolerance()
