"""Run directories as a run writes them, without a run: curves, events, parties and logs for who only reads."""

import json
import math
import time
from datetime import UTC, datetime
from pathlib import Path

RUN_ID, DIGEST = "ab" * 16, "cd" * 32


def metric_row(step, **changes):
    """One line of metrics.jsonl."""
    row = {
        "step": step,
        "time": time.time(),
        "batch": "00",
        "samples_digest": None,
        "loss": 2.0 + 5.0 * math.exp(-step / 40) + 0.05 * math.sin(step * 1.7),
        "lr": 1e-3,
        "grad_norm": 1.0 + 0.1 * math.cos(step),
        "tokens": 1536,
        "tokens_per_s": 800.0 + 30 * math.sin(step / 3),
        "wall_s": 1.9,
        "audits": 3,
        "alarms": 0,
        "attacked": False,
        "repaired": False,
        "peak_memory_bytes": 8.1e8,
        "validation_perplexity": 400.0 / (1 + step / 50) if step % 20 == 0 else None,
        "phases": {"compute": 1.3, "wait": 0.4, "send": 0.1},
        "bytes": {"owner>worker-1": 1_840_353, "worker-1>worker-2": 7_895_142, "worker-2>owner": 1_591_736},
        "bytes_claimed": ["worker-1>worker-2"],
    }
    return row | changes


def event_row(kind, body=None, moment=None):
    """One line of events.jsonl; it is not signed."""
    when = datetime.fromtimestamp(time.time() if moment is None else moment, UTC).isoformat()
    return {"kind": kind, "body": body or {}, "time": when, "run": RUN_ID, "sequence": 0}


def party_row(name, **changes):
    """One party of peers.json."""
    row = {"name": name, "state": "serving", "serves": [1], "shadows": [2], "since": int(time.time()), "steps": 9}
    row |= {"audits": {"messages": 9}, "bytes_from": 5 << 20, "bytes_to": 9 << 20, "heard": int(time.time())}
    return row | changes


def append_rows(path, rows):
    with Path(path).open("a", encoding="utf-8") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)


def write_peers(run_dir, *parties, steps=400, ended=False):
    status = {"version": 1, "run": "run", "step": 9, "steps": steps, "written": int(time.time()), "ended": ended}
    (run_dir / "peers.json").write_text(json.dumps(status | {"parties": list(parties)}))


def write_run(run_dir, *, num_steps=120, events=(), summary=None, config="[train]\nsteps = 400\n", parties=True):
    """Write a run directory and return it."""
    run_dir.mkdir(parents=True)
    (run_dir / "run.json").write_text(json.dumps({"run": RUN_ID, "config_digest": DIGEST}))
    (run_dir / "config.toml").write_text(config)
    append_rows(run_dir / "metrics.jsonl", [metric_row(step) for step in range(num_steps)])
    append_rows(run_dir / "events.jsonl", [event_row("run_started", {"step": 0}), *events])
    if parties:
        write_peers(run_dir, party_row("worker-1"), party_row("worker-2", serves=[2], shadows=[1]))
    (run_dir / "workers").mkdir()
    (run_dir / "workers" / "worker-1.log").write_text("worker-1: joined\nworker-1: serves stage 1\n")
    if summary is not None:
        (run_dir / "summary.json").write_text(json.dumps(summary))
    return run_dir


VERDICT = {
    "party": "worker-1",
    "step": 41,
    "stage": 1,
    "offence": "message",
    "reason": "stage 1, step 41, microbatch 2: distance 2.0, allowed 0",
    "evidence": "evidence/verdict-1.json",
}
