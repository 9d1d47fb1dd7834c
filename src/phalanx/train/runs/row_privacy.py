"""What a run with a section ``[privacy]`` cannot have in the sections of every engine, and why."""

from collections.abc import Iterator

from phalanx.data import DataConfig
from phalanx.models import ModelConfig
from phalanx.train.train_section import TrainConfig

LEARNED_BY_STAGES = ("causal_lm", "weighted_causal_lm")
LEARNED_AT_SITES = ("causal_lm", "classification")


def data_faults(model: ModelConfig, data: DataConfig, train: TrainConfig, learned: tuple[str, ...]) -> Iterator[str]:
    """Describe what of a model, its text and its training a bound on single rows would not cover."""
    yield from _adapter_faults(model)
    if data.tokenizer.kind == "bpe":
        yield (
            'data.tokenizer.kind = "bpe": a vocabulary that is trained on the rows tells of them without noise; take '
            '"model", or "file" with one of public text'
        )
    for name, value in (("phases", data.phases), ("skip", data.skip)):
        if value:
            yield f"data.{name}: every row must have the same chance to be drawn in each step; leave it out"
    if train.objective_kind not in learned:
        yield (
            f'train.objective = "{train.objective_kind}": its loss is not known to be a sum over rows that each depend '
            f"on one example; take one of {', '.join(learned)}"
        )
    if train.precision != "fp32":
        yield f'train.precision = "{train.precision}": a norm in it does not bound what is added; take "fp32"'
    if train.neftune_alpha is not None:
        yield "train.neftune_alpha: its noise follows from a row's place among those that were drawn; leave it out"


def _adapter_faults(model: ModelConfig) -> Iterator[str]:
    adapter = model.adapter
    if adapter is None:
        return
    if adapter.kind != "lora":
        yield f'model.adapter.kind = "{adapter.kind}": single rows are not shown to be told apart; take "lora"'
    elif adapter.quantize is not None:
        yield "model.adapter.quantize: hooks that tell rows apart are not tried with it; leave it out"
    elif adapter.dora:
        yield "model.adapter.dora: Opacus clips the sizes of its outputs wrongly or not at all; set it to false"
