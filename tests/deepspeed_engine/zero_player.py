"""Rank processes that play one case after another: what is heavy is imported once, then this process is forked."""

import contextlib
import gc
import json
import os
import sys
import traceback
from pathlib import Path

import references
import torch
from rank_layouts import BATCH, MICROBATCHES, TOKENS, Case
from references import adapter_of, batch_of, one_process, source_of
from safetensors.torch import load_file, save_file
from zero_cases import CASES, DIRECTORY, STEPS, ZeroCase

from phalanx.child import die_with_parent
from phalanx.errors import ConfigError, FailedBatchError
from phalanx.optimizers import OptimizerConfig
from phalanx.parallel import ParallelConfig, RankEnv, RankRecipe, RankTrainer, join_ranks
from phalanx.parallel.deepspeed import DeepSpeedConfig, check_machine, opened_member
from phalanx.parallel.groups.mesh import open_domain

VOCAB = 64


def adamw_of(case: Case) -> OptimizerConfig:
    """What deepspeed has, for adapters too; with a large rate rounding alone moves a wide model's curve."""
    return OptimizerConfig(lr=2e-4 if case.family == "wide" else 5e-3, warmup_steps=3, clip_norm=0.5)


references.optimizer_of = adamw_of
TOGETHER = 3


def as_case(case: ZeroCase) -> Case:
    """The same model and optimizer in one process."""
    return Case({"dp": case.dp}, "adamw", case.family, adapted=case.adapted)


def section_of(case: ZeroCase, home: Path) -> DeepSpeedConfig:
    named = {key: str(home / "disk") if value == DIRECTORY else value for key, value in case.section.items()}
    return DeepSpeedConfig(**named)


def recipe_of(case: ZeroCase) -> RankRecipe:
    zero = {"zero": 3} if case.engine == "parallel" else {}
    return RankRecipe(
        ParallelConfig(dp=case.dp, activation_checkpointing=case.recompute, **zero),
        adamw_of(as_case(case)),
        BATCH,
        MICROBATCHES // case.dp,
        TOKENS,
        STEPS,
        precision=case.precision,
        adapter=adapter_of(as_case(case)),
    )


@contextlib.contextmanager
def member_of(case: ZeroCase, rank: int, home: Path, number: int):
    recipe, source = recipe_of(case), source_of(as_case(case), home / "models")
    place, device = RankEnv(rank, case.dp, rank, case.dp, home / f"meeting-{number}"), torch.device("cpu")
    with join_ranks(place, device, "00" * 32):
        domain = open_domain(recipe.parallel, device)
        if case.engine == "parallel":
            yield RankTrainer(recipe, source, domain)
            return
        digest = f"{number:064x}"
        with opened_member(section_of(case, home), recipe, source, domain, place, digest) as member:
            yield member


def play(case: ZeroCase, rank: int, home: Path, number: int) -> dict[str, object]:
    """One case on this rank; the same on all ranks but for what only rank 0 is told."""
    with member_of(case, rank, home, number) as member:
        if case.loads and not (home / f"{case.loads}.safetensors").exists():
            return {"lacking": "what it goes on from could not be made on this machine"}
        first = STEPS // 2 if case.loads else 0
        whole = load_file(home / f"{case.loads}.safetensors") if case.loads and rank == 0 else {}
        for stage in range(member.num_stages) if case.loads else ():
            tensors = {name: whole[name] for name in member.tensor_names(stage)} if rank == 0 else None
            member.load_stage(first, stage, tensors)
        curve, failed = [], None
        for step in range(first, STEPS):
            if case.saves and step == STEPS // 2:
                kept = member.collect_stage(0)
                if rank == 0:
                    save_file(kept, home / f"{case.saves}.safetensors")
            if case.engine == "deepspeed" and step == STEPS - 3:
                failed = fails(member, step)
            outcome = member.train_step(step, *batch_of(step, VOCAB))
            curve.append((outcome.loss, outcome.gradient_norm))
        held_out = member.evaluate_batch(*batch_of(999, VOCAB))
        files = [str(path.relative_to(home)) for path in sorted((home / "disk").rglob("*.swp")) if path.stat().st_size]
        return {"curve": curve, "held_out": held_out, "files": files, "failed": failed, "kinds": kinds(member)}


def fails(member, step: int) -> str:
    """Return the error of a step in which the last rank alone has a loss that is not a number."""
    last = torch.distributed.get_rank() == torch.distributed.get_world_size() - 1
    ids, labels = batch_of(step, VOCAB)
    hook = member._engine.module.register_forward_hook(lambda *found: found[-1] * (torch.nan if last else 1.0))
    try:
        member.train_step(step, ids, labels)
    except FailedBatchError as exc:
        return str(exc)
    finally:
        hook.remove()
    return "nothing"


def kinds(member) -> list[str]:
    """Which kinds of tensors are other than zero everywhere; on rank 0."""
    return sorted(
        {name.partition("/")[0] for name, tensor in member.collect_stage(0).items() if tensor.abs().sum() > 0}
    )


def be_rank(rank: int, cases: dict[int, ZeroCase], home: Path) -> None:
    for number, case in cases.items():
        if rank >= case.dp:
            continue
        try:
            result = play(case, rank, home, number)
        except Exception:  # noqa: BLE001 - whatever it is, the test shows it
            result = {"error": traceback.format_exc()}
        gc.collect()
        if rank == 0 or "error" in result:
            (home / f"result-{number}-{rank}.json").write_text(json.dumps(result))
        if "error" in result:
            # the other rank would wait for this one
            os._exit(1)


def play_together(cases: dict[int, ZeroCase], home: Path) -> None:
    """Fork two ranks that play some cases one after another."""
    children = []
    for rank in range(2):
        child = os.fork()
        if child == 0:
            die_with_parent()
            be_rank(rank, cases, home)
            os._exit(0)
        children.append(child)
    for child in children:
        os.waitpid(child, 0)


def lacks(case: ZeroCase, home: Path, number: int) -> bool:
    """Whether this machine cannot play a case; the reason is its result."""
    if case.engine == "parallel":
        return False
    try:
        check_machine(section_of(case, home), [10**6], case.dp, case.dp, "cpu", build=True)
    except ConfigError as exc:
        (home / f"result-{number}-0.json").write_text(json.dumps({"lacking": str(exc)}))
        return True
    return False


def main() -> None:
    home = Path(sys.argv[1])
    chosen = {number: case for number, case in enumerate(CASES) if not sys.argv[2:] or str(number) in sys.argv[2:]}
    torch.set_num_threads(1)
    (home / "disk").mkdir(exist_ok=True)
    os.environ["PHALANX_PARENT"] = str(os.getpid())
    found = {}
    for case in chosen.values():
        if case.reference not in found:
            found[case.reference] = one_process(as_case(case), home / "models")
    (home / "references.json").write_text(json.dumps(found))
    for number in [number for number in chosen if lacks(chosen[number], home, number)]:
        del chosen[number]
    # one process may be a rank of several runs, one after another
    play_together({number: case for number, case in chosen.items() if number < TOGETHER}, home)
    for number, case in chosen.items():
        if number >= TOGETHER:
            play_together({number: case}, home)
    left = [str(path) for path in (home / "disk").rglob("*")]
    (home / "left.json").write_text(json.dumps(left))


if __name__ == "__main__":
    main()
