"""Run directories with made-up figures: a fixture to draw, not a result of anything."""

import json
import math
import random

CONFIG = """# made-up figures, for tests
[train]
steps = 200
seed = 7

[guard]
mode = "phalanx"
audit_rate = 0.125

[attack]
kind = "forward_sign_flip"
stages = [1]
"""
LINKS = ["owner>worker-1", "worker-1>worker-2", "worker-2>owner", "owner>worker-2", "worker-2>worker-1"]
EVIDENCE = "step-00000104-stage-1-worker-1.json"


def write_json(path, value):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value))


def write_lines(path, values):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(value) + "\n" for value in values))


def metric(step, rng, attacked=False, guarded=True):
    damage = 0.0 if guarded else max(0.0, (step - 100) * 0.03)
    loss = 4.1 + 5.0 * math.exp(-step / 40) + rng.gauss(0, 0.09) + damage
    busy = rng.uniform(0.95, 1.1)
    phases = {"forward": 0.31, "backward": 0.55, "audit": 0.07, "optimizer": 0.06, "wait": 0.05}
    minor = {"hash": 0.012, "sign": 0.004, "screen": 0.003, "shadow": 0.02}
    return {
        "step": step,
        "loss": loss,
        "lr": 3e-4,
        "grad_norm": 1.0,
        "tokens": 4096,
        "tokens_per_s": 4000 * busy,
        "wall_s": 1.05 * busy,
        "attempts": 2 if attacked and guarded else 1,
        "audits": 2 if guarded else 0,
        "alarms": int(attacked and guarded),
        "attacked": attacked,
        "repaired": attacked and guarded,
        "validation_perplexity": math.exp(loss + 0.1) if step % 40 == 0 else None,
        "phases": {name: seconds * busy for name, seconds in {**phases, **minor}.items()},
        "bytes": {link: 262144 * (5 - i) for i, link in enumerate(LINKS)},
    }


def event(sequence, second, kind, body):
    time = f"2031-05-04T10:{second // 60:02}:{second % 60:02}.250000Z"
    return {
        "sequence": sequence,
        "time": time,
        "run": "fixture",
        "kind": kind,
        "body": body,
        "previous": "00" * 32,
        "signature": "00" * 64,
    }


VERDICT = {
    "step": 104,
    "microbatch": 3,
    "stage": 1,
    "party": "worker-1",
    "offence": "message",
    "direction": "forward",
    "distance": 2.0,
    "allowed": 2e-5,
    "reason": "stage 1, step 104, microbatch 3, forward: distance 2.0e+00, allowed 2.0e-05",
    "accuser": "worker-2",
    "evidence": f"evidence/{EVIDENCE}",
}

HEADERS = {
    role: {"header": json.dumps({"sender": sender, "kind": kind}), "signature": "00" * 64}
    for role, sender, kind in (
        ("output", "worker-1", "tensor"),
        ("input_forward", "owner", "tensor"),
        ("report", "worker-2", "audit_report"),
    )
}

SUMMARY = {
    "status": "completed",
    "steps": 200,
    "tokens": 819200,
    "loss_first": 9.01,
    "loss_last": 4.12,
    "validation_perplexity": 68.4,
    "validation_perplexity_first": 8123.0,
    "unigram_perplexity": 420.5,
    "tokens_per_s": 3981.2,
    "wall_s": 211.0,
    "world": {"processes": 3, "stages": 4},
    "seed": 7,
    "config_digest": "ab" * 32,
    "final_weights_digest": "cd" * 32,
    "audits": 1600,
    "attacks_injected": 1,
    "detections": 1,
    "false_accusations": 0,
    "evicted": ["worker-1"],
    "usage_cpu_s": {"worker-1": {"compute": 27.1, "audit": 2.5, "hashing": 0.5, "process": 47.9}, "owner": {}},
    "takeovers": 1,
    "steps_lost": 0,
}


def stages():
    holders = ["owner", "worker-1", "worker-2", "owner"]
    shadows = [None, "worker-2", "worker-1", None]
    return [
        {"index": i, "layers": f"{2 * i}-{2 * i + 1}", "parameters": 1_574_912, "holder": h, "shadow": s}
        for i, (h, s) in enumerate(zip(holders, shadows, strict=True))
    ]


def events():
    told = [
        (0, "run_started", {"config_digest": "ab" * 32, "stages": stages()}),
        (1, "party_joined", {"party": "worker-1"}),
        (1, "party_joined", {"party": "worker-2"}),
        (54, "checkpoint", {"step": 50}),
        (109, "checkpoint", {"step": 100}),
        (
            113,
            "screen_hit",
            {
                "step": 104,
                "source": 1,
                "microbatch": 3,
                "direction": "forward",
                "party": "worker-1",
                "reason": "norm differs from its moving average by a factor of 4.1",
            },
        ),
        (113, "alarm", {"step": 104, "microbatch": 3, "stage": 1, "accuser": "worker-2"}),
        (114, "verdict", VERDICT),
        (114, "evicted", {"party": "worker-1", "stages": [1], "step": 104}),
        (114, "takeover", {"stage": 1, "step": 104, "by": "worker-2", "from": "worker-1"}),
        (115, "step_redone", {"step": 104, "epoch": 1}),
        (164, "checkpoint", {"step": 150}),
        (211, "run_completed", {"final_weights_digest": "cd" * 32}),
    ]
    return [event(i, second, kind, body) for i, (second, kind, body) in enumerate(told)]


def make_run(directory, steps=200, attacked=(104,), guarded=True):
    """Write a whole run directory and return it."""
    directory.mkdir(parents=True, exist_ok=True)
    rng = random.Random(3)
    (directory / "config.toml").write_text(CONFIG)
    write_lines(
        directory / "metrics.jsonl",
        [metric(step, rng, step in attacked, guarded) for step in range(1, steps + 1)],
    )
    write_lines(directory / "events.jsonl", events())
    write_json(directory / "summary.json", SUMMARY)
    write_json(directory / "evidence" / EVIDENCE, {"verdict": VERDICT, "headers": HEADERS})
    return directory
