"""`ChatTokenizer`: the tokenizer of a model directory, with its chat template. Read from disk, never from the network.

Templates may write control tokens, the contents of messages may not (`control_tokens`). A chat whose contents spell no
control token is encoded as by the tokenizer's own `apply_chat_template`. Decoding is exact: it keeps special tokens and
spaces.
"""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from functools import cache, cached_property
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

from inference_contract.schemas import ChatCompletionRequest, ChatMessage
from inference_contract.tools import ToolDefinition
from pipelinerl.answers.thinking import opened_by, openings_in
from pipelinerl.answers.tool_calls import FORMATS, ParsedAnswer, parsed
from pipelinerl.errors import ModelError, TemplateNameError, UnshownFieldError
from pipelinerl.models.call_style import CallStyle, find_style, written_call
from pipelinerl.models.control_tokens import Chat, ContentGuard, ConversationTail, Turn
from pipelinerl.models.detokenizer import IncrementalDetokenizer
from pipelinerl.models.directory_files import foreign_failures, json_object, one_line
from pipelinerl.types import Message

if TYPE_CHECKING:
    from jinja2 import Template
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast


#: Model types whose tokenizer is loaded with the class that tokenizer_config.json names. `AutoTokenizer` would load the
#: same class, but takes two seconds of CPU time in each process and imports torch. Other types need `AutoTokenizer`,
#: because their tokenizer_config.json may name a wrong class.
_TAKEN_AT_THEIR_WORD: Final = frozenset({"bigram", "gpt2", "llama", "qwen3", "qwen3_moe"})
#: Characters that most vocabularies lack; encoding them tests whether the tokenizer has a token for unknown characters.
_UNUSUAL: Final = "a\U000f0000\u0378"
_MOST_TOKENS: Final = 1 << 24
#: Number of a prompt's last tokens that may spell the opening of thinking.
_OPENING_TOKENS: Final = 32
_PLAIN_CLASSES: Final = frozenset({"PreTrainedTokenizerFast", "TokenizersBackend"})
_NO_KWARGS: Final[Mapping[str, Any]] = MappingProxyType({})
#: Exceptions that templates raise for a message of an unexpected shape.
FAILURES: Final = (TypeError, ValueError, ArithmeticError, LookupError, AttributeError)
#: Error message about a model without a chat template.
WITHOUT_TEMPLATE: Final = (
    "{} has no chat template, as a base model may; write one into chat_template.jinja of its directory, such as "
    "{{% for message in messages %}}{{{{ message.content }}}}{{{{ '\\n' }}}}{{% endfor %}}"
)


