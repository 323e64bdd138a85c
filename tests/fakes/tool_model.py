"""A tokenizer and a tiny random model whose chat template renders tools, tool calls, results and thinking text."""

from __future__ import annotations

from typing import Final

from pipelinerl.models.tokenizer import ChatTokenizer
from pipelinerl.plugins.warmstart.tiny_decoder import DecoderShape, random_decoder, word_tokenizer

#: Special tokens that enclose tool calls, tool results and thinking text, as in Hermes and Qwen models.
TOOL_TOKENS: Final = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>")
TOOL_TEMPLATE: Final = (
    "{%- if tools %}{{- '<|system|># Tools\n' }}{%- for tool in tools %}{{- tool | tojson + '\n' }}"
    "{%- endfor %}{{- '<|end|>' }}{%- endif %}"
    "{%- for m in messages %}"
    "{%- if m.role == 'tool' %}"
    "{{- '<|user|><tool_response>\n' + m.content + '\n</tool_response><|end|>' }}"
    "{%- else %}{{- '<|' + m.role + '|>' }}"
    "{%- if m.reasoning_content %}{{- '<think>\n' + m.reasoning_content + '\n</think>\n' }}{%- endif %}{{- m.content }}"
    '{%- for call in m.tool_calls %}{{- \'<tool_call>\n{"name": "\' + call.function.name + \'", "arguments": \' }}'
    "{{- call.function.arguments if call.function.arguments is string else call.function.arguments | tojson }}"
    "{{- '}\n</tool_call>' }}{%- endfor %}{{- '<|end|>' }}{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|assistant|>' }}{%- endif %}"
)
_LEARNED: Final = (
    '{"type": "function", "function": {"name": "get_weather", "description": "Look up the weather of a city", '
    '"parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}}}',
    "<|im_start|> <|end|> <tool_call> What is the weather in Paris? 21 degrees",
)


def tool_tokenizer(*, template=TOOL_TEMPLATE):
    """Return a byte-level tokenizer whose merges were also learned on the text of control tokens."""
    from tokenizers import AddedToken

    made = word_tokenizer(_LEARNED * 3, vocab=440)
    made.add_tokens([AddedToken(token, normalized=False) for token in TOOL_TOKENS])
    made.chat_template = template
    return made


def tool_chat():
    """Return `tool_tokenizer` as a `ChatTokenizer`, which ends answers at `<|end|>`."""
    made = tool_tokenizer()
    return ChatTokenizer(made, {made.convert_tokens_to_ids("<|end|>")})


def save_tool_model(path, *, context_length):
    tokenizer = tool_tokenizer()
    shape = DecoderShape(
        hidden=32, layers=2, heads=4, kv_heads=2, intermediate=48, vocab=len(tokenizer), max_positions=context_length
    )
    random_decoder(shape, seed=1).save_pretrained(path)
    tokenizer.save_pretrained(path)
