"""One arm of the bench of texts in a process of its own: this engine, transformers' generate, or llama.cpp.

Every arm has one thread, the same weights, the same prompts of token ids, takes the likeliest token, and writes on
where the model would end, so that all write equally many tokens. Weights are float32, or have 8 bits: here one scale an
output, in llama.cpp (Q8_0) one for 32 weights. llama.cpp has its own cache of 16 bits: with one of float32 it is
about half as fast.
"""

import asyncio
import importlib
import importlib.metadata
import importlib.util
import os
import random
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import IO, Any, Literal

import numpy as np
import torch
from transformers import AutoModelForCausalLM, StoppingCriteria, StoppingCriteriaList

from phalanx.config import StrictModel
from phalanx.errors import ModelError
from phalanx.lab.bench.measure.harness import parse_message, send_message, serve_bench, serve_orders
from phalanx.models.quiet import quiet_transformers
from phalanx.pipeline import settle_numerics
from phalanx.serve.engine import (
    BatchingEngine,
    ChoiceEnd,
    EngineSettings,
    GenerationRequest,
    HostedModel,
    SamplingSettings,
    TextPiece,
)
from phalanx.serve.engine.hosted_model import Weights
from phalanx.serve.marks import MarkPolicy, TokenMark
from phalanx.serve.where import open_text_model

ArmName = Literal["phalanx", "transformers", "llama.cpp"]
Precision = Literal["float32", "8 bits"]


class TextArmSpec(StrictModel):
    """The order of one arm.

    Attributes:
        model: Directory in the hub's layout.
        gguf: The same weights for llama.cpp.
        max_streams: The most that an order asks for.
    """

    arm: ArmName
    precision: Precision
    model: str
    gguf: str
    max_streams: int
    prompt_tokens: int
    new_tokens: int


class LoadOrder(StrictModel):
    """Write so many texts at the same time; texts of another turn have other prompts."""

    streams: int
    turn: int


class LoadReport(StrictModel):
    """Seconds of one order; the first line of a process has its version instead.

    Attributes:
        first_s: Until the first piece of each text.
        token_s: Between two tokens of each text, on average.
    """

    version: str = ""
    tokens: int = 0
    wall_s: float = 0.0
    cpu_s: float = 0.0
    first_s: tuple[float, ...] = ()
    token_s: tuple[float, ...] = ()


@dataclass
class _TextTimes:
    """When the pieces of one text came, since the beginning of its order."""

    tokens: int = 0
    times: list[float] = field(default_factory=list)

    @property
    def token_s(self) -> float:
        return (self.times[-1] - self.times[0]) / max(1, self.tokens - 1)


Writer = Callable[[Sequence[list[int]]], list[_TextTimes]]


def serve_arm(spec: TextArmSpec, orders: Iterable[str], answers: IO[str]) -> None:
    """Serve orders until there are no more."""
    version, write_texts = _ARMS[spec.arm](spec)

    def act(order: LoadOrder) -> LoadReport:
        prompts = make_prompts(order.streams, spec.prompt_tokens, order.turn)
        cpu, wall = time.process_time(), time.perf_counter()
        texts = write_texts(prompts)
        cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
        return LoadReport(
            tokens=sum(text.tokens for text in texts),
            wall_s=wall,
            cpu_s=cpu,
            first_s=tuple(text.times[0] for text in texts),
            token_s=tuple(text.token_s for text in texts),
        )

    send_message(answers, LoadReport(version=version))
    serve_orders(LoadOrder, orders, answers, act)


def make_prompts(count: int, length: int, turn: int) -> list[list[int]]:
    """Return prompts that begin differently, so that no arm can reuse a beginning."""
    drawn = random.Random(turn)  # noqa: S311 - no secret
    return [[drawn.randrange(1000, 20_000) for _ in range(length)] for _ in range(count)]


class _EndlessModel(HostedModel):
    """A model that writes until its bound."""

    @cached_property
    def ends(self) -> frozenset[int]:
        return frozenset()


def _open_phalanx(spec: TextArmSpec) -> tuple[str, Writer]:
    weights: Weights = "float" if spec.precision == "float32" else "int8"
    served = _EndlessModel("bench", open_text_model(Path(spec.model)), 0, weights=weights)
    mark = TokenMark(MarkPolicy(mark="off"), None)
    engine = BatchingEngine(served, EngineSettings(max_rows=spec.max_streams), mark)

    async def write_text(number: int, prompt: list[int], begun: float) -> _TextTimes:
        request = GenerationRequest(
            model="bench",
            owner=f"owner {number}",
            ids=tuple(prompt),
            max_tokens=spec.new_tokens,
            sampling=SamplingSettings(temperature=0.0),
        )
        text = _TextTimes()
        async for event in await engine.open_events(request, tuple(prompt), ""):
            if isinstance(event, TextPiece | ChoiceEnd):
                text.tokens = event.num_tokens
                text.times.append(time.perf_counter() - begun)
        return text

    async def write_all(prompts: Sequence[list[int]]) -> list[_TextTimes]:
        begun = time.perf_counter()
        return await asyncio.gather(*(write_text(n, prompt, begun) for n, prompt in enumerate(prompts)))

    return "this engine", lambda prompts: asyncio.run(write_all(prompts))


