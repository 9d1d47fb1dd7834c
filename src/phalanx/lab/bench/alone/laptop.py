"""Pre-train on the same text with ``phalanx laptop`` and with plain PyTorch, and compare bits a byte at equal CPU time.

``python -m phalanx.lab.bench.alone.laptop OUT.json --texts PATH [--minutes M] [--only whole]``

``phalanx laptop`` plans for so many minutes and trains the phase "pretrain". Each other arm gets the CPU seconds of
that whole process: a loop of PyTorch and transformers that reads the same documents with the same
vocabulary, once in the same shape, once in the shape and with the batch of nanochat's CPU run. nanochat itself needs
the network for its data and packages, and its optimizer is another: it was not run. CPU time is compared, since wall
time depends on what else the machine does. Held-out text is the same, and no arm learned from it.

``--only whole`` compares nothing: it runs the command through all of its phases, and returns its times and scores.
"""

# ruff: noqa: PLC0415 - each child loads nothing but what it measures

import json
import math
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Literal

OURS, SAME, NANOCHAT = "phalanx laptop", "PyTorch loop, same shape", "PyTorch loop, shape of nanochat's CPU run"
NANOCHAT_SHAPE = {"layers": 6, "hidden": 384, "heads": 6, "tokens": 512, "inner": 1536, "batch": 32, "lr": 1e-3}
"""Of ``runs/runcpu.sh`` of nanochat: depth 6, heads of 64, windows of 512, 16,384 tokens a step."""
_MICRO_ROWS = 8
_THIS = "phalanx.lab.bench.alone.laptop"


def measure(texts: Path, minutes: float = 7.0, only: Literal["whole"] | None = None) -> dict[str, Any]:
    """Play every arm in a process of its own, one after the other, or run the whole command once."""
    play = run_whole if only == "whole" else compare_arms
    return play(texts.resolve(), str(minutes))


def run_whole(texts: Path, minutes: str) -> dict[str, Any]:
    """Run ``phalanx laptop`` from the texts to the model; return its plan, times, scores and answers."""
    with tempfile.TemporaryDirectory() as name:
        os.chdir(name)
        os.environ["HF_HUB_OFFLINE"] = "1"
        used = run_child("phalanx", "laptop", str(texts), "--minutes", minutes, "--yes")
        os.chdir("laptop")
        results = json.loads(Path("results.json").read_text())
        plan = read_plan()
        os.chdir("/")
    whole = {key: results[key] for key in ("parameters", "final_weights_digest", "answers")}
    return {"minutes": float(minutes), **used, "plan": plan, **whole, "rows": [*results["phases"], *results["scores"]]}


def compare_arms(texts: Path, minutes: str) -> dict[str, Any]:
    """Play every arm of the comparison."""
    with tempfile.TemporaryDirectory() as name:
        os.chdir(name)
        os.environ["HF_HUB_OFFLINE"] = "1"
        run_child("phalanx", "laptop", str(texts), "--minutes", minutes, "--prepare", "--yes")
        os.chdir("laptop")
        run_child("phalanx", "tokenizer", "train", "tokenizer", "--recipe", "tokenizer.toml")
        used = run_child("phalanx", "train", "pretrain.toml", "--run-dir", "runs/pretrain")
        run_child("phalanx", "checkpoint", "export", "runs/pretrain", "models/pretrain", "--best")
        rows = [{"arm": OURS, **used, **read_ours(), **score("models/pretrain")}]
        for arm in (SAME, NANOCHAT):
            used = run_child(_THIS, arm, str(rows[0]["cpu_s"]))
            rows.append({"arm": arm, **used, **json.loads(Path("arm.json").read_text()), **score("arm")})
        plan = read_plan()
        os.chdir("/")
    return {"minutes": float(minutes), "plan": plan, "rows": rows}


def run_child(*command: str) -> dict[str, float]:
    """Run a module to its end, and return its wall and CPU seconds."""
    from phalanx.lab.bench.measure.harness import run_module

    return run_module(*command).seconds


def score(directory: str) -> dict[str, float]:
    """Return the bits a byte of a model on the held-out text."""
    run_child(_THIS, "score", directory)
    scores: dict[str, float] = json.loads(Path("score.json").read_text())
    return scores


def read_plan() -> dict[str, Any]:
    """Return the part of the plan that identifies text, shape and length."""
    from phalanx.config import load_config
    from phalanx.laptop import LaptopPlan

    plan = load_config(Path("plan.toml"), LaptopPlan, ())
    names = {"vocab_size", "threads", "train_bytes", "held_out_bytes", "shape", "pretrain", "seconds_per_token"}
    return {**plan.model_dump(mode="json", include=names), "texts": plan.question.texts}


def read_ours() -> dict[str, Any]:
    """Return the tokens and parameters of our arm."""
    from phalanx.config import load_config
    from phalanx.laptop import LaptopPlan

    summary = json.loads(Path("runs/pretrain/summary.json").read_text())
    parameters = load_config(Path("plan.toml"), LaptopPlan, ()).num_parameters
    return {"tokens": summary["tokens"], "steps": summary["steps"], "parameters": parameters}