class ChatTokenizer:
    """A fast tokenizer with a chat template."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast | PlainTokenizer, eos_token_ids: Iterable[int]) -> None:
        self._tokenizer = tokenizer
        self.vocab_size = len(tokenizer)
        """The number of tokens, including added ones."""
        self.eos_token_ids = frozenset(eos_token_ids)
        """The tokens that end a sample: those of generation_config.json or config.json, and the tokenizer's."""

    @classmethod
    def load(cls, path: Path) -> ChatTokenizer:
        """Read the tokenizer of a directory. Raises ModelError if it is unusable or names no end-of-turn token."""
        if not (path / "tokenizer.json").is_file():
            raise ModelError(
                f"expected a tokenizer.json in the model directory {path}, found none; give a local Hugging Face model "
                "directory with a fast tokenizer"
            )
        json_object(path / "tokenizer.json")
        declared = _declared_eos(path)
        with foreign_failures(f"the tokenizer of {path} cannot be used"):
            tokenizer: Any = _read(path)
            own, _, _ = tokenizer.eos_token_id, tokenizer.unk_token_id, len(tokenizer)
            tokenizer.backend_tokenizer.encode(_UNUSUAL, add_special_tokens=False)
        ids = declared | ({own} - {None})
        if not ids:
            raise ModelError(
                f"{path} names no end-of-turn token; set eos_token in tokenizer_config.json or eos_token_id in "
                "generation_config.json"
            )
        return cls(tokenizer, ids)

    def encode_chat(
        self,
        messages: Sequence[Message | ChatMessage],
        template_kwargs: Mapping[str, Any] = _NO_KWARGS,
        tools: Sequence[ToolDefinition] = (),
    ) -> list[int]:
        """Return token ids of the rendered conversation, with the opening of the assistant's turn.

        Control tokens that messages or tools spell become plain text. `template_kwargs` are further variables for the
        template.

        Raises:
            ModelError: the model has no chat template, the template rejects the messages, a name is not allowed in
                `template_kwargs`, or the template changes the text of a message that spells a control token, so that
                the spelling cannot be located in the rendered text.
            UnshownFieldError: the template ignores the tools or a field of a message, or writes calls of the tools in
                no format that is parsed.
        """
        return self._contents.encode_chat(self._chat(messages, template_kwargs, tools))

    def encode_continuation(
        self,
        messages: Sequence[Message | ChatMessage],
        first_new: int,
        token_ids: Sequence[int],
        template_kwargs: Mapping[str, Any] = _NO_KWARGS,
        tools: Sequence[ToolDefinition] = (),
    ) -> list[int]:
        """Return token ids of a conversation whose ids are known up to the answer `messages[first_new - 1]`, inclusive.

        The known ids, `token_ids`, are kept; the tokens that the template writes after the answer are appended
        (`ConversationTail`). If those tokens cannot be separated from the rest, return the result of `encode_chat`.
        Raises the errors of `encode_chat`.
        """
        chat = self._chat(messages, template_kwargs, tools)
        tail = self.tail.encode(chat, first_new, last_id=token_ids[-1])
        return self._contents.encode_chat(chat) if tail is None else [*token_ids, *tail]

    @cached_property
    def tail(self) -> ConversationTail:
        """The encoder of the text that this model's template writes after an answer."""
        style = self.call_style
        return ConversationTail(self._contents, self._render, self._ends, style.turns if style else list)

    @cached_property
    def call_style(self) -> CallStyle | None:
        """How the chat template writes tool calls; None if its calls cannot be parsed back."""
        return find_style(self._render, self._ends.values()) if "tool_calls" in self._template_source else None

    def check_calls(self) -> CallStyle:
        """Return how the chat template writes tool calls. Raises UnshownFieldError if its calls cannot be parsed."""
        self._check_shown("tools", "tools")
        if self.call_style is None:
            name = self._tokenizer.name_or_path or "this model"
            raise UnshownFieldError(
                f"tools: the calls that the chat template of {name} writes cannot be parsed back, so no call would "
                "ever run; serve a model whose template writes calls in a known format "
                f"({', '.join(form.name for form in FORMATS)}), or leave the tools out",
                "tools",
            )
        return self.call_style

    def parse_answer(
        self, text: str, tools: Sequence[ToolDefinition], *, prompt_token_ids: Sequence[int], key: bytes
    ) -> ParsedAnswer:
        """Return an answer's text and its calls of `tools`, with ids by `key`; drafts in its thinking stay text."""
        if self.call_style is None:
            return ParsedAnswer(text)
        opened = opened_by(self.decode(prompt_token_ids[-_OPENING_TOKENS:]))
        openings = openings_in(self._template_source)
        return parsed(text, self.call_style.form, tools, key=key, opened_by=opened, openings=openings)

    def written_call(self, name: str, arguments: Mapping[str, Any]) -> str:
        """Return a call as the model would write it as its answer. Raises UnshownFieldError, as `check_calls` does."""
        return written_call(self.check_calls(), name, arguments, self._render, self._ends.values())

    @cached_property
    def _ends(self) -> Mapping[int, str]:
        decoded = {index: self._tokenizer.backend_tokenizer.id_to_token(index) for index in self.eos_token_ids}
        return {index: text for index, text in decoded.items() if text}

    def _chat(
        self,
        messages: Sequence[Message | ChatMessage],
        template_kwargs: Mapping[str, Any],
        tools: Sequence[ToolDefinition],
    ) -> Chat:
        turns = [self._turn(row, message) for row, message in enumerate(messages)]
        if tools:
            self.check_calls()
        if any("tool_calls" in turn for turn in turns) and self.call_style is not None:
            turns = self.call_style.turns(turns)
        return Chat(turns=turns, tools=[tool.for_template() for tool in tools], also=template_kwargs)

    def _turn(self, row: int, message: Message | ChatMessage) -> Turn:
        """Return message number `row` as the template expects it; an unknown role `developer` becomes `system`."""
        turn: Turn = {"role": message.role, "content": message.content}
        if message.role == "developer" and "developer" not in self._template_source:
            turn["role"] = "system"
        if not isinstance(message, ChatMessage):
            return turn
        if message.tool_calls:
            self._check_shown("tool_calls", f"messages.{row}.tool_calls")
            turn["tool_calls"] = [call.for_template() for call in message.tool_calls]
        if message.reasoning_content:
            self._check_shown("reasoning_content", f"messages.{row}.reasoning_content")
            turn["reasoning_content"] = message.reasoning_content
        if message.tool_call_id is not None:
            turn["tool_call_id"] = message.tool_call_id
        if message.name is not None:
            turn["name"] = message.name
        return turn

    def _check_shown(self, name: str, place: str) -> None:
        if name not in self._template_source:
            raise UnshownFieldError(
                f"{place}: the chat template of this model does not use {name}, so the model would not see it; "
                "serve a model whose template does",
                place,
            )

    @cached_property
    def _template_source(self) -> str:
        template: Any = self._tokenizer.chat_template
        sources = list(template.values()) if isinstance(template, dict) else [template or ""]
        if not all(isinstance(source, str) for source in sources):
            raise ModelError("the chat template is not text; correct chat_template in tokenizer_config.json")
        return "\n".join(sources)

    def encode_request(self, chat: ChatCompletionRequest) -> list[int]:
        """Return the prompt's tokens of a request with text or messages; raises as the other methods do."""
        messages, tools = chat.messages or [], offered_tools(chat)
        if chat.prompt:
            return self.encode_prompt(chat.prompt)
        if chat.continue_token_ids and chat.continue_from:
            known, first_new = chat.continue_token_ids, chat.continue_from
            return self.encode_continuation(messages, first_new, known, chat.chat_template_kwargs, tools)
        return self.encode_chat(messages, chat.chat_template_kwargs, tools)

    def encode_prompt(self, text: str) -> list[int]:
        """Return token ids of `text` as a raw prompt, after any beginning-of-text token; raises like `encode`."""
        special: list[int] = self._tokenizer.backend_tokenizer.encode("", add_special_tokens=True).ids
        return [token_id for token_id in special if token_id not in self.eos_token_ids] + self.encode(text)

    def encode(self, text: str) -> list[int]:
        """Return token ids of `text` as an assistant's content. Raises ModelError if it cannot be encoded."""
        return self._contents.encode_content(text, role="assistant")

    @cached_property
    def _contents(self) -> ContentGuard:
        """Encoder that turns control tokens in contents into plain text; built on first use, since building is slow."""
        tokenizer = self._tokenizer
        backend = tokenizer.backend_tokenizer
        backend.no_truncation()
        backend.no_padding()
        backend.encode_special_tokens = False
        return ContentGuard(
            backend,
            # Empty if the model has no template; then only `encode_content` works.
            template=self._template_source,
            render=self._render,
            ends=self.eos_token_ids,
            unknown=tokenizer.unk_token_id,
        )

    def _render(self, chat: Chat, opens: bool) -> str:
        from jinja2 import TemplateError

        tokenizer, template_kwargs, tools = self._tokenizer, chat.also, list(chat.tools) or None
        signature = inspect.signature(self._whole.apply_chat_template) if template_kwargs else None
        own = {*signature.parameters, *self._whole.special_tokens_map, "messages"} if signature else set()
        if taken := sorted(template_kwargs.keys() & own):
            raise TemplateNameError(
                f"chat_template_kwargs must not set {', '.join(taken)}, which the engine decides; remove it"
            )
        if tokenizer.chat_template is None:
            raise ModelError(WITHOUT_TEMPLATE.format(tokenizer.name_or_path or "the model"))
        try:
            if isinstance(tokenizer, PlainTokenizer) and not template_kwargs:
                text = tokenizer.rendered(chat.turns, opens=opens, tools=tools)
                if text is not None:
                    return text
            given: Any = tools
            whole = self._whole.apply_chat_template(
                list(chat.turns), tools=given, add_generation_prompt=opens, tokenize=False, **template_kwargs
            )
        except (TemplateError, *FAILURES) as error:
            raise ModelError(
                f"the chat template cannot render {len(chat.turns)} messages: {one_line(error)}; change the messages "
                "or the template"
            ) from error
        return str(whole)

    @property
    def _whole(self) -> PreTrainedTokenizerFast:
        return self._tokenizer.whole if isinstance(self._tokenizer, PlainTokenizer) else self._tokenizer

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of `token_ids`, including special tokens."""
        if isinstance(self._tokenizer, PlainTokenizer):
            return self._tokenizer.decode(token_ids)
        return str(
            self._tokenizer.decode(list(token_ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)
        )

    @cached_property
    def bytes_of(self) -> Callable[[int], bytes]:
        """The function from a token's id to its bytes, which may be part of a character."""
        return _byte_reader(self._tokenizer.backend_tokenizer, self.decode)

    def detokenizer(self) -> IncrementalDetokenizer:
        return IncrementalDetokenizer(self.decode)

    def save(self, path: Path) -> None:
        """Write the tokenizer files into the existing directory `path`, with the template in tokenizer_config.json."""
        self._whole.save_pretrained(str(path), save_jinja_files=False)


