"""The aggregator's process: ``python -m phalanx.federated.enclave.process FILE FD``, behind a sandbox, on one pipe."""

import contextlib
import json
import socket
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch

from phalanx.config import StrictModel, dump_toml, escape_controls, load_config
from phalanx.errors import AggregationError, IsolationError, PeerLostError, PhalanxError
from phalanx.federated.config import OWNER, FederatedConfig
from phalanx.federated.enclave.aggregator import AggregatorPort, AggregatorState, EnclaveAggregator, RoundOutcome
from phalanx.federated.enclave.channel import ROLE, as_split_config
from phalanx.federated.rounds.keepers import pack_items, unpack_items
from phalanx.federated.rounds.terms import RunTerms
from phalanx.federated.vectors import Shapes
from phalanx.security.aggregate import SumRefusal
from phalanx.security.crypto import Identity, Peer, make_private_directory
from phalanx.security.isolation import Program, Sandbox, start_isolated
from phalanx.split.hardware.tier import Tier, open_tier

_SIZE_BYTES, _MAX_BYTES = 8, 2**36
_SECONDS_TO_CLOSE, _SECONDS_TO_END = 60.0, 5.0


class AggregatorFile(StrictModel):
    """The host's settings for an aggregator; sites compare the terms with their own by its evidence."""

    run: str
    digest: str
    section: FederatedConfig
    seed: int
    rounds: int
    roster: dict[str, str]
    shapes: dict[str, tuple[int, ...]]
    directory: str

    @property
    def run_terms(self) -> RunTerms:
        """The terms of the run; an aggregator does not ask which party the owner is."""
        roster = {name: Peer.from_hex(name, key) for name, key in self.roster.items()}
        nobody = Identity.without_certificate(OWNER).public
        return RunTerms(self.run, self.digest, self.section, self.seed, nobody, roster, self.rounds)


def open_aggregator(file: AggregatorFile) -> tuple[EnclaveAggregator, Tier]:
    """Open an aggregator in this process."""
    directory = Path(file.directory)
    tier = open_tier(as_split_config(file.section.enclave), directory, Identity.without_certificate(ROLE))
    state = AggregatorState(directory, tier.key, file.run, tier.counter("sealed"), tier.counter("settled"))
    return EnclaveAggregator(file.run_terms, file.shapes, tier.attester, state), tier


@contextlib.contextmanager
def run_aggregator(terms: RunTerms, shapes: Shapes, directory: Path) -> Iterator[AggregatorPort]:
    """Start the aggregator that the terms name, and end it."""
    make_private_directory(directory)
    file = AggregatorFile(
        run=terms.run,
        digest=terms.digest,
        section=terms.config,
        seed=terms.seed,
        rounds=terms.rounds,
        roster={name: peer.public_key.hex() for name, peer in terms.roster.items()},
        shapes={name: tuple(shape) for name, shape in shapes.items()},
        directory=str((directory / "own").resolve()),
    )
    if terms.config.enclave.tier != "process":
        aggregator, tier = open_aggregator(file)
        try:
            yield aggregator
        finally:
            tier.close()
        return
    path = directory / "aggregator.toml"
    path.write_text(dump_toml(file), encoding="utf-8")
    make_private_directory(Path(file.directory))
    own_end, other = socket.socketpair()
    with own_end:
        program = Program(
            "phalanx.federated.enclave.process",
            (str(path.resolve()), str(other.fileno())),
            (other.fileno(),),
            {"OMP_NUM_THREADS": "1", "HOME": file.directory, "TMPDIR": file.directory},
        )
        process = start_isolated(program, Sandbox((str(path.resolve()),), (file.directory,)), _SECONDS_TO_CLOSE)
        other.close()
        try:
            yield _AggregatorProcess(own_end)
        finally:
            own_end.close()
            with contextlib.suppress(IsolationError):
                process.wait(_SECONDS_TO_END)
            process.close()


