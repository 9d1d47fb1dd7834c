"""A bench of exact numerics: equal digests under other kernels, losses beside float32's, and the price of a step.

``python -m phalanx.lab.bench.alone.exact_numerics OUT.json --part digests|losses|price [--steps N]``

- `digests`: a llama of width 64 trains under every kernel that this machine can be told to use.
- `losses`: a llama of width 128 (2 blocks) on bytes, 8 sequences of 64 a step; in float32 with two seeds.
- `price`: CPU time of steps of a llama of width 768 (2 blocks, 4 microbatches of 2 sequences of 256 tokens), in turns.
"""

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from statistics import mean, median
from tempfile import TemporaryDirectory
from typing import Any, Literal

import torch
from torch import Tensor

from phalanx.errors import TrainingError
from phalanx.exact import products
from phalanx.exact.fused import FusedKernels, open_kernels
from phalanx.lab.bench.measure.harness import run_program
from phalanx.lab.bench.measure.workloads import standard_library
from phalanx.models import ModelConfig, ModelSource, StageSpec, build_stage, open_model, weights_digest
from phalanx.models.config import Attention
from phalanx.optimizers import OptimizerConfig, StageOptimizer, clip_coefficient, gradient_norm_squared
from phalanx.pipeline.plan import Numerics
from phalanx.pipeline.stage.runner import StageRunner

NUMERICS: tuple[Numerics, ...] = ("float", "exact", "exact_fast")
KERNELS: dict[str, dict[str, str]] = {
    "AVX-512": {"ATEN_CPU_CAPABILITY": "avx512"},
    "AVX2": {"ATEN_CPU_CAPABILITY": "avx2", "MKL_ENABLE_INSTRUCTIONS": "AVX2", "ONEDNN_MAX_CPU_ISA": "AVX2"},
    "no vectors": {
        "ATEN_CPU_CAPABILITY": "default",
        "MKL_ENABLE_INSTRUCTIONS": "SSE4_2",
        "ONEDNN_MAX_CPU_ISA": "SSE41",
    },
    "MKL_CBWR=COMPATIBLE": {"MKL_CBWR": "COMPATIBLE"},
    "2 threads": {"THREADS": "2"},
    "4 threads": {"THREADS": "4"},
    "OpenBLAS through numpy": {"PRODUCTS": "numpy"},
}
"""Variables of a process by the kernels that they choose; the last three are read by this program."""
ARM = "ARM under qemu-user"


class PlainTraining:
    """A whole model in one stage that trains on rows of tokens, without a guard.

    Args:
        rows: Token ids ``[rows, seq + 1]``, of which steps take one microbatch after the other.
    """

    def __init__(self, source: ModelSource, numerics: Numerics, rows: Tensor, microbatch_size: int) -> None:
        spec = StageSpec(0, 1, 0, source.num_layers)
        attention: Attention = "sdpa" if numerics == "float" else "eager"
        self.module = build_stage(
            source, spec, adapter=None, activation_checkpointing=False, attention=attention, seed=0
        )
        self._runner = StageRunner(
            self.module, spec, seed=0, precision="fp32" if numerics == "float" else numerics, device="cpu"
        )
        self._exact = numerics != "float"
        self._optimizer = StageOptimizer(
            self.module.trainable_parameters(), OptimizerConfig(lr=1e-3), single_rounding=self._exact
        )
        self._rows, self._size = rows, microbatch_size

    def train_step(self, step: int, microbatches: int) -> float:
        """Make one step and return its mean loss in nats."""
        total, num_targets = 0.0, microbatches * self._size * (self._rows.shape[1] - 1)
        for microbatch in range(microbatches):
            first = (step * microbatches + microbatch) * self._size % (len(self._rows) - self._size)
            rows = self._rows[first : first + self._size]
            self._runner.forward(step, microbatch, rows[:, :-1].contiguous())
            total += self._runner.compute_loss(microbatch, rows[:, 1:].contiguous(), num_targets)
            self._runner.backward(step, microbatch, None)
        gradients = self._runner.take_gradients()
        norm = gradient_norm_squared(gradients, exact=self._exact) ** 0.5
        self._optimizer.step(gradients, 1e-3, clip_coefficient(norm, 1.0))
        return total / num_targets

    def weights_digest(self) -> str:
        """SHA-256 of all parameters."""
        return weights_digest((name, value.detach()) for name, value in self.module.all_parameters().items())


