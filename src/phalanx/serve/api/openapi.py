"""The OpenAPI file of the routes, made from the bodies that they read."""

import importlib.metadata
from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

_REF = "#/components/schemas/{model}"
_JSON = "application/json"
_ERRORS = {
    "400": "The body or a field of it is refused.",
    "401": "No valid key.",
    "404": "No such model, or the key may not use it.",
    "408": "The body did not arrive in time.",
    "413": "The body is too long.",
    "415": "The body is no JSON.",
    "429": "A budget of the key is used up.",
    "503": "The queue is full; ask again later.",
}


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
    described: dict[str, Any] = {
        "responses": {"200": {"description": answer}, **{code: {"description": text} for code, text in _ERRORS.items()}}
    }
    if schema is not None:
        described["requestBody"] = {"required": True, "content": {_JSON: {"schema": schema}}}
    names = [part[1:-1].removesuffix(":path") for part in path.split("/") if part.startswith("{")]
    if names:
        described["parameters"] = [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in names
        ]
    return described
