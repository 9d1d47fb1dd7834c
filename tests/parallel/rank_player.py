"""Layouts that are played one after another, each by forks of this process: torch is imported once."""

import json
import os
import sys
import traceback
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from forks import fork_ranks
from rank_layouts import BATCH, COMPILED, FAST, FURTHER, LARGE, MIXTURES, PLANNED, RING, SECOND, SLOW, TOKENS, Case
from references import adapter_of, batch_of, one_process, optimizer_of, seen_of, source_of
from rounded_references import rounded_process
from safetensors.torch import load_file, save_file

from phalanx.parallel import ParallelConfig, RankEnv, RankRecipe, RankSaver, RankTrainer, join_ranks
from phalanx.parallel.groups.mesh import open_domain

TABLES = {
    "fast": FAST,
    "second": SECOND,
    "slow": SLOW,
    "ring": RING,
    "large": LARGE,
    "compiled": COMPILED,
    "planned": PLANNED,
    "further": FURTHER,
    "mixtures": MIXTURES,
}


def play(case: Case, rank: int, home: Path, number: int) -> dict[str, object]:
    """One layout on this rank; the same on all ranks but for what only rank 0 is told."""
    config = ParallelConfig(**case.parallel)
    recipe = RankRecipe(
        config,
        optimizer_of(case),
        BATCH,
        case.microbatches,
        TOKENS,
        case.steps,
        attention=case.attention,
        precision=case.precision,
        adapter=adapter_of(case),
        attends=case.attends,
        neftune_alpha=case.noise,
    )
    place = RankEnv(rank, case.world, rank, case.world, home / f"meeting-{number}")
    device = torch.device("cpu")
    with join_ranks(place, device, "00" * 32):
        domain = open_domain(config, device)
        member = RankTrainer(recipe, source_of(case, home / "models"), domain)
        first = case.steps // 2 if case.loads else 0
        whole = {}
        if case.loads and rank == 0:
            whole = load_file(home / f"{case.loads}.safetensors")
        for stage in range(member.num_stages) if case.loads else ():
            tensors = {name: whole[name] for name in member.tensor_names(stage)} if rank == 0 else None
            member.load_stage(first, stage, tensors)
        curve = []
        for step in range(first, case.steps):
            if case.saves and step == case.steps // 2:
                kept = [member.collect_stage(stage) for stage in range(member.num_stages)]
                if rank == 0:
                    tensors = {name: tensor for part in kept for name, tensor in part.items()}
                    save_file(tensors, home / f"{case.saves}.safetensors")
            outcome = member.train_step(step, *batch_of(step, case.vocab), seen_of(case, step))
            curve.append((outcome.loss, outcome.gradient_norm))
        held_out = member.evaluate_batch(*batch_of(999, case.vocab), seen_of(case, 999))
        beside = copied_beside(member, RankSaver(member, domain), rank, case)
        return {"curve": curve, "held_out": held_out, "beside": beside}


def copied_beside(member: RankTrainer, saving: RankSaver, rank: int, case: Case) -> bool:
    """Whether what is collected while another step runs is, to the bit, what was there before that step."""
    stages = range(member.num_stages)
    saving.copy_contribution()
    before = [member.collect_stage(stage) for stage in stages]
    with ThreadPoolExecutor(1) as worker:
        if rank:
            saving.begin_sending()
        receiving = worker.submit(lambda: [tensors for _, tensors in saving.receive_state()] if rank == 0 else [])
        member.train_step(case.steps - 1, *batch_of(998, case.vocab), seen_of(case, 998))
        saving.wait_until_sent()
        received = receiving.result()
    after = [member.collect_stage(stage) for stage in stages]
    if rank:
        return True
    pairs = [
        (mine[name], tensor) for mine, theirs in zip(received, before, strict=True) for name, tensor in theirs.items()
    ]
    has_moved = any(not torch.equal(after[0][name], tensor) for name, tensor in before[0].items())
    return has_moved and all(torch.equal(mine, tensor) for mine, tensor in pairs)


def be_rank(rank: int, case: Case, number: int, home: Path) -> None:
    try:
        result = play(case, rank, home, number)
    except Exception:  # noqa: BLE001 - whatever it is, the test shows it
        result = {"error": traceback.format_exc()}
    if rank == 0 or "error" in result:
        (home / f"result-{number}-{rank}.json").write_text(json.dumps(result))


def play_all(cases: list[Case], home: Path) -> None:
    """Each layout in processes of its own: a rank that fails lets go of its peers, and no group outlives its layout."""
    for number, case in enumerate(cases):
        for child in fork_ranks(case.world, lambda rank, case=case, number=number: be_rank(rank, case, number, home)):
            os.waitpid(child, 0)


def main() -> None:
    table, home = TABLES[sys.argv[1]], Path(sys.argv[2])
    torch.set_num_threads(1)
    for case in table:
        source_of(case, home / "models")
    (player,) = fork_ranks(1, lambda _: play_all(table, home))
    references = {case.model: case for case in table}
    found = {
        model: (rounded_process if case.rounds else one_process)(case, home / "models")
        for model, case in references.items()
    }
    (home / "references.json").write_text(json.dumps(found))
    os.waitpid(player, 0)


if __name__ == "__main__":
    main()
