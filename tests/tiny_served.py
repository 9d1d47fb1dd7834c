"""A tiny model with a byte-level tokenizer and a template with tools, and a server of it on a loopback port."""

import asyncio
import contextlib
import json
import threading
import time
from contextlib import asynccontextmanager

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from phalanx.models import parse_hub_config
from phalanx.models.source import write_random_model
from phalanx.serve import TextModel
from phalanx.serve.access import Access, KeyStore, ListenConfig, RequestBounds, bind_socket, make_server
from phalanx.serve.access.key_file import KeyLimits, KeyTerms
from phalanx.serve.api import Service, make_app
from phalanx.serve.chat_page import ChatPage
from phalanx.serve.engine import EnginePool, EngineSettings, HostedModel
from phalanx.serve.filters import FiltersConfig, TextFilters
from phalanx.serve.marks import MarkPolicy, TokenMark

END, BEGIN_TURN, END_TURN = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
MERGES = [("t", "h"), ("th", "e"), ("Ġ", "the"), ("i", "n"), ("a", "n"), ("an", "d"), ("Ã", "©")]
TEMPLATE = (
    "{% if tools %}<|im_start|>system\n{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}<|im_end|>\n{% endif %}"
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] or '' }}"
    "{% for call in message['tool_calls'] or [] %}<tool_call>\n"
    "{\"name\": {{ call['function']['name'] | tojson }}, \"arguments\": {{ call['function']['arguments'] | tojson }}}"
    "\n</tool_call>{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CONFIG = {
    "model_type": "llama",
    "vocab_size": 272,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": False,
    # wide enough that the likeliest token of random weights leads clearly
    "initializer_range": 0.3,
    "bos_token_id": None,
}
UNMARKED = TokenMark(MarkPolicy(mark="off"), None)
OPEN_LIMITS = KeyLimits(
    requests_per_minute=1_000_000,
    tokens_per_minute=1_000_000_000,
    requests_per_month=1_000_000_000,
    tokens_per_month=1_000_000_000_000,
    concurrency=1000,
)
_BY_CHANCE = ("terminal_controls", "hidden_characters", "secrets", "personal_data", "links")
NO_FILTERS = FiltersConfig.model_validate({"output": dict.fromkeys(_BY_CHANCE, "off")})
"""Random weights write control characters by chance."""


def make_tokenizer():
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {letter: number for number, letter in enumerate(letters)}
    for left, right in MERGES:
        vocab[left + right] = len(vocab)
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=MERGES))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([END, BEGIN_TURN, END_TURN])
    return tokenizer


def write_model(cache, seed=1, **changes):
    """A directory in the hub's layout."""
    directory = write_random_model(parse_hub_config(CONFIG | changes, "tiny"), seed, cache, None)
    tokenizer = make_tokenizer()
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": tokenizer.token_to_id(END)}))
    (directory / "chat_template.jinja").write_text(TEMPLATE)
    return directory


def serve_model(directory, name="tiny", adapters=()):
    return HostedModel(name, TextModel(directory), 1_700_000_000, dict(adapters))


def add_key(access_directory, owner="alice", **terms):
    """The id and the secret of a new key."""
    make = KeyStore.open if (access_directory / "keys.json").exists() else KeyStore.create
    terms = {"limits": OPEN_LIMITS, "expires": int(time.time()) + 86_400, **terms}
    return make(access_directory).create_key(KeyTerms(owner=owner, **terms))


@contextlib.contextmanager
def running_server(
    models, access_directory, *, engine=None, filters=NO_FILTERS, mark=UNMARKED, make_watch=None, seal_texts=None
):
    """The address of a server in a thread of this process, with its pool.

    Args:
        make_watch: Returns what watches it, from its access directory's log and its pool.
    """
    with (
        Access.open(access_directory, seal_texts=seal_texts) as access,
        EnginePool(models, engine or EngineSettings(default_max_tokens=16), mark) as pool,
        contextlib.closing(bind_socket(ListenConfig(port=0))) as sock,
    ):

        @asynccontextmanager
        async def lifespan():
            async with watch.run_checks() if watch else contextlib.AsyncExitStack():
                started.set()
                yield

        # connections wait from now on; uvicorn listens only when the lifespan has begun
        sock.listen()
        started = threading.Event()
        watch = None if make_watch is None else make_watch(access.request_log, pool)
        service = Service(pool, access, TextFilters(filters, [END, BEGIN_TURN, END_TURN]))
        app = make_app(service, RequestBounds(), is_ready=lambda: True, lifespan=lifespan, watch=watch)
        server = make_server(ChatPage(app), ListenConfig(port=0), RequestBounds(), 5)
        thread = threading.Thread(target=lambda: asyncio.run(server.serve(sockets=[sock])))
        # connections wait from here on, also before the server takes them
        sock.listen()
        thread.start()
        try:
            started.wait(60)
            yield f"http://127.0.0.1:{sock.getsockname()[1]}", pool
        finally:
            server.should_exit = True
            thread.join()
