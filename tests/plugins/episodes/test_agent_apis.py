"""Agents that speak Anthropic's Messages API or OpenAI's Responses API, called with the official clients.

A scripted model with a real tokenizer and chat template answers; each conversation must become one segment, whose
tokens the engine continues exactly.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Final

import anthropic
import httpx
import openai
import pytest
from hypothesis import given, strategies as st

from inference_contract.schemas import ChatCompletionRequest
from pipelinerl.config.domains import EpisodeSection
from pipelinerl.plugins.episodes.agent_api.answer import AnswerReader, split_thinking
from pipelinerl.plugins.episodes.episode import Episode, NewSegment
from pipelinerl.plugins.episodes.gateway import Gateway
from pipelinerl.plugins.episodes.tool_loop import Toolbox
from pipelinerl.plugins.episodes.trial import ScriptedAnswers
from tests.fakes.talking_sampler import order
from tests.fakes.tool_model import tool_chat
from tests.patience import PATIENCE_S
from tests.plugins.episodes.test_tool_loop import Shout

CALL: Final = '<tool_call>\n{"name": "look", "arguments": {"at": "b"}}\n</tool_call>'
ANSWERS: Final = (f"<think>\nhm\n</think>\n\nLooking.\n{CALL}", "It is\n\na b. ", "bye")
SYSTEM: Final = "Be brief."
SCHEMA: Final = {"type": "object", "properties": {"at": {"type": "string"}}}


@dataclass
class ScriptedModel:
    """Function that samples scripted answers; it reports their text in pieces and keeps the engine's requests."""

    answers: Iterable[str]
    requests: list[ChatCompletionRequest] = field(default_factory=list)
    between_pieces: Callable[[str], Awaitable[None]] | None = None
    content_pieces: Callable[[str], Sequence[str]] = lambda text: [text[: end + 1] for end in range(len(text))]

    def __post_init__(self):
        self.tokenizer = tool_chat()
        self._scripted = ScriptedAnswers(self.tokenizer, self.answers)

    async def __call__(self, request, on_text=None, /):
        sent = ChatCompletionRequest.model_validate_json(request.model_dump_json(exclude_none=True))
        answered = await self._scripted.complete(sent, begun=lambda: None)
        self.requests.append(sent)
        for text in self.content_pieces(answered.completion.choices[0].message.content) if on_text else ():
            on_text(text)
            await asyncio.sleep(0)
            if self.between_pieces is not None:
                await self.between_pieces(text)
        return answered.completion


@asynccontextmanager
async def opened(model, *, tools=None, max_turns=20):
    gateway = Gateway()
    one = Episode(order(max_tokens=256), 0, EpisodeSection(max_turns=max_turns))
    async with asyncio.timeout(PATIENCE_S), gateway.serve(), gateway.open(one, model, tools) as episode:
        yield episode


#: An agent: it sends a user's message, answers calls of `look` and says "thanks"; returns what it has read each time.
Agent = Callable[[str, bool, str], Awaitable[list[dict[str, Any]]]]


async def by_messages(base, streams, edited=""):
    tools = [{"name": "look", "description": "Look.", "input_schema": SCHEMA, "cache_control": {"type": "ephemeral"}}]
    messages = [{"role": "user", "content": [{"type": "text", "text": "hi"}]}]
    read = []
    async with anthropic.AsyncAnthropic(base_url=base.removesuffix("/v1"), api_key="any") as client:
        for _ in ANSWERS:
            system = [
                {"type": "text", "text": f"x-anthropic-billing-header: {len(read)}"},
                {"type": "text", "text": SYSTEM, "cache_control": {"type": "ephemeral"}},
            ]
            fields = {"model": "claude", "max_tokens": 100, "system": system, "tools": tools, "messages": messages}
            if streams:
                async with client.messages.stream(**fields) as stream:
                    answer = await stream.get_final_message()
            else:
                answer = await client.messages.create(**fields)
            blocks = [block.model_dump(exclude_none=True) for block in answer.content]
            by_type = {block["type"]: block for block in blocks}
            call = by_type.get("tool_use")
            read.append(
                {
                    "thinking": by_type.get("thinking", {}).get("thinking"),
                    "text": by_type.get("text", {}).get("text"),
                    "call": call and (call["name"], call["input"]),
                    "usage": (answer.usage.input_tokens, answer.usage.output_tokens),
                    "reason": answer.stop_reason,
                }
            )
            if edited and "text" in by_type:
                by_type["text"]["text"] = edited
            result = [{"type": "tool_result", "tool_use_id": call["id"], "content": "b"}] if call else "thanks"
            messages += [{"role": "assistant", "content": blocks}, {"role": "user", "content": result}]
    return read


