"""A bench of verified rollouts: which liars are found, is an honest worker ever accused, and what does checking cost?

``python -m phalanx.lab.bench.alone.rollouts OUT.json [--honest 100000] [--answers 6] [--note TEXT]``

A small Llama learns the bytes of Python's standard library; the policy is the model after its last step. An honest
worker (KV cache, fused attention, one thread, batches of 64) writes texts, which are read again in one pass by checkers
of other numeric classes: fused attention, attention in plain operations with two threads and other batches, float64.
Each attack then answers the same requests, once careless and once careful (with the commitments of an honest worker);
a stale policy also with smaller steps behind it, and four times as many requests. Detection is counted in single
texts, and in answers of which an eighth is read, one text also by the policy before. Costs are CPU seconds of this
process.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from phalanx.lab.attacks.rollouts import ROLLOUT_ATTACKS, make_liar
from phalanx.lab.attacks.rollouts.liar import LyingWriter
from phalanx.lab.bench.measure.harness import run_program, time_turns
from phalanx.lab.bench.measure.workloads import standard_library
from phalanx.models.token_draw import draw_tokens
from phalanx.rollouts import (
    BorderTally,
    CheckedShare,
    PolicyModel,
    Prompt,
    RereadRollout,
    Rollout,
    RolloutDismissal,
    RolloutPolicy,
    RolloutRequest,
    RolloutTolerance,
    RolloutVerdict,
    SamplerConfig,
    generate_rollouts,
    judge_age,
    judge_reward,
    judge_rollout,
    judge_texts,
    reread_rollouts,
)
from phalanx.rollouts.draw import DrawPlace

RATE = 0.125
"""Share of an answer that is read again, as `RolloutCheck` has it."""

_TOLERANCE = RolloutTolerance()
_SIGNED = "two_answers"
_END = 0
_PROMPT = 32
_NEW = 64
_PROMPTS, _SAMPLES = 8, 8
_LEARNING = 300
_STEP_LR = 1e-5
_SMALLER = (1e-1, 1e-2)
"""Shares of that step, for a policy that has hardly moved."""
_MANY = 4
"""So many times as many answers of policies with little difference."""


@dataclass(frozen=True)
class RolloutPolicies:
    """The policy, and what liars may still have.

    Attributes:
        before: After the last step but one, by a learning rate as fine-tuning has it.
        text: Bytes that prompts are cut from.
    """

    now: RolloutPolicy
    before: RolloutPolicy
    text: torch.Tensor

    def move_nearer(self, share: float) -> "RolloutPolicies":
        """The same, with so much of the last step: Adam's is linear in its learning rate."""
        moved = {k: v + share * (self.before.tensors[k] - v) for k, v in self.now.tensors.items()}
        return RolloutPolicies(self.now, RolloutPolicy(self.now.config, moved), self.text)


def learned_policies() -> RolloutPolicies:
    """Train the small model on the standard library."""
    torch.manual_seed(0)
    text = standard_library()
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=256,
            hidden_size=96,
            intermediate_size=256,
            num_hidden_layers=3,
            num_attention_heads=4,
            max_position_embeddings=256,
        )
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)

    def step() -> None:
        starts = torch.randint(0, len(text) - 96, (8,))
        batch = torch.stack([text[start : start + 96] for start in starts.tolist()])
        optimizer.zero_grad()
        model(batch, labels=batch).loss.backward()
        optimizer.step()

    for _ in range(_LEARNING):
        step()
    for group in optimizer.param_groups:
        group["lr"] = _STEP_LR
    before = _copy_policy(model)
    step()
    return RolloutPolicies(_copy_policy(model), before, text)


def requests_of(policies: RolloutPolicies, count: int) -> list[RolloutRequest]:
    """Requests of as many steps, of 64 texts of 64 tokens each."""
    generator = torch.Generator().manual_seed(1)
    rows = []
    for step in range(1, count + 1):
        starts = torch.randint(0, len(policies.text) - _PROMPT, (_PROMPTS,), generator=generator).tolist()
        prompts = [policies.text[start : start + _PROMPT].tolist() for start in starts]
        rows.append(
            RolloutRequest(
                step=step,
                policy=policies.now.full_digest,
                seed=17,
                sampler=SamplerConfig(max_new_tokens=_NEW),
                prompts=tuple(Prompt(number=n, ids=tuple(ids)) for n, ids in enumerate(prompts)),
                samples=_SAMPLES,
                ends=(_END,),
            )
        )
    return rows


