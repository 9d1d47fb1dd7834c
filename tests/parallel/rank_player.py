"""Rank processes that play one layout after another: torch is imported once, then this process is forked."""

import gc
import json
import os
import sys
import traceback
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from rank_layouts import BATCH, FAST, LARGE, SLOW, STEPS, TOKENS, Case, architecture
from safetensors.torch import load_file, save_file
from torch.nn.utils import clip_grad_norm_

from phalanx.data import IGNORE
from phalanx.models import ModelConfig, ModelSource, StageSpec, build_stage, open_model
from phalanx.objectives import causal_lm
from phalanx.optimizers import OptimizerConfig, learning_rate
from phalanx.parallel import Member, ParallelConfig, Place, Recipe, Saving, join
from phalanx.parallel.mesh import open_domain
from phalanx.pipeline import die_with_parent

TABLES = {"fast": FAST, "slow": SLOW, "large": LARGE}


def optimizer_of(case: Case) -> OptimizerConfig:
    if case.optimizer == "sgd":
        # nothing is clipped: a wrong scale of the whole gradient would show as well
        return OptimizerConfig(kind="sgd", lr=0.1, warmup_steps=3, clip_norm=1e6, weight_decay=0.01)
    return OptimizerConfig(lr=5e-3, warmup_steps=3, clip_norm=0.5)


def batch_of(step: int, vocab: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Random tokens, with another number of targets in each row; two batches take turns, so that both are learnt."""
    generator = torch.Generator().manual_seed(77 + step % 2)
    tokens = torch.randint(0, vocab, (BATCH, TOKENS + 1), generator=generator)
    labels = tokens[:, 1:].clone()
    labels[0, :5] = IGNORE
    labels[3, 9:] = IGNORE
    return tokens[:, :-1].contiguous(), labels


def source_of(case: Case, cache: Path) -> ModelSource:
    config = ModelConfig(from_scratch=True, architecture=architecture(case.family, case.vocab))
    return open_model(config, cache, seed=3)


def one_process(case: Case, cache: Path) -> list[tuple[float, float]]:
    """Loss and gradient norm of each step by torch's own optimizer and clipping, and no engine."""
    source, config = source_of(case, cache), optimizer_of(case)
    spec = StageSpec(0, 1, 0, source.num_layers)
    model = build_stage(source, spec, adapter=None, activation_checkpointing=False, attention="sdpa", seed=0)
    trained = list(model.parameters())
    groups = [
        {"params": [p for p in trained if p.ndim >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in trained if p.ndim < 2], "weight_decay": 0.0},
    ]
    if config.kind == "sgd":
        optimizer: torch.optim.Optimizer = torch.optim.SGD(groups, lr=1.0, momentum=config.momentum)
    else:
        optimizer = torch.optim.AdamW(groups, lr=1.0, betas=config.betas, eps=config.eps)
    curve = []
    for step in range(STEPS):
        ids, labels = batch_of(step, case.vocab)
        total, count = causal_lm(model(ids), labels)
        (total / count).backward()
        norm = float(clip_grad_norm_(trained, config.clip_norm or 1e9))
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(config, step, STEPS)
        optimizer.step()
        optimizer.zero_grad()
        curve.append((float(total.detach()) / count, norm))
    return curve


def play(case: Case, rank: int, home: Path, number: int) -> dict[str, object]:
    """One layout on this rank; the same on all ranks but for what only rank 0 is told."""
    config = ParallelConfig(**case.parallel)
    recipe = Recipe(config, optimizer_of(case), BATCH, case.microbatches, TOKENS, STEPS)
    place = Place(rank, case.world, rank, case.world, home / f"meeting-{number}")
    device = torch.device("cpu")
    with join(place, device, "00" * 32):
        domain = open_domain(config, device)
        member = Member(recipe, source_of(case, home / "models"), domain)
        first = STEPS // 2 if case.loads else 0
        whole = {}
        if case.loads and rank == 0:
            whole = load_file(home / f"{case.loads}.safetensors")
        for stage in range(member.num_stages) if case.loads else ():
            tensors = {name: whole[name] for name in member.names(stage)} if rank == 0 else None
            member.load(first, stage, tensors)
        curve = []
        for step in range(first, STEPS):
            if case.saves and step == STEPS // 2:
                kept = [member.collect(stage) for stage in range(member.num_stages)]
                if rank == 0:
                    tensors = {name: tensor for part in kept for name, tensor in part.items()}
                    save_file(tensors, home / f"{case.saves}.safetensors")
            outcome = member.step(step, *batch_of(step, case.vocab))
            curve.append((outcome.loss, outcome.gradient_norm))
        held_out = member.evaluate(*batch_of(999, case.vocab))
        beside = copied_beside(member, Saving(member, domain), rank, case.vocab)
        return {"curve": curve, "held_out": held_out, "beside": beside}


def copied_beside(member: Member, saving: Saving, rank: int, vocab: int) -> bool:
    """Whether what is collected while another step runs is, to the bit, what was there before that step."""
    stages = range(member.num_stages)
    saving.take()
    before = [member.collect(stage) for stage in stages]
    with ThreadPoolExecutor(1) as worker:
        if rank:
            saving.begin_sending()
        receiving = worker.submit(lambda: [tensors for _, tensors in saving.receive()] if rank == 0 else [])
        member.step(STEPS - 1, *batch_of(998, vocab))
        saving.wait()
        received = receiving.result()
    after = [member.collect(stage) for stage in stages]
    if rank:
        return True
    pairs = [
        (mine[name], tensor) for mine, theirs in zip(received, before, strict=True) for name, tensor in theirs.items()
    ]
    has_moved = any(not torch.equal(after[0][name], tensor) for name, tensor in before[0].items())
    return has_moved and all(torch.equal(mine, tensor) for mine, tensor in pairs)


def be_rank(rank: int, cases: list[Case], home: Path) -> None:
    for number, case in enumerate(cases):
        if rank >= case.world:
            continue
        try:
            result = play(case, rank, home, number)
        except Exception:  # noqa: BLE001 - whatever it is, the test shows it
            result = {"error": traceback.format_exc()}
        # groups that something still refers to would leave others waiting
        gc.collect()
        if rank == 0 or "error" in result:
            (home / f"result-{number}-{rank}.json").write_text(json.dumps(result))


def main() -> None:
    table, home = TABLES[sys.argv[1]], Path(sys.argv[2])
    torch.set_num_threads(1)
    os.environ["PHALANX_PARENT"] = str(os.getpid())
    for case in table:
        source_of(case, home / "models")
    children = []
    for rank in range(max(case.world for case in table)):
        child = os.fork()
        if child == 0:
            die_with_parent()
            be_rank(rank, table, home)
            os._exit(0)
        children.append(child)
    references = {case.model: case for case in table}
    found = {model: one_process(case, home / "models") for model, case in references.items()}
    (home / "references.json").write_text(json.dumps(found))
    for child in children:
        os.waitpid(child, 0)


if __name__ == "__main__":
    main()