class _AggregatorProcess:
    """An aggregator behind a pipe."""

    def __init__(self, end: socket.socket) -> None:
        self._end = end

    def get_evidence(self, nonce: bytes) -> tuple[bytes, bytes]:
        ((_, public), (_, evidence)) = self._ask_child([(b"evidence", nonce)], 2)
        return public, evidence

    def aggregate_updates(self, number: int, model: str, sealed: Mapping[str, bytes]) -> RoundOutcome:
        order = json.dumps({"round": number, "model": model}).encode()
        ((statement, values),) = self._ask_child(
            [(b"aggregate", order), *((n.encode(), content) for n, content in sealed.items())], 1
        )
        body = json.loads(statement)
        update = torch.frombuffer(bytearray(values), dtype=torch.float32)
        return RoundOutcome(tuple(body["members"]), dict(body["refused"]), update)

    def _ask_child(self, items: list[tuple[bytes, bytes]], count: int) -> list[tuple[bytes, bytes]]:
        _send_bytes(self._end, pack_items(items))
        message = _receive_bytes(self._end)
        if message is None:
            raise PeerLostError("the aggregator's process has ended; its last lines are above; continue with --resume")
        answer = unpack_items(message, max(count, 1))
        if answer and answer[0][0] == b"refused":
            reason, _, text = answer[0][1].decode().partition(" ")
            raise AggregationError(SumRefusal(reason), text)
        if len(answer) != count:
            raise PeerLostError("the aggregator's process sent an answer to another request")
        return answer


def serve_aggregator(aggregator: AggregatorPort, end: socket.socket, most: int) -> None:
    """Answer the host's requests until it closes its end.

    Args:
        most: Largest number of sites in a round.
    """
    while (asked := _receive_bytes(end)) is not None:
        try:
            _send_bytes(end, pack_items(_answer_items(aggregator, unpack_items(asked, most + 1))))
        except AggregationError as exc:
            _send_bytes(end, pack_items([(b"refused", f"{exc.reason} {exc}".encode())]))


def _answer_items(aggregator: AggregatorPort, items: list[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
    if items and items[0][0] == b"evidence":
        public, evidence = aggregator.get_evidence(items[0][1])
        return [(b"key", public), (b"evidence", evidence)]
    if not items or items[0][0] != b"aggregate":
        raise AggregationError(SumRefusal.MALFORMED, "aggregator: unknown request")
    try:
        order = json.loads(items[0][1])
        number, model = int(order["round"]), str(order["model"])
        sealed = {name.decode(): content for name, content in items[1:]}
    except (ValueError, KeyError, TypeError) as exc:
        raise AggregationError(SumRefusal.MALFORMED, "aggregator: the order is malformed") from exc
    outcome = aggregator.aggregate_updates(number, model, sealed)
    statement = json.dumps({"members": list(outcome.members), "refused": outcome.refused}).encode()
    return [(statement, outcome.update.numpy().tobytes())]


def _send_bytes(end: socket.socket, data: bytes) -> None:
    try:
        end.sendall(len(data).to_bytes(_SIZE_BYTES, "big") + data)
    except OSError as exc:
        raise PeerLostError(f"the aggregator's pipe broke ({exc.strerror})") from exc


def _receive_bytes(end: socket.socket) -> bytes | None:
    size = int.from_bytes(_read_exactly(end, _SIZE_BYTES), "big")
    return None if not 0 < size <= _MAX_BYTES else _read_exactly(end, size)


def _read_exactly(end: socket.socket, size: int) -> bytes:
    received = bytearray()
    while len(received) < size:
        try:
            part = end.recv(min(size - len(received), 2**20))
        except OSError:
            part = b""
        if not part:
            return b""
        received += part
    return bytes(received)


def main(path: str, descriptor: str) -> int:
    """Be the aggregator of a file and return an exit code."""
    try:
        torch.set_num_threads(1)
        file = load_config(Path(path), AggregatorFile)
        aggregator, tier = open_aggregator(file)
        with socket.socket(fileno=int(descriptor)) as pipe:
            serve_aggregator(aggregator, pipe, len(file.roster))
        tier.close()
    except PhalanxError as exc:
        sys.stderr.write(f"aggregator: {escape_controls(str(exc))}\n")
        return exc.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
