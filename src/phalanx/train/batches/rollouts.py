"""Batches of texts that the model itself has just written, with the reward of each."""

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from phalanx.data import IGNORE, Batch, BatchLoader
from phalanx.data.prompts import PromptRecord, PromptSet
from phalanx.engine import UNGUARDED, StepResult
from phalanx.errors import CheckpointError, ConfigError, StaleRolloutsError
from phalanx.models import ModelSource, StageSpec, build_stage
from phalanx.models.family import SCORE_WEIGHT
from phalanx.objectives import RolloutSettings
from phalanx.objectives.policy_gradient import DrawnTexts, token_log_probs
from phalanx.objectives.ppo import RETURNS
from phalanx.rewards import RewardScorer, ScoredText
from phalanx.rollouts import (
    PolicyModel,
    Prompt,
    ReadTexts,
    Rollout,
    RolloutPolicy,
    RolloutRequest,
    SamplerConfig,
    generate_rollouts,
)
from phalanx.train.batches.scores import MeanReward
from phalanx.train.config import RunConfig

Weights = Callable[[], Mapping[str, Tensor]]
"""Gives the verified weights of the whole model as they are, by the hub's names."""


WriteTexts = Callable[[RolloutPolicy, PolicyModel, RolloutRequest], tuple[Rollout, ...]]
"""Writes the texts of a request; the model has the weights of the policy."""


def write_alone(_policy: RolloutPolicy, model: PolicyModel, request: RolloutRequest) -> tuple[Rollout, ...]:
    """Write texts in this process."""
    return generate_rollouts(model, request)


@dataclass(frozen=True)
class LearnedRow:
    """One sampled text as a step learns from it.

    Attributes:
        columns: For each kind of extra rows a number for each sampled token.
    """

    prompt: tuple[int, ...]
    ids: tuple[int, ...]
    columns: Mapping[str, tuple[float, ...]]

    def to_json(self) -> dict[str, Any]:
        """The row as JSON data."""
        return {
            "prompt": list(self.prompt),
            "ids": list(self.ids),
            "columns": {k: list(v) for k, v in self.columns.items()},
        }

    @classmethod
    def from_json(cls, saved: Mapping[str, Any]) -> "LearnedRow":
        """Read what `to_json` wrote."""
        columns = {name: tuple(map(float, numbers)) for name, numbers in saved["columns"].items()}
        return cls(tuple(saved["prompt"]), tuple(saved["ids"]), columns)


def batch_of(rows: Sequence[LearnedRow], indices: Sequence[int], seq: int, filler: int) -> Batch:
    """Return sampled texts as a batch: a row each, prompt first, padded behind; the sampled tokens are the labels."""
    ids = torch.full((len(rows), seq), filler)
    labels = torch.full((len(rows), seq), IGNORE)
    extras = {name: torch.zeros(len(rows), seq) for name in (rows[0].columns if rows else ())}
    for number, row in enumerate(rows):
        sequence, begin = [*row.prompt, *row.ids], len(row.prompt) - 1
        ids[number, : len(sequence) - 1] = torch.tensor(sequence[:-1])
        labels[number, begin : begin + len(row.ids)] = torch.tensor(row.ids)
        for name, column in row.columns.items():
            extras[name][number, begin : begin + len(row.ids)] = torch.tensor(column)
    return Batch(ids, labels, tuple(indices), extras)


