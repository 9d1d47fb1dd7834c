"""The price of 100 viewers of `phalanx watch`: times of steps with all of them, and without.

``python -m phalanx.lab.bench.alone.viewers OUT.json [--viewers 100] [--blocks 12] [--block-s 12]``

A run of one process trains, a watcher shows it, and blocks with all viewers alternate with blocks without any. Viewers
are connections of one client process: each reads the stream of states, and asks for the curves as often as the page
does. They stand for browsers elsewhere, so that the client runs at a lower priority, and its time is told apart. On
a busy machine times of steps say little: the processor time of an answer, times the answers a second that the watcher
allows all pages together, bounds what viewers can take from a step.
"""

import asyncio
import contextlib
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psutil
import requests

from phalanx.lab.bench.measure.harness import run_program
from phalanx.telemetry import read_metrics
from phalanx.watch.page import MAX_ANSWERS_PER_S

RUN_FILE = """
[model]
from_scratch = true
[model.architecture]
model_type = "gpt2"
vocab_size = 512
n_positions = 64
n_embd = 64
n_layer = 2
n_head = 4
bos_token_id = 0
eos_token_id = 0
[data]
sources = [{ kind = "python_manual" }]
tokenizer = { kind = "bpe", vocab_size = 512 }
sequence_length = 64
validation_share = 0.1
max_documents = 60
[train]
steps = 1000000
batch_size = 8
microbatches = 1
[optimizer]
lr = 1e-3
[parallel]
dp = 1
"""
_CURVES = re.compile(rb'"curves_s": ([0-9.]+)')
_QUERY = "run=0&points=800&curve=loss&curve=tokens_per_s&curve=grad_norm&curve=lr&curve=peak_memory_bytes"


async def _view(address: str, secret: str, counts: list[int]) -> None:
    """Read states like one browser, and ask for curves at the pace that they tell."""
    parts = urlsplit(address)
    head = f" HTTP/1.1\r\nhost: {parts.netloc}\r\nauthorization: Bearer {secret}\r\n\r\n"
    reader, writer = await asyncio.open_connection(parts.hostname, parts.port, limit=1 << 22)
    writer.write(f"GET /stream{head}".encode())
    next_s, spare = 0.0, await asyncio.open_connection(parts.hostname, parts.port, limit=1 << 22)
    while True:
        text = await reader.readuntil(b"\n\n")
        counts[0] += 1
        pace = _CURVES.search(text)
        if pace is not None and time.monotonic() >= next_s:
            next_s = time.monotonic() + float(pace[1])
            spare[1].write(f"GET /curves?{_QUERY}{head}".encode())
            answer = await spare[0].readuntil(b"\r\n\r\n")
            size = re.search(rb"content-length: (\d+)", answer)
            counts[1] += len(await spare[0].readexactly(int(size[1]) if size else 0)) > 0


async def _view_all(address: str, secret: str, viewers: int) -> None:
    counts = [0, 0]
    views = [asyncio.create_task(_view(address, secret, counts)) for _ in range(viewers)]
    # whoever started this asks for the counts by a line each
    while await asyncio.to_thread(sys.stdin.readline):
        sys.stdout.write(f"{counts[0]} {counts[1]}\n")
        sys.stdout.flush()
    for view in views:
        view.cancel()


@contextlib.contextmanager
def _process(*arguments: str, **options: Any) -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen([sys.executable, *arguments], text=True, **options) as process:  # noqa: S603 - our own code
        try:
            yield process
        finally:
            process.kill()


def _spent_s(process: psutil.Process) -> float:
    """Return processor seconds of a process and of those below it."""
    times = [each.cpu_times() for each in (process, *process.children(recursive=True))]
    return float(sum(time.user + time.system for time in times))


def _ask_counts(client: subprocess.Popen[str] | None) -> list[int]:
    if client is None or client.stdin is None or client.stdout is None:
        return [0, 0]
    client.stdin.write("\n")
    client.stdin.flush()
    return [int(word) for word in client.stdout.readline().split()]


