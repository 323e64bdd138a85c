"""Fields that clients send by default, with the values that do not change the answer.

OpenAI's and vLLM's clients, and libraries built on them, fill in optional fields of requests and messages. Each field
below is accepted and dropped at the listed values and at `null`. At any other value it is rejected by name, because the
engine would otherwise ignore it; fields that are listed nowhere are rejected too. Tags that serve only OpenAI's own
bookkeeping are accepted at any value.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from typing import Any, Final

#: Accepted at any value: they do not change the answer at OpenAI either.
TAGS: Final = frozenset({"metadata", "prompt_cache_key", "safety_identifier"})

#: Fields of a chat request.
OF_REQUEST: Final[Mapping[str, tuple[Any, ...]]] = {
    # OpenAI's fields
    "audio": (),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "modalities": (["text"],),
    "prediction": (),
    "reasoning_effort": (),
    "response_format": ({"type": "text"},),
    "service_tier": ("auto", "default"),
    "store": (False,),
    "tools": ([],),
    "verbosity": (),
    "web_search_options": (),
    # vLLM's fields
    "add_generation_prompt": (True,),
    "add_special_tokens": (False,),
    "allowed_token_ids": (),
    "bad_words": ([],),
    "chat_template": (),
    "continue_final_message": (False,),
    "documents": ([],),
    "echo": (False,),
    "include_stop_str_in_output": (False,),
    "length_penalty": (1,),
    "logprob_token_ids": (),
    "min_tokens": (0,),
    "prompt_logprobs": (),
    "repetition_penalty": (1,),
    "stop_token_ids": ([],),
    "structured_outputs": (),
    "thinking_token_budget": (),
    "truncate_prompt_tokens": (),
    "use_beam_search": (False,),
}

#: Fields of a message: parts of an answer that clients send back within the conversation.
OF_MESSAGE: Final[Mapping[str, tuple[Any, ...]]] = {
    "annotations": ([],),
    "audio": (),
    "function_call": (),
    "provider_specific_fields": ({}, {"refusal": None}),  # from litellm
    "reasoning": (),
    "refusal": (),
    "tool_calls": ([],),
}

#: Fields of `stream_options`.
OF_STREAM: Final[Mapping[str, tuple[Any, ...]]] = {
    "continuous_usage_stats": (False,),
    "include_obfuscation": (False,),
}


def without_idle(fields: Any, known: Container[str], idle: Mapping[str, tuple[Any, ...]]) -> Any:
    """Return `fields` without null `known` fields and without idle fields at an idle value.

    A value that is no mapping is returned unchanged; the schema rejects it.
    """
    if not isinstance(fields, dict):
        return fields
    return {
        name: value
        for name, value in fields.items()
        if not (name in TAGS and idle is OF_REQUEST)
        and not (value is None and (name in known or name in idle))
        and not (name in idle and value in idle[name])
    }
