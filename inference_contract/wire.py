"""`Wire`, the base class of all contract types, and the fields that requests may have without effect.

Clients of OpenAI and vLLM fill in optional fields that do not change the answer. Each field below is dropped at `null`
and at the listed values. Any other value is rejected by name, because the engine would ignore it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from pydantic import BaseModel, ConfigDict


class Wire(BaseModel):
    """Base class of wire types: immutable; unknown fields are rejected."""

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())


#: Fields for OpenAI's bookkeeping, accepted at any value: they never change the answer.
TAGS: Final = frozenset({"metadata", "prompt_cache_key", "safety_identifier"})

#: Fields of a chat request that are dropped at `null` and at these values.
IN_REQUEST: Final[Mapping[str, tuple[Any, ...]]] = {
    # fields of OpenAI's API
    "audio": (), "function_call": ("none", "auto"), "functions": ([],), "modalities": (["text"],), "prediction": (),
    "reasoning_effort": (), "response_format": ({"type": "text"},), "service_tier": ("auto", "default"),
    "store": (False,), "tools": ([],), "verbosity": (), "web_search_options": (),
    # fields of vLLM's API
    "add_generation_prompt": (True,), "add_special_tokens": (False,), "allowed_token_ids": (), "bad_words": ([],),
    "chat_template": (), "continue_final_message": (False,), "documents": ([],), "echo": (False,),
    "include_stop_str_in_output": (False,), "length_penalty": (1,), "logprob_token_ids": (), "min_tokens": (0,),
    "prompt_logprobs": (), "repetition_penalty": (1,), "stop_token_ids": ([],), "structured_outputs": (),
    "thinking_token_budget": (), "truncate_prompt_tokens": (), "use_beam_search": (False,),
}  # fmt: skip

#: Fields of a message that are dropped at `null` and at these values; clients copy them from earlier answers.
IN_MESSAGE: Final[Mapping[str, tuple[Any, ...]]] = {
    "annotations": ([],),
    "audio": (),
    "function_call": (),
    "provider_specific_fields": ({}, {"refusal": None}),  # litellm sends this field
    "reasoning": (),
    "refusal": (),
    "tool_calls": ([],),
}

#: Fields of `stream_options` that are dropped at `null` and at these values.
IN_STREAM: Final[Mapping[str, tuple[Any, ...]]] = {"continuous_usage_stats": (False,), "include_obfuscation": (False,)}
