"""Sealed states: an enclave resumes from the newest kept state, whichever party crashes at whatever moment.

Two counters, both only go up. The first numbers every state that is sealed, so no two have the same number. The second
is moved up to a state's number once that state is safe on the keeper's disk. A state opens if its number is
not below the second counter: everything older than the newest one that is known to be kept is void, and a crash between
sealing and keeping costs no more than the steps in between, which are done again.

A state that was sealed and never kept stays usable until the next one is kept, and not longer: by then the second
counter has passed it, as it was numbered before. One that an enclave goes on from was kept, so it is settled then.

Nobody else moves the first counter: an enclave that finds it moved was started a second time, and seals nothing more.
"""

import torch
from safetensors import SafetensorError
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors
from torch import Tensor

from phalanx.config import canonical_json
from phalanx.errors import CheckpointError, RollbackError
from phalanx.security.crypto import parse_canonical
from phalanx.security.seal import BlobPlace, BlobSealer, MonotonicCounter

_BOOKS = "books"


class StateKeeper:
    """A keeper that seals states and opens the one to go on from.

    Args:
        key: 32 bytes that this enclave alone is given.
        run: Name of the run, the same after a restart.
        sealed: Counter that numbers sealed states; used for nothing else.
        settled: Counter at the number of the newest kept state; used for nothing else.
    """

    def __init__(self, key: bytes, run: str, sealed: MonotonicCounter, settled: MonotonicCounter) -> None:
        self._sealer, self._run, self._sealed, self._settled = BlobSealer(key, sealed), run, sealed, settled
        self._newest = sealed.read_count()

    def seal_state(self, tensors: dict[str, Tensor], books: dict[str, object], step: int) -> tuple[bytearray, int]:
        """Seal a state; the ones before stay usable until this one is settled.

        Raises:
            RollbackError: Another process of this enclave has sealed states meanwhile.
        """
        self._check_alone()
        plain = {name: tensor.detach().contiguous() for name, tensor in tensors.items()}
        plain[_BOOKS] = torch.frombuffer(bytearray(canonical_json(books)), dtype=torch.uint8)
        blob = self._sealer.seal_blob(self._blob_place(step), save_tensors(plain))
        self._newest += 1
        self._check_alone()
        return blob, self._newest

    def open_state(self, blob: bytes | memoryview, step: int) -> tuple[dict[str, Tensor], dict[str, object]]:
        """Open a state that is not older than the newest settled one.

        Raises:
            CheckpointError: It is altered, or another enclave's, run's or step's.
        """
        self._check_alone()
        behind = self._newest - self._settled.read_count()
        plain = self._sealer.open_blob(self._blob_place(step), blob, unsafe_accept_behind=behind)
        try:
            tensors = load_tensors(bytes(plain))
            books = parse_canonical(tensors.pop(_BOOKS).numpy().tobytes())
        except (SafetensorError, KeyError, ValueError) as exc:
            raise CheckpointError(f"sealed state of step {step}: holds no state of this release: {exc}") from exc
        return tensors, books

    def state_number(self, blob: bytes | memoryview, step: int) -> int:
        """Return the number of a state that has opened."""
        return self._sealer.read_number(self._blob_place(step), blob)

    @property
    def newest_number(self) -> int:
        """Number of the newest sealed state; 0 before the first."""
        return self._newest

    def is_settled(self, number: int) -> bool:
        """Whether every state that was sealed before this number is void."""
        return self._settled.read_count() >= number

    def settle_state(self, number: int) -> None:
        """Note that a state is on the keeper's disk; every earlier state becomes void."""
        self._check_alone()
        if number > self._newest:
            raise CheckpointError(f"sealed state {number}: was never sealed; the newest is {self._newest}")
        while self._settled.read_count() < number:
            self._settled.increment()

    @property
    def has_kept(self) -> bool:
        """Whether a kept state exists, which the enclave must resume from."""
        return self._settled.read_count() > 0

    @property
    def rollback_proof(self) -> bool:
        """Whether the machine cannot turn either counter back."""
        return self._sealed.rollback_proof and self._settled.rollback_proof

    def _check_alone(self) -> None:
        if (count := self._sealed.read_count()) != self._newest:
            raise RollbackError(
                f"sealed states: {count} were sealed, {self._newest} of them known here: the enclave runs twice; "
                "end both, then --resume"
            )

    def _blob_place(self, step: int) -> BlobPlace:
        return BlobPlace(self._run, "state", step)
