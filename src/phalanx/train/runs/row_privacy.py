"""What a run with a section ``[privacy]`` cannot have in the sections of every engine, and why."""

from collections.abc import Iterator

from phalanx.data import DataConfig
from phalanx.models import ModelConfig
from phalanx.train.train_section import TrainConfig

LEARNED_BY_STAGES = ("causal_lm", "weighted_causal_lm")
LEARNED_AT_SITES = ("causal_lm", "classification")


def data_faults(model: ModelConfig, data: DataConfig, train: TrainConfig, learned: tuple[str, ...]) -> Iterator[str]:
    """Describe parts of a model, its text and its training that a bound on single rows would not cover."""
    yield from _adapter_faults(model)
    if data.tokenizer.kind == "bpe":
        yield (
            'data.tokenizer.kind = "bpe": a vocabulary trained on the rows reveals them without noise; use '
            '"model", or "file" with one of public text'
        )
    for name, value in (("phases", data.phases), ("skip", data.skip)):
        if value:
            yield f"data.{name}: every row must have the same chance to be drawn in each step; remove it"
    if train.objective_kind not in learned:
        yield (
            f'train.objective = "{train.objective_kind}": its loss may not be a sum over rows that each '
            f"depend on one example; choose one of {', '.join(learned)}"
        )
    if train.precision != "fp32":
        yield (
            f'train.precision = "{train.precision}": its rounded norms do not bound a row\'s contribution; set it '
            'to "fp32"'
        )
    if train.neftune_alpha is not None:
        yield "train.neftune_alpha: its noise depends on a row's place in the draw; remove it"


def _adapter_faults(model: ModelConfig) -> Iterator[str]:
    adapter = model.adapter
    if adapter is None:
        return
    if adapter.kind != "lora":
        yield f'model.adapter.kind = "{adapter.kind}": per-row gradients are not tested with it; set it to "lora"'
    elif adapter.quantize is not None:
        yield "model.adapter.quantize: per-row gradients are not supported with it; remove it"
    elif adapter.dora:
        yield "model.adapter.dora: Opacus clips its magnitudes wrongly or not at all; set it to false"