def measure_viewers(viewers: int = 100, blocks: int = 12, block_s: float = 12.0) -> dict[str, Any]:
    """Alternate blocks with and without viewers, and compare steps and processor time."""
    with tempfile.TemporaryDirectory(prefix="phalanx-viewers-") as home, contextlib.ExitStack() as stack:
        path, run = Path(home) / "run.toml", Path(home) / "run"
        path.write_text(RUN_FILE)
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        command = ("-m", "phalanx", "train", str(path), "--run-dir", str(run))
        trainer = psutil.Process(stack.enter_context(_process(*command, **quiet)).pid)
        while not (run / "metrics.jsonl").exists():
            time.sleep(0.1)
        shown = stack.enter_context(
            _process("-m", "phalanx", "watch", str(run), "--json", stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        )
        ready = json.loads(shown.stdout.readline()) if shown.stdout is not None else {}
        link = urlsplit(ready["link"]).fragment.removeprefix("link=")
        answer = requests.post(f"{ready['url']}/session", headers={"authorization": f"Bearer {link}"}, timeout=60)
        words = ("-m", "phalanx.lab.bench.alone.viewers", "view", ready["url"], answer.json()["secret"], str(viewers))
        watcher, measured = psutil.Process(shown.pid), list[dict[str, Any]]()
        for number in range(blocks):
            with contextlib.ExitStack() as inside:
                pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
                client = inside.enter_context(_process(*words, **pipes)) if number % 2 else None
                # the clients' own start is in no block
                while client is not None and _ask_counts(client)[0] < viewers:
                    time.sleep(1)
                measured.append(_measure_block(block_s, watcher, trainer, client))
        rows = read_metrics(run / "metrics.jsonl")
    steps = [(float(row["time"]), float(row["wall_s"])) for row in rows]
    return {"viewers": viewers, **summarise_blocks(measured, steps)}


def _measure_block(
    block_s: float, watcher: psutil.Process, trainer: psutil.Process, client: subprocess.Popen[str] | None
) -> dict[str, Any]:
    parties = {"watcher": watcher, "trainer": trainer}
    parties |= {} if client is None else {"client": psutil.Process(client.pid)}
    start, before = time.time(), {name: _spent_s(process) for name, process in parties.items()}
    counts = _ask_counts(client)
    time.sleep(block_s)
    states, curves = (now - then for now, then in zip(_ask_counts(client), counts, strict=True))
    stop = time.time()
    used = {f"{name}_cpu_s": _spent_s(process) - before[name] for name, process in parties.items()}
    return {"has_viewers": client is not None, "start": start, "stop": stop, "answers": states + curves, **used}


def summarise_blocks(blocks: Sequence[dict[str, Any]], steps: Sequence[tuple[float, float]]) -> dict[str, Any]:
    """Return medians over the blocks of each side, and the processor time of an answer.

    Args:
        blocks: As they followed each other, without viewers first.
        steps: When each step ended, and its seconds.
    """
    figures = []
    for block in blocks:
        inside = [seconds for end, seconds in steps if block["start"] < end - seconds and end < block["stop"]]
        length = block["stop"] - block["start"]
        figures.append(
            {
                "has_viewers": block["has_viewers"],
                "steps": len(inside),
                "step_s": statistics.median(inside),
                "step_cpu_s": block["trainer_cpu_s"] / len(inside),
                "watcher_cpu_share": block["watcher_cpu_s"] / length,
                "client_cpu_share": block.get("client_cpu_s", 0.0) / length,
                "answers_per_s": block["answers"] / length,
            }
        )
    ratios = [
        with_them["step_s"] / alone["step_s"] for alone, with_them in pairwise(figures) if not alone["has_viewers"]
    ]
    sides = {
        name: {
            key: statistics.median(figure[key] for figure in figures if figure["has_viewers"] is side)
            for key in figures[0]
            if key != "has_viewers"
        }
        for name, side in (("without", False), ("with", True))
    }
    pairs = [(alone, with_them) for alone, with_them in pairwise(figures) if not alone["has_viewers"]]
    answer_s = statistics.median(
        (with_them["watcher_cpu_share"] - alone["watcher_cpu_share"]) / with_them["answers_per_s"]
        for alone, with_them in pairs
    )
    return {
        **sides,
        "step_ratio": statistics.median(ratios),
        "step_ratios": ratios,
        "answer_cpu_s": answer_s,
        "max_answers_per_s": MAX_ANSWERS_PER_S,
        "max_share_of_machine": answer_s * MAX_ANSWERS_PER_S / (os.cpu_count() or 1),
        "blocks": figures,
    }


if __name__ == "__main__":
    if sys.argv[1:2] == ["view"]:
        os.nice(5)
        asyncio.run(_view_all(sys.argv[2], sys.argv[3], int(sys.argv[4])))
    else:
        run_program("viewers", measure_viewers)
