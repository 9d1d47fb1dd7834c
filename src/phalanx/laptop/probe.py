"""The training speed of this machine: a few steps of each size, until a larger one is not worth its time."""

import os
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from phalanx.laptop.plan import MICROBATCH_TOKENS, SHAPES, LaptopShape, is_larger_worth_probing

_STEPS = 2
Clock = Callable[[], float]


@dataclass(frozen=True)
class Measured:
    """Seconds for each token of training: on the clock, and of the processor, all threads together."""

    wall_s: float
    cpu_s: float


Measure = Callable[[LaptopShape, int, int], Measured]
"""Measures one shape with a vocabulary and a number of threads."""


def choose_threads(measure: Measure | None = None) -> int:
    """Return how many threads train fastest now: one, or as many as this process may use of the machine's cores.

    Threads wait for each other at every product, so on a machine with other work one of them may be faster than all.
    """
    cores = len(os.sched_getaffinity(0))
    if cores == 1:
        return 1
    shape, vocab_size = SHAPES[2], 512
    return min((cores, 1), key=lambda threads: (measure or measure_shape)(shape, vocab_size, threads).wall_s)


def measure_costs(
    vocab_size: int, text_tokens: float, seconds: float, threads: int, measure: Measure | None = None
) -> dict[LaptopShape, float]:
    """Return seconds a token of training, by shape, beginning with the smallest.

    Shapes are compared by processor time, which other work on the machine changes little; how much the clock is slower
    than that is taken from all shapes together.

    Args:
        seconds: Time that pre-training has; a shape that would see too few tokens in it ends the search.
        measure: `measure_shape` when left out.
    """
    measured: dict[LaptopShape, Measured] = {}
    costs: dict[LaptopShape, float] = {}
    for shape in SHAPES:
        measured[shape] = (measure or measure_shape)(shape, vocab_size, threads)
        share = sum(entry.wall_s for entry in measured.values()) / sum(entry.cpu_s for entry in measured.values())
        costs = {probed: measured[probed].cpu_s * share for probed in measured}
        if not is_larger_worth_probing(costs, vocab_size, text_tokens, seconds):
            break
    return costs


def measure_shape(
    shape: LaptopShape, vocab_size: int, threads: int, clocks: tuple[Clock, Clock] | None = None
) -> Measured:
    """Measure forward, backward and AdamW of one microbatch: the mean of steps behind a first one.

    Args:
        clocks: Wall clock and processor clock; this machine's when left out.
    """
    old_threads = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        model = _build(shape, vocab_size)
        return _time_steps(model, shape, vocab_size, clocks or (time.perf_counter, time.process_time))
    finally:
        torch.set_num_threads(old_threads)


def _build(shape: LaptopShape, vocab_size: int) -> LlamaForCausalLM:
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


def _time_steps(model: LlamaForCausalLM, shape: LaptopShape, vocab_size: int, clocks: tuple[Clock, Clock]) -> Measured:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    ids = torch.randint(vocab_size, (MICROBATCH_TOKENS // shape.tokens, shape.tokens))
    begun = [clock() for clock in clocks]
    for step in range(_STEPS + 1):
        if step == 1:
            begun = [clock() for clock in clocks]
        model(input_ids=ids, labels=ids).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    wall_s, cpu_s = ((clock() - start) / (_STEPS * ids.numel()) for clock, start in zip(clocks, begun, strict=True))
    return Measured(wall_s, cpu_s)
