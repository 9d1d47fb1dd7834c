"""A model that writes answers that a test has chosen: its position embedding says which token comes next."""

import json
from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import GPT2Config, GPT2LMHeadModel

from phalanx.data.chat import ChatMessage
from phalanx.serve import TextModel
from tiny_served import END, TEMPLATE, make_tokenizer

_WIDTH = 288
_LOUDNESS = 50.0


def write_answering_model(directory: Path, turns: Sequence[tuple[str, str]], *, num_positions: int = 2048) -> Path:
    """Write a model that answers a chat of these questions by these answers, whatever words the questions have.

    Args:
        turns: Question and answer of each turn; questions of the same number of tokens get the same answer.
    """
    tokenizer = make_tokenizer()
    config = GPT2Config(
        vocab_size=tokenizer.get_vocab_size(),
        n_positions=num_positions,
        n_embd=_WIDTH,
        n_layer=1,
        n_head=2,
        bos_token_id=None,
        eos_token_id=tokenizer.token_to_id(END),
    )
    torch.manual_seed(0)
    model = GPT2LMHeadModel(config)
    model.save_pretrained(directory)
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    (directory / "chat_template.jinja").write_text(TEMPLATE)
    _choose_tokens(model, _plan_positions(TextModel(directory), tokenizer, turns))
    model.save_pretrained(directory)
    return directory


def _plan_positions(text_model: TextModel, tokenizer, turns: Sequence[tuple[str, str]]) -> dict[int, int]:
    """The token that is written behind each position."""
    plan: dict[int, int] = {}
    messages: list[ChatMessage] = []
    for question, answer in turns:
        messages.append(ChatMessage(role="user", content=question))
        start = len(text_model.chat_prompt(messages)) - 1
        ids = [*tokenizer.encode(answer, add_special_tokens=False).ids, tokenizer.token_to_id(END)]
        plan |= {start + number: token for number, token in enumerate(ids)}
        messages.append(ChatMessage(role="assistant", content=answer))
    return plan


def _choose_tokens(model: GPT2LMHeadModel, plan: dict[int, int]) -> None:
    vocab_size = model.config.vocab_size
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "c_proj" in name:
                parameter.zero_()
        tokens = torch.linalg.qr(torch.randn(_WIDTH, _WIDTH)).Q[:vocab_size]
        model.transformer.wte.weight.copy_(tokens)
        model.transformer.wpe.weight.zero_()
        for position, token in plan.items():
            model.transformer.wpe.weight[position] = _LOUDNESS * tokens[token]