class RolloutLoader:
    """A loader that has the model continue prompts, and rewards its texts.

    Texts are a function of the weights, the run's seed, the number of the draw and the place in it: a run that goes on
    from a state writes the same texts.
    """

    def __init__(
        self,
        prompts: PromptSet,
        run: RunConfig,
        source: ModelSource,
        scorer: RewardScorer,
        write: WriteTexts = write_alone,
    ) -> None:
        self._prompts, self._run, self._scorer, self._write_texts = prompts, run, scorer, write
        self._settings = settings_of(run)
        # texts are written by the language model alone, whether or not a value stands beside its words
        self._source = source.with_head("lm") if self._settings.has_critic else source
        self._order = BatchLoader(prompts, run.train.batch_size // self._settings.group, run.train.seed)
        self._weights: Weights | None = None
        self._policy: PolicyModel | None = None
        self._reference: PolicyModel | None = None
        self._value_head: Tensor | None = None
        self._draws = 0
        self._kl = self._settings.kl
        self._rows: list[LearnedRow] = []
        self._indices: list[int] = []
        self._used = 0
        self._figures: dict[str, float] = {}

    def draw_from(self, weights: Weights) -> None:
        """Have texts written by these weights from now on."""
        self._weights = weights

    @property
    def corpus_digest(self) -> str:
        """SHA-256 in hex of all prompts."""
        return self._prompts.digest

    def next_batch(self) -> Batch:
        """The next batch: new texts, or the last ones once more where several steps learn from them.

        Raises:
            TrainingError: A reward fails, hangs, or is no finite number; names prompt and text.
            ModelError: The weights give a logit that is no finite number.
        """
        if not self._rows or self._used == self._settings.updates:
            self._write_batch()
        self._used += 1
        eos = self._prompts.tokenizer.eos_id
        batch = batch_of(self._rows, self._indices, self._run.data.sequence_length, eos)
        return replace(batch, figures=self._figures)

    def measure_reward(self) -> MeanReward:
        """The mean reward of the likeliest text to each held-out prompt; not a number where none is held out."""
        held_out = self._prompts.held_out
        if not held_out:
            return MeanReward(math.nan)
        rollouts = self._sample_texts(held_out, 1, 0.0)
        rewards = self._scorer.score_texts(self._texts_to_score(rollouts, held_out))
        return MeanReward(sum(map(self._scorer.total_reward, rewards)) / len(rewards), self._mean_rewards(rewards))

    def position_state(self) -> dict[str, Any]:
        """Which prompts were drawn, and the texts that a further step will learn from."""
        pending = None
        if self._rows and self._used < self._settings.updates:
            rows = [row.to_json() for row in self._rows]
            pending = {"rows": rows, "indices": self._indices, "used": self._used, "figures": self._figures}
        weighed = {"kl": self._kl} if self._settings.has_critic else {}
        return {"prompts": self._order.position_state(), "draws": self._draws, "kept": pending, **weighed}

    def load_position(self, state: Mapping[str, Any]) -> None:
        """Go on where a state was taken."""
        if state.keys() != self.position_state().keys() or type(state["draws"]) is not int:
            raise CheckpointError("loader state: does not belong to a run with rollouts; resume the run that was saved")
        self._order.load_position(state["prompts"])
        self._draws, pending = state["draws"], state["kept"]
        try:
            self._rows = [] if pending is None else [LearnedRow.from_json(row) for row in pending["rows"]]
            self._indices = [] if pending is None else [int(index) for index in pending["indices"]]
            self._used = 0 if pending is None else int(pending["used"])
            self._figures = {} if pending is None else dict(pending["figures"])
            self._kl = float(state.get("kl", self._kl))
        except (KeyError, TypeError, ValueError, AttributeError) as exc:
            raise CheckpointError(f"loader state: texts are malformed ({exc}); use an older checkpoint") from exc

    def _write_batch(self) -> None:
        indices = self._order.next_sequences()
        prompts, group = [self._prompts.train[index] for index in indices], self._settings.group
        rollouts = self._sample_texts(prompts, group, self._settings.temperature)
        rewards = self._scorer.score_texts(self._texts_to_score(rollouts, prompts))
        drawn = self._make_drawn_texts(rollouts, [self._scorer.total_reward(reward) for reward in rewards])
        columns = self._settings.extra_columns(drawn)
        self._rows = [
            LearnedRow(
                rollout.prompt_ids,
                rollout.ids,
                {name: tuple(column[number, : len(rollout.ids)].tolist()) for name, column in columns.items()},
            )
            for number, rollout in enumerate(rollouts)
        ]
        self._indices = [index for index in indices for _ in range(group)]
        self._draws, self._used = self._draws + 1, 0
        self._figures = self._sum_up_draw(rollouts, drawn, rewards, columns)
        self._kl = self._settings.next_kl(self._kl, float(drawn.token_divergence.sum(dim=1).mean()))

    def _make_drawn_texts(self, rollouts: Sequence[Rollout], rewards: Sequence[float]) -> DrawnTexts:
        """What is known of texts; reference and values are computed by this process alone."""
        old = _pad_rows([torch.from_numpy(rollout.logprobs) for rollout in rollouts])
        return DrawnTexts(
            rewards=torch.tensor(rewards, dtype=torch.float64),
            mask=_pad_rows([torch.ones(len(rollout.ids), dtype=torch.bool) for rollout in rollouts]),
            old=old,
            reference=_pad_rows(self._reference_log_probs(rollouts)) if self._settings.kl else old,
            kl=self._kl,
            values=_pad_rows(self._expected_values(rollouts)) if self._settings.has_critic else None,
            weights=_text_weights(rollouts),
        )

    def _sample_texts(self, prompts: Sequence[PromptRecord], samples: int, temperature: float) -> tuple[Rollout, ...]:
        if self._weights is None:
            raise ConfigError("rollouts: no engine provides the weights to generate texts")
        weights = dict(self._weights())
        if self._settings.has_critic:
            self._value_head = weights.pop(SCORE_WEIGHT)
        policy = RolloutPolicy(self._source.hub_config_dict, weights)
        if self._policy is None:
            self._policy = self._build_policy(policy)
        else:
            self._policy.copy_weights(policy)
        request = RolloutRequest(
            step=self._draws,
            policy=policy.full_digest,
            seed=self._run.train.seed,
            sampler=SamplerConfig(max_new_tokens=self._settings.max_new_tokens, temperature=temperature),
            prompts=tuple(Prompt(number=number, ids=prompt.ids) for number, prompt in enumerate(prompts)),
            samples=samples,
            ends=self._prompts.ends,
        )
        with self._autocast_context():
            return self._write_texts(policy, self._policy, request)

    def _build_policy(self, policy: RolloutPolicy) -> PolicyModel:
        return PolicyModel.from_policy(policy, self._run.model.attention, self._run.train.device)

    def _reference_log_probs(self, rollouts: Sequence[Rollout]) -> list[Tensor]:
        """Log-probability of every sampled token under the model that the run began with."""
        if self._reference is None:
            layers = self._source.num_layers
            stage = build_stage(
                self._source,
                StageSpec(0, 1, 0, layers),
                adapter=None,
                activation_checkpointing=False,
                attention=self._run.model.attention,
                seed=self._run.train.seed,
            )
            tensors = {name: parameter.detach() for name, parameter in stage.all_parameters().items()}
            self._reference = self._build_policy(RolloutPolicy(self._source.hub_config_dict, tensors))
        return [
            token_log_probs("reference", read.logits.cpu(), labels, self._settings.temperature)[labels != IGNORE]
            for labels, read in self._read_again(self._reference, rollouts)
        ]

    def _expected_values(self, rollouts: Sequence[Rollout]) -> list[Tensor]:
        """What the policy that sampled expects before every sampled token, as its last stage says it."""
        if self._policy is None or self._value_head is None:
            raise ConfigError("rollouts: no weights to compute values with")
        head = self._value_head.to(self._run.train.device)
        values_by_rollout = []
        for labels, read in self._read_again(self._policy, rollouts):
            with self._autocast_context():
                values = torch.nn.functional.linear(read.states, head)[..., 0]
            values_by_rollout.append(values.float().cpu()[labels != IGNORE])
        return values_by_rollout

    def _read_again(self, model: PolicyModel, rollouts: Sequence[Rollout]) -> Iterator[tuple[Tensor, ReadTexts]]:
        """Read texts again; yield each one's labels and the values at their places, ``[1, tokens]``."""
        size = self._run.train.batch_size // self._run.train.microbatches
        for start in range(0, len(rollouts), size):
            rows = [LearnedRow(rollout.prompt_ids, rollout.ids, {}) for rollout in rollouts[start : start + size]]
            seq = max(len(row.prompt) + len(row.ids) for row in rows) - 1
            batch = batch_of(rows, range(len(rows)), seq, 0)
            with self._autocast_context():
                read = model.read_whole_texts(batch.input_ids, seq)
            for number in range(len(rows)):
                here = slice(number, number + 1)
                yield batch.labels[here], ReadTexts(read.logits[here], read.states[here])

    def _autocast_context(self) -> contextlib.AbstractContextManager[object]:
        if self._run.train.precision == "fp32":
            return contextlib.nullcontext()
        narrow = torch.float16 if self._run.train.precision == "fp16" else torch.bfloat16
        return torch.autocast(torch.device(self._run.train.device).type, dtype=narrow)

    def _texts_to_score(self, rollouts: Sequence[Rollout], prompts: Sequence[PromptRecord]) -> list[ScoredText]:
        decode = self._prompts.tokenizer.backend.decode
        return [
            ScoredText(
                f"draw {self._draws}, {prompts[rollout.prompt].where}, text {rollout.sample + 1}",
                prompts[rollout.prompt].text,
                decode([token for token in rollout.ids if token not in self._prompts.ends]),
                prompts[rollout.prompt].reward_record,
            )
            for rollout in rollouts
        ]

    def _mean_rewards(self, rewards: Sequence[Sequence[float]]) -> dict[str, float]:
        named = zip(self._scorer.reward_names, zip(*rewards, strict=True), strict=True)
        return {name: sum(values) / len(values) for name, values in named}

    def _sum_up_draw(
        self,
        rollouts: Sequence[Rollout],
        drawn: DrawnTexts,
        rewards: Sequence[Sequence[float]],
        columns: Mapping[str, Tensor],
    ) -> dict[str, float]:
        tokens, figures = sum(len(rollout.ids) for rollout in rollouts), {}
        if self._settings.kl:
            figures["kl"] = float(drawn.token_divergence.sum()) / tokens
        if drawn.values is not None:
            figures["kl_weight"] = drawn.kl
            figures["value_error"] = float((columns[RETURNS] - drawn.values)[drawn.mask].square().mean())
        return {
            "reward": float(drawn.rewards.mean()),
            # a checkpoint holds numbers alone, and of one text that would be none
            "reward_std": float(drawn.rewards.std(correction=min(1, len(rollouts) - 1))),
            **{f"reward_{name}": mean for name, mean in self._mean_rewards(rewards).items()},
            "text_tokens": tokens / len(rollouts),
            "texts_ended": sum(rollout.finish == "stop" for rollout in rollouts) / len(rollouts),
            **figures,
        }


def _text_weights(rollouts: Sequence[Rollout]) -> Tensor | None:
    """Return the weight of each text; None where all have the whole one."""
    weights = torch.tensor([rollout.weight for rollout in rollouts], dtype=torch.float64)
    return None if bool((weights == 1.0).all()) else weights


def _pad_rows(rows: Sequence[Tensor]) -> Tensor:
    """Numbers of tokens as one table, ``[texts, tokens]``; 0 behind a text."""
    return torch.nn.utils.rnn.pad_sequence(list(rows), batch_first=True)


def settings_of(run: RunConfig) -> RolloutSettings:
    """Return how a run samples texts and learns from them."""
    settings = run.train.objective
    if not isinstance(settings, RolloutSettings):
        raise ConfigError(f'train.objective = "{run.train.objective_kind}": needs no rollouts')
    return settings


def check_fresh(result: StepResult) -> None:
    """Return where a step's texts were written by weights that still hold."""
    redone = (result.guard or UNGUARDED).steps_redone
    if redone:
        raise StaleRolloutsError(
            f"step {result.step}: {redone} steps before it were undone, so its texts were generated with invalid "
            "weights; no earlier checkpoint exists: set checkpoint.every"
        )
