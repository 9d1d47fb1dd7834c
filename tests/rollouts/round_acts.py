"""Every single act of one writer in a small run, derived from the schema of its messages, and what must hold after it.

An act is a frame that the writer's honest self would have sent, with one field of it set to a neighbouring value, at
one moment. The engine of `turn_taking` runs each; bounds of the engine's memory are at their smallest, so that a run of
three steps reaches them.
"""

import contextlib
import copy
import itertools
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rollout_scene import after_a_step
from turn_taking import Pki, Said, TurnTaking

from phalanx.errors import EvidenceError, PhalanxError
from phalanx.rollouts import (
    PolicyModel,
    Prompt,
    Rollout,
    RolloutCheck,
    RolloutPolicy,
    RolloutRequest,
    RolloutWriter,
    SamplerConfig,
    company,
    generate_rollouts,
    pack_answer,
)
from phalanx.rollouts.evidence import explain_any_evidence
from phalanx.rollouts.messages import TO_OWNER, TO_WORKER

STEPS = 3
LIAR = "writer-0"
CHECK = RolloutCheck(rate=1.0, answer_timeout_s=1.0)
END = 5


def reward(rollout: Rollout) -> float:
    return len(set(rollout.ids)) / (2 * len(rollout.ids))


class Drill:
    """The parties, policies and honest texts of the small run, and what its writers say in it."""

    def __init__(self, home: Path, policy: RolloutPolicy) -> None:
        self.home, self.pki = home, Pki(home / "pki")
        self.steps: list[tuple[RolloutPolicy, PolicyModel, RolloutRequest, tuple[Rollout, ...]]] = []
        for step in range(STEPS):
            policy = after_a_step(policy, seed=step)
            request = RolloutRequest(
                step=step,
                policy=policy.full_digest,
                seed=3,
                sampler=SamplerConfig(max_new_tokens=4, sketch_every=2),
                prompts=tuple(Prompt(number=n, ids=(7 + n, 9, 11)) for n in range(3)),
                samples=2,
                ends=(END,),
            )
            model = PolicyModel.from_policy(policy)
            self.steps.append((policy, model, request, generate_rollouts(model, request)))
        self.frames: dict[tuple[int, str], Said] = {}
        self.table = self.play(Act("", "", Said("", {}), "instead", 0), note=True)

    def play(self, act: "Act", *, note: bool = False) -> TurnTaking:
        """Run all steps with this act of the liar, and check what must hold after each.

        Raises:
            AssertionError: It does not hold.
            PhalanxError: The owner ended.
        """

        def noted(name: str) -> Any:
            def rewrite(step: int, said: Said) -> Sequence[Said]:
                if note:
                    self.frames[step, name] = said
                return [said] if note or name != LIAR else act.spoken(step, said, table)

            return rewrite

        shutil.rmtree(self.home / "evidence", ignore_errors=True)
        writers = {name: RememberedWriter(self.steps) for name in self.pki.writers}
        table = TurnTaking(
            self.home, self.pki, CHECK, writers, {name: noted(name) for name in self.pki.writers}, reward
        )
        with smallest_memory():
            for step, (policy, model, request, alone) in enumerate(self.steps):
                if act.moment == "early" and step == act.step:
                    table.say(LIAR, act.said)
                check_texts(table.generate(policy, model, request), alone)
        self.check_parties(table, act)
        return table

    def check_parties(self, table: TurnTaking, act: "Act") -> None:
        """No honest certificate is convicted or left out, and a convicted one is convicted offline too."""
        owner = table.owner
        accused = {one.party for one in owner.verdicts} - ({LIAR} if act.is_lie else set())
        assert not accused, f"convicted {accused}: {owner.verdicts[0].reason}"
        left_out = set(self.pki.writers) - set(owner.active_workers) - {LIAR}
        assert not left_out, f"left out {left_out}"
        for verdict in owner.verdicts:
            facts = explain_any_evidence(self.home / verdict.evidence, self.pki.authority, "run-1")
            assert facts["conclusion"].startswith(f"holds: {LIAR}"), facts["conclusion"]