def write_score(directory: str) -> None:
    """Score one model, in a child."""
    from phalanx.laptop.folder import read_lines
    from phalanx.laptop.scores import count_bits
    from phalanx.serve import open_text_model

    texts = [row["text"] for row in read_lines(Path("texts/held_out.jsonl"))]
    bits, perplexity = count_bits(open_text_model(Path(directory)), texts)
    Path("score.json").write_text(json.dumps({"bits_per_byte": bits, "perplexity": perplexity}))


def play_loop(arm: str, cpu_s: float) -> None:
    """Train an arm until this process has used its CPU time; the learning rate falls with the time that is left."""
    import random

    import torch

    rows = read_rows(arm)
    settings = rows["settings"]
    torch.set_num_threads(rows["threads"])
    torch.manual_seed(0)
    model = build_model(settings)
    decayed = [weight for weight in model.parameters() if weight.dim() > 1]
    others = [weight for weight in model.parameters() if weight.dim() <= 1]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=settings["lr"], betas=(0.9, 0.95))
    windows, steps, drawer = list(range(len(rows["windows"]))), 0, random.Random(0)  # noqa: S311 - an order of rows
    queue: list[int] = []
    start_s = time.process_time()
    # the export at the end takes about a second of the same account
    while time.process_time() < cpu_s - 1:
        while len(queue) < settings["batch"]:
            drawer.shuffle(windows)
            queue += windows
        chosen, queue = queue[: settings["batch"]], queue[settings["batch"] :]
        done = (time.process_time() - start_s) / max(1.0, cpu_s - start_s)
        for group in optimizer.param_groups:
            group["lr"] = settings["lr"] * rate_at(done)
        for first in range(0, len(chosen), _MICRO_ROWS):
            part = torch.tensor([rows["windows"][index] for index in chosen[first : first + _MICRO_ROWS]])
            loss = model(input_ids=part, labels=part).loss * (len(part) / len(chosen))
            loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        steps += 1
    save_arm(model, steps, settings)


def rate_at(done: float) -> float:
    """Return the share of the learning rate: a warm-up over a twentieth of the time, then a cosine down to a tenth."""
    if done < 0.05:
        return max(0.02, done / 0.05)
    return 0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * min(1.0, (done - 0.05) / 0.95)))


def read_rows(arm: str) -> dict[str, Any]:
    """Return the settings of an arm, and the documents as windows of tokens."""
    from tokenizers import Tokenizer

    from phalanx.config import load_config
    from phalanx.laptop import LaptopPlan
    from phalanx.laptop.folder import read_lines
    from phalanx.laptop.scores import END_OF_TEXT

    plan = load_config(Path("plan.toml"), LaptopPlan, ())
    shape = {**plan.shape.model_dump(), "inner": plan.shape.inner, "batch": plan.pretrain.batch}
    settings = {**(shape if arm == SAME else NANOCHAT_SHAPE), "vocab_size": plan.vocab_size}
    tokenizer = Tokenizer.from_file("tokenizer/tokenizer.json")
    tokenizer.encode_special_tokens = True
    end, ids = int(tokenizer.token_to_id(END_OF_TEXT) or 0), list[int]()
    for row in read_lines(Path("texts/train.jsonl")):
        ids += [end, *tokenizer.encode(row["text"], add_special_tokens=False).ids]
    length = int(settings["tokens"]) + 1
    windows = [ids[at : at + length] for at in range(0, len(ids) - length, length - 1)]
    return {"settings": settings, "windows": windows, "threads": plan.threads}


def build_model(settings: dict[str, Any]) -> Any:
    """Return a llama with random weights."""
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=settings["vocab_size"],
            hidden_size=settings["hidden"],
            intermediate_size=settings["inner"],
            num_hidden_layers=settings["layers"],
            num_attention_heads=settings["heads"],
            num_key_value_heads=settings["heads"],
            max_position_embeddings=settings["tokens"],
            tie_word_embeddings=True,
            bos_token_id=0,
            eos_token_id=0,
        )
    )


def save_arm(model: Any, steps: int, settings: dict[str, Any]) -> None:
    """Leave the model, with the tokenizer that all arms share, for the score."""
    import shutil

    model.save_pretrained("arm")
    for path in Path("models/pretrain").glob("*token*"):
        shutil.copyfile(path, Path("arm") / path.name)
    counts = {"tokens": steps * settings["batch"] * settings["tokens"], "steps": steps}
    Path("arm.json").write_text(json.dumps({**counts, "parameters": model.num_parameters()}))


if __name__ == "__main__":
    if sys.argv[1] == "score":
        write_score(sys.argv[2])
    elif sys.argv[1] in (SAME, NANOCHAT):
        play_loop(sys.argv[1], float(sys.argv[2]))
    else:
        from phalanx.lab.bench.measure.harness import run_program

        run_program("laptop", measure)
