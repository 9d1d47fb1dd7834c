"""The one table of roles: which role each command and each remote call needs. ``docs/roles.md`` is made from it."""

from dataclasses import dataclass
from typing import Literal

Role = Literal["owner", "trainer", "auditor", "data_steward", "releaser", "reader"]
Action = Literal["release", "key_rotation", "decryption", "policy_change"]

ROLES: dict[Role, str] = {
    "owner": "answers for the project: signs the roles, keeps the keys of runs, servers and parties",
    "trainer": "starts runs, evaluates and attacks models, and lends machines to runs",
    "auditor": "reads logs, evidence and who read what; changes nothing",
    "data_steward": "builds, reads, opens and erases data",
    "releaser": "lets a model out: to an export, a server, a passport",
    "reader": "reads reports and asks a model",
}
FOUR_EYES: dict[Action, tuple[Role, ...]] = {
    "release": ("releaser", "owner"),
    "key_rotation": ("owner", "data_steward"),
    "decryption": ("owner", "data_steward"),
    "policy_change": ("owner", "auditor"),
}
"""Roles of which a second person must approve."""


@dataclass(frozen=True)
class Right:
    """One row.

    Attributes:
        roles: A person needs one of them; empty: nobody is asked.
        action: Act that needs a second person's approval.
    """

    roles: tuple[Role, ...] = ()
    action: Action | None = None


ANYONE = Right()
_MAKERS = Right(("owner", "trainer"))
_STEWARDS = Right(("owner", "data_steward"))
_AUDITORS = Right(("owner", "auditor"))
_MEASURERS = Right(("owner", "trainer", "auditor"))
_OPENERS = Right(("owner", "data_steward"), "decryption")
_RELEASERS = Right(("owner", "releaser"), "release")
_WATCHERS = Right(("owner", "trainer", "auditor", "data_steward", "releaser", "reader"))
_OWNERS = Right(("owner",))
_OPERATORS = Right(("owner", "releaser"))

COMMANDS: dict[str, Right] = {
    **dict.fromkeys(("doctor", "explain", "init", "plan", "verify", "bench", "reproduce"), ANYONE),
    **dict.fromkeys(("train", "laptop", "launch", "lr", "sweep", "calibrate", "attack"), _MAKERS),
    **dict.fromkeys(("nvflare-job", "flower-app", "invite", "peers"), _MAKERS),
    **dict.fromkeys(("join", "client", "site", "worker", "masked-worker", "rollout-worker", "stage-worker"), _MAKERS),
    **dict.fromkeys(("report", "watch", "runs", "compare", "generate", "classify", "detect"), _WATCHERS),
    **dict.fromkeys(("eval", "redteam"), _MEASURERS),
    **dict.fromkeys(("serve", "export", "checkpoint export", "unlearn"), _RELEASERS),
    **dict.fromkeys(("gateway", "deploy"), _OPERATORS),
    "erase": Right(("owner", "data_steward"), "decryption"),
    "passport": Right(("owner", "releaser", "auditor")),
    "publish": _RELEASERS,
    "reverify": ANYONE,
    "audit close": _MAKERS,
    "audit stamp": _OWNERS,
    "forms": Right(("owner", "releaser", "auditor")),
    **dict.fromkeys(("align revise", "align choose", "align safety", "align feedback", "align values"), _MAKERS),
    **dict.fromkeys(("audit verify", "audit explain", "audit reads", "checkpoint verify"), _AUDITORS),
    **dict.fromkeys(("checkpoint new-key", "data new-key", "mark new-keys"), _STEWARDS),
    **dict.fromkeys(("checkpoint rotate", "data rotate", "mark new-epoch"), Right(_STEWARDS.roles, "key_rotation")),
    **dict.fromkeys(("data build", "data import", "data copy", "data verbatim-index", "data classifier"), _STEWARDS),
    **dict.fromkeys(("data inspect", "data sample", "data where", "data diff", "data export"), _OPENERS),
    **dict.fromkeys(("data verify", "data report"), Right(("owner", "data_steward", "trainer", "auditor"))),
    **dict.fromkeys(("tokenizer train", "tokenizer check", "tokenizer compare"), Right(("data_steward", "trainer"))),
    **dict.fromkeys(("enclave appraise", "enclave measure", "enclave pack"), _MEASURERS),
    **dict.fromkeys(("enclave attest", "enclave enrol", "enclave serve", "enclave local", "enclave own"), _MAKERS),
    **dict.fromkeys(("incident open", "incident quarantine", "incident release", "incident close"), _OPERATORS),
    **dict.fromkeys(("incident rollback", "incident exercise"), _OPERATORS),
    "incident report": Right(("owner", "releaser", "auditor")),
    **dict.fromkeys(("keys create", "keys limit", "keys revoke"), _OPERATORS),
    "keys text-key": Right(("owner", "auditor")),
    "keys texts": Right(("owner", "auditor"), "decryption"),
    **dict.fromkeys(("keys list", "keys usage", "keys log"), Right(("owner", "releaser", "auditor"))),
    **dict.fromkeys(("model merge", "model unmerge", "model import", "model convert"), _MAKERS),
    **dict.fromkeys(("model inspect", "model verify"), _WATCHERS),
    **dict.fromkeys(("interpret loss", "interpret layers"), _MEASURERS),
    "interpret documents": Right(("data_steward", "auditor"), "decryption"),
    **dict.fromkeys(("pki init", "pki issue", "pki sign"), _OWNERS),
    **dict.fromkeys(("pki request", "pki show"), ANYONE),
    "policy sign": Right(("owner",), "policy_change"),
    "policy check": Right(("owner", "trainer", "auditor", "releaser")),
    "policy approve": Right(("owner", "releaser")),
    **dict.fromkeys(("roles key", "roles show"), ANYONE),
    "roles sign": Right(("owner",), "policy_change"),
    "roles approve": Right(("owner", "releaser", "data_steward", "auditor")),
    **dict.fromkeys(("witness keys", "witness publish", "witness prove"), _OWNERS),
    **dict.fromkeys(("witness verify", "witness compare", "witness mirror"), ANYONE),
    **dict.fromkeys(("witness init", "witness trust", "witness serve"), ANYONE),
}
"""By the words of the command."""

_PARTIES = Right(("owner", "trainer", "data_steward"))
_ASKERS = Right(("owner", "releaser", "reader"))

CALLS: dict[str, Right] = {
    **dict.fromkeys(("Deliver", "Describe", "Collect"), _PARTIES),
    "Stacks": Right(("owner",)),
    **dict.fromkeys(("/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses"), _ASKERS),
    **dict.fromkeys(("/v1/messages/count_tokens", "/v1/embeddings", "/v1/models"), _ASKERS),
    **dict.fromkeys(("/chat/session", "/chat/session/end"), _ASKERS),
    "/metrics": Right(("owner", "releaser", "auditor")),
    **dict.fromkeys(("/session", "/curves", "/stream"), _WATCHERS),
    **dict.fromkeys(("/health", "/openapi.json", "/", "/add-checkpoint", "/checkpoint"), ANYONE),
}
"""By the method of gRPC, or the path of HTTP; a path below one that is listed has its row."""


def row_of_call(call: str) -> str | None:
    """Return the row of a call, that of the longest path above it; None where it has none."""
    while call not in CALLS and "/" in call[1:]:
        call = call.rpartition("/")[0]
    return call if call in CALLS else None


def right_of_call(call: str) -> Right | None:
    """Return the right of a call; None where it has no row, so nobody may."""
    row = row_of_call(call)
    return None if row is None else CALLS[row]
