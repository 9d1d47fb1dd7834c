"""The owner's file about the parties that hold a served model's middle layers, and such a party's own file."""

from itertools import chain
from typing import Annotated, Self

from pydantic import Field, model_validator

from phalanx.config import StrictModel
from phalanx.pipeline.protocol.message import PartyName
from phalanx.transport import JoiningWorkerConfig, TransportConfig

MAX_STAGES = 64
MAX_HOLDERS = 8


class StagesConfig(StrictModel):
    """The parties that hold the layers between the owner's first and last ones.

    Attributes:
        identity: Directory with the owner's certificate and keys.
        holders: Parties of each stage in the order of the stages: the first one serves it, the others are its shadows,
            which have the weights and take over in this order. No party has two places.
        front_layers: Layers that the owner runs itself before the first stage, beside the embedding.
        back_layers: Layers that the owner runs itself behind the last stage, before the head.
        check_rate: Chance with which the owner redoes a text at all its stages; drawn in secret, after every piece is
            signed.
        tolerance: Largest distance of an honest party's hidden states, token by token, as in `token_distance`.
        answer_timeout_s: A party without an answer by then is taken out, and convicted of nothing.
        join_timeout_s: Seconds that one party may take to join and to load its weights.
        max_waiting_checks: Texts that wait for their check; beyond it writing waits, so that no check is left out.
        kept_stages: Stages whose weights the owner has in memory for checks; others are read from disk again.
        workers_here: Directory with an identity for each party: they are started as processes of this machine, which
            protects from nothing and is for trying out.
    """

    identity: str
    holders: Annotated[
        tuple[Annotated[tuple[PartyName, ...], Field(min_length=1, max_length=MAX_HOLDERS)], ...],
        Field(min_length=1, max_length=MAX_STAGES),
    ]
    front_layers: int = Field(default=1, ge=1, le=10**4)
    back_layers: int = Field(default=1, ge=1, le=10**4)
    check_rate: float = Field(default=0.125, ge=0.0, le=1.0)
    tolerance: float = Field(default=2e-5, gt=0.0, le=0.1)
    answer_timeout_s: Annotated[float, Field(gt=0, le=3600)] = 30.0
    join_timeout_s: Annotated[float, Field(gt=0, le=86400)] = 120.0
    max_waiting_checks: int = Field(default=32, ge=1, le=10**4)
    kept_stages: int = Field(default=1, ge=1, le=MAX_STAGES)
    workers_here: str | None = None
    transport: TransportConfig = TransportConfig()

    @property
    def parties(self) -> tuple[str, ...]:
        """Names of all parties."""
        return tuple(chain.from_iterable(self.holders))

    @model_validator(mode="after")
    def _check_places(self) -> Self:
        if len(set(self.parties)) < len(self.parties):
            raise ValueError("a party has two places; give each stage and each shadow a party of its own")
        return self


class StageWorkerConfig(JoiningWorkerConfig):
    """The file of a party that holds a stage: its identity, where the owner listens, and its bounds.

    Attributes:
        max_size_bytes: Largest weights of its stage.
        max_texts: Texts that it keeps keys and values of at the same time.
        tolerance: A stage that is to be judged by a narrower one is refused: it could convict an honest party.
    """

    threads: int = Field(default=1, ge=1, le=1024)
    max_size_bytes: int = Field(default=2**34, ge=1, le=2**44)
    max_texts: int = Field(default=1024, ge=1, le=2**16)
    max_tokens: int = Field(default=1 << 20, ge=64, le=1 << 26)
    tolerance: float = Field(default=2e-5, gt=0.0, le=0.1)