def offered_tools(chat: ChatCompletionRequest) -> Sequence[ToolDefinition]:
    """Return the tools that the prompt describes: none if the request forbids tool calls."""
    return () if chat.tools is None or chat.tool_choice == "none" else chat.tools


def decoder_of(path: Path) -> Callable[[Sequence[int]], str]:
    """Return a function from token ids to text; if the tokenizer of `path` cannot be loaded, the text lists the ids."""

    @cache
    def decode() -> Callable[[Sequence[int]], str]:
        try:
            return ChatTokenizer.load(path).decode
        except ModelError:
            return lambda token_ids: " ".join(map(str, token_ids))

    return lambda token_ids: decode()(token_ids)


def _read(path: Path) -> PreTrainedTokenizerFast | PlainTokenizer:
    """Read the tokenizer of `path`, without importing transformers where possible; raises transformers' errors."""
    is_plain = entry_of(path / "tokenizer_config.json", "tokenizer_class") in _PLAIN_CLASSES
    is_plain = is_plain and entry_of(path / "config.json", "model_type") in _TAKEN_AT_THEIR_WORD

    def read_whole() -> PreTrainedTokenizerFast:
        import transformers

        reader: Any = transformers.PreTrainedTokenizerFast if is_plain else transformers.AutoTokenizer
        return reader.from_pretrained(str(path), local_files_only=True, trust_remote_code=False)

    return (read_plain(path, read_whole) if is_plain else None) or read_whole()


