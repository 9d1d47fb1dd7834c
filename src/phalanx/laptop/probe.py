"""How fast this machine trains: a few steps of each size, until a larger one is not worth its time."""

import os
import time
from collections.abc import Callable

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from phalanx.laptop.plan import BYTES_PER_TOKEN, MICROBATCH_TOKENS, SHAPES, Shape, is_larger_worth_probing

_STEPS = 2


def choose_threads(measure: Callable[[Shape, int, int], float] | None = None) -> int:
    """Return how many threads train fastest now: one, or as many as this process may use of the machine's cores.

    Threads wait for each other at every product, so on a machine with other work one of them may be faster than all.
    """
    cores = len(os.sched_getaffinity(0))
    if cores == 1:
        return 1
    shape, vocab_size = SHAPES[2], min(BYTES_PER_TOKEN)
    return min((cores, 1), key=lambda threads: (measure or measure_shape)(shape, vocab_size, threads))


def measure_costs(
    vocab_size: int,
    train_bytes: int,
    seconds: float,
    threads: int,
    measure: Callable[[Shape, int, int], float] | None = None,
) -> dict[Shape, float]:
    """Return seconds a token of training, by shape, beginning with the smallest.

    Args:
        seconds: Time that pre-training has; a shape that would see too few tokens in it ends the search.
        measure: Measures one shape with a vocabulary and threads; `measure_shape` when left out.
    """
    costs: dict[Shape, float] = {}
    for shape in SHAPES:
        costs[shape] = (measure or measure_shape)(shape, vocab_size, threads)
        if not is_larger_worth_probing(costs, vocab_size, train_bytes / BYTES_PER_TOKEN[vocab_size], seconds):
            break
    return costs


def measure_shape(shape: Shape, vocab_size: int, threads: int, clock: Callable[[], float] = time.perf_counter) -> float:
    """Return seconds a token: forward, backward and AdamW of one microbatch, the mean of steps behind a first one."""
    old_threads = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        return _time_steps(_build(shape, vocab_size), shape, vocab_size, clock)
    finally:
        torch.set_num_threads(old_threads)


def _build(shape: Shape, vocab_size: int) -> LlamaForCausalLM:
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=vocab_size,
            hidden_size=shape.hidden,
            intermediate_size=shape.inner,
            num_hidden_layers=shape.layers,
            num_attention_heads=shape.heads,
            num_key_value_heads=shape.heads,
            max_position_embeddings=shape.tokens,
            tie_word_embeddings=True,
        )
    )


def _time_steps(model: LlamaForCausalLM, shape: Shape, vocab_size: int, clock: Callable[[], float]) -> float:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    ids = torch.randint(vocab_size, (MICROBATCH_TOKENS // shape.tokens, shape.tokens))
    begun = clock()
    for step in range(_STEPS + 1):
        if step == 1:
            begun = clock()
        model(input_ids=ids, labels=ids).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return (clock() - begun) / (_STEPS * ids.numel())
