"""What a run with a section ``[privacy]`` cannot have, and why: a bound is quoted for what earns it alone."""

import json
from collections.abc import Iterator
from typing import Any

_SPLIT = (
    "[privacy] needs [parallel], [federated] or [pipeline]: clients and enclave of [split] share no secret for the "
    "noise, and their messages reveal rows; remove one"
)
_UNDONE = {
    "keep_states": "a published step could be repeated with the same rows without a charge",
    "classes": "a gradient with noise does not show how wrong it may be",
}
_GUARDED: dict[str, object] = {"keep_states": 0, "classes": "one"}
_LEARNED = ("causal_lm", "weighted_causal_lm")
_LEARNED_AT_SITES = ("causal_lm", "classification")


def privacy_fault(run: Any) -> str | None:
    """Describe the part of a run with ``[privacy]`` that its bound would not cover; None where there is none."""
    if run.privacy is None:
        return None
    if run.split is not None:
        return _SPLIT
    return next((f"[privacy] excludes {fault}" for fault in _faults(run)), None)


def _faults(run: Any) -> Iterator[str]:
    is_pipeline = run.parallel is None and run.federated is None
    if not is_pipeline and run.privacy.mean_rows is not None:
        yield "privacy.mean_rows: a step draws train.batch_size rows on average here; remove it"
    if is_pipeline:
        yield from _of_pipeline(run)
        yield from _of_guard(run.guard)
    elif run.federated is None:
        yield from _of_layout(run)
    elif run.parallel is not None:
        yield "[parallel] with [federated]: not yet tested to add the noise of a site only once; remove one"
    elif run.has_site_stages:
        yield "[pipeline] with [federated]: stages with a site's own budget are not supported yet; remove one"
    elif run.federated.privacy is not None:
        yield "federated.privacy: a site would have two budgets, without a joint bound; remove one"
    yield from _of_adapter(run.model.adapter)
    yield from _of_data(run)
    train, learned = run.train, _LEARNED if run.federated is None else _LEARNED_AT_SITES
    if train.objective_kind not in learned:
        yield (
            f'train.objective = "{train.objective_kind}": its loss may not be a sum over rows that each depend on '
            f"one example; choose one of {', '.join(learned)}"
        )
    if train.precision != "fp32":
        yield (
            f'train.precision = "{train.precision}": its rounded norms do not bound a row\'s contribution; set it '
            'to "fp32"'
        )
    if train.neftune_alpha is not None:
        yield "train.neftune_alpha: its noise depends on a row's place in the draw; remove it"
    if run.tracking and run.federated is None:
        yield "tracking: the loss of training rows would leave this machine without noise; remove it"


def _of_pipeline(run: Any) -> Iterator[str]:
    train, privacy = run.train, run.privacy
    if train.microbatches != train.batch_size:
        yield (
            f"train.microbatches = {train.microbatches} for train.batch_size = {train.batch_size}: stages clip single "
            "rows, so each microbatch is one; set both to the rows for which a step has room"
        )
    if privacy.mean_rows is not None and privacy.mean_rows > train.batch_size:
        yield f"privacy.mean_rows = {privacy.mean_rows} but room for train.batch_size = {train.batch_size}; lower it"
    if privacy.mean_rows is not None and privacy.sampling == "order":
        yield 'privacy.mean_rows with sampling = "order": each step has train.batch_size rows; remove it'
    if "clipping" in privacy.model_fields_set:
        yield "privacy.clipping: with one row a microbatch, a stage has the gradient of each row; remove it"
    if train.epochs is not None:
        yield "train.epochs: the number of rows of a step varies; set train.steps"
    if train.device != "cpu":
        yield f'train.device = "{train.device}": noise and clipping of stages are not supported there; set it to "cpu"'
    if run.pipeline.layout is not None or run.pipeline.layouts is not None:
        yield "pipeline.layout: each rank of a worker sees a part of a row's gradient; remove it"
    if run.model.adapter is not None and run.model.adapter.dropout:
        yield (
            f"model.adapter.dropout = {run.model.adapter.dropout}: auditors draw it by the index of a microbatch, "
            "which would reveal the number of rows before it; set it to 0"
        )


def _of_guard(guard: Any) -> Iterator[str]:
    """Name what would let a step be published with noise that no other party has computed, or be undone afterwards."""
    if guard.mode != "phalanx" or not guard.upkeep.in_lockstep:
        yield (
            f'guard.mode = "{guard.mode}" with shadow = "{guard.shadow}": a step without noise could be published '
            'before its detection; set mode = "phalanx" and shadow = "lockstep"'
        )
    for name, only in _GUARDED.items():
        if (value := getattr(guard, name)) != only:
            yield f"guard.{name} = {json.dumps(value)}: {_UNDONE[name]}; set it to {json.dumps(only)}"


def _of_layout(run: Any) -> Iterator[str]:
    if run.deepspeed is not None:
        yield "[deepspeed]: it sums gradients before single rows can be clipped; remove one"
    layout = run.parallel
    if layout.most_dp > 1:
        yield (
            "parallel.dp: data-parallel copies are not yet tested to add the noise only once; set dp and max_dp to 1"
        )
    for name in ("tp", "pp", "cp"):
        if (size := getattr(layout, name)) > 1:
            yield (
                f"parallel.{name} = {size}: each rank would see a part of a row's gradient and of its norm; set it to 1"
            )
    plain: dict[str, object] = {"zero": 0, "gradient_compression": "none", "activation_checkpointing": "none"}
    for name, only in {**plain, "compile": False, "outer": None}.items():
        if getattr(layout, name) != only:
            yield f"parallel.{name}: per-row gradients are not supported with it; remove it"


def _of_adapter(adapter: Any) -> Iterator[str]:
    if adapter is None:
        return
    if adapter.kind != "lora":
        yield f'model.adapter.kind = "{adapter.kind}": per-row gradients are not tested with it; set it to "lora"'
    elif adapter.quantize is not None:
        yield "model.adapter.quantize: per-row gradients are not supported with it; remove it"
    elif adapter.dora:
        yield "model.adapter.dora: Opacus clips its magnitudes wrongly or not at all; set it to false"


def _of_data(run: Any) -> Iterator[str]:
    data = run.data
    if data.tokenizer.kind == "bpe":
        yield (
            'data.tokenizer.kind = "bpe": a vocabulary trained on the rows reveals them without noise; use '
            '"model", or "file" with one of public text'
        )
    for name in ("phases", "skip"):
        if getattr(data, name, ()):
            yield f"data.{name}: every row must have the same chance to be drawn in each step; remove it"
