"""Owner, clients and the enclave process: started together, and ended together."""

import contextlib
import secrets
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

from phalanx.config import digest_config
from phalanx.models import ModelSource
from phalanx.pipeline import OWNER
from phalanx.security.crypto import Identity, Peer, load_identity, make_private_directory, peer_from_certificate
from phalanx.split import ENCLAVE, Front, FrontPart, SplitConfig, SplitDriver, TensorKinds, kinds_of_task, task_of
from phalanx.split.channel.connection import Aside, Connection
from phalanx.split.channel.frame_pipe import FramePipe
from phalanx.split.handshake.meeting import ClientHandshake
from phalanx.split.handshake.party import EnclavePeer
from phalanx.split.handshake.terms import HandshakeTerms, attested_keys
from phalanx.split.hardware.measure import policy_of
from phalanx.split.hardware.tier import file_counter, open_epochs
from phalanx.split.masked.remote import PipedWorkerConfig
from phalanx.split.processes.confined import ConfinedEnclave, confined_workers
from phalanx.split.processes.local_enclave import EnclaveConfig, LocalEnclave
from phalanx.split.processes.offload import masked_session
from phalanx.split.training.parts import FewBits
from phalanx.train.config import SplitRun
from phalanx.train.records.run_directory import RunDirectory
from phalanx.train.sessions.enclave_owner import EnclaveOwnerConfig
from phalanx.train.sessions.middle_stages import MiddleStages
from phalanx.transport import Endpoint, GrpcWire, TransportConfig

OpenEnclave = Callable[[Path, EnclaveConfig, int], LocalEnclave]
"""Opens an enclave with a directory for its file and log, its file, and its threads."""


def num_classes_of(run: SplitRun) -> int:
    """Classes of the clients' own texts, as the run file names them; 0 of a run without such texts."""
    own_texts = None if run.data.labelled is None else run.data.labelled.own_task
    return 0 if own_texts is None else len(own_texts.classes)


def num_pair_sums_of(run: SplitRun) -> int:
    """How many sums over pairs a measurement of a run comes to; 0 where it learns no preferences."""
    return task_of(run.train.objective, num_classes_of(run)).num_pair_sums if run.train.learns_pairs else 0


def kinds_of(run: SplitRun, source: ModelSource, num_classes: int) -> TensorKinds:
    """Return the kinds of tensors that cross in a run."""
    rows = run.train.batch_size // run.train.microbatches
    task = task_of(run.train.objective, num_classes)
    width = source.hidden_size + (run.data.attention == "document")
    return kinds_of_task(task, rows, run.data.sequence_length, width, run.split.wire)


def enclave_of(home: RunDirectory) -> Peer:
    """The enclave's name and key, as the authority of the run certified them."""
    return peer_from_certificate(home.read_certificate(ENCLAVE).encode("ascii"), home.owner.authority_pem)


@contextlib.contextmanager
def split_company(
    run: SplitRun,
    home: RunDirectory,
    source: ModelSource,
    num_classes: int = 0,
    middle: MiddleStages | None = None,
    refused: Aside = lambda message: False,
    *,
    front: Front | None = None,
    open_enclave: OpenEnclave = LocalEnclave,
    transport: TransportConfig | None = None,
) -> Iterator[SplitDriver]:
    """Start the enclave, have every party meet it, and end it whatever happens.

    Args:
        num_classes: Number of classes of a classification; 0 of any other task.
        middle: Middle stages of an enclave that owns a pipeline.
        front: Front part of all clients; cut from the model by the run file when left out.
        open_enclave: Opens an enclave on the network; another than the default is for benches only.
        transport: Transport of owner and clients; that of the run file when left out.
    """
    split, limits = run.split, transport or run.split.transport
    # a new session name for each start, so that nothing of an earlier one can be replayed
    session = f"{home.run_id}-{secrets.token_hex(8)}"
    with contextlib.ExitStack() as stack:
        near, far = stack.enter_context(_open_pipe(split)) if split.tier == "process" else (None, None)
        addresses: dict[str, str] = {}
        endpoints: dict[str, tuple[Identity, Endpoint]] = {}
        for name in (OWNER, *split.client_names):
            identity = home.owner if name == OWNER else load_identity(home.pki_directory / name)
            wire = GrpcWire(identity, limits) if near is None else near.open_wire(name)
            stack.callback(wire.close)
            endpoint = stack.enter_context(Endpoint(identity, {}, session, wire, limits))
            endpoint.add_peer(enclave_of(home))
            addresses[name], endpoints[name] = wire.address, (identity, endpoint)
        config, workers = _enclave_config(run, home, session, addresses, num_classes), home.path / "workers"
        if far is None:
            process: LocalEnclave | ConfinedEnclave = _local_enclave(run, workers, config, middle, open_enclave)
        else:
            behind_pipes = _piped_workers(split, home, session)
            ends = stack.enter_context(confined_workers(workers, behind_pipes, run.train.threads))
            process = ConfinedEnclave(workers, config, far, ends)
        stack.enter_context(process)
        process.start()
        parties = []
        for name, (identity, endpoint) in endpoints.items():
            connection = _open_connection(
                split, endpoint, process.check_running, middle if name == OWNER else None, refused
            )
            parties.append(party_of(run, home, identity, connection, session))
        front = front or FrontPart(
            source,
            split.cut,
            attention=run.model.attention,
            wire=split.wire,
            document_attention=run.data.attention == "document",
            few_bits=FewBits(run.computes_in, run.model.base_quantization),
        )
        lead = SplitDriver(
            split, parties[0], parties[1:], front, kinds_of(run, source, num_classes), run.train.microbatches
        )
        stack.callback(lead.close)
        lead.meet_enclave()
        yield lead
        lead.end_session()
        process.close()
        if middle is not None:
            middle.close()


