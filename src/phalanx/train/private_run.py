"""What a run with a section ``[privacy]`` cannot have, and why: a bound is quoted for what earns it alone."""

import json
from collections.abc import Iterator
from typing import Any

_SPLIT = (
    "[privacy] is carried by [parallel], [federated] and [pipeline]: clients and enclave of [split] share no secret "
    "that noise could come from, and what they send each other tells of rows; remove one"
)
_UNDONE = {
    "keep_states": "a step that was published could be done again with the same rows, which was not paid for",
    "classes": "a gradient with noise in it is no measure for how far it may be off without",
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
    return next((f"[privacy] has no {fault}" for fault in _faults(run)), None)


def _faults(run: Any) -> Iterator[str]:
    is_pipeline = run.parallel is None and run.federated is None
    if not is_pipeline and run.privacy.mean_rows is not None:
        yield "privacy.mean_rows: a step draws train.batch_size rows in the mean here; leave it out"
    if is_pipeline:
        yield from _of_pipeline(run)
        yield from _of_guard(run.guard)
    elif run.federated is None:
        yield from _of_layout(run)
    elif run.parallel is not None:
        yield "[parallel] beside [federated]: ranks of a site are not shown yet to add the noise once; remove one"
    elif run.has_site_stages:
        yield "[pipeline] beside [federated]: a site's stages are not tried yet with a budget of its own; remove one"
    elif run.federated.privacy is not None:
        yield "federated.privacy: a site would have two budgets, and tell of neither which one holds; remove one"
    yield from _of_adapter(run.model.adapter)
    yield from _of_data(run)
    train, learned = run.train, _LEARNED if run.federated is None else _LEARNED_AT_SITES
    if train.objective_kind not in learned:
        yield (
            f'train.objective = "{train.objective_kind}": its loss is not known to be a sum over rows that each depend '
            f"on one example; take one of {', '.join(learned)}"
        )
    if train.precision != "fp32":
        yield f'train.precision = "{train.precision}": a norm in it does not bound what is added; take "fp32"'
    if train.neftune_alpha is not None:
        yield "train.neftune_alpha: its noise follows from a row's place among those that were drawn; leave it out"
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
        yield f"privacy.mean_rows = {privacy.mean_rows} with room for train.batch_size = {train.batch_size}; lower it"
    if privacy.mean_rows is not None and privacy.sampling == "order":
        yield 'privacy.mean_rows with sampling = "order": each step has train.batch_size rows; leave it out'
    if "clipping" in privacy.model_fields_set:
        yield "privacy.clipping: a stage has the gradient of each row, as a microbatch is one; leave it out"
    if train.epochs is not None:
        yield "train.epochs: a step draws another number of rows than train.batch_size; give train.steps"
    if train.device != "cpu":
        yield f'train.device = "{train.device}": noise and clipping of stages are not tried there; set it to "cpu"'
    if run.pipeline.layout is not None or run.pipeline.layouts is not None:
        yield "pipeline.layout: ranks of a worker each see a part of a row's gradient; leave it out"
    if run.model.adapter is not None and run.model.adapter.dropout:
        yield (
            f"model.adapter.dropout = {run.model.adapter.dropout}: auditors draw it by the place of a microbatch, and "
            "so it would tell how many rows stand before one; set it to 0"
        )


def _of_guard(guard: Any) -> Iterator[str]:
    """Name what would let a step be published with noise that no other party has computed, or be undone afterwards."""
    if guard.mode != "phalanx" or not guard.upkeep.in_lockstep:
        yield (
            f'guard.mode = "{guard.mode}" with shadow = "{guard.shadow}": a step whose noise was left out could be '
            'published before it is found out; set mode = "phalanx" and shadow = "lockstep"'
        )
    for name, only in _GUARDED.items():
        if (value := getattr(guard, name)) != only:
            yield f"guard.{name} = {json.dumps(value)}: {_UNDONE[name]}; set it to {json.dumps(only)}"


def _of_layout(run: Any) -> Iterator[str]:
    if run.deepspeed is not None:
        yield "[deepspeed]: it joins gradients before single rows could be clipped; remove one"
    layout = run.parallel
    if layout.most_dp > 1:
        yield "parallel.dp: data parallel copies are not shown yet to add the noise once; set dp and max_dp to 1"
    for name in ("tp", "pp", "cp"):
        if (size := getattr(layout, name)) > 1:
            yield (
                f"parallel.{name} = {size}: each rank would see a part of a row's gradient, and clip by a part of its "
                "norm; set it to 1"
            )
    plain: dict[str, object] = {"zero": 0, "gradient_compression": "none", "activation_checkpointing": "none"}
    for name, only in {**plain, "compile": False, "outer": None}.items():
        if getattr(layout, name) != only:
            yield f"parallel.{name}: hooks that tell rows apart are not tried with it; leave it out"


def _of_adapter(adapter: Any) -> Iterator[str]:
    if adapter is None:
        return
    if adapter.kind != "lora":
        yield f'model.adapter.kind = "{adapter.kind}": single rows are not shown to be told apart; take "lora"'
    elif adapter.quantize is not None:
        yield "model.adapter.quantize: hooks that tell rows apart are not tried with it; leave it out"
    elif adapter.dora:
        yield "model.adapter.dora: Opacus clips the sizes of its outputs wrongly or not at all; set it to false"


def _of_data(run: Any) -> Iterator[str]:
    data = run.data
    if data.tokenizer.kind == "bpe":
        yield (
            'data.tokenizer.kind = "bpe": a vocabulary that is trained on the rows tells of them without noise; take '
            '"model", or "file" with one of public text'
        )
    for name in ("phases", "skip"):
        if getattr(data, name, ()):
            yield f"data.{name}: every row must have the same chance to be drawn in each step; leave it out"
