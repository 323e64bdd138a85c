"""Fields that clients send without meaning anything by them, at the values that change no answer.

OpenAI's and vLLM's clients, and the libraries around them, fill in what a request or a message could have. Each field
below is taken and dropped at these values, and at `null`. At any other value it would be ignored, so it is refused by
name, as is every field that stands nowhere. Tags that only OpenAI's own bookkeeping reads are taken at any value.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from typing import Any, Final

#: At any value: the answer does not depend on it, at OpenAI either.
TAGS: Final = frozenset({"metadata", "prompt_cache_key", "safety_identifier"})

#: Of a chat request.
OF_REQUEST: Final[Mapping[str, tuple[Any, ...]]] = {
    # OpenAI's
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
    # vLLM's
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

#: Of a message: what clients keep of the answer that they send back as a part of the conversation.
OF_MESSAGE: Final[Mapping[str, tuple[Any, ...]]] = {
    "annotations": ([],),
    "audio": (),
    "function_call": (),
    "provider_specific_fields": ({}, {"refusal": None}),  # litellm's
    "reasoning": (),
    "refusal": (),
    "tool_calls": ([],),
}

#: Of `stream_options`.
OF_STREAM: Final[Mapping[str, tuple[Any, ...]]] = {
    "continuous_usage_stats": (False,),
    "include_obfuscation": (False,),
}


def without_idle(fields: Any, known: Container[str], idle: Mapping[str, tuple[Any, ...]]) -> Any:
    """`fields` without those that change nothing: a null one of the `known`, and an idle one at an idle value.

    What is no mapping is left to the schema to refuse.
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
