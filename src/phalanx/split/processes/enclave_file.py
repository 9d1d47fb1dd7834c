"""The file that an enclave process is started with; torch-free, and no secret in it."""

from pydantic import Field

from phalanx.config import StrictModel
from phalanx.models import ModelConfig
from phalanx.optimizers import OptimizerConfig
from phalanx.split.config import OWNER, SplitConfig

__all__ = ["OWNER", "EnclaveConfig"]


class EnclaveConfig(StrictModel):
    """The facts that an enclave must know before a client calls.

    Attributes:
        identity: Directory of its keys and certificate.
        directory: Where it keeps its own key and counters; no other process writes there.
        run: Name of the run, the same after a restart.
        session: Name of this session.
        config_digest: SHA-256 of the run's config, in hex.
        addresses: Where owner and clients listen.
        certificates: PEM of owner and clients.
        workers: PEM of masked workers that were started for this enclave; empty where it starts them itself.
        model: Which model.
        cache: Where models that are written out are kept.
        split: Mode, cut, tier and the rest.
        optimizer: Of what is trained.
        objective: A key of `OBJECTIVES`.
        classes: Of a classification; 0 of anything else.
        rows: Sequences of a microbatch.
        seq: Tokens of a sequence.
        microbatches: Of a step.
        steps: Of the run.
        seed: Of the run.
        threads: Threads of tensor kernels.
        document_attention: Whether attention stays inside documents.
        passes_turns: Whether clients are processes of others, which the owner asks for turns by way of the enclave.
    """

    identity: str
    directory: str
    run: str
    session: str
    config_digest: str = Field(pattern=r"^[0-9a-f]{64}$")
    addresses: dict[str, str]
    certificates: dict[str, str]
    workers: dict[str, str] = Field(default_factory=dict)
    model: ModelConfig
    cache: str
    split: SplitConfig
    optimizer: OptimizerConfig
    objective: str = "causal_lm"
    classes: int = Field(default=0, ge=0)
    rows: int = Field(ge=1)
    seq: int = Field(ge=1)
    microbatches: int = Field(ge=1)
    steps: int = Field(ge=1)
    seed: int = Field(ge=0)
    threads: int = Field(default=1, ge=1)
    document_attention: bool = False
    passes_turns: bool = False
