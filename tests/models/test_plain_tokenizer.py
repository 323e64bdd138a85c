"""The plain tokenizer, which does not import transformers, equals transformers' or leaves a directory to it."""

import json
import subprocess
import sys
from shutil import copytree

import pytest
from hypothesis import given, settings, strategies as st
from transformers import PreTrainedTokenizerFast

from pipelinerl.config.sections import MODELS
from pipelinerl.errors import ModelError
from pipelinerl.models.control_tokens import Chat
from pipelinerl.models.tokenizer import ChatTokenizer, read_plain
from pipelinerl.plugins.warmstart.tiny_decoder import CHAT_TEMPLATE, char_tokenizer, word_tokenizer
from pipelinerl.types import Message

TEXTS = ["", "cat", " a  b\n", "1+2=3", "héllo <|end|> wörld", "日本語 👩‍👩‍👧", "<|user|><|assistant|>"]
LOOKS = "{{ unk_token }}{% if documents is none %}{{ [messages, tools] | tojson(indent=1) }}{% endif %}\n x"


def taken(path):
    return read_plain(path, lambda: PreTrainedTokenizerFast.from_pretrained(str(path), local_files_only=True))


def both(path):
    """Return two tokenizers of the same directory: this project's and transformers'."""
    plain = taken(path)
    assert plain is not None
    return ChatTokenizer(plain, {4}), ChatTokenizer(plain.whole, {4})


def answers(tokenizer, turns):
    """Encode the whole chat, and the first message's text; return the tokens of each, or its error message."""
    results = []
    for encode in (lambda: tokenizer.encode_chat(turns), lambda: tokenizer.encode(turns[0].content)):
        try:
            results.append(encode())
        except ModelError as error:
            results.append(str(error))
    return results


@pytest.fixture(scope="module", params=["tiny_rlvr", "tiny_speller", "words", "characters"])
def path(request, tmp_path_factory):
    if (MODELS / request.param).is_dir():
        return MODELS / request.param
    made = word_tokenizer(TEXTS * 3, vocab=300) if request.param == "words" else char_tokenizer(phrases=("cat",))
    folder = tmp_path_factory.mktemp(request.param)
    made.save_pretrained(str(folder))  # this also writes the chat template, to a separate file
    return folder


def rewrite(path, **changes):
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_plain_tokenizer_gives_the_same_ids_texts_and_errors_as_transformers(path):
    ours, theirs = both(path)
    assert (ours.vocab_size, ours._tokenizer.chat_template) == (theirs.vocab_size, theirs._tokenizer.chat_template)
    for name in ("eos_token_id", "unk_token_id", "name_or_path"):
        assert getattr(ours._tokenizer, name) == getattr(theirs._tokenizer, name)

    @settings(max_examples=25, database=None)
    @given(st.lists(st.text() | st.sampled_from(TEXTS), min_size=1, max_size=3), st.randoms(use_true_random=False))
    def same(contents, random):
        turns = [Message(random.choice(["system", "user", "assistant"]), content) for content in contents]
        drawn = [random.randrange(theirs.vocab_size) for _ in range(9)]
        assert ours.decode(drawn) == theirs.decode(drawn)
        assert answers(ours, turns) == answers(theirs, turns)

    same()


@pytest.mark.parametrize("template", [LOOKS, "{% generation %}a{% endgeneration %}", "{{ dict(a=1) }}", "{{ 1 / 0 }}"])
def test_chat_template_has_the_same_functions_and_variables_as_in_transformers(path, template, tmp_path):
    copied = copytree(path, tmp_path / "model")
    (copied / "chat_template.jinja").write_text(template)
    turns = [{"role": "user", "content": "é<a>'"}]
    for chat in (Chat(turns=turns), Chat(turns=turns, tools=[{"type": "function", "function": {"name": "é<a>"}}])):
        results = []
        for tokenizer in both(copied):
            try:
                results.append(tokenizer._render(chat, True))
            except ModelError as error:
                results.append(str(error))
        assert results[0] == results[1] and results[0]


def test_plain_tokenizer_leaves_template_variables_and_saving_to_transformers(path, tmp_path):
    ours, theirs = both(path)
    turns = [Message("user", "a")]
    assert ours.encode_chat(turns, {"thinking": True}) == theirs.encode_chat(turns, {"thinking": True})
    with pytest.raises(ModelError, match="must not set unk_token"):
        ours.encode_chat(turns, {"unk_token": "b"})
    for name, tokenizer in (("ours", ours), ("theirs", theirs)):
        (tmp_path / name).mkdir()
        tokenizer.save(tmp_path / name)
    for file in (tmp_path / "theirs").iterdir():
        assert (tmp_path / "ours" / file.name).read_bytes() == file.read_bytes()


@pytest.mark.parametrize(
    ("file", "changes"),
    [
        ("tokenizer_config.json", {"extra_special_tokens": ["<|a|>"]}),
        ("tokenizer_config.json", {"eos_token": "a token that is not there"}),
        ("tokenizer_config.json", {"eos_token": {"content": "<|end|>", "__type": "AddedToken"}}),
        ("tokenizer_config.json", {"chat_template": {"default": CHAT_TEMPLATE}}),
        ("tokenizer_config.json", {"fast_tokenizer_files": ["tokenizer.4.json"]}),
        ("tokenizer.json", {"added_tokens": []}),
        ("special_tokens_map.json", {}),
        ("added_tokens.json", {}),
    ],
)
def test_plain_tokenizer_leaves_directories_with_unsupported_settings_to_transformers(file, changes, tmp_path):
    copied = copytree(MODELS / "tiny_rlvr", tmp_path / "model")
    assert taken(copied) is not None
    (copied / file).exists() or (copied / file).write_text("{}")
    rewrite(copied / file, **changes)
    assert taken(copied) is None


def test_plain_tokenizer_imports_neither_transformers_nor_torch():
    code = (
        "import sys; from pathlib import Path; from pipelinerl.types import Message\n"
        "from pipelinerl.models.tokenizer import ChatTokenizer\n"
        f"tokenizer = ChatTokenizer.load(Path({str(MODELS / 'tiny_rlvr')!r}))\n"
        "tokenizer.decode(tokenizer.encode_chat([Message('user', 'a')]))\n"
        "assert not {'transformers', 'torch'} & sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
