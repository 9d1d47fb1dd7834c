"""Requests that a gateway forwards: every field is named, typed and bounded, and there are no others."""

from typing import Annotated, Any, Literal

from pydantic import Field

from phalanx.config import StrictModel

PRIVATE_FIELDS = frozenset(
    """
    add_generation_prompt add_special_tokens allowed_token_ids bad_words best_of cache_prompt cache_salt chat_template
    chat_template_kwargs continue_final_message detokenize documents dry_multiplier dynatemp_range grammar
    guided_choice guided_decoding_backend guided_grammar guided_json guided_regex guided_whitespace_pattern id_slot
    ignore_eos include_stop_str_in_output kv_transfer_params length_penalty lora lora_path lora_request min_keep min_p
    min_tokens mirostat mirostat_eta mirostat_tau mm_processor_kwargs n_cache_reuse n_discard n_keep n_predict n_probs
    post_sampling_probs priority prompt_logprobs regex repeat_penalty repetition_penalty request_id return_hidden_states
    return_token_ids return_tokens return_tokens_as_token_ids rid samplers session_params skip_special_tokens slot_id
    spaces_between_special_tokens stop_token_ids structural_tag structured_outputs t_max_predict_ms
    timings_per_token top_k truncate_prompt_tokens typical_p use_beam_search vllm_xargs
    """.split()  # noqa: SIM905 - read as a table
)
"""Fields of single engines (vLLM, SGLang, llama.cpp) that have had faults, steer memory or reach files."""

Text = Annotated[str, Field(max_length=4_000_000)]
Name = Annotated[str, Field(min_length=1, max_length=128)]
Token = Annotated[int, Field(ge=0, le=10_000_000)]
_Penalty = Annotated[float, Field(ge=-2, le=2)]


class TextPart(StrictModel):
    """A part of a message; other kinds, which hold addresses or media, do not exist here."""

    type: Literal["text"]
    text: Text


Content = Text | Annotated[tuple[TextPart, ...], Field(min_length=1, max_length=256)]


class _CalledFunction(StrictModel):
    name: Name
    arguments: Text


class _ToolCall(StrictModel):
    id: Name
    type: Literal["function"] = "function"
    function: _CalledFunction


class ChatTurn(StrictModel):
    """One turn of a chat."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Content | None = None
    name: Name | None = None
    refusal: Text | None = None
    tool_calls: Annotated[tuple[_ToolCall, ...], Field(max_length=128)] | None = None
    tool_call_id: Name | None = None


class _Function(StrictModel):
    name: Name
    description: Text | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class _Tool(StrictModel):
    type: Literal["function"]
    function: _Function


class _JsonSchema(StrictModel):
    name: Name
    description: Text | None = None
    schema_: Annotated[dict[str, Any] | None, Field(alias="schema")] = None
    strict: bool | None = None


class _ResponseFormat(StrictModel):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: _JsonSchema | None = None


class _StreamOptions(StrictModel):
    include_usage: bool = False
    include_obfuscation: bool | None = None


class _Sampled(StrictModel):
    """Fields that routes which write text have in common."""

    model: Name
    max_tokens: Annotated[int, Field(ge=0, le=1_000_000)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    n: Annotated[int, Field(ge=1, le=64)] | None = None
    stop: Name | Annotated[tuple[Name, ...], Field(max_length=16)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), le=2**63 - 1)] | None = None
    presence_penalty: _Penalty | None = None
    frequency_penalty: _Penalty | None = None
    logit_bias: (
        Annotated[
            dict[Annotated[str, Field(pattern=r"^[0-9]{1,7}\z")], Annotated[float, Field(ge=-100, le=100)]],
            Field(max_length=300),
        ]
        | None
    ) = None
    stream: bool | None = None
    stream_options: _StreamOptions | None = None
    user: Annotated[str, Field(max_length=256)] | None = None


class ChatRequest(_Sampled):
    """``POST /v1/chat/completions``."""

    messages: Annotated[tuple[ChatTurn, ...], Field(min_length=1, max_length=2000)]
    max_completion_tokens: Annotated[int, Field(ge=1, le=1_000_000)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    tools: Annotated[tuple[_Tool, ...], Field(max_length=128)] | None = None
    tool_choice: Literal["none", "auto", "required"] | _Tool | None = None
    parallel_tool_calls: bool | None = None
    response_format: _ResponseFormat | None = None


_Tokens = Annotated[tuple[Token, ...], Field(min_length=1, max_length=1_000_000)]
Prompts = (
    Text
    | Annotated[tuple[Text, ...], Field(min_length=1, max_length=256)]
    | _Tokens
    | Annotated[tuple[_Tokens, ...], Field(min_length=1, max_length=256)]
)


class CompletionRequest(_Sampled):
    """``POST /v1/completions``."""

    prompt: Prompts
    echo: bool | None = None
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    suffix: Text | None = None


class EmbeddingRequest(StrictModel):
    """``POST /v1/embeddings``."""

    model: Name
    input: Prompts
    dimensions: Annotated[int, Field(ge=1, le=100_000)] | None = None
    encoding_format: Literal["float", "base64"] | None = None
    user: Annotated[str, Field(max_length=256)] | None = None


class _UsedTool(StrictModel):
    type: Literal["tool_use"]
    id: Name
    name: Name
    input: dict[str, Any]


class _ToolResult(StrictModel):
    type: Literal["tool_result"]
    tool_use_id: Name
    content: Content | None = None
    is_error: bool | None = None


class _Turn(StrictModel):
    role: Literal["user", "assistant"]
    content: (
        Text
        | Annotated[
            tuple[Annotated[TextPart | _UsedTool | _ToolResult, Field(discriminator="type")], ...],
            Field(min_length=1, max_length=256),
        ]
    )


class _OfferedTool(StrictModel):
    name: Name
    description: Text | None = None
    input_schema: dict[str, Any]


class _MessagesToolChoice(StrictModel):
    type: Literal["auto", "any", "tool", "none"]
    name: Name | None = None
    disable_parallel_tool_use: bool | None = None


class _Metadata(StrictModel):
    user_id: Annotated[str, Field(max_length=256)] | None = None


class MessagesRequest(StrictModel):
    """``POST /v1/messages``."""

    model: Name
    messages: Annotated[tuple[_Turn, ...], Field(min_length=1, max_length=2000)]
    max_tokens: Annotated[int, Field(ge=1, le=1_000_000)]
    system: Content | None = None
    metadata: _Metadata | None = None
    stop_sequences: Annotated[tuple[Name, ...], Field(max_length=16)] | None = None
    stream: bool | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    tools: Annotated[tuple[_OfferedTool, ...], Field(max_length=128)] | None = None
    tool_choice: _MessagesToolChoice | None = None