class RememberedWriter(RolloutWriter):
    """An honest writer that has computed its texts before."""

    def __init__(self, steps: Sequence[tuple[Any, Any, RolloutRequest, Sequence[Rollout]]]) -> None:
        super().__init__()
        self._texts = {(request.step, one.prompt): [] for _, _, request, alone in steps for one in alone}
        for _, _, request, alone in steps:
            for one in alone:
                self._texts[request.step, one.prompt].append(one)

    def use_policy(self, policy: RolloutPolicy) -> None:
        self._policy = policy.full_digest

    def write_answers(self, request: RolloutRequest) -> Any:
        texts = [one for prompt in request.prompts for one in self._texts[request.step, prompt.number]]
        return [pack_answer(request, texts)]


def check_texts(found: Sequence[Rollout], alone: Sequence[Rollout]) -> None:
    """What is trained on is what an honest process writes, numbers and all."""
    assert [(one.prompt, one.sample, one.ids, one.finish) for one in found] == [
        (one.prompt, one.sample, one.ids, one.finish) for one in alone
    ], "a lie was used"
    for one, other in zip(found, alone, strict=True):
        assert np.allclose(one.logprobs, other.logprobs, atol=1e-3, rtol=0), "a wrong log-probability was used"
        assert one.reward is None or abs(one.reward - reward(other)) < 1e-6, "a wrong reward was used"