def _piped_workers(split: SplitConfig, home: RunDirectory, session: str) -> dict[str, PipedWorkerConfig]:
    """Files of masked workers for an enclave that can start none itself."""
    return {
        name: PipedWorkerConfig(
            identity=str((home.pki_directory / name).resolve()),
            owner_certificate=home.read_certificate(ENCLAVE),
            session=masked_session(session),
            transport=split.transport,
        )
        for name in split.masked_workers
    }


@contextlib.contextmanager
def _open_pipe(split: SplitConfig) -> Iterator[tuple[FramePipe, socket.socket]]:
    """The only way to an enclave that reaches no network: this side's end, and the one to hand over."""
    near, far = socket.socketpair()
    pipe = FramePipe(near, split.transport.max_frame_bytes)
    try:
        yield pipe, far
    finally:
        pipe.close()
        far.close()


def _open_connection(
    split: SplitConfig, endpoint: Endpoint, look: Callable[[], None], middle: MiddleStages | None, refused: Aside
) -> Connection:
    if middle is None:
        return Connection(endpoint, ENCLAVE, split.step_timeout_s, look, refused)

    def look_at_both() -> None:
        look()
        middle.check_joining_workers()

    return Connection(endpoint, ENCLAVE, split.step_timeout_s, look_at_both, middle.serve_enclave_message)


def party_of(run: SplitRun, home: RunDirectory, identity: Identity, line: Connection, session: str) -> EnclavePeer:
    """One end of a session, with the keys, epochs and policy that it meets the enclave with."""
    split = run.split
    if split.mode == "plaintext":
        return EnclavePeer(identity, line, None)
    directory = home.path / "clients" / identity.name
    make_private_directory(directory)
    epochs = open_epochs(directory, file_counter(directory, "epoch"))
    enclave = enclave_of(home)
    keys = attested_keys(enclave, home.read_certificate(ENCLAVE).encode("ascii"))
    occasion = HandshakeTerms(session, bytes.fromhex(digest_config(run)), enclave, keys, split.chunk_bytes)
    return EnclavePeer(identity, line, ClientHandshake(identity, occasion, epochs, lambda: policy_of(split)))


def _local_enclave(
    run: SplitRun, directory: Path, config: EnclaveConfig, middle: MiddleStages | None, open_enclave: OpenEnclave
) -> LocalEnclave:
    if middle is None:
        return open_enclave(directory, config, config.threads)
    owns = EnclaveOwnerConfig(enclave=config, run=middle.run, middle=str(middle.home.path.resolve()))
    return LocalEnclave(directory, owns, config.threads, ("phalanx", "enclave", "own"))


def _enclave_config(
    run: SplitRun, home: RunDirectory, session: str, addresses: dict[str, str], num_classes: int
) -> EnclaveConfig:
    split = run.split
    behind_pipes = split.masked_workers if split.tier == "process" else ()
    return EnclaveConfig(
        identity=str((home.pki_directory / ENCLAVE).resolve()),
        directory=str((home.path / ENCLAVE).resolve()),
        run=home.run_id,
        session=session,
        config_digest=digest_config(run),
        addresses=addresses,
        certificates={name: home.read_certificate(name) for name in addresses},
        workers={name: home.read_certificate(name) for name in behind_pipes},
        model=run.model,
        cache=str((home.cache_directory / "models").resolve()),
        split=split,
        optimizer=run.optimizer,
        objective=run.train.objective,
        classes=num_classes,
        rows=run.train.batch_size // run.train.microbatches,
        seq=run.data.sequence_length,
        document_attention=run.data.attention == "document",
        precision=run.computes_in,
        microbatches=run.train.microbatches,
        steps=run.train.steps,
        seed=run.train.seed,
        threads=run.train.threads,
    )
