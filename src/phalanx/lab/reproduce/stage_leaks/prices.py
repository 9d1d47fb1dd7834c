"""The cost of hiding one boundary: by noise, a sealed frame, shares for two servers, homomorphic encryption."""

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from phalanx.errors import ConfigError
from phalanx.lab.bench.alone.seal import MIB, shake_hands
from phalanx.lab.reproduce.stage_leaks.trained_pipeline import OwnerNoise
from phalanx.security.homomorphic import HomomorphicTerms, decrypt_sum, encrypt_integers, new_key, sum_ciphertexts
from phalanx.security.mask import MaskedWorker, OsPads, masked_linear
from phalanx.security.seal import Purpose, TensorKind

Row = dict[str, Any]
TOKENS, DIM = 256, 576
"""A microbatch of the real model's boundary."""
_REPEATS = 5
_NUMBERS = TOKENS * DIM


def price_boundaries() -> list[Row]:
    """Measure each guard of one boundary on one core.

    Returns:
        By guard the processor seconds to hide and to read a microbatch's tensor (``hide_s``, ``read_s``), its bytes,
        and the processor seconds of one product with a square matrix behind it (``product_s``); None where it is
        not measured.
    """
    generator = torch.Generator().manual_seed(0)
    x = torch.randn((TOKENS, DIM), generator=generator)
    weight = torch.randn((DIM, DIM), generator=generator) * DIM**-0.5
    plain = _seconds_of(lambda: x @ weight)
    rows = [
        _price("plaintext", 0.0, 0.0, _NUMBERS * 4, plain),
        _price("noise", _seconds_of(lambda: OwnerNoise(1.0, 0).add_noise(x[None])), 0.0, _NUMBERS * 4, plain),
        _price_sealed(x, plain),
        _price_shares(x, weight),
    ]
    try:
        rows.append(_price_homomorphic(x))
    except ConfigError:
        # TenSEAL is an extra
        rows.append(_price("homomorphic", None, None, None, None))
    return rows


def _price_sealed(x: torch.Tensor, plain: float) -> Row:
    client, enclave = shake_hands(MIB)
    kind = TensorKind(Purpose.ACTIVATION, "boundary", "float32", tuple(x.shape))
    numbers, out = bytearray(x.contiguous().numpy().tobytes()), bytearray(4 * _NUMBERS)
    frame = bytearray(client.sender.frame_size(kind))
    hide, read = [], []
    for step in range(_REPEATS):
        started = time.process_time()
        client.sender.seal_into(kind, step, 0, numbers, frame)
        hide.append(time.process_time() - started)
        started = time.process_time()
        enclave.receiver.open_into(frame, kind, step, 0, out)
        read.append(time.process_time() - started)
    return _price("sealed", min(hide), min(read), len(frame), plain)


def _price_shares(x: torch.Tensor, weight: torch.Tensor) -> Row:
    """Additive shares modulo p of two servers that do not talk: one has the pad, the other one the masked numbers."""
    values = np.ascontiguousarray(x.numpy())
    side = masked_linear("boundary", weight.numpy(), TOKENS, lambda product: OsPads()).forward
    worker = MaskedWorker()
    worker.load_matrix(side.product, side.weight.values)
    pads = _seconds_of(side.pool.make_pad)
    for _ in range(2 * _REPEATS + 2):
        side.pool.make_pad()
    hide = _seconds_of(lambda: side.mask_rows(values))
    sent = side.mask_rows(values)
    product = _seconds_of(lambda: worker.answer_request(sent.request))
    answer = worker.answer_request(sent.request)
    read = _seconds_of(lambda: side.unmask_answer(sent, answer))
    # both servers multiply; the pad's product is made with the pad
    return _price("secret_shares", hide, read, 2 * sent.request.values.nbytes, product + pads)


def _price_homomorphic(x: torch.Tensor) -> Row:
    """Ciphertexts that a server can add; a product with a matrix is not measured, for this scheme's keys allow none."""
    key, names = new_key(), ("boundary", "zero", "zeros")
    terms = HomomorphicTerms("boundary", 0, key.public_digest, names, len(names), _NUMBERS, 1.0)
    levels = np.clip(np.rint(x.numpy().ravel() * 2**16), -terms.max_level, terms.max_level).astype(np.int64)
    started = time.process_time()
    parts = [encrypt_integers(key.public, terms, names[0], levels)]
    hide = time.process_time() - started
    parts += [encrypt_integers(key.public, terms, name, np.zeros_like(levels)) for name in names[1:]]
    total = sum_ciphertexts(key.public, terms, parts)
    started = time.process_time()
    decrypt_sum(key, terms, total)
    return _price("homomorphic", hide, time.process_time() - started, len(parts[0]), None)


def _price(guard: str, hide: float | None, read: float | None, size: int | None, product: float | None) -> Row:
    return {
        "guard": guard,
        "tokens": TOKENS,
        "dim": DIM,
        "hide_s": hide,
        "read_s": read,
        "bytes": size,
        "product_s": product,
    }


def _seconds_of(action: Callable[[], object]) -> float:
    """The least processor time of several calls."""
    action()
    times = []
    for _ in range(_REPEATS):
        started = time.process_time()
        action()
        times.append(time.process_time() - started)
    return min(times)