async def by_responses(base, streams, edited="", stateful=False):
    tools = [{"type": "function", "name": "look", "description": "Look.", "parameters": SCHEMA, "strict": False}]
    items = [{"role": "user", "content": "hi"}]
    read, previous = [], openai.omit
    async with openai.AsyncOpenAI(base_url=base, api_key="any") as client:
        for _ in ANSWERS:
            fields = {"model": "gpt", "instructions": SYSTEM, "tools": tools, "input": items, "store": stateful}
            fields["previous_response_id"] = previous
            if streams:
                async with client.responses.stream(**fields) as stream:
                    answer = await stream.get_final_response()
            else:
                answer = await client.responses.create(**fields)
            output = [item.model_dump(exclude_none=True, exclude={"parsed_arguments"}) for item in answer.output]
            for item in output:
                for part in item.get("content") or ():
                    part.pop("parsed", None)
            by_type = {item["type"]: item for item in output}
            call = by_type.get("function_call")
            read.append(
                {
                    "thinking": by_type["reasoning"]["content"][0]["text"] if "reasoning" in by_type else None,
                    "text": answer.output_text or None,
                    "call": call and (call["name"], json.loads(call["arguments"])),
                    "usage": (answer.usage.input_tokens, answer.usage.output_tokens),
                    "reason": answer.status,
                }
            )
            if edited and "message" in by_type:
                by_type["message"]["content"][0]["text"] = edited
            result = {"type": "function_call_output", "call_id": call["call_id"], "output": "b"} if call else None
            new = [result or {"role": "user", "content": "thanks"}]
            items, previous = (new, answer.id) if stateful else ([*items, *output, *new], openai.omit)
    return read


async def by_stored_responses(base, streams, edited=""):
    return await by_responses(base, streams, edited, stateful=True)


