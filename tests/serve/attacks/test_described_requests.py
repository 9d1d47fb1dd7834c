"""Requests made from the server's OpenAPI file: none makes it fail, and each answer is one that the file describes."""

import json
import time
from collections import Counter

import hypothesis
import pytest

from late_imports import need_module

schemathesis = need_module("schemathesis", "could not import schemathesis")
jsonschema_rs = need_module("jsonschema_rs", "could not import jsonschema_rs")
MODES = ["POSITIVE", "NEGATIVE"]
NUM_OPERATIONS = 10


@pytest.fixture(scope="module")
def described(own_target):
    with own_target.client(own_target.secret) as http:
        return http.get("/openapi.json").json()


def check_answer(described, path: str, method: str, answer) -> None:
    """Return where the file describes status, type and form of an answer."""
    responses = described["paths"][path][method.lower()]["responses"]
    assert str(answer.status_code) in responses, (path, answer.status_code)
    content = responses[str(answer.status_code)]["content"]
    kind = answer.headers["content-type"].partition(";")[0]
    assert kind in content, (path, answer.status_code, kind)
    if kind == "application/json":
        schema = {**content[kind]["schema"], "components": described["components"]}
        jsonschema_rs.validate(schema, answer.json())
        return
    for block in answer.text.strip().split("\n\n"):
        data = block.rpartition("data: ")[2]
        assert data == "[DONE]" or isinstance(json.loads(data), dict), block


def try_operation(operation, mode, count: int, ask) -> None:
    """Make requests of one route: such as its description allows, or such as it forbids.

    Most of the time is the generators': about 25 ms of CPU a request, beside 10 of client, server and tiny model.
    """

    @hypothesis.settings(
        max_examples=count,
        database=None,
        derandomize=True,
        deadline=None,
        suppress_health_check=list(hypothesis.HealthCheck),
        phases=[hypothesis.Phase.generate],
    )
    @hypothesis.given(case=operation.as_strategy(generation_mode=mode))
    def run(case):
        body = case.body
        if isinstance(body, dict) and isinstance(body.get("model"), str):
            # most requests reach further than the name of the model
            body["model"] = "tiny" if len(body["model"]) % 4 else body["model"]
        path = operation.path.replace("{model_id}", "tiny")
        ask(path, {"json": body} if isinstance(body, dict | list | str | int | float | bool) else {})

    run()


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("count", [2, pytest.param(600, marks=pytest.mark.slow)])
def test_requests_of_the_openapi_file_are_answered_as_it_says(own_target, described, note_attack, count):
    operations = [result.ok() for result in schemathesis.openapi.from_dict(described).get_all_operations()]
    statuses: Counter[int] = Counter()
    assert len(operations) >= NUM_OPERATIONS
    begun = time.process_time()

    with own_target.client(own_target.secret) as http:
        for operation in operations:

            def ask(path: str, more: dict, operation=operation) -> None:
                answer = http.request(operation.method, path, **more)
                statuses[answer.status_code] += 1
                assert answer.status_code < 500, (more, answer.text)
                check_answer(described, operation.path, operation.method, answer)

            is_post = operation.method == "post"
            for mode in MODES if is_post else MODES[:1]:
                generated = schemathesis.GenerationMode[mode]
                try_operation(operation, generated, count if is_post else max(1, count // 5), ask)

    assert statuses[200]
    assert statuses.total() >= (10_000 if count > 5 else NUM_OPERATIONS)
    counts = {"requests": statuses.total(), "statuses": dict(statuses)}
    note_attack("requests of the OpenAPI file", target="own", **counts, cpu_s=time.process_time() - begun)
    assert "failed inside" not in own_target.read_log()
