"""The one judge of rollouts: from signed records and a control run to at most one guilty certificate and a reason.

The owner and every reader of evidence call the same function on the same records. No knowledge of the owner alone
enters: not its counts, its reward rule, or its open requests.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

from phalanx.config import canonical_json
from phalanx.errors import EvidenceError, FrameError, ModelError, SignatureError
from phalanx.pipeline.protocol.signed import StatementReader, to_signed
from phalanx.rollouts.judgement import judge_age, judge_rollout, judge_second_answer, read_answer
from phalanx.rollouts.messages import TO_OWNER, TO_WORKER
from phalanx.rollouts.near_ties import search_near_ties
from phalanx.rollouts.policy import PolicyModel, RolloutPolicy, policy_digest
from phalanx.rollouts.prefill import RereadRollout, compare_text, rewrite_rollouts
from phalanx.rollouts.request import RolloutRequest
from phalanx.rollouts.rollout import Rollout, RolloutAnswer
from phalanx.rollouts.verdict import RolloutVerdict
from phalanx.security.crypto import Peer, digest_hex
from phalanx.transport import SignedHeader, parse_body

MAX_VOCAB = 2**24
MAX_CONTROL_ROWS = 256
"""Of one batch of a control run: no worker has the checker hold more caches at a time."""


class SignedAnswer(NamedTuple):
    """An answer as its worker signed it."""

    header: SignedHeader
    payload: bytes


class AnsweredRequest(NamedTuple):
    """A request as its owner signed it, and the answer of its worker."""

    request: SignedHeader
    answer: SignedHeader


@dataclass(frozen=True)
class RolloutBundle:
    """The records that a verdict on rollouts rests on, all of it.

    Attributes:
        policy: Policy of the request; None where its weights are not at hand.
        config: Config of that policy, where its weights are not at hand: keys of the hub's config.json.
        weights: Digest of its weights; with the config it gives the digest that the request names.
        place: Prompt and sample of the text that is looked at.
        older: An older request that the worker has answered, to ask whether the text is of that one's policy.
    """

    party: str
    request: SignedHeader
    answer: SignedAnswer
    policy: RolloutPolicy | None = None
    config: Mapping[str, Any] = field(default_factory=dict)
    weights: str = ""
    second_answer: SignedHeader | None = None
    place: tuple[int, int] | None = None
    older: AnsweredRequest | None = None
    older_policy: RolloutPolicy | None = None

    @property
    def headers_by_role(self) -> dict[str, SignedHeader]:
        """Every header by its role."""
        roles = {
            "request": self.request,
            "answer": self.answer.header,
            "second_answer": self.second_answer,
            "older_request": None if self.older is None else self.older.request,
            "older_answer": None if self.older is None else self.older.answer,
        }
        return {role: header for role, header in roles.items() if header is not None}


class RolloutJudgement(NamedTuple):
    """The outcome of `judge_bundle`.

    Attributes:
        verdict: Convicts the accused; None where nothing does.
        doubt: Why the text can neither be convicted nor be trusted; None where it can.
        reread: Result of the control run on a text that passed; None for anything else.
    """

    verdict: RolloutVerdict | None = None
    doubt: str | None = None
    reread: RereadRollout | None = None


class ControlModels:
    """Models for control runs, built from data; the last one of each kind of attention is held."""

    def __init__(self, device: str = "cpu") -> None:
        self._device = device
        self._models: dict[str, tuple[str, PolicyModel]] = {}

    def model_for(self, policy: RolloutPolicy, attention: str) -> PolicyModel:
        """Return a model with these weights."""
        digest, model = self._models.get(attention, ("", None))
        if model is None:
            model = PolicyModel.from_policy(policy, attention, self._device)
        elif digest != policy.full_digest:
            model.copy_weights(policy)
        self._models[attention] = (policy.full_digest, model)
        return model


def judge_bundle(
    bundle: RolloutBundle, session: str, peer: Callable[[str], Peer], models: ControlModels
) -> RolloutJudgement:
    """Judge a worker by records that it signed.

    Args:
        session: Name that every header must bear.
        peer: Key of a party of the session; raises `PeerRefusedError` for any other name.
        models: Builds what control runs compute with.

    Guarantees:
        No worker is convicted by its texts before these were computed again as an honest worker computes them: from
        the same weights, in the same batches, with a cache and the same kernel of attention; and where the policy
        has routers, with every choice of experts that rounding may have made. An answer is judged by the request
        that it names and by no other.
    """
    records = _CheckedRecords(bundle, StatementReader(session, peer))
    request, party = records.request, bundle.party
    if bundle.second_answer is not None:
        return RolloutJudgement(judge_second_answer(party, request, records.answer_digests))
    answer, payload = records.answer, records.answer_payload
    texts, formal = read_answer(party, request, answer, payload, records.vocab_size)
    if formal is not None or bundle.place is None:
        return RolloutJudgement(formal)
    if bundle.policy is None:
        return RolloutJudgement(doubt="the weights of the policy are not here")
    number = request.text_places.index(bundle.place) if bundle.place in request.text_places else None
    if number is None:
        raise EvidenceError(f"prompt {bundle.place[0]}, sample {bundle.place[1]} was not asked for")
    model = models.model_for(bundle.policy, answer.written_in.attention)
    rows = min(MAX_CONTROL_ROWS, answer.written_in.batch_rows)

    def control_run(by: PolicyModel) -> RereadRollout:
        read = rewrite_rollouts(by, request, texts, number, rows)
        return compare_text(request, texts[number], read, request.tolerance.margin)

    now = control_run(model)
    verdict = judge_rollout(party, request, texts[number], now)
    if verdict is not None:
        return _judge_other_experts(model, request, texts[number], verdict)
    older = records.older_policy
    # an older policy may fit better by a router's choice alone
    if older is None or model.is_routed:
        return RolloutJudgement(reread=now)
    before = control_run(models.model_for(older, answer.written_in.attention))
    verdict = judge_age(party, request, texts[number], now, before)
    return RolloutJudgement(verdict, reread=None if verdict else now)


def _judge_other_experts(
    model: PolicyModel, request: RolloutRequest, text: Rollout, verdict: RolloutVerdict
) -> RolloutJudgement:
    """Look whether a text that is off is what an honest writer wrote with routers that rounded otherwise."""
    if not model.is_routed:
        return RolloutJudgement(verdict)
    if not model.expert_routers:
        return RolloutJudgement(doubt=f"{verdict.reason}; the routers of this family are not known here")
    search = search_near_ties(model, request, text)
    match search.outcome:
        case "fits":
            return RolloutJudgement(reread=search.reread)
        case "excluded":
            return RolloutJudgement(verdict)
        case "open":
            return RolloutJudgement(doubt=f"{verdict.reason}; routers have more near ties than can be tried")


def digest_of_answer(header: SignedHeader) -> str:
    """Digest of what an answer says and carries; the place on its link is left out."""
    return digest_hex(canonical_json([header.fields.body, header.fields.payload_digest]))


class _CheckedRecords:
    """The records of a bundle, each checked when it is first read."""

    def __init__(self, bundle: RolloutBundle, statements: StatementReader) -> None:
        self._bundle, self._statements = bundle, statements
        self.request = self._read_request(bundle.request, (None, bundle.party))
        self._owner = bundle.request.fields.sender
        self.answer = self._read_answer(bundle.answer.header, self.request)

    @cached_property
    def answer_digests(self) -> Sequence[str]:
        second = self._bundle.second_answer
        if second is None:
            raise EvidenceError("there is no second answer")
        self._read_answer(second, self.request)
        return digest_of_answer(self._bundle.answer.header), digest_of_answer(second)

    @cached_property
    def answer_payload(self) -> bytes:
        """Of the answer, as it was signed."""
        header, payload = self._bundle.answer
        if digest_hex(payload) != header.fields.payload_digest:
            raise EvidenceError(f"the texts are not those that {header.fields.sender} signed")
        return payload

    @cached_property
    def vocab_size(self) -> int:
        """Of the policy that the request names."""
        policy = self._bundle.policy
        config = self._bundle.config if policy is None else policy.config
        try:
            name = policy_digest(config, self._bundle.weights) if policy is None else policy.full_digest
        except (ValueError, ModelError) as exc:
            raise EvidenceError(f"the policy is malformed ({exc})") from exc
        if name != self.request.policy:
            raise EvidenceError(f"the policy is {name[:16]}, the request names {self.request.policy[:16]}")
        return int(config.get("vocab_size", MAX_VOCAB))

    @cached_property
    def older_policy(self) -> RolloutPolicy | None:
        """The policy of an earlier request that this party has answered."""
        older, policy = self._bundle.older, self._bundle.older_policy
        if older is None or policy is None:
            return None
        request = self._read_request(older.request, (self._owner, self._bundle.party))
        self._read_answer(older.answer, request)
        if request.order >= self.request.order or policy.full_digest != request.policy:
            raise EvidenceError("the older policy is not that of an older request")
        return policy

    def _read_request(self, header: SignedHeader, link: tuple[str | None, str]) -> RolloutRequest:
        body = self._open_header(header, link, TO_WORKER)
        if not isinstance(body, RolloutRequest):
            raise EvidenceError(f"a request is a {header.fields.kind!r} message")
        return body

    def _read_answer(self, header: SignedHeader, request: RolloutRequest) -> RolloutAnswer:
        body = self._open_header(header, (self._bundle.party, self._owner), TO_OWNER)
        if not isinstance(body, RolloutAnswer):
            raise EvidenceError(f"an answer is a {header.fields.kind!r} message")
        if body.request != request.request_digest:
            raise EvidenceError(
                f"an answer names the request {body.request[:16]}, expected {request.request_digest[:16]}"
            )
        return body

    def _open_header(self, header: SignedHeader, link: tuple[str | None, str], kinds: Mapping[str, Any]) -> Any:
        try:
            opened = self._statements.open_frame_header(to_signed(header), link)
            return parse_body(kinds, opened.fields.kind, opened.fields.body)
        except (FrameError, SignatureError) as exc:
            raise EvidenceError(f"a header does not hold: {exc}") from exc