@contextlib.contextmanager
def smallest_memory() -> Iterator[None]:
    """Have the engine remember the requests of one step alone."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(company, "_MAX_KEPT", 1)
        yield


# --- acts


MOMENTS = ("instead", "twice", "before", "after", "late by 1", "late by 2", "after, late by 1", "early")


@dataclass(frozen=True)
class Act:
    """One act.

    Attributes:
        field: Which field was set.
        value: To what.
        said: The frame.
        moment: When it is sent, and with which honest frames.
        step: In which step.
    """

    field: str
    value: str
    said: Said
    moment: str
    step: int

    @property
    def is_lie(self) -> bool:
        """Whether an honest writer never sends such a frame, at whatever moment."""
        return self.value != "own"

    def __str__(self) -> str:
        return f"step {self.step}: {self.said.kind} with {self.field} = {self.value}, {self.moment}"

    def spoken(self, step: int, honest: Said, table: TurnTaking) -> Sequence[Said]:
        """What the writer sends in place of an honest frame."""
        if step != self.step:
            return [honest]
        match self.moment:
            case "instead":
                return [self.said]
            case "twice":
                return [self.said, self.said]
            case "before":
                return [self.said, honest]
            case "after":
                return [honest, self.said]
            case "early":
                return [honest]
        delay = int(self.moment.rsplit(maxsplit=1)[-1])
        table.held.append((step + delay, LIAR, self.said))
        return [honest] if self.moment.startswith("after") else []


def acts_of(drill: Drill) -> Iterator[Act]:
    """Every act, in a fixed order; the honest frame at every moment comes first."""
    for moment, step in itertools.product(MOMENTS, range(STEPS)):
        yield Act("", "own", drill.frames[step, LIAR], moment, step)
    for step in range(STEPS):
        yield Act("", "silence", Said("", {}), "late by 9", step)
    for moment, step in itertools.product(MOMENTS, range(STEPS)):
        for field, value, said in frames_of(drill, step):
            yield Act(field, value, said, moment, step)


def frames_of(drill: Drill, step: int) -> Iterator[tuple[str, str, Said]]:
    """The honest frame of a step with one neighbouring value."""
    honest = drill.frames[step, LIAR]
    neighbours = {
        "other's": drill.frames[step, "writer-1"],
        "stale": drill.frames[(step - 1) % STEPS, LIAR],
        "ahead": drill.frames[(step + 1) % STEPS, LIAR],
    }
    yield from _whole(honest, neighbours)
    for field, value, body in _bodies(honest.body, {name: said.body for name, said in neighbours.items()}):
        yield field, value, replace(honest, body=body)
    for value, payload in _payloads(honest.payload, {name: said.payload for name, said in neighbours.items()}):
        yield "payload", value, replace(honest, payload=payload)
    yield from _other_kinds(honest)


def _whole(honest: Said, neighbours: Mapping[str, Said]) -> Iterator[tuple[str, str, Said]]:
    for name, said in neighbours.items():
        yield "frame", name, said
        yield "body", name, replace(honest, body=said.body)


def _other_kinds(honest: Said) -> Iterator[tuple[str, str, Said]]:
    """Each kind that parties of this protocol know, with its own fields and with those of the honest frame."""
    for kind in sorted({*TO_OWNER, *TO_WORKER, "unknown"} - {honest.kind}):
        yield "kind", kind, replace(honest, kind=kind)
    refusal = Said("rollout_refusal", {"request": honest.body["request"], "reason": "no time"})
    yield "kind", "a refusal", refusal
    for field, value, body in _bodies(refusal.body, {}):
        yield field, f"refusal {value}", replace(refusal, body=body)


def _bodies(body: Mapping[str, Any], neighbours: Mapping[str, Any]) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """A body with each of its fields set to each neighbouring value; of a list the first and the last entry."""
    for path in _paths(body):
        found = _at(body, path)
        values = {name: _at(other, path) for name, other in neighbours.items() if _has(other, path)}
        values |= dict(_altered(found))
        for name, value in values.items():
            if value != found:
                yield _named(path), name, _set(body, path, value)
        yield _named(path), "absent", _set(body, path, None, remove=True)
    yield "surplus", "1", {**body, "surplus": 1}


def _altered(value: Any) -> Iterator[tuple[str, Any]]:
    """Values of the same type beside this one, and none."""
    yield "none", None
    match value:
        case bool():
            yield "not", not value
        case int():
            yield from (("one more", value + 1), ("one less", value - 1), ("0", 0), ("far more", 2**62))
        case float():
            yield from (("half", value / 2), ("nan", "NaN"))
        case str():
            yield "altered", f"{'0' if value[:1] != '0' else '1'}{value[1:]}"
            yield from ((word, word) for word in ("eager", "stop", "length", ""))
        case list():
            yield from (("empty", []), ("repeated", [*value, value[-1]]), ("cut", value[1:]), ("turned", value[::-1]))
        case None:
            yield from (("1", 1.0), ("word", "1"))


def _payloads(payload: bytes, neighbours: Mapping[str, bytes]) -> Iterator[tuple[str, bytes]]:
    yield from neighbours.items()
    yield from (("absent", b""), ("cut", payload[:-4]), ("repeated", payload * 2))
    numbers = np.frombuffer(payload, "<i4")
    # tokens come first, then as many log-probabilities, then sketches
    for name, at, kind in (("token", 0, "<i4"), ("log-probability", len(numbers) // 6, "<f4"), ("sketch", -1, "<f4")):
        for change, by in (("altered", 1), ("negative", -1000)):
            changed = np.frombuffer(payload, kind).copy()
            changed[at] += by
            yield f"{name} {change}", changed.tobytes()
    yield "nan", np.full(len(numbers), np.nan, "<f4").tobytes()


def _paths(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    if path:
        yield path
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _paths(inner, (*path, key))
    elif isinstance(value, list) and value:
        for at in sorted({0, len(value) - 1}):
            yield from _paths(value[at], (*path, at))


def _named(path: tuple[Any, ...]) -> str:
    return ".".join(map(str, path))


def _has(value: Any, path: tuple[Any, ...]) -> bool:
    with contextlib.suppress(KeyError, IndexError, TypeError):
        _at(value, path)
        return True
    return False


def _at(value: Any, path: tuple[Any, ...]) -> Any:
    for key in path:
        value = value[key]
    return value


def _set(body: Mapping[str, Any], path: tuple[Any, ...], value: Any, *, remove: bool = False) -> dict[str, Any]:
    made = copy.deepcopy(dict(body))
    inner = _at(made, path[:-1])
    if remove:
        del inner[path[-1]]
    else:
        inner[path[-1]] = value
    return made


def finding(drill: Drill, act: Act) -> str | None:
    """What does not hold after an act; None where all does."""
    try:
        drill.play(act)
    except AssertionError as exc:
        return str(exc)
    except EvidenceError as exc:
        return f"its evidence convicts it no more: {exc}"
    except PhalanxError as exc:
        return f"the owner ended: {exc}"
    except (ArithmeticError, LookupError, RuntimeError, TypeError, ValueError) as exc:
        return f"the owner broke: {type(exc).__name__}: {exc}"
    return None
