"""A worker's config file, and an owner's section about checks; reading it needs no torch."""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from phalanx.config import StrictModel
from phalanx.config.strict import later_key
from phalanx.pipeline.protocol.message import PartyName
from phalanx.rollouts.verdict import RolloutTolerance
from phalanx.transport import JoiningWorkerConfig, TransportConfig

BATCH_ROWS = 64

AttentionKernel = Literal["sdpa", "eager"]


class RolloutCheck(StrictModel):
    """Checks of workers' texts.

    Attributes:
        rate: The share of each answer that is read again, after it was signed; at least one text, unless it is 0.
        answer_timeout_s: A worker that has not answered by then is passed over, and convicted of nothing.
        max_unanswered: A worker that leaves more requests than this without an answer in time is left out from then on,
            and convicted of nothing; every 32 answers allow one more.
        unread_weight: Weight in training of a worker's text that was not read again; of all others it is 1. 0 trains on
            texts that were read again, and on the owner's own, alone.
    """

    rate: float = Field(default=0.125, ge=0.0, le=1.0)
    tolerance: RolloutTolerance = RolloutTolerance()
    answer_timeout_s: Annotated[float, Field(gt=0, le=86400)] = 600.0
    max_unanswered: int = Field(default=2, ge=0, le=10**6)
    unread_weight: float = later_key(1.0, ge=0.0, le=1.0, allow_inf_nan=False)

    @model_validator(mode="after")
    def _check_weight(self) -> "RolloutCheck":
        if self.unread_weight < 1.0 and not self.rate:
            raise ValueError("unread_weight sets texts that were read again before others, and rate = 0 reads none")
        return self


class RolloutsConfig(StrictModel):
    """The section ``[rollouts]`` of a run file: workers that are not trusted write its texts.

    Attributes:
        workers: Number of processes on this machine; 0 with workers on other machines.
        threads: Threads of tensor kernels per process on this machine.
        remote_workers: Names of workers on other machines, which `phalanx invite` certifies.
        pki: Directory of the authority that certifies them.
        transport: Address at which the owner awaits them, deadlines and bounds.
    """

    workers: int = Field(default=0, ge=0, le=256)
    threads: int = Field(default=1, ge=1, le=1024)
    check: RolloutCheck = RolloutCheck()
    remote_workers: tuple[PartyName, ...] = later_key((), max_length=256)
    pki: str | None = later_key(None)
    transport: TransportConfig = later_key(TransportConfig())

    @model_validator(mode="after")
    def _check_workers(self) -> "RolloutsConfig":
        remote = self.remote_workers
        if bool(remote) == bool(self.workers):
            raise ValueError("expected workers = N on this machine, or remote_workers with names; give one of both")
        if len(set(remote)) != len(remote) or "owner" in remote:
            raise ValueError("remote_workers must be distinct names and none may be 'owner'")
        if bool(remote) != (self.pki is not None):
            raise ValueError("remote_workers and pki = DIR, where `phalanx invite` makes an authority, need each other")
        if not remote and self.transport != TransportConfig():
            raise ValueError("transport is for remote_workers; workers on this machine need none")
        return self


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
