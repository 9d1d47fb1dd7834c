"""The enclave process of this machine, and the file that it is started with: no secret is in it."""

from collections.abc import Sequence
from pathlib import Path
from typing import Literal, Self

from pydantic import Field

from phalanx.child import PythonProcess, request_stacks
from phalanx.config import StrictModel, dump_toml
from phalanx.errors import PeerLostError
from phalanx.models import ModelConfig
from phalanx.objectives import ObjectiveChoice
from phalanx.optimizers import OptimizerConfig
from phalanx.split.config import OWNER, SplitConfig

__all__ = ["OWNER", "EnclaveConfig"]

_LAST_LINES = 3
_LOG = "enclave.log"
COMMAND = ("phalanx", "enclave", "local")


class LocalEnclave:
    """A child process; a context manager that ends it.

    Args:
        directory: Gets its file and its log.
        command: Module and arguments, without the file.
    """

    def __init__(
        self, directory: Path, config: StrictModel, threads: int = 1, command: Sequence[str] = COMMAND
    ) -> None:
        self._directory, self._config, self._threads, self._command = directory, config, threads, command
        self._process: PythonProcess | None = None

    def start(self) -> None:
        """Start it; its output, and the stacks of one that has to be killed, go to ``enclave.log``."""
        self._directory.mkdir(parents=True, exist_ok=True)
        path = self._directory / "enclave.toml"
        path.write_text(dump_toml(self._config), encoding="utf-8")
        threads = {"OMP_NUM_THREADS": str(self._threads)}
        self._process = PythonProcess((*self._command, str(path)), threads, self._directory / _LOG, renew=True)

    @property
    def process_id(self) -> int | None:
        """Its process id; None before it is started."""
        return None if self._process is None else self._process.pid

    def check_running(self) -> None:
        """Return while it runs."""
        if self._process is not None and self._process.poll() is not None:
            how, last_output = self._process.how_it_ended(), self._process.last_output(_LAST_LINES)
            raise PeerLostError(f"the enclave ended with {how}: {last_output}; continue with --resume")

    def close(self) -> None:
        """Give the enclave, which has been told to end, a moment; then kill it."""
        if self._process is not None:
            self._process.end_or_kill()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._process is not None:
            if self._process.poll() is None:
                request_stacks(self._process.pid, self._directory / _LOG)
            self._process.kill()


class EnclaveConfig(StrictModel):
    """The facts that an enclave must know before a client calls.

    Attributes:
        directory: Directory for its own key and counters; no other process writes there.
        run: Name of the run, the same after a restart.
        config_digest: SHA-256 of the run's config, in hex.
        certificates: PEM of owner and clients.
        workers: PEM of masked workers that were started for this enclave; empty where it starts them itself.
        cache: Directory for models that are written out.
        split: Mode, cut, tier and the rest.
        objective: The objective of the back part, with its settings where it has any.
        classes: Number of classes of a classification; 0 of any other task.
        document_attention: Whether attention stays inside documents.
        precision: Matrix products of the back part while it learns.
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
    objective: ObjectiveChoice = "causal_lm"
    classes: int = Field(default=0, ge=0)
    rows: int = Field(ge=1)
    seq: int = Field(ge=1)
    microbatches: int = Field(ge=1)
    steps: int = Field(ge=1)
    seed: int = Field(ge=0)
    threads: int = Field(default=1, ge=1)
    document_attention: bool = False
    precision: Literal["fp32", "bf16"] = "fp32"
    passes_turns: bool = False
