"""A bench of served stages: what does it cost to have a model's middle layers at two parties, and to check them?

``python -m phalanx.lab.bench.alone.served_stages OUT.json [--tokens 8] [--layers 10] [--note TEXT]``

The first layers of SmolLM2-135M in float32, with its embedding and head, write greedy texts from prompts of 40 bytes,
one stream and eight: in one process, and with all layers but two at two processes of this machine, over mutual TLS,
with no text redone and with every one. All share the processors that there are, so that this counts work and not
machines: with a machine for each party the parties' work is not the owner's. Texts are compared with the texts of one
process, and the largest distance of an honest party is noted.
"""

import asyncio
import json
import os
import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from phalanx.lab.bench.measure.harness import (
    cache_directory,
    print_progress,
    run_program,
    scratch_directory,
)
from phalanx.lab.bench.measure.process_clock import cpu_seconds, process_tree
from phalanx.models.packaged import open_packaged
from phalanx.security.crypto import create_authority, issue_certificate
from phalanx.serve import TextModel
from phalanx.serve.engine import (
    BatchingEngine,
    EngineSettings,
    GenerationRequest,
    HostedModel,
    SamplingSettings,
    TextPiece,
    collect_events,
)
from phalanx.serve.marks import MarkPolicy, TokenMark
from phalanx.serve.stages import StagesConfig, open_staged_model
from phalanx.transport import TransportConfig

_STREAMS = (1, 8)
_RATES = (0.0, 1.0)
_PARTIES = (("first",), ("second",))
_PROMPT = "The river had risen again in the night, "
_ENGINE = EngineSettings(max_owner_prefix_tokens=0)


def measure_stages(tokens: int = 8, layers: int = 10, note: str = "") -> dict[str, Any]:
    """Measure all arms one behind the other; the first call of each warms up and is not counted."""
    torch.set_num_threads(1)
    with scratch_directory() as home:
        return {**_measure_model(_shorten_model(home / "model", layers), layers, tokens), "note": note}


def _shorten_model(directory: Path, layers: int) -> Path:
    """Write the first layers of SmolLM2-135M as a model of its own; weights of the others stay unread in the file."""
    shutil.copytree(open_packaged("smollm2-135m", cache_directory()), directory, symlinks=False)
    path = directory / "config.json"
    path.chmod(0o600)
    config = json.loads(path.read_text(encoding="utf-8")) | {"num_hidden_layers": layers}
    path.write_text(json.dumps(config), encoding="utf-8")
    return directory


def _measure_model(directory: Path, layers: int, tokens: int) -> dict[str, Any]:
    rows: list[dict[str, Any]] = []
    alone = BatchingEngine(HostedModel("model", TextModel(directory), 0), _ENGINE, _unmarked())
    right = {streams: _write(alone, streams, tokens) for streams in _STREAMS}
    for streams in _STREAMS:
        rows.append({"arm": "one process", "check_rate": None, **_time_texts(alone, streams, tokens, None)})
    alone.close()
    for rate in _RATES:
        rows.extend(_measure_rate(directory, rate, tokens, right))
    return {"model": "smollm2-135m", "layers": layers, "layers_of_parties": layers - 2, "rows": rows}


def _measure_rate(directory: Path, rate: float, tokens: int, right: dict[int, list[str]]) -> list[dict[str, Any]]:
    rows = []
    with scratch_directory() as home:
        pki = home / "pki"
        create_authority(pki)
        for name in ("owner", *(name for names in _PARTIES for name in names)):
            issue_certificate(pki, name)
        config = StagesConfig(
            identity=str(pki / "owner"),
            holders=_PARTIES,
            check_rate=rate,
            kept_stages=2,
            answer_timeout_s=600.0,
            join_timeout_s=600.0,
            workers_here=str(pki),
            transport=TransportConfig(timeout_s=300.0),
        )
        with open_staged_model("model", directory, config, _ENGINE, home / "access") as model:
            engine = BatchingEngine(model, _ENGINE, _unmarked())
            for streams in _STREAMS:
                print_progress(f"rate {rate}: {streams} streams")
                texts = _write(engine, streams, tokens)
                model.relay.finish_checks()
                row = _time_texts(engine, streams, tokens, model.relay)
                same = sum(text == correct for text, correct in zip(texts, right[streams], strict=True))
                rows.append({"arm": "in stages", "check_rate": rate, **row, "texts_like_one_process": same / streams})
            engine.close()
        for row in rows:
            row["convicted"] = len(model.relay.verdicts)
            row["worst_distance"] = model.relay.worst_distance if rate else None
    return rows


def _time_texts(engine: BatchingEngine, streams: int, tokens: int, relay: Any) -> dict[str, Any]:
    before = (time.perf_counter(), cpu_seconds(process_tree(os.getpid())), 0 if relay is None else relay.bytes_moved)
    _write(engine, streams, tokens)
    if relay is not None:
        relay.finish_checks()
    wall_s = time.perf_counter() - before[0]
    cpu_s = cpu_seconds(process_tree(os.getpid())) - before[1]
    moved = 0 if relay is None else relay.bytes_moved - before[2]
    written = streams * tokens
    return {
        "streams": streams,
        "tokens": written,
        "tokens_per_s": written / wall_s,
        "cpu_ms_per_token": 1000 * cpu_s / written,
        "bytes_per_token": moved / written,
    }


def _write(engine: BatchingEngine, streams: int, tokens: int) -> list[str]:
    async def write_text(number: int) -> str:
        bias = {end: -100.0 for end in engine.served.turn_ends}
        request = GenerationRequest(
            model="model",
            owner="bench",
            text=f"{number} {_PROMPT}",
            sampling=SamplingSettings(temperature=0.0, logit_bias=bias),
            max_tokens=tokens,
        )
        events = await collect_events(await engine.open_events(request, engine.served.encode_prompt(request), ""))
        return "".join(event.text for event in events if isinstance(event, TextPiece))

    async def write_all() -> Sequence[str]:
        return await asyncio.gather(*(write_text(number) for number in range(streams)))

    return list(asyncio.run(write_all()))


def _unmarked() -> TokenMark:
    return TokenMark(MarkPolicy(mark="off"), None)


if __name__ == "__main__":
    run_program("served-stages", measure_stages)
