"""Views of a tensor from the machine between both ends, under each guard; made by the guards themselves.

An attacker wants numbers, so each wire gives the best reading as numbers that its bytes have: the tensor itself, the
bytes of its ciphertext, or its masked integers.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Literal, Protocol

import numpy as np
import torch
from torch import Tensor

from phalanx.security.crypto import Identity
from phalanx.security.mask import MaskedProduct, OsPads, P, ProductMessage, masked_linear
from phalanx.security.seal import Channel, HandshakeOffer, Purpose, TensorKind, Terms, answer_hello
from phalanx.security.seal.header import TAG_BYTES

Guard = Literal["plaintext", "sealed", "masked"]


class CutWire(Protocol):
    """One way for a tensor to cross."""

    def host_view(self, x: Tensor) -> Tensor:
        """Send a tensor and return the host's view of it.

        Args:
            x: Activations or gradients, ``[..., dim]``, float32.

        Returns:
            Finite numbers of the same shape, float32.
        """
        ...


class PlainWire:
    """No guard: the host has the tensor as it crosses, in bfloat16."""

    def host_view(self, x: Tensor) -> Tensor:
        """As `CutWire` says."""
        return x.detach().to(torch.bfloat16).float()


class SealedWire:
    """Frames of a real channel; the host takes the clear header and the tags away, and reads the rest as bfloat16."""

    def __init__(self, purpose: Purpose = Purpose.ACTIVATION) -> None:
        self._purpose = purpose
        self._channel = _open_channel()
        self._step = 0

    def host_view(self, x: Tensor) -> Tensor:
        """As `CutWire` says; numbers are squashed to their logarithms, as ciphertext has exponents of any size."""
        plain = x.detach().to(torch.bfloat16).contiguous()
        kind = TensorKind(self._purpose, "cut", "bfloat16", tuple(plain.shape))
        frame = self._channel.sender.seal_tensor(kind, self._step, 0, plain.view(torch.uint8).numpy().data)
        self._step += 1
        ciphertext = _cut_ciphertext(frame, kind.size_bytes, self._channel.context.terms.chunk_bytes)
        numbers = torch.frombuffer(bytearray(ciphertext), dtype=torch.bfloat16).float().reshape(x.shape)
        numbers = torch.nan_to_num(numbers, nan=0.0, posinf=0.0, neginf=0.0)
        return numbers.sign() * numbers.abs().log1p()


class MaskedWire:
    """Requests of masked offload; the worker reads elements of Z_p as the numbers next to zero that they stand for."""

    def host_view(self, x: Tensor) -> Tensor:
        """As `CutWire` says, between -1 and 1."""
        rows = np.ascontiguousarray(x.detach().reshape(-1, x.shape[-1]).numpy(), dtype=np.float32)
        product = _masked_product(rows.shape[0], rows.shape[1])
        product.pool.make_pad()
        masked = product.mask_rows(rows).request.values.astype(np.int64)
        centred = np.where(masked > P // 2, masked - P, masked) / (P // 2)
        return torch.from_numpy(centred.astype(np.float32)).reshape(x.shape)


WIRES: Mapping[Guard, Callable[[], CutWire]] = MappingProxyType(
    {"plaintext": PlainWire, "sealed": SealedWire, "masked": MaskedWire}
)
"""By guard; each call makes fresh keys."""


def _open_channel() -> Channel:
    terms = Terms("leaks", bytes([1]) * 32, bytes([2]) * 32, "client", "enclave")
    client, enclave = Identity.without_certificate("client"), Identity.without_certificate("enclave")
    offer = HandshakeOffer(terms, client, _FirstEpoch())
    reply, _ = answer_hello(offer.hello, terms, enclave, _FirstEpoch(), client.public)
    return offer.accept_reply(reply, enclave.public)


class _FirstEpoch:
    """The one epoch of keys that live as long as this process."""

    def raise_epoch(self) -> int:
        return 1


def _cut_ciphertext(frame: bytearray, size_bytes: int, chunk_bytes: int) -> bytes:
    chunks = -(-size_bytes // chunk_bytes)
    body = memoryview(frame)[len(frame) - size_bytes - chunks * TAG_BYTES :]
    step = chunk_bytes + TAG_BYTES
    return b"".join(bytes(body[index * step : (index + 1) * step][:-TAG_BYTES]) for index in range(chunks))


def _masked_product(rows: int, inner: int) -> MaskedProduct:
    # what is sent does not depend on the matrix, so one column will do
    weight = np.ones((inner, 1), np.float32)
    return masked_linear("cut", weight, rows, _fresh_pads).forward


def _fresh_pads(product: ProductMessage) -> OsPads:
    del product
    return OsPads()