def entry_of(file: Path, name: str) -> Any:
    """Return an entry of a JSON file of a model directory; None if there is no such entry or file."""
    return json_object(file).get(name) if file.is_file() else None


def _declared_eos(path: Path) -> set[int]:
    for name in ("generation_config.json", "config.json"):
        declared = entry_of(path / name, "eos_token_id")
        if declared is None:
            continue
        ids = declared if isinstance(declared, list) else [declared]
        if not all(isinstance(each, int) and 0 <= each < _MOST_TOKENS for each in ids):
            raise ModelError(f"eos_token_id in {path / name} must be token ids, got {declared!r:.40}; copy it again")
        return set(ids)
    return set()


# --- bytes of a token -------------------------------------------------------------------------------------------------
#
# The bytes of an answer's tokens, joined, are the answer's text in UTF-8, apart from a first space that some decoders
# strip. A decoded token would not do: half a character decodes to U+FFFD, and a leading space may be lost.

_BYTE: Final = re.compile(r"<0x([0-9A-Fa-f]{2})>")
#: Decoders that leave the bytes of a single token as they are.
_NEUTRAL: Final = frozenset({"Fuse", "Strip"})
_KNOWN: Final = _NEUTRAL | {"ByteLevel", "ByteFallback", "Replace", "Metaspace"}


