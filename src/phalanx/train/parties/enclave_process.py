"""The process of an enclave that owner and clients call: the run file, its own keys and its own directory."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from phalanx.config import digest_config
from phalanx.errors import CertificateError, ConfigError
from phalanx.interrupts import allow_interrupts
from phalanx.models import open_model
from phalanx.security.crypto import load_identity, make_private_directory
from phalanx.split import ENCLAVE
from phalanx.split.check import check_split
from phalanx.split.config import OWNER
from phalanx.split.hardware.tier import describe_protection
from phalanx.split.processes.local_enclave import EnclaveConfig
from phalanx.split.roles.host import EnclaveHost, EnclaveSettings
from phalanx.train.config import SplitRun, load_run
from phalanx.train.records.run_directory import cache_beside
from phalanx.train.sessions.split_cluster import num_classes_of
from phalanx.train.setup.preflight import check_inputs

Say = Callable[[str], None]


@dataclass(frozen=True)
class EnclaveStart:
    """What an enclave's host says of it, beside the run file.

    Attributes:
        directory: Its own: key of its states, counters.
        bind: Address to listen on; None for this machine alone where the run names this one, else every address.
    """

    identity: Path
    directory: Path
    bind: str | None = None
    port: int | None = None


def read_enclave_run(path: Path, start: EnclaveStart) -> SplitRun:
    """Read a run file for the enclave of other parties, and look at keys and model; torch is not needed."""
    run = load_run(path)
    if not isinstance(run, SplitRun) or run.split.remote_enclave is None:
        raise ConfigError(f"{path}: split.remote_enclave is missing; `phalanx train` starts the enclave of such a run")
    name = load_identity(start.identity).name
    if name != ENCLAVE:
        raise CertificateError(
            f"{start.identity}: belongs to {name!r}; make the enclave's keys with `phalanx pki request {ENCLAVE}`"
        )
    check_inputs(run)
    return run


def serve_enclave(run: SplitRun, start: EnclaveStart, tell: Say) -> None:
    """Be the enclave until the owner ends the run; where a session breaks off, wait for the next one."""
    split = run.split
    make_private_directory(start.directory)
    cache = cache_beside(start.directory) / "models"
    source = open_model(run.model, cache, run.train.seed)
    check_split(split, source, seq=run.data.sequence_length, objective=run.train.objective_kind)
    tell(f"run {digest_config(run)[:16]}; {describe_protection(split)}")
    host, _, port = (split.remote_enclave or "").rpartition(":")
    is_here = host in ("localhost", "127.0.0.1", "[::1]")
    bind = start.bind or ("127.0.0.1" if is_here else "0.0.0.0")  # noqa: S104 - parties of other machines call it
    transport = split.transport.model_copy(
        update={"bind": bind, "port": int(port) if start.port is None else start.port}
    )
    identity, parties = load_identity(start.identity), (OWNER, *split.client_names)
    place = EnclaveSettings(
        identity, start.directory, transport, parties, digest_config(run)[:16], split.tier == "process"
    )

    def make_config(session: str, certificates: Mapping[str, str]) -> EnclaveConfig:
        return _enclave_config(run, start, cache, session, certificates)

    with allow_interrupts():
        EnclaveHost(place, make_config, tell).serve_sessions()


def sealed_directory(own: Path, run: str) -> Path:
    """Return where an enclave keeps key and counters of one run, the same after a restart.

    Args:
        own: The enclave's own directory, for all runs.
        run: Digest of the run, in whose name states are sealed; another one's are of no use to it.
    """
    # as releases before had it, for one run alone
    older = own / "sealed"
    return older if older.exists() else own / f"sealed-{run[:16]}"


def _enclave_config(
    run: SplitRun, start: EnclaveStart, cache: Path, session: str, certificates: Mapping[str, str]
) -> EnclaveConfig:
    return EnclaveConfig(
        identity=str(start.identity.resolve()),
        directory=str(sealed_directory(start.directory, digest_config(run)).resolve()),
        run=digest_config(run),
        session=session,
        config_digest=digest_config(run),
        addresses=dict.fromkeys(certificates, ""),
        certificates=dict(certificates),
        model=run.model,
        cache=str(cache.resolve()),
        split=run.split,
        optimizer=run.optimizer,
        objective=run.train.objective,
        classes=num_classes_of(run),
        rows=run.train.batch_size // run.train.microbatches,
        seq=run.data.sequence_length,
        precision=run.computes_in,
        microbatches=run.train.microbatches,
        steps=run.train.steps,
        seed=run.train.seed,
        threads=run.train.threads,
        passes_turns=True,
    )
