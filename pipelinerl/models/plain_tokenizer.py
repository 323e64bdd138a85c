"""`PlainTokenizer`: a tokenizer from tokenizer.json and a chat template, without `transformers`.

Importing transformers takes most of a second of CPU time, and numpy and JAX engines need it for nothing else. Ids,
texts and renderings equal those of `PreTrainedTokenizerFast`, to the character. A directory with settings beyond those
that class itself writes is not supported. Chats with non-text contents, and failures, are left to that class (`whole`),
which is loaded on demand.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, final

from pipelinerl.errors import ModelError
from pipelinerl.models.directory_files import foreign_failures, json_object

if TYPE_CHECKING:
    from jinja2 import Template
    from tokenizers import Tokenizer

#: The tokens that have a name, in transformers' order.
_NAMED: Final = tuple(f"{name}_token" for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask"))
#: Other entries of tokenizer_config.json, which do not affect ids, texts and renderings.
_WITHOUT_MEANING: Final = frozenset(
    {
        "backend", "chat_template", "clean_up_tokenization_spaces", "is_local", "local_files_only", "model_max_length",
        "padding_side", "tokenizer_class", "truncation_side",
    }
)  # fmt: skip
#: Additional files in which older versions kept tokens, and a folder of templates by name.
_MORE: Final = ("added_tokens.json", "special_tokens_map.json", "additional_chat_templates")
#: Names that transformers gives templates in a form of its own.
_OF_ITS_OWN: Final = re.compile(r"\b(end)?generation\b|\bnamespace\b|\bdict\b")
#: Larger vocabularies may be Mistral's, whose pre-tokenizer transformers repairs.
_MOST_TOKENS: Final = 100_000


@final
class PlainTokenizer:
    """The part of `PreTrainedTokenizerFast` that `ChatTokenizer` uses."""

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
        """Return the number of tokens, including added ones."""
        return int(self.backend_tokenizer.get_vocab_size())

    @cached_property
    def whole(self) -> Any:
        """The tokenizer that transformers reads from the directory, loaded on first use."""
        return self._read_whole()

    def get_chat_template(self) -> str:
        """Return the template; raises ValueError without one."""
        if self.chat_template is None:
            raise ValueError("there is no chat template")
        return self.chat_template

    def rendered(
        self, turns: Sequence[Mapping[str, Any]], *, opens: bool, tools: Sequence[Mapping[str, Any]] | None = None
    ) -> str:
        """Render messages; `opens` adds the opening of the assistant's turn. Raises as `whole` does."""
        from jinja2 import TemplateError

        plain = turns and all(isinstance(turn["content"], str) for turn in turns)
        if plain and self.chat_template is not None and not _OF_ITS_OWN.search(self.chat_template):
            try:
                return self._template.render(
                    messages=[{key: _plain(value) for key, value in turn.items()} for turn in turns],
                    tools=tools,
                    documents=None,
                    add_generation_prompt=opens,
                    **self._named,
                )
            except (TemplateError, TypeError, ValueError, ArithmeticError, LookupError, AttributeError):
                pass  # `whole` fails too, with transformers' message
        messages: Any = [dict(turn) for turn in turns]
        offered: Any = None if tools is None else list(tools)
        return str(self.whole.apply_chat_template(messages, tools=offered, add_generation_prompt=opens, tokenize=False))

    @cached_property
    def _template(self) -> Template:
        return compiled(self.get_chat_template())

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of `token_ids`, including special tokens."""
        return str(self.backend_tokenizer.decode(list(token_ids), skip_special_tokens=False))


def _plain(value: Any) -> Any:
    """Return a plain string for a subclass of `str`; a template would print an enum member otherwise."""
    return str.__str__(value) if isinstance(value, str) else value


def read_plain(path: Path, read_whole: Callable[[], Any]) -> PlainTokenizer | None:
    """Return the tokenizer of the directory `path`, or None if only `read_whole` can read it or report its error."""
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
    if not isinstance(template, str | None) or backend.get_vocab_size() > _MOST_TOKENS:
        return None
    return PlainTokenizer(backend, path=path, chat_template=template, named=named, read_whole=read_whole)


def compiled(template: str) -> Template:
    """Compile a template as `transformers` does (`utils/chat_template_utils.py`), without its own extensions."""
    from jinja2 import TemplateError, ext
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    def refuse(message: str) -> None:
        raise TemplateError(message)

    world = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[ext.loopcontrols])
    world.filters["tojson"] = lambda value, **options: json.dumps(value, **{"ensure_ascii": False} | options)
    world.globals |= {"raise_exception": refuse, "strftime_now": lambda form: datetime.now().strftime(form)}
    return world.from_string(template)