@pytest.mark.parametrize("streams", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("agent", [by_messages, by_responses, by_stored_responses])
async def test_conversation_with_tools_is_one_segment_of_exact_tokens(agent, streams):
    model = ScriptedModel(ANSWERS)
    async with opened(model) as episode:
        read = await agent(episode.base_url(), streams, "")
    turns = episode.episode.turns
    third = turns[-1]
    assert [turn.new_segment for turn in turns] == [NewSegment.FIRST, None, None]
    assert third.path == list(turns)
    for before, request in zip(turns, model.requests[1:], strict=False):
        assert request.continue_token_ids == before.token_ids.tolist()
    whole = model.tokenizer.decode(third.token_ids.tolist())
    assert whole.startswith(
        '<|system|># Tools\n{"type": "function", "function": {"name": "look", "description": "Look."'
    )
    assert f"<|system|>{SYSTEM}<|end|><|user|>hi<|end|><|assistant|>{ANSWERS[0]}<|end|>" in whole
    assert f"<tool_response>\nb\n</tool_response><|end|><|assistant|>{ANSWERS[1]}<|end|><|user|>thanks" in whole
    assert [each["text"] and each["text"].strip() for each in read] == ["Looking.", "It is\n\na b.", "bye"]
    assert [each["thinking"] for each in read] == ["hm", None, None]
    assert [each["call"] for each in read] == [("look", {"at": "b"}), None, None]
    sizes = [(len(turn.token_ids) - len(turn.turn.token_ids), len(turn.turn.token_ids)) for turn in turns]
    assert [each["usage"] for each in read] == sizes
    assert read[0]["reason"] in ("tool_use", "completed") and read[1]["reason"] in ("end_turn", "completed")


@pytest.mark.parametrize("agent", [by_messages, by_responses])
async def test_agent_that_edits_an_answer_begins_a_new_segment(agent):
    answers = ("one", "two", "three")
    async with opened(ScriptedModel(answers)) as episode:
        await agent(episode.base_url(), False, "edited")
    turns = episode.episode.turns
    assert [turn.new_segment for turn in turns] == [NewSegment.FIRST, *2 * [NewSegment.HISTORY_DIFFERS]]


async def test_every_thinking_style_is_shown_and_recognised_again():
    """Where the opening tag is in the prompt, the first streamed answer is shown as it is; later ones are split."""
    answers = ("a</think>\n\nb", "c</think>d</think>e", "f</th", "g")
    async with (
        opened(ScriptedModel(answers)) as episode,
        openai.AsyncOpenAI(base_url=episode.base_url(), api_key="any") as client,
    ):
        messages = [{"role": "user", "content": "hi"}]
        read = []
        for _ in answers:
            text, thinking = "", ""
            async for chunk in await client.chat.completions.create(model="m", messages=messages, stream=True):
                text += chunk.choices[0].delta.content or ""
                thinking += getattr(chunk.choices[0].delta, "reasoning_content", None) or ""
            read.append((thinking, text))
            messages += [{"role": "assistant", "content": text}, {"role": "user", "content": "more"}]
    assert read == [("", "a</think>\n\nb"), ("c", "d</think>e"), ("f</th", ""), ("g", "")]
    assert [turn.new_segment for turn in episode.episode.turns] == [NewSegment.FIRST, None, None, None]


@pytest.mark.parametrize("marks", ["<think> </think>", "[THINK] [/THINK]"])
async def test_call_drafted_in_thinking_is_shown_as_thinking_and_the_answer_as_the_answer(marks):
    opening, closing = marks.split()
    draft = f"I could run {CALL} but"
    async with (
        opened(ScriptedModel([f"{opening}{draft}{closing}4", "5"])) as episode,
        openai.AsyncOpenAI(base_url=episode.base_url(), api_key="any") as client,
    ):
        messages = [{"role": "user", "content": "hi"}]
        (choice,) = (await client.chat.completions.create(model="m", messages=messages)).choices
        assert choice.message.content == "4" and not choice.message.tool_calls
        assert choice.message.reasoning_content == draft
        messages += [{"role": "assistant", "content": "4"}, {"role": "user", "content": "more"}]
        await client.chat.completions.create(model="m", messages=messages)
    assert [turn.new_segment for turn in episode.episode.turns] == [NewSegment.FIRST, None]


@given(
    st.lists(st.sampled_from(["<think>", "</think>", "<th", "</", "ink>", "\n", " ", "a", "b"]), max_size=8),
    st.booleans(),
)
def test_pieces_of_an_answer_join_to_what_its_agent_is_shown(parts, thinks):
    reader, content, joined = AnswerReader(thinks=thinks), "".join(parts), {True: "", False: ""}
    for end in range(len(content) + 1):
        for piece in reader.more(content[:end]):
            assert piece.text and not (piece.is_thinking and joined[False])
            joined[piece.is_thinking] += piece.text
    for piece in reader.rest(content):
        joined[piece.is_thinking] += piece.text
    thinking, text = reader.shown(content)
    assert joined == {True: thinking or "", False: text}
    if content.lstrip().startswith("<think>"):
        assert (thinking, text) == split_thinking(content)


STREAMS: Final = {
    "/chat/completions": {"messages": [{"role": "user", "content": "hi"}]},
    "/messages": {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 9},
    "/responses": {"input": "hi"},
}


async def events(url, body, seen):
    """POST a streamed request; pass each event to `seen`, and return the last line of the stream."""
    last = ""
    async with (
        httpx.AsyncClient(trust_env=False, timeout=PATIENCE_S) as http,
        http.stream("POST", url, json=body | {"stream": True}) as response,
    ):
        assert response.status_code == 200, await response.aread()
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                seen(json.loads(line.removeprefix("data: ")))
            last = line or last
    return last


@pytest.mark.parametrize("path", [*STREAMS])
async def test_piece_of_an_answer_arrives_before_the_next_is_sampled(path):
    arrived, model = asyncio.Event(), ScriptedModel(["ab"])

    async def between(text):
        if text == "a":
            await arrived.wait()

    def seen(event):
        if '"a"' in json.dumps(event):
            arrived.set()

    model.between_pieces = between
    async with opened(model) as episode:
        await events(episode.base_url() + path, STREAMS[path], seen)


async def test_turn_of_a_client_that_leaves_in_mid_stream_is_cancelled_and_not_recorded():
    left, model = asyncio.Event(), ScriptedModel(["abc", "d"])

    async def between(text):
        try:
            await asyncio.sleep(PATIENCE_S if text == "a" else 0)
        except asyncio.CancelledError:
            left.set()
            raise

    model.between_pieces = between
    async with opened(model) as episode, httpx.AsyncClient(trust_env=False) as http:
        url = f"{episode.base_url()}/responses"
        async with http.stream("POST", url, json={"input": "hi", "stream": True}) as response:
            await anext(response.aiter_lines())
        await left.wait()
        assert (await http.post(url, json={"input": "hi"})).status_code == 200
        assert [turn.number for turn in episode.episode.turns] == [0]


async def test_events_of_the_responses_api_come_in_its_order_with_matching_items():
    seen = []
    async with opened(ScriptedModel(ANSWERS)) as episode:
        tools = [{"type": "function", "name": "look", "parameters": SCHEMA}]
        await events(f"{episode.base_url()}/responses", {"input": "hi", "tools": tools}, seen.append)
    kinds = [each["type"].removeprefix("response.") for each in seen]
    assert [each["sequence_number"] for each in seen] == list(range(len(seen)))
    assert [kind for at, kind in enumerate(kinds) if at == 0 or kinds[at - 1] != kind] == [
        *("created", "in_progress"),
        *("output_item.added", "content_part.added", "reasoning_text.delta", "reasoning_text.done"),
        *("content_part.done", "output_item.done"),
        *("output_item.added", "content_part.added", "output_text.delta", "output_text.done"),
        *("content_part.done", "output_item.done"),
        *("output_item.added", "function_call_arguments.delta", "function_call_arguments.done", "output_item.done"),
        "completed",
    ]
    done = [each["item"] for each in seen if each["type"] == "response.output_item.done"]
    assert seen[-1]["response"]["output"] == done
    for each in seen:
        if "output_index" in each and "item_id" in each:
            assert done[each["output_index"]]["id"] == each["item_id"]


async def test_answer_with_calls_of_the_recipes_tools_is_streamed_without_them():
    answers = ('before <tool_call>\n{"name": "shout", "arguments": {"text": "ab"}}\n</tool_call>', "AB")
    async with opened(ScriptedModel(answers), tools=Toolbox(Shout())) as episode:
        texts = []
        await events(
            f"{episode.base_url()}/messages",
            STREAMS["/messages"],
            lambda event: texts.append(event.get("delta", {}).get("text", "")),
        )
    assert "".join(texts) == "AB" and len(episode.episode.turns) == 2


@pytest.mark.parametrize("path", [*STREAMS])
async def test_stream_breaks_off_if_another_engine_samples_other_tokens(path):
    """The answer that the agent has half read is not the one that would train, so the episode gets no verdict."""
    model = ScriptedModel(["abc"], content_pieces=lambda text: ["x", "", "ab", text])
    seen = []
    async with opened(model) as episode:
        last = await events(episode.base_url() + path, STREAMS[path], seen.append)
        assert "another engine sampled other tokens" in episode.fault and episode.fault in last


async def test_token_count_of_the_messages_api_is_exact_and_samples_no_turn():
    model = ScriptedModel(["a", "b"])
    async with (
        opened(model) as episode,
        anthropic.AsyncAnthropic(base_url=episode.base_url().removesuffix("/v1"), api_key="any") as client,
    ):
        fields = {"model": "m", "system": SYSTEM, "messages": [{"role": "user", "content": "hi"}]}
        counted = await client.messages.count_tokens(**fields)
        assert not episode.episode.turns
        answer = await client.messages.create(**fields, max_tokens=5)
        assert counted.input_tokens == answer.usage.input_tokens


async def test_secret_may_be_the_api_key_of_anthropics_client():
    async with opened(ScriptedModel(["a"])) as episode:
        base, key = episode.base_url().split("/e/")[0], episode.episode.secret
        async with anthropic.AsyncAnthropic(base_url=base, api_key=key) as client:
            answer = await client.messages.create(
                model="m", max_tokens=9, messages=[{"role": "user", "content": "hi"}], stop_sequences=["z"]
            )
        assert answer.content[0].type == "text" and answer.content[0].text == "a"


@pytest.mark.parametrize(
    ("path", "change", "names"),
    [
        ("/messages", {"messages": []}, "messages"),
        ("/messages", {"fast": True}, "fast"),
        ("/messages", {"mcp_servers": [{}]}, "mcp_servers"),
        ("/messages", {"messages": [{"role": "assistant", "content": "a"}]}, "the last message"),
        ("/messages", {"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "messages.0.content.0.type"),
        ("/messages", {"messages": [{"role": "user", "content": [{"type": "tool_result"}]}]}, "tool_use_id"),
        ("/messages", {"tools": [{"type": "web_search_20260101", "name": "w"}]}, "tools.0.type"),
        ("/messages", {"tool_choice": {"type": "any"}}, "tool_choice"),
        ("/messages", {"system": [{"type": "image"}]}, "system.0"),
        ("/messages", {"max_tokens": 0}, "max_tokens"),
        ("/responses", {"input": []}, "messages"),
        ("/responses", {"background": True}, "background"),
        ("/responses", {"conversation": "c"}, "conversation"),
        ("/responses", {"previous_response_id": "resp_0"}, "this episode has no such response"),
        ("/responses", {"input": [{"type": "item_reference", "id": "x"}]}, "items are not stored"),
        ("/responses", {"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input.0.content.0"),
        ("/responses", {"tools": [{"type": "web_search"}]}, "tools.0.type"),
        ("/responses", {"truncation": "auto"}, "truncation"),
        ("/chat/completions", {"stream_options": [1]}, "stream_options"),
        ("/chat/completions", {"tools": 5}, "tools"),
    ],
)
async def test_unsupported_request_is_rejected_by_name_in_the_form_of_its_api(path, change, names):
    async with opened(ScriptedModel([])) as episode, httpx.AsyncClient(trust_env=False) as http:
        refused = await http.post(episode.base_url() + path, json=STREAMS[path] | change)
        body = refused.json()
        assert refused.status_code == 400 and names in body["error"]["message"]
        assert body["error"]["type"] == "invalid_request_error"
        assert (body.get("type") == "error") == (path == "/messages")
        assert not episode.episode.turns