def _byte_reader(backend: Tokenizer, decode: Callable[[Sequence[int]], str]) -> Callable[[int], bytes]:
    """Return a cached function from a token's id to its bytes, by a known decoder, else by the text of `decode`."""
    decoder: Any = {"type": ""} if backend.decoder is None else json.loads(backend.decoder.__getstate__())
    steps = decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
    if any(step["type"] not in _KNOWN or "Regex" in step.get("pattern", {}) for step in steps):
        return cache(lambda token_id: decode([token_id]).encode())

    @cache
    def read(token_id: int) -> bytes:
        piece = backend.id_to_token(token_id)
        if piece is None:
            return decode([token_id]).encode()
        for step in steps:
            match step["type"]:
                case "ByteLevel":  # an added token may be no text of byte-level characters
                    table = _byte_of_char()
                    return bytes(map(table.__getitem__, piece)) if table.keys() >= set(piece) else piece.encode()
                case "ByteFallback" if (byte := _BYTE.fullmatch(piece)) is not None:
                    return bytes.fromhex(byte[1])
                case "Replace":
                    piece = piece.replace(step["pattern"]["String"], step["content"])
                case "Metaspace":
                    piece = piece.replace(step["replacement"], " ")
        return piece.encode()

    return read


@cache
def _byte_of_char() -> dict[str, int]:
    """Return the bytes of byte-level BPE's characters (GPT-2): printable Latin-1, then the others from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(0x100) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + place): byte for place, byte in enumerate(others)}


# --- without transformers ---------------------------------------------------------------------------------------------
#
# Importing transformers takes most of a second of CPU time; numpy and JAX engines need it only for the tokenizer.
# `PlainTokenizer` reads tokenizer.json and the chat template. Ids, texts and renderings equal those of
# `PreTrainedTokenizerFast`, to the character. Directories with settings that `PreTrainedTokenizerFast` does not write
# are not supported. For chats with non-text contents, and after failures, `ChatTokenizer` loads that class and calls
# it (`PlainTokenizer.whole`).

#: The entries of tokenizer_config.json that name a special token, in transformers' order.
_NAMED: Final = tuple(f"{name}_token" for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask"))
#: Entries of tokenizer_config.json that have no effect on ids, texts and renderings.
_WITHOUT_MEANING: Final = frozenset(
    {
        "backend", "chat_template", "clean_up_tokenization_spaces", "is_local", "local_files_only", "model_max_length",
        "padding_side", "tokenizer_class", "truncation_side",
    }
)  # fmt: skip
#: Files in which older versions of transformers kept tokens, and the folder of additional named templates. Directories
#: with any of these are not supported.
_MORE: Final = ("added_tokens.json", "special_tokens_map.json", "additional_chat_templates")
#: Matches names that mean something else in transformers' templates than in plain Jinja.
_OF_ITS_OWN: Final = re.compile(r"\b(end)?generation\b|\bnamespace\b|\bdict\b")
#: Maximum vocabulary size. A larger vocabulary may be Mistral's, whose files have a wrong pre-tokenizer that only
#: transformers corrects.
_MOST_PLAIN_TOKENS: Final = 100_000


class PlainTokenizer:
    """The part of `PreTrainedTokenizerFast` that `ChatTokenizer` uses, without transformers."""

    def __init__(
        self,
        backend: Tokenizer,
        *,
        path: Path,
        chat_template: str | None,
        named: Mapping[str, str],
        read_whole: Callable[[], Any],
    ) -> None:
        self.backend_tokenizer = backend
        self.name_or_path = str(path)
        self.chat_template = chat_template
        self.eos_token_id, self.unk_token_id = (
            backend.token_to_id(named[name]) if name in named else None for name in ("eos_token", "unk_token")
        )
        self._named = dict(named)
        self._read_whole = read_whole

    def __len__(self) -> int:
        return int(self.backend_tokenizer.get_vocab_size())

    @cached_property
    def whole(self) -> Any:
        """The tokenizer that transformers reads from the directory, loaded on first use."""
        return self._read_whole()

    def rendered(
        self, turns: Sequence[Mapping[str, Any]], *, opens: bool, tools: Sequence[Mapping[str, Any]] | None = None
    ) -> str | None:
        """Render messages, with the assistant's opening if `opens`; None if transformers' tokenizer is needed."""
        from jinja2 import TemplateError

        has_texts = turns and all(isinstance(turn["content"], str) for turn in turns)
        if not has_texts or self.chat_template is None or _OF_ITS_OWN.search(self.chat_template):
            return None
        try:
            return compiled(self.chat_template).render(
                messages=[{key: _plain(value) for key, value in turn.items()} for turn in turns],
                tools=tools,
                documents=None,
                add_generation_prompt=opens,
                **self._named,
            )
        except (TemplateError, *FAILURES):
            return None

    def decode(self, token_ids: Sequence[int]) -> str:
        return str(self.backend_tokenizer.decode(list(token_ids), skip_special_tokens=False))


def _plain(value: Any) -> Any:
    """Return a plain `str` for a string, because a template would print an enum member by its name."""
    return str.__str__(value) if isinstance(value, str) else value


def read_plain(path: Path, read_whole: Callable[[], Any]) -> PlainTokenizer | None:
    """Return the tokenizer of `path`; None if transformers is needed to read it, or to explain why it is unreadable."""
    from tokenizers import Tokenizer

    if any((path / name).exists() for name in _MORE) or not (path / "tokenizer_config.json").is_file():
        return None
    try:
        settings = json_object(path / "tokenizer_config.json")
        own = path / "chat_template.jinja"
        template = own.read_text() if own.is_file() else settings.get("chat_template")
        text = (path / "tokenizer.json").read_text()
        special = {token["content"] for token in json.loads(text)["added_tokens"] if token["special"]}
        named = {name: settings[name] for name in _NAMED if settings.get(name) is not None}
        if settings.keys() - {*_NAMED, *_WITHOUT_MEANING} or not special.issuperset(named.values()):
            return None
        with foreign_failures(f"the tokenizer of {path} cannot be used"):
            backend = Tokenizer.from_str(text)
    except (ModelError, OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return None
    if not isinstance(template, str | None) or backend.get_vocab_size() > _MOST_PLAIN_TOKENS:
        return None
    return PlainTokenizer(backend, path=path, chat_template=template, named=named, read_whole=read_whole)


@cache
def compiled(template: str) -> Template:
    """Compile a template like transformers (`utils/chat_template_utils.py`), but without transformers' extensions."""
    from jinja2 import TemplateError, ext
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    def refuse(message: str) -> None:
        raise TemplateError(message)

    world = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[ext.loopcontrols])
    world.filters["tojson"] = lambda value, **options: json.dumps(value, **{"ensure_ascii": False} | options)
    world.globals |= {"raise_exception": refuse, "strftime_now": lambda form: datetime.now().strftime(form)}
    return world.from_string(template)