def measure_honest(policies: RolloutPolicies, tokens: int) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Honest texts, read by checkers of each class; and what writing and reading them costs."""
    writer, older = PolicyModel.from_policy(policies.now), policies.move_nearer(_SMALLER[-1]).before
    checkers = {
        "prefill, fused attention, 1 thread": (_build_pair(policies.now, older, "sdpa"), 1, _NEW),
        "prefill, plain attention, 2 threads, batches of 16": (_build_pair(policies.now, older, "eager"), 2, 16),
        "prefill, float64": (_build_pair(_widen_policy(policies.now), _widen_policy(older), "eager"), 1, _NEW),
    }
    rereads: dict[str, list[RereadRollout]] = {name: [] for name in checkers}
    fits: dict[str, list[float]] = {name: [] for name in checkers}
    accused = dict.fromkeys(checkers, 0)
    books = {name: BorderTally(_TOLERANCE.border_rate) for name in checkers}
    written, seconds = 0, {"write": 0.0, "read": 0.0}
    texts: list[Rollout] = []
    requests = requests_of(policies, -(-tokens // (_PROMPTS * _SAMPLES * _NEW)))
    for request in requests:
        begin = time.process_time()
        texts = list(generate_rollouts(writer, request))
        seconds["write"] += time.process_time() - begin
        written += sum(len(text.ids) for text in texts)
        for name, (models, threads, rows) in checkers.items():
            torch.set_num_threads(threads)
            begin = time.process_time()
            reread = _read_in_parts(models[0], request, texts, rows)
            if name.startswith("prefill, fused"):
                seconds["read"] += time.process_time() - begin
            before = _read_in_parts(models[1], request, texts, rows)
            torch.set_num_threads(1)
            for text, reread_text, aged in zip(texts, reread, before, strict=True):
                verdict = judge_rollout("writer", request, text, reread_text)
                verdict = verdict or judge_age("writer", request, text, reread_text, aged)
                accused[name] += (verdict or books[name].add_text("writer", request, reread_text)) is not None
                fits[name].append(_rms_gap(reread_text) / max(_rms_gap(aged), 1e-30))
            rereads[name] += reread
    rows_of = [_honest_row(name, rereads[name], written, accused[name], max(fits[name])) for name in checkers]
    size = sum(text.size_bytes for text in texts) / sum(len(text.ids) for text in texts)
    return rows_of, _cost_row(seconds, written, size)


def _build_pair(now: RolloutPolicy, older: RolloutPolicy, attention: str) -> tuple[PolicyModel, PolicyModel]:
    return PolicyModel.from_policy(now, attention), PolicyModel.from_policy(older, attention)


def _widen_policy(policy: RolloutPolicy) -> RolloutPolicy:
    return RolloutPolicy(policy.config, {k: v.double() for k, v in policy.tensors.items()})


def _read_in_parts(
    model: PolicyModel, request: RolloutRequest, texts: Sequence[Rollout], rows: int
) -> list[RereadRollout]:
    parts = (texts[start : start + rows] for start in range(0, len(texts), rows))
    return [text for part in parts for text in reread_rollouts(model, request, part, _TOLERANCE.margin)]


def _rms_gap(one: RereadRollout) -> float:
    return float(np.sqrt(np.mean(one.logprob_gaps**2)))


def _honest_row(
    name: str, reread: Sequence[RereadRollout], tokens: int, accused: int, older_fit: float
) -> dict[str, Any]:
    return {
        "what": "honest",
        "checker": name,
        "tokens": tokens,
        "accused": accused,
        "differing": int(sum(text.differs.sum() for text in reread)),
        "worst_margin": float(max(text.margins.max() for text in reread)),
        "worst_logprob": float(max(text.logprob_gaps.max() for text in reread)),
        "usual_logprob": float(np.median([_rms_gap(text) for text in reread])),
        "best_older_fit": older_fit,
        "worst_sketch": float(max(text.sketch_gaps.max() for text in reread)),
        "allowed": _TOLERANCE.margin,
    }


def _cost_row(seconds: dict[str, float], tokens: int, size_bytes: float) -> dict[str, Any]:
    # what drawing costs beside a draw of torch's own, for one step of a batch
    logits = torch.randn((_NEW, 256))
    keys = torch.tensor([DrawPlace(0, 0, 0, n).draw_key(0) for n in range(_NEW)])
    draws = {
        "ours": lambda: draw_tokens(logits, keys, SamplerConfig()),
        "plain": lambda: torch.multinomial(logits.softmax(-1), 1),
    }
    ours, plain = (np.median([sample.cpu_s for sample in samples]) for samples in time_turns(draws, 50).values())
    return {
        "what": "cost",
        "tokens": tokens,
        "write_cpu_us_per_token": 1e6 * seconds["write"] / tokens,
        "read_cpu_us_per_token": 1e6 * seconds["read"] / tokens,
        "rate": RATE,
        # one text of each answer is read by the policy before as well
        "share_of_writing": (RATE + 1 / (_PROMPTS * _SAMPLES)) * seconds["read"] / seconds["write"],
        "share_of_writing_if_all_is_read": seconds["read"] / seconds["write"],
        "seeded_draw_us_per_token": 1e6 * float(ours) / _NEW,
        "plain_draw_us_per_token": 1e6 * float(plain) / _NEW,
        "bytes_per_token": size_bytes,
    }


def measure_attack(policies: RolloutPolicies, kind: str, answers: int, step_lr: float) -> list[dict[str, Any]]:
    """One attack, careless and careful: texts and answers in which it is found."""
    right, careless = _build_pair(policies.now, policies.before, "sdpa"), make_liar(kind, careful=False)
    careless.use_policy(policies.before)
    careless.use_policy(policies.now)
    honest = PolicyModel.from_policy(policies.now)
    counts = {way: _AttackCounts() for way in ("careless", "careful")}
    for request in requests_of(policies, answers):
        true = generate_rollouts(honest, request)
        lied = careless.make_texts(request)
        for way, texts in (("careless", lied), ("careful", careless.with_right_evidence(request, lied))):
            counts[way].add_answer(request, texts, true, _judge_all(right, request, texts))
    rows = [counts[way].counts_row(kind, way, careless) | {"step_lr": step_lr} for way in counts]
    # a liar about rewards alone has nothing to make good
    return rows[:1] if kind == "invented_reward" else rows


def _judge_all(
    models: tuple[PolicyModel, PolicyModel], request: RolloutRequest, texts: Sequence[Rollout]
) -> list[RolloutVerdict | RolloutDismissal | None]:
    """Return the offence or dismissal that each text would cause if it were drawn."""
    if (formal := judge_texts("writer", request, texts, models[0].vocab_size)) is not None:
        return [formal] * len(texts)
    reread, older = (reread_rollouts(model, request, texts, _TOLERANCE.margin) for model in models)
    return [
        judge_rollout("writer", request, text, now)
        or judge_age("writer", request, text, now, aged)
        or judge_reward("writer", request, text, _token_variety)
        for text, now, aged in zip(texts, reread, older, strict=True)
    ]


def _token_variety(one: Rollout) -> float:
    return len(set(one.ids)) / (2 * len(one.ids))


class _AttackCounts:
    """What became of one way of one attack."""

    def __init__(self) -> None:
        self.texts = self.found = self.harmful = self.found_harmful = self.tokens = 0
        self.answers: list[bool] = []
        self.offences: set[str] = set()

    def add_answer(
        self,
        request: RolloutRequest,
        texts: Sequence[Rollout],
        true: Sequence[Rollout],
        verdicts: Sequence[RolloutVerdict | RolloutDismissal | None],
    ) -> None:
        flags = [verdict is not None for verdict in verdicts]
        self.offences |= {
            verdict.cause if isinstance(verdict, RolloutDismissal) else verdict.offence
            for verdict in verdicts
            if verdict is not None
        }
        # a text with the tokens of an honest worker and no reward does no harm, whatever wrote it
        harmful = [text.ids != other.ids or text.reward is not None for text, other in zip(texts, true, strict=True)]
        self.texts += len(texts)
        self.tokens += sum(len(text.ids) for text in texts)
        self.found += sum(flags)
        self.harmful += sum(harmful)
        self.found_harmful += sum(is_harmful and other for is_harmful, other in zip(harmful, flags, strict=True))
        drawn = CheckedShare(b"b" * 32, RATE).draw_texts("writer", request.request_digest, len(texts))
        self.answers.append(any(flags[n] for n in drawn))

    def counts_row(self, kind: str, way: str, liar: LyingWriter) -> dict[str, Any]:
        """The figures."""
        return {
            "what": "attack",
            "kind": kind,
            "way": way,
            "liar": type(liar).__name__,
            "offences": sorted(self.offences),
            "texts": self.texts,
            "tokens": self.tokens,
            "texts_found": self.found / self.texts,
            "texts_that_differ": self.harmful / self.texts,
            "of_these_found": self.found_harmful / self.harmful if self.harmful else None,
            "answers": len(self.answers),
            "answers_found": sum(self.answers) / len(self.answers),
        }


def _copy_policy(model: LlamaForCausalLM) -> RolloutPolicy:
    policy = RolloutPolicy.from_model(model)
    return RolloutPolicy(policy.config, {name: tensor.clone() for name, tensor in policy.tensors.items()})


def measure(honest: int = 100_000, answers: int = 6, note: str | None = None) -> dict[str, Any]:
    """Measure so many honest tokens, costs, and every attack on so many answers."""
    torch.set_num_threads(1)
    policies = learned_policies()
    honest_rows, cost = measure_honest(policies, honest)
    rows = [*honest_rows, cost]
    for kind in sorted(set(ROLLOUT_ATTACKS) - {_SIGNED}):
        rows += measure_attack(policies, kind, answers, _STEP_LR)
    for share in (1.0, *_SMALLER):
        rows += measure_attack(policies.move_nearer(share), "stale_policy", _MANY * answers, share * _STEP_LR)
    return {"note": note, "rows": rows}


if __name__ == "__main__":
    run_program("rollouts", measure)
