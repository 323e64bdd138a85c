"""Measure how often rendering a conversation again changes its tokens; the gateway must never change them.

    naive      renders and tokenises all messages again for each turn; a conversation drifts if the new tokens do not
               begin with the tokens of the turns before
    ours       `Episode` and `encode_continuation`, as in a run; a conversation drifts if a sampled id is misplaced in
               the training sequence, or not trained exactly once

The chat templates behave like those of the models they are named after. `Qwen3-2507` stands for Qwen3-Instruct-2507,
whose template keeps thinking and white space in answers. Answers resemble those of models: one in five ends with white
space, and half of the tool calls are compact JSON. The answers of a conversation are `plain` text, think (`think`),
call a tool (`tool`), or do `both` in one turn. In the arms `split`, one token in 50 is sampled as two tokens that spell
the same text, as happens at temperature 1.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Final

import numpy as np

from benchmarks.gateway import completion, order
from benchmarks.measure import Row, report
from inference_contract.schemas import ChatCompletion, ChatMessage
from inference_contract.tools import ToolDefinition
from pipelinerl.config.domains import EpisodeSection
from pipelinerl.models.tokenizer import ChatTokenizer
from pipelinerl.plugins.episodes.episode import Episode
from pipelinerl.plugins.warmstart.tiny_decoder import word_tokenizer
from pipelinerl.rng import generator
from pipelinerl.types import Outcome, Verdict

CONVERSATIONS: Final = 100
TURNS: Final = 4
_CHATML: Final = ("<|im_start|>", "<|im_end|>", "<tool_call>", "</tool_call>", "<think>", "</think>")
_LLAMA: Final = ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|python_tag|>")
_DEFAULT: Final = "{%- if messages[0].role != 'system' %}{{- '<|im_start|>system\nHelp.<|im_end|>\n' }}{%- endif %}"
_OPEN: Final = "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"
_TOOLS: Final = (
    "{%- if tools %}{{- '<|im_start|>system\n# Tools' }}{%- for tool in tools %}{{- '\n' + (tool | tojson) }}"
    "{%- endfor %}{{- '<|im_end|>\n' }}{%- endif %}"
)
_RESULT: Final = (
    "{%- if m.role == 'tool' %}"
    "{{- '<|im_start|>user\n<tool_response>\n' + m.content + '\n</tool_response><|im_end|>\n' }}"
)
_CALLS: Final = (
    "{%- for c in m.tool_calls or [] %}{%- if not loop.first or content %}{{- '\n' }}{%- endif %}"
    '{{- \'<tool_call>\n{"name": "\' + c.function.name + \'", "arguments": \' + (c.function.arguments | tojson) }}'
    "{{- '}\n</tool_call>' }}{%- endfor %}"
)
_HEADER: Final = "{{- '<|start_header_id|>' + role + '<|end_header_id|>\n\n' }}"
_VERBATIM: Final = (
    _TOOLS + "{%- for m in messages %}{%- set content = m.content %}" + _RESULT + "{%- else %}"
    "{{- '<|im_start|>' + m.role + '\n' + content }}" + _CALLS + "{{- '<|im_end|>\n' }}{%- endif %}{%- endfor %}"
    + _OPEN
)  # fmt: skip
#: Chat templates by name. SmolLM2's does not support tools. In Llama's, a call takes the whole answer.
TEMPLATES: Final = {
    "SmolLM2": (
        _DEFAULT + "{%- for m in messages %}{{- '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}"
        "{%- endfor %}" + _OPEN
    ),
    "Qwen2.5": _DEFAULT + _VERBATIM,
    "Qwen3": (
        _TOOLS + "{%- set ns = namespace(last=0) %}{%- for m in messages %}{%- if m.role == 'user' %}"
        "{%- set ns.last = loop.index0 %}{%- endif %}{%- endfor %}"
        "{%- for m in messages %}{%- set content = m.content %}" + _RESULT + "{%- elif m.role == 'assistant' %}"
        "{%- set thinking = m.reasoning_content or '' %}{%- if '</think>' in content %}"
        "{%- set thinking = content.split('</think>')[0].split('<think>')[-1].strip('\n') %}"
        "{%- set content = content.split('</think>')[-1].lstrip('\n') %}{%- endif %}{{- '<|im_start|>assistant\n' }}"
        "{%- if loop.index0 > ns.last and thinking %}{{- '<think>\n' + thinking + '\n</think>\n\n' }}{%- endif %}"
        "{{- content }}" + _CALLS + "{{- '<|im_end|>\n' }}{%- else %}"
        "{{- '<|im_start|>' + m.role + '\n' + content + '<|im_end|>\n' }}{%- endif %}{%- endfor %}" + _OPEN
    ),
    "Qwen3-2507": _VERBATIM,
    "Llama 3.1": (
        "{%- set role = 'system' %}" + _HEADER + "{{- 'Cutting Knowledge Date: December 2023\n\n' }}"
        "{%- for tool in tools or [] %}{{- (tool | tojson) + '\n' }}{%- endfor %}{{- '<|eot_id|>' }}"
        "{%- for m in messages %}{%- set role = 'ipython' if m.role == 'tool' else m.role %}" + _HEADER
        + "{%- if m.tool_calls %}"
        '{{- \'{"name": "\' + m.tool_calls[0].function.name + \'", "parameters": \' }}'
        "{{- (m.tool_calls[0].function.arguments | tojson) + '}' }}"
        "{%- else %}{{- m.content | trim }}{%- endif %}{{- '<|eot_id|>' }}{%- endfor %}"
        "{%- if add_generation_prompt %}{%- set role = 'assistant' %}" + _HEADER + "{%- endif %}"
    ),
}  # fmt: skip
_SENTENCE: Final = "the answer to this question is seven times six so we add more steps and check"
_PARAMETERS: Final = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}}
_ADD: Final = {"type": "function", "function": {"name": "add", "description": "Add", "parameters": _PARAMETERS}}


def run(quick: bool = False) -> None:
    """Run the benchmark, print its table and, unless `quick`, write its record."""
    rows, record, count = [], {}, 10 if quick else CONVERSATIONS
    for name, template in TEMPLATES.items():
        model, needed = TemplateModel(template), {"tool": "tool_calls", "both": "<tool_call>"}
        for kind in ("plain", "think", "tool", "both"):
            if needed.get(kind, "") not in template:
                continue
            naive = [sum(model.naive_drifts(kind, seed, split) for seed in range(count)) for split in (0.0, 0.02)]
            played = [model.episode(kind, seed, 0.02) for seed in range(count)]
            drifts, segments = sum(drift for drift, _ in played), sum(number for _, number in played) / count
            shares = {"naive": naive[0] / count, "naive_split": naive[1] / count, "ours": drifts / count}
            record[f"{name}, {kind}"] = shares | {"segments": segments}
            value = "; ".join(f"{each:.2f}" for each in (*shares.values(), segments))
            rows.append(Row(f"{name}, {kind}", value, "-; -; 0; 1", drifts == 0 and segments == 1.0))
    title = "drift: share of conversations, naive; naive, split; ours; and our segments an episode"
    report("drift", rows, {"conversations": CONVERSATIONS, "shares": record}, quick=quick, title=title)


class TemplateModel:
    """A tokenizer with a chat template, and a scripted model whose answers are drawn at random from a seed."""

    def __init__(self, template: str) -> None:
        from tokenizers import AddedToken

        self._is_llama = "<|eot_id|>" in template
        control = _LLAMA if self._is_llama else _CHATML
        made = word_tokenizer([_SENTENCE, json.dumps(_ADD), "<tool_response> user assistant system"] * 3, vocab=600)
        made.add_tokens([AddedToken(token, normalized=False) for token in control])
        made.chat_template = template
        self._vocab, self._control = made.get_vocab(), frozenset(control)
        self._spelling = {number: text for text, number in self._vocab.items()}
        self.end = self._vocab["<|eot_id|>" if self._is_llama else "<|im_end|>"]
        self.tokenizer = ChatTokenizer(made, {self.end})

    def answers(self, kind: str, seed: int, split: float) -> Iterator[list[int]]:
        """Yield the token ids of each turn's answer; `split`: probability that two tokens spell the text of one."""
        draw, words = generator(seed, "drift", kind), _SENTENCE.split()
        for turn in range(TURNS):
            text = " ".join(draw.choice(words, size=draw.integers(3, 12))) + draw.choice(["", "", "", "", " \n"])
            thinking = " ".join(draw.choice(words, size=8)) if kind in ("think", "both") else ""
            if kind in ("tool", "both") and turn < TURNS - 1:
                fields = {"a": int(draw.integers(100)), "b": int(draw.integers(100))}
                call = {"name": "add", "parameters" if self._is_llama else "arguments": fields}
                text = json.dumps(call, separators=(",", ":") if draw.random() < 0.5 else None)
                text = text if self._is_llama else f"<tool_call>\n{text}\n</tool_call>"
            text = f"<think>\n{thinking}\n</think>\n\n{text}" if thinking else text
            ids = self.tokenizer.encode(text)
            yield [part for one in ids for part in (self._halves(one) if draw.random() < split else [one])] + [self.end]

    def naive_drifts(self, kind: str, seed: int, split: float) -> bool:
        """Play a conversation; return whether rendering it again changes the tokens of earlier turns."""
        messages, tools = [ChatMessage(role="user", content="begin")], _tools(kind)
        known = self.tokenizer.encode_chat(messages, {}, tools)
        for number, sampled in enumerate(self.answers(kind, seed, split)):
            known, messages = [*known, *sampled], [*messages, *self._replies(sampled, tools, number)]
            again = self.tokenizer.encode_chat(messages, {}, tools)
            if again[: len(known)] != known:
                return True
            known = again
        return False

    def episode(self, kind: str, seed: int, split: float) -> tuple[bool, int]:
        """Play an `Episode`; return whether it drifts, and the number of training sequences (segments) it becomes."""
        messages, tools = [ChatMessage(role="user", content="begin")], _tools(kind)
        episode, answers = Episode(order(seed, 512), 0, EpisodeSection()), list(self.answers(kind, seed, split))
        seen, drifts = list[int](), False
        for number, sampled in enumerate(answers):
            body = {"messages": [each.model_dump(exclude_none=True) for each in messages]}
            planned = episode.plan("main", body | ({"tools": [_ADD]} if tools else {}))
            asked, known = planned.request, planned.request.continue_token_ids
            if known and asked.continue_from:
                prompt = self.tokenizer.encode_continuation(asked.messages or [], asked.continue_from, known, {}, tools)
            else:
                prompt = self.tokenizer.encode_chat(asked.messages or [], {}, tools)
            drifts |= prompt[: len(seen)] != seen
            turn = episode.record(planned, self._completion(prompt, sampled, tools, number))
            seen = [*prompt, *sampled]
            drifts |= not np.array_equal(turn.token_ids, seen)
            messages += self._replies(sampled, tools, number)
        rollout = episode.rollout(Verdict(outcome=Outcome.CORRECT, reward=1.0), temperature=1.0)
        drifts |= [turn.token_ids.tolist() for turn in rollout.turns] != answers
        return drifts, len(rollout.segments)

    def _replies(self, sampled: Sequence[int], tools: Sequence[ToolDefinition], number: int) -> list[ChatMessage]:
        said = self._completion([0], sampled, tools, number).choices[0].message
        answer = ChatMessage(role="assistant", content=said.content, tool_calls=said.tool_calls)
        if not said.tool_calls:
            return [answer, ChatMessage(role="user", content="go on")]
        return [answer, *(ChatMessage(role="tool", content="42", tool_call_id=call.id) for call in said.tool_calls)]

    def _completion(
        self, prompt: Sequence[int], sampled: Sequence[int], tools: Sequence[ToolDefinition], number: int
    ) -> ChatCompletion:
        text = self.tokenizer.decode(sampled[:-1])
        answer = self.tokenizer.parse_answer(text, tools, prompt_token_ids=prompt, key=bytes([number]))
        return completion(prompt, answer.content, sampled, answer.calls) if tools else completion(prompt, text, sampled)

    def _halves(self, token: int) -> list[int]:
        """Return two tokens that together spell the same text as `token`, or only `token` if there are none."""
        text = self._spelling[token]
        for at in range(1, len(text)):
            if text not in self._control and text[:at] in self._vocab and text[at:] in self._vocab:
                return [self._vocab[text[:at]], self._vocab[text[at:]]]
        return [token]


def _tools(kind: str) -> list[ToolDefinition]:
    return [ToolDefinition.model_validate(_ADD)] if kind in ("tool", "both") else []
