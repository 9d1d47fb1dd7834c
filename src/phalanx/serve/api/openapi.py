"""The OpenAPI file of the routes, made from the bodies that they read."""

import importlib.metadata
from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from phalanx.serve.access.refusals import MESSAGES_ROUTE

_REF = "#/components/schemas/{model}"
_JSON = "application/json"
_ERRORS = {
    "400": "The body or a field of it is refused.",
    "401": "No valid key.",
    "403": "The text may not be without a mark.",
    "404": "No such model, or the key may not use it.",
    "405": "The route has another method.",
    "408": "The body did not arrive in time.",
    "413": "The body is too long.",
    "414": "The path is too long.",
    "415": "The body is no JSON.",
    "429": "A budget of the key is used up.",
    "431": "The headers are too many or too long.",
    "503": "The queue is full; ask again later.",
}
_TEXT: dict[str, Any] = {"type": "string", "maxLength": 200}
_WORD: dict[str, Any] = {"type": ["string", "null"], "maxLength": 64}
_OPENAI_ERROR: dict[str, Any] = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {"message": _TEXT, "type": {"type": "string"}, "param": _WORD, "code": _WORD},
        }
    },
}
_ANTHROPIC_ERROR: dict[str, Any] = {
    "type": "object",
    "required": ["type", "error"],
    "properties": {
        "type": {"const": "error"},
        "error": {
            "type": "object",
            "required": ["type", "message"],
            "properties": {"type": {"type": "string"}, "message": _TEXT},
        },
    },
}
_COUNTS: dict[str, Any] = {"type": "object", "additionalProperties": {"type": ["integer", "object"]}}
_ANSWERS: dict[str, tuple[str | None, tuple[str, ...]]] = {
    "/v1/chat/completions": ("chat.completion", ("id", "created", "model", "choices", "usage", "phalanx")),
    "/v1/completions": ("text_completion", ("id", "created", "model", "choices", "usage", "phalanx")),
    "/v1/responses": ("response", ("id", "created_at", "model", "status", "output", "usage", "phalanx")),
    "/v1/messages": (None, ("id", "type", "role", "model", "content", "stop_reason", "usage", "phalanx")),
    "/v1/messages/count_tokens": (None, ("input_tokens",)),
    "/chat/session": (None, ("secret", "owner", "filters")),
    "/chat/session/end": (None, ("status",)),
    "/v1/embeddings": ("list", ("data", "model", "usage")),
    "/v1/models": ("list", ("data", "has_more", "first_id", "last_id")),
    "/v1/models/{model_id}": ("model", ("id", "created", "digest", "window")),
    "/health/live": (None, ("status",)),
    "/health/ready": (None, ("status",)),
}
"""Name of the kind and further fields that an answer has."""


def describe_routes(bodies: Mapping[str, type[BaseModel]], reads: Mapping[str, str]) -> dict[str, Any]:
    """Return the description of all routes.

    Args:
        bodies: Body, by the path of each route that is posted to.
        reads: Description of the answer, by the path of each GET route.
    """
    kinds = list(dict.fromkeys(bodies.values()))
    names, definitions = models_json_schema([(kind, "validation") for kind in kinds], ref_template=_REF)
    paths: dict[str, Any] = {
        path: {"post": _describe(path, "The answer.", names[kind, "validation"])} for path, kind in bodies.items()
    }
    paths |= {path: {"get": _describe(path, answer, None)} for path, answer in reads.items()}
    return {
        "openapi": "3.1.0",
        "info": {"title": "Phalanx", "version": importlib.metadata.version("phalanx-train")},
        "paths": paths,
        "components": {
            "schemas": definitions.get("$defs", {}),
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer"},
                "header": {"type": "apiKey", "in": "header", "name": "x-api-key"},
            },
        },
        "security": [{"bearer": []}, {"header": []}],
    }


def _describe(path: str, answer: str, schema: Mapping[str, Any] | None) -> dict[str, Any]:
    error = _ANTHROPIC_ERROR if path.startswith(MESSAGES_ROUTE) else _OPENAI_ERROR
    kind, names = _ANSWERS[path]
    fields: dict[str, Any] = {"usage": _COUNTS}
    if kind is not None:
        fields["object"] = {"const": kind}
        names = (*names, "object")
    form: dict[str, Any] = {"type": "object", "required": list(names), "properties": fields}
    content: dict[str, Any] = {_JSON: {"schema": form}}
    if "phalanx" in names:
        content["text/event-stream"] = {"schema": {"type": "string"}}
    refusals = {code: {"description": text, "content": {_JSON: {"schema": error}}} for code, text in _ERRORS.items()}
    described: dict[str, Any] = {"responses": {"200": {"description": answer, "content": content}, **refusals}}
    if schema is not None:
        described["requestBody"] = {"required": True, "content": {_JSON: {"schema": schema}}}
    parameters = [part[1:-1].removesuffix(":path") for part in path.split("/") if part.startswith("{")]
    if parameters:
        described["parameters"] = [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in parameters
        ]
    return described