def open_llama(width: int, layers: int, positions: int, cache: Path, seed: int = 1) -> ModelSource:
    """Draw a llama for bytes."""
    architecture: dict[str, Any] = {
        "model_type": "llama",
        "vocab_size": 256,
        "hidden_size": width,
        "intermediate_size": width * 8 // 3 // 32 * 32,
        "num_hidden_layers": layers,
        "num_attention_heads": max(2, width // 64),
        "num_key_value_heads": max(2, width // 64),
        "max_position_embeddings": positions,
    }
    return open_model(ModelConfig(from_scratch=True, architecture=architecture), cache, seed)


def byte_rows(length: int) -> Tensor:
    """Rows of the standard library's bytes."""
    text = standard_library()
    return text[: len(text) // length * length].view(-1, length)


def measure_digests(steps: int) -> list[dict[str, Any]]:
    """Train under each kind of kernels, in a process of its own.

    ``$ARM_PYTHON``: a program that runs a Python of another processor, with torch; its row is null without it.
    """
    rows, arm = [], os.environ.get("ARM_PYTHON")
    kinds = [*((name, sys.executable) for name in KERNELS), *([(ARM, arm)] if arm else [])]
    for name, program in kinds:
        command, variables = [program, "-m", __spec__.name, "one-digest", str(steps)], KERNELS.get(name, {})
        process = subprocess.run(  # noqa: S603 - this program itself
            command, env=os.environ | variables, stdout=subprocess.PIPE, text=True, check=False, timeout=3600
        )
        if process.returncode:
            raise TrainingError(f"{name}: the process ended with {process.returncode}")
        rows.append({"kernels": name, **json.loads(process.stdout.splitlines()[-1])})
    # no accelerator was lent
    missing = ["CUDA"] if arm else [ARM, "CUDA"]
    return [*rows, *({"kernels": name, "digests": None} for name in missing)]


def multiply_by_numpy(left: products.FixedPoint, right: products.FixedPoint) -> Tensor:
    """As the float64 product of torch, by the BLAS of numpy."""
    total: Tensor | None = None
    for first in range(0, left.integers.shape[-1], products.RUN):
        run = slice(first, first + products.RUN)
        part = torch.from_numpy(left.wide[..., run].numpy() @ right.wide[..., run].mT.numpy())
        total = part if total is None else total.add_(part)
    if total is None:
        raise TrainingError("a product without an inner dimension")
    return total


def train_once(steps: int) -> dict[str, Any]:
    """Train with the kernels that the environment names."""
    torch.set_num_threads(int(os.environ.get("THREADS", "1")))
    if os.environ.get("PRODUCTS") == "numpy":
        setattr(products, "_wide_sum", multiply_by_numpy)  # noqa: B010 - the other kernel of the same law
        setattr(products, "digits_are_exact", lambda: False)  # noqa: B010
    with TemporaryDirectory() as directory:
        source, digests, losses = open_llama(64, 2, 64, Path(directory)), {}, {}
        for numerics in NUMERICS:
            training = PlainTraining(source, numerics, byte_rows(65), 4)
            losses[numerics] = [training.train_step(step, 2) for step in range(steps)][-1]
            digests[numerics] = training.weights_digest()
    return {"digests": digests, "last_losses": losses}


def measure_losses(steps: int) -> list[dict[str, Any]]:
    """Train by each law, and once more in float32 from the first values of another seed."""
    torch.set_num_threads(1)
    arms: tuple[tuple[Numerics, int], ...] = (("float", 1), ("float", 2), ("exact", 1), ("exact_fast", 1))
    rows = []
    for numerics, seed in arms:
        with TemporaryDirectory() as directory:
            training = PlainTraining(open_llama(128, 2, 64, Path(directory), seed), numerics, byte_rows(65), 4)
            losses = [training.train_step(step, 2) for step in range(steps)]
        rows.append({"numerics": numerics, "seed": seed, "losses": losses, "mean_of_last_50": mean(losses[-50:])})
    return rows


def measure_price(rounds: int) -> list[dict[str, Any]]:
    """Take turns, so that what else the machine does meets all alike; with compiled kernels where there are some."""
    torch.set_num_threads(1)
    compiled = open_kernels()
    arms: list[tuple[Numerics, FusedKernels | None]] = [(numerics, None) for numerics in NUMERICS]
    if compiled is not None:
        arms += [(numerics, compiled) for numerics in NUMERICS if numerics != "float"]
    with TemporaryDirectory() as directory:
        source = open_llama(768, 2, 256, Path(directory))
        trainings = [PlainTraining(source, numerics, byte_rows(257), 2) for numerics, _ in arms]
        seconds: list[list[float]] = [[] for _ in arms]
        for turn in range(rounds + 1):
            for (_, kernels), training, durations in zip(arms, trainings, seconds, strict=True):
                setattr(products, "open_kernels", lambda chosen=kernels: chosen)  # noqa: B010
                started = time.process_time()
                training.train_step(turn, 4)
                if turn:
                    durations.append(time.process_time() - started)
    return [
        {
            "numerics": numerics,
            "fused": kernels is not None,
            "cpu_s": median(durations),
            "price": median(durations) / median(seconds[0]),
            "all_cpu_s": durations,
            "digest": training.weights_digest(),
        }
        for (numerics, kernels), training, durations in zip(arms, trainings, seconds, strict=True)
    ]


def measure_part(part: Literal["digests", "losses", "price"], steps: int = 50) -> dict[str, object]:
    """Measure one part."""
    rows = {"digests": measure_digests, "losses": measure_losses, "price": measure_price}[part](steps)
    return {"part": part, "steps": steps, "int8_digits": products.digits_are_exact(), "rows": rows}


if __name__ == "__main__":
    if "one-digest" in sys.argv:
        sys.stdout.write(json.dumps(train_once(int(sys.argv[-1]))) + "\n")
    else:
        run_program("exact-numerics", measure_part)