class _StepClock(StoppingCriteria):  # type: ignore[misc]
    """Notes the time of each step, and stops none."""

    def __init__(self, begun: float) -> None:
        self._begun = begun
        self.times: list[float] = []

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **_others: Any) -> torch.Tensor:
        self.times.append(time.perf_counter() - self._begun)
        return torch.zeros(len(input_ids), dtype=torch.bool)


def _open_transformers(spec: TextArmSpec) -> tuple[str, Writer]:
    with quiet_transformers():
        model: Any = AutoModelForCausalLM.from_pretrained(spec.model, dtype=torch.float32, local_files_only=True)
    model = model.eval()

    def write_texts(prompts: Sequence[list[int]]) -> list[_TextTimes]:
        ids, clock = torch.tensor(prompts), _StepClock(time.perf_counter())
        with torch.inference_mode():
            model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=False,
                max_new_tokens=spec.new_tokens,
                min_new_tokens=spec.new_tokens,
                pad_token_id=0,
                stopping_criteria=StoppingCriteriaList([clock]),
            )
        return [_TextTimes(spec.new_tokens, clock.times) for _ in prompts]

    return f"transformers {importlib.metadata.version('transformers')}", write_texts


def _open_llama(spec: TextArmSpec) -> tuple[str, Writer]:
    library: Any = importlib.import_module("xllamacpp")
    options = library.CommonParams()
    options.model.path = spec.gguf
    options.n_parallel = spec.max_streams
    options.n_ctx = spec.max_streams * (spec.prompt_tokens + spec.new_tokens + 32)
    options.cpuparams.n_threads = options.cpuparams_batch.n_threads = 1
    options.cache_prompt, options.warmup = False, False
    server = library.Server(options)

    def write_texts(prompts: Sequence[list[int]]) -> list[_TextTimes]:
        begun = time.perf_counter()
        texts = [_TextTimes() for _ in prompts]

        def write_text(prompt: list[int], text: _TextTimes) -> None:
            def take_piece(piece: Any) -> None:
                text.times.append(time.perf_counter() - begun)
                for part in piece if isinstance(piece, list) else [piece]:
                    usage = part.get("usage") if isinstance(part, dict) else None
                    text.tokens = usage["completion_tokens"] if usage else text.tokens

            body = {"prompt": prompt, "max_tokens": spec.new_tokens, "temperature": 0, "ignore_eos": True}
            server.handle_completions({**body, "stream": True}, take_piece)

        threads = [threading.Thread(target=write_text, args=pair) for pair in zip(prompts, texts, strict=True)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return texts

    return f"llama.cpp of xllamacpp {importlib.metadata.version('xllamacpp')}", write_texts


_ARMS: dict[str, Callable[[TextArmSpec], tuple[str, Writer]]] = {
    "phalanx": _open_phalanx,
    "transformers": _open_transformers,
    "llama.cpp": _open_llama,
}


def write_gguf(module: str, file: str, precision: Precision, target: Path) -> None:
    """Write the weights of a packaged GGUF file as float32 or Q8_0, with everything else that the file says."""
    spec = importlib.util.find_spec(module)
    if spec is None or spec.origin is None or importlib.util.find_spec("gguf") is None:
        raise ModelError(f"bench serve: needs the packages gguf and {module}; install phalanx-train[gguf]")
    gguf: Any = importlib.import_module("gguf")
    reader, writer = gguf.GGUFReader(Path(spec.origin).parent / file), gguf.GGUFWriter(target, "llama")
    of_the_file = ("general.architecture", "general.file_type", "general.quantization_version")
    for name, value in reader.fields.items():
        if not name.startswith("GGUF.") and name not in of_the_file:
            is_list = value.types[0] == gguf.GGUFValueType.ARRAY
            writer.add_key_value(name, value.contents(), value.types[0], value.types[-1] if is_list else None)
    kind = gguf.GGMLQuantizationType.F32 if precision == "float32" else gguf.GGMLQuantizationType.Q8_0
    writer.add_file_type(gguf.LlamaFileType.ALL_F32 if precision == "float32" else gguf.LlamaFileType.MOSTLY_Q8_0)
    for tensor in reader.tensors:
        weights = gguf.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        # vectors of norms stay as they are
        matrix_kind = kind if weights.ndim > 1 else gguf.GGMLQuantizationType.F32
        writer.add_tensor(tensor.name, gguf.quantize(weights, matrix_kind), raw_dtype=matrix_kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def main(path: Path, orders: IO[str], answers: IO[str]) -> None:
    """Be a child of the bench."""
    settle_numerics(1)
    serve_arm(parse_message(TextArmSpec, path.read_text(encoding="utf-8")), orders, answers)


if __name__ == "__main__":
    with serve_bench() as pipes:
        main(Path(sys.argv[1]), *pipes)
    # llama.cpp's threads and the decode thread end with the process
    sys.stderr.flush()
    os._exit(0)
