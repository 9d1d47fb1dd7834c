"""What does the example of QLoRA learn, and what memory does a step of it take beside LoRA's?

``python benchmarks/qlora_example.py RUN_DIR OUT.json`` reads a finished run of ``examples/qlora.toml``, and measures a
step of the whole model in a process for each arm: the memory that it adds from before the model is built.
"""

import multiprocessing
from pathlib import Path

import torch
from finished_run import FinishedRun, arguments_of, write_result

from phalanx.lab.bench.measure.resident import added_at_peak, forget_peak, give_back_freed_memory, resident
from phalanx.models import ModelConfig, StageSpec, build_stage, open_model
from phalanx.models.master_weights import keep_masters
from phalanx.objectives import causal_lm
from phalanx.train import load_run

FILE = Path("examples/qlora.toml")
ARMS = {"lora": None, "lora_bf16": None, "int8": "int8", "nf4": "nf4"}
"""What the frozen matrices are kept in; without it float32, or bf16 with float32 masters of the adapter."""
STEPS = 2
_TOKENS = (2, 96)


def measure(arm: str, run_dir: str) -> dict[str, int]:
    """Bytes of the weights, and what building the model and two steps in bf16 add at their peak."""
    run = load_run(FILE)
    model = run.model.model_dump()
    config = ModelConfig.model_validate({**model, "adapter": {**model["adapter"], "quantize": ARMS[arm]}})
    source = open_model(config, Path(run_dir).parent / ".cache", 0)
    give_back_freed_memory()
    # libraries load with the first small product
    (torch.ones(8, 8, requires_grad=True) @ torch.ones(8, 8)).sum().backward()
    forget_peak()
    before = resident()
    spec = StageSpec(0, 1, 0, source.num_layers)
    stage = build_stage(source, spec, adapter=config.adapter, activation_checkpointing=False, attention="sdpa", seed=1)
    if arm == "lora_bf16":
        keep_masters(stage)
        give_back_freed_memory()
    built = resident().anonymous - before.anonymous
    forget_peak()
    optimizer = torch.optim.AdamW(stage.trainable().values())
    ids = torch.randint(0, source.vocab_size, _TOKENS, generator=torch.Generator().manual_seed(1))
    for _ in range(STEPS):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            logits = stage(ids)
        causal_lm(logits.float(), ids)[0].backward()
        optimizer.step()
        optimizer.zero_grad()
    # of bf16 both are held: the weights, and the masters of those that are trained
    held = [*stage.all_parameters().values(), *stage.computing.values()]
    weights = sum(value.numel() * value.element_size() for value in held)
    return {"weights_bytes": weights, "built_bytes": built, "peak_bytes": added_at_peak(before)}


def main() -> None:
    """Write one JSON object."""
    arguments = arguments_of(__doc__).parse_args()
    run = FinishedRun(FILE, arguments.run_dir)
    memory = {}
    for arm in ARMS:
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            memory[arm] = pool.apply(measure, (arm, str(arguments.run_dir)))
    result = run.facts("qlora-example", "python benchmarks/qlora_example.py runs/qlora OUT.json") | {
        "held_out_perplexity": run.perplexities(),
        "loss": run.losses(),
        "memory": memory,
    }
    write_result(arguments.out, result)


if __name__ == "__main__":
    main()
