"""Scores by the protocol of lm-eval's completions adapter equal those of the model itself."""

import random
from operator import itemgetter

import pytest
import torch
from transformers import AutoModelForCausalLM

from late_imports import LateModule

openai = LateModule("openai")


def make_payload(prompts: list[list[int]]) -> dict:
    """The body that `LocalCompletionsAPI._create_payload` of lm_eval 0.4.13 sends to score."""
    fields = {"temperature": 0, "max_tokens": 1, "logprobs": 1, "seed": 1234, "echo": True}
    return {"model": "tiny", "prompt": prompts, **fields}


def parse_scores(answer: dict, context_lengths: list[int]) -> list[tuple[float, bool]]:
    """What `parse_logprobs` of the adapter makes of an answer: the sum, and whether each token is the likeliest."""
    scores = []
    choices = sorted(answer["choices"], key=itemgetter("index"))
    for choice, length in zip(choices, context_lengths, strict=True):
        values = choice["logprobs"]["token_logprobs"][length:-1]
        top = choice["logprobs"]["top_logprobs"][length:-1]
        scores.append((sum(values), all(v == max(t.values()) for v, t in zip(values, top, strict=True))))
    return scores


def score_locally(model, ids: list[int], length: int) -> tuple[float, bool]:
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([ids])).logits[0].float()
    logprobs = logits.log_softmax(dim=-1)[length - 1 : len(ids) - 1]
    wanted = torch.tensor(ids[length:])
    is_greedy = bool((logprobs.argmax(dim=-1) == wanted).all())
    return float(logprobs.gather(1, wanted[:, None]).double().sum()), is_greedy


def make_rows(rng: random.Random, model, count: int) -> list[tuple[list[int], int]]:
    """Contexts with continuations, of which some are the model's own."""
    rows = []
    for number in range(count):
        ids = [rng.randrange(256) for _ in range(rng.randrange(1, 100))]
        length = len(ids)
        for _ in range(rng.randrange(1, 9)):
            if number % 2:
                with torch.no_grad():
                    ids.append(int(model(input_ids=torch.tensor([ids])).logits[0, -1].argmax()))
            else:
                ids.append(rng.randrange(256))
        rows.append((ids, length))
    return rows


def test_log_likelihoods_over_the_api_equal_local_ones(server):
    model = AutoModelForCausalLM.from_pretrained(server.directory).eval()
    rows = make_rows(random.Random(37), model, 60)
    end = server.pool.engines[0].served.backend.token_to_id("<|endoftext|>")

    scores = []
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key=server.secrets["alice"], max_retries=0) as client:
        for start in range(0, len(rows), 10):
            batch = rows[start : start + 10]
            # a model that ends after the continuation: the written token is one without text
            more = {"logit_bias": {str(end): 100}} if start % 20 else {}
            answer = client.completions.create(**make_payload([ids for ids, _ in batch]), **more).model_dump()
            for choice, (ids, _) in zip(answer["choices"], batch, strict=True):
                assert len(choice["logprobs"]["token_logprobs"]) == len(ids) + 1
            scores += parse_scores(answer, [length for _, length in batch])

    expected = [score_locally(model, ids, length) for ids, length in rows]
    assert [value for value, _ in scores] == pytest.approx([value for value, _ in expected], rel=1e-6)
    assert [is_greedy for _, is_greedy in scores] == [is_greedy for _, is_greedy in expected]
    assert sum(is_greedy for _, is_greedy in expected) >= 25
