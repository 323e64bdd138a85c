"""Message contents never become control tokens; chats without control tokens as text are encoded as by transformers."""

from functools import cache
from itertools import chain

import pytest
from hypothesis import given, settings, strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from pipelinerl.errors import ModelError
from pipelinerl.models.tokenizer import ChatTokenizer
from pipelinerl.plugins.warmstart.tiny_decoder import SPECIAL_TOKENS, SPELL_BACKWARD_PHRASE, char_tokenizer
from pipelinerl.types import Message

CHATML = (
    "{%- for m in messages %}{{- '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"
    "{#- <think> <tool_response> #}"
)
#: A chat template that trims message contents and begins with the bos token, like Llama 3's.
TRIMMING = (
    "{{- bos_token }}{%- for m in messages %}{{- '<|start_header_id|>' + m.role + '<|end_header_id|>\n\n'"
    " + m.content | trim + '<|eot_id|>' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{%- endif %}"
)
CHATML_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
LLAMA_TOKENS = ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|eom_id|>")
INNER = ("<think>", "</think>", "<tool_response>")
LEARNED = (
    "user\nassistant\nsystem\n the end of <|text|> <| im start |> think tool eot_id header\n\n hello there, 1 + 2 = 3. "
    "How are you? <b>bold</b> |> <| __init__ endoftext begin im_start im_end"
)


def byte_level(template, special, end, *plain):
    """Return a byte-level BPE tokenizer whose tokens may span spaces, newlines and brackets."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=420, initial_alphabet=alphabet, show_progress=False)
    backend.train_from_iterator([LEARNED] * 3, trainer)
    backend.add_special_tokens([AddedToken(token, normalized=False) for token in special])
    backend.add_tokens([AddedToken(token, normalized=False) for token in plain])
    return with_template(backend, template, eos_token=end, bos_token=special[0])


def with_template(backend, template, **tokens):
    made = PreTrainedTokenizerFast(tokenizer_object=backend, clean_up_tokenization_spaces=False, **tokens)
    made.chat_template = template
    return made


def unigram(template=CHATML):
    """Return a unigram tokenizer like SentencePiece's: its vocabulary has control tokens, texts begin with a blank."""
    letters = [(char, -5.0) for char in "abcdefghijklmnopqrstuvwxyz0123456789 <>|_/.,+=\n▁ABC"]
    pieces = [("<unk>", 0.0), ("<|im_start|>", 0.0), ("<|im_end|>", 0.0), *letters, ("▁a", -3.0), ("<|", -4.0)]
    backend = Tokenizer(models.Unigram(pieces, unk_id=0))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    backend.decoder = decoders.Metaspace()
    backend.add_special_tokens([AddedToken(token, normalized=False) for token in ("<unk>", *CHATML_TOKENS[1:])])
    return with_template(backend, template, eos_token="<|im_end|>", unk_token="<unk>")


@cache
def raw(name):
    made = {
        "tiny": lambda: char_tokenizer(phrases=(SPELL_BACKWARD_PHRASE,)),
        "chatml": lambda: byte_level(CHATML, CHATML_TOKENS, "<|im_end|>", *INNER),
        "llama": lambda: byte_level(TRIMMING, LLAMA_TOKENS, "<|eot_id|>"),
        "unigram": unigram,
    }
    return made[name]()


def guarded(tokenizer):
    return ChatTokenizer(tokenizer, {tokenizer.eos_token_id})


@cache
def chat(name):
    return guarded(raw(name))


NAMES = ("tiny", "chatml", "llama", "unigram")
CONTROL = {"tiny": SPECIAL_TOKENS, "chatml": CHATML_TOKENS, "llama": LLAMA_TOKENS, "unigram": CHATML_TOKENS[1:]}


def own(tokenizer, messages):
    """Return the token ids to which transformers encodes the chat with the tokenizer's chat template."""
    turns = [{"role": message.role, "content": message.content} for message in messages]
    rendered = tokenizer.apply_chat_template(turns, add_generation_prompt=True, tokenize=True, return_dict=False)
    assert isinstance(rendered, list)
    return rendered


def structure(name, ids):
    """Return the control tokens among `ids`, except the one for unknown characters."""
    tokens = raw(name).convert_ids_to_tokens(ids)
    return [token for token in tokens if token in CONTROL[name] and token != raw(name).unk_token]


ROLES = st.sampled_from(["system", "user", "assistant"])
WORDS = st.sampled_from(
    ["ab", " a", "\n", "<", "|", ">", "<|", "|>", "1 + 2 = 3", " <b>x</b>", "é", "日本", "user\n", "▁"]
)


@st.composite
def chats(draw, *words):
    """Draw one to four messages whose contents are sequences of fragments from WORDS and `words`."""
    pieces = st.one_of(WORDS, st.sampled_from(words)) if words else WORDS
    contents = st.lists(pieces, min_size=1, max_size=6).map("".join)
    turns = draw(st.lists(st.tuples(ROLES, contents), min_size=1, max_size=4))
    return [Message(role, content) for role, content in turns]


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_message_contents_never_become_control_tokens_and_other_chats_are_encoded_as_by_transformers(name, data):
    messages = data.draw(chats(*CONTROL[name]))
    ids = chat(name).encode_chat(messages)
    plain = [Message(message.role, "a") for message in messages]
    assert structure(name, ids) == structure(name, own(raw(name), plain))
    spelt = any(token in message.content for message in messages for token in CONTROL[name])
    if not spelt:
        assert ids == own(raw(name), messages)
    # A control token that was split into several tokens decodes to the same text, if the tokenizer can represent it.
    if name in ("chatml", "llama"):
        assert chat(name).decode(ids) == chat(name).decode(own(raw(name), messages))


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_message_that_contains_a_control_token_as_text_does_not_change_the_encoding_of_other_messages(name, data):
    before, after = data.draw(chats()), data.draw(chats())
    spelt = [Message("user", data.draw(st.sampled_from(CONTROL[name]))), *after]
    ids, theirs = chat(name).encode_chat([*before, *spelt]), own(raw(name), [*before, *spelt])
    start = own(raw(name), [*before, Message("user", "a")])
    agree = next(at for at, (one, two) in enumerate(zip(theirs, start, strict=False)) if one != two)
    assert ids[:agree] == theirs[:agree]
    alone = len(own(raw(name), after))
    shared = alone - 2  # the number of tokens of `after` without the two that open its first turn
    assert ids[len(ids) - shared :] == theirs[len(theirs) - shared :]


def test_control_token_written_as_text_is_split_into_ordinary_tokens_as_by_the_tokenizer():
    content = "ab <|im_end|> cd\n"
    split = raw("chatml").encode(f"user\n{content}", add_special_tokens=False, split_special_tokens=True)
    start, end = (raw("chatml").convert_tokens_to_ids(token) for token in ("<|im_start|>", "<|im_end|>"))
    tail = raw("chatml").encode("\n", add_special_tokens=False)
    tail += [start, *raw("chatml").encode("assistant\n", add_special_tokens=False)]
    assert chat("chatml").encode_chat([Message("user", content)]) == [start, *split, end, *tail]


def test_only_system_and_assistant_messages_may_contain_control_tokens_such_as_think():
    think = raw("chatml").convert_tokens_to_ids("<think>")
    for role, may in (("system", True), ("assistant", True), ("user", False), ("tool", False)):
        messages = [Message("user", "hi"), Message(role, "so <think> it")]
        assert (think in chat("chatml").encode_chat(messages)) is may, role
        if may:
            assert chat("chatml").encode_chat(messages) == own(raw("chatml"), messages)
    # In an assistant's content, <think> stays a control token, even if the content also has <|im_end|>, which does not.
    ids = chat("chatml").encode_chat([Message("assistant", "<think>a<|im_end|>b"), Message("user", "<think>")])
    assert ids.count(think) == 1
    assert structure("chatml", ids).count("<|im_end|>") == 2


def test_added_tokens_not_used_by_the_template_are_ordinary_vocabulary():
    phrase = raw("tiny").convert_tokens_to_ids(SPELL_BACKWARD_PHRASE)
    for content in (SPELL_BACKWARD_PHRASE + "cat", SPELL_BACKWARD_PHRASE + "<|end|>cat"):
        assert phrase in chat("tiny").encode_chat([Message("user", content)])


def test_message_contents_cannot_contain_an_end_token_that_is_not_marked_as_special():
    tokenizer = byte_level("{{ messages[0].content }}", CHATML_TOKENS[:1], "<|endoftext|>", "<|stop|>")
    stop = tokenizer.convert_tokens_to_ids("<|stop|>")
    assert stop in guarded(tokenizer).encode_chat([Message("user", "a<|stop|>")])
    assert stop not in ChatTokenizer(tokenizer, {stop}).encode_chat([Message("user", "a<|stop|>")])


def test_message_contents_cannot_contain_the_tokens_that_begin_a_turn_even_if_not_marked_as_special():
    tokenizer = byte_level(CHATML, CHATML_TOKENS[:1], "<|endoftext|>", *CHATML_TOKENS[1:], *INNER)
    start, think = tokenizer.convert_tokens_to_ids(["<|im_start|>", "<think>"])
    ids = guarded(tokenizer).encode_chat([Message("assistant", "<think>a<|im_start|>user\n")])
    assert ids.count(start) == 2 and ids.count(think) == 1


def test_encoding_an_answers_text_gives_no_control_token():
    for name in NAMES:
        for token in CONTROL[name]:
            assert structure(name, chat(name).encode(f"a{token}b")) == []
        assert chat(name).encode("a b") == raw(name).encode("a b", add_special_tokens=False)


# --- templates that change contents ------------------------------------------------------------------------------


def refitted(template):
    tokenizer = byte_level(template, CHATML_TOKENS, "<|im_end|>")
    return tokenizer, guarded(tokenizer)


OPENED = "<|im_start|>user\n{{ %s }}<|im_end|>"


@pytest.mark.parametrize(
    ("change", "content", "shown"),
    [
        ("messages[0].content | tojson", 'a"<|im_end|>\n', '"a\\"<|im_end|>\\n"'),
        ("messages[0].content | trim", "  <|im_end|> b ", "<|im_end|> b"),
        ("messages[0].content + messages[0].content", "<|im_end|>", "<|im_end|><|im_end|>"),
        ("messages[0].content[:9]", "<|im_end|>", "<|im_end|"),
        ("messages[0].content | upper", "a<|im_end|>", "A<|IM_END|>"),
        ("messages[0].content | length", "<|im_end|>", "10"),
        ("'x' if messages | length > 5 else messages[0].content", "<|im_start|>b", "<|im_start|>b"),
    ],
)
def test_control_token_written_as_text_is_tracked_through_template_filters(change, content, shown):
    tokenizer, made = refitted(OPENED % change)
    ids = made.encode_chat([Message("user", content)])
    assert tokenizer.convert_ids_to_tokens([ids[0], ids[-1]]) == ["<|im_start|>", "<|im_end|>"]
    assert sum(token in CHATML_TOKENS for token in tokenizer.convert_ids_to_tokens(ids)) == 2
    assert made.decode(ids) == f"<|im_start|>user\n{shown}<|im_end|>"


def test_error_names_the_text_with_a_control_token_that_cannot_be_tracked_through_the_template():
    tokenizer, made = refitted(OPENED % "'x' if '<|' in messages[0].content else messages[0].content")
    for content in ("a <| b", "ab"):
        assert made.encode_chat([Message("user", content)]) == own(tokenizer, [Message("user", content)])
    with pytest.raises(ModelError, match=r"^messages\.0\.content spells a control token .*; leave the spelling out$"):
        made.encode_chat([Message("user", "<|im_end|>")])


@pytest.mark.parametrize(
    ("change", "contents"),
    [
        ("messages[0].content | lower", ["<|IM_END|>"]),
        ("messages[0].content | replace('\n', '')", ["<|im\n_end|>"]),
        ("messages[0].content + messages[1].content", ["a<|im_", "end|>b"]),
    ],
)
def test_control_token_that_the_template_assembles_from_contents_stays_text(change, contents):
    tokenizer, made = refitted(OPENED % change)
    messages = [Message("user", content) for content in contents]
    ends = [
        sum(token == "<|im_end|>" for token in tokenizer.convert_ids_to_tokens(ids))
        for ids in (own(tokenizer, messages), made.encode_chat(messages))
    ]
    assert ends == [2, 1]
    assert made.decode(made.encode_chat(messages)) == made.decode(own(tokenizer, messages))


def test_control_token_that_the_tokenizers_normalizer_produces_from_contents_stays_text():
    backend = Tokenizer(models.BPE())
    backend.normalizer = normalizers.NFKC()
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=300, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    backend.train_from_iterator([LEARNED], trainer)
    backend.add_special_tokens([AddedToken(token, normalized=True) for token in CHATML_TOKENS])
    tokenizer = with_template(backend, CHATML, eos_token="<|im_end|>")
    messages = [Message("user", "a＜|im_end|＞b")]
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert own(tokenizer, messages).count(end) == 2
    assert guarded(tokenizer).encode_chat(messages).count(end) == 1


def test_private_use_characters_in_contents_never_become_control_tokens():
    everything = "".join(map(chr, chain(range(0xF0000, 0xF0010), range(0x100000, 0x100010))))
    assert chat("chatml").encode_chat([Message("user", everything)]) == own(
        raw("chatml"), [Message("user", everything)]
    )
    with pytest.raises(ModelError, match="private characters"):
        chat("chatml").encode_chat([Message("user", everything + "<|im_end|>")])


SWITCHED = (
    "{%- for m in messages %}{{- '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}"
    "{%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\n\n</think>\n\n' }}{%- endif %}"
    "{%- if note is defined %}{{- note }}{%- endif %}{%- endif %}"
)


@cache
def switched():
    return guarded(byte_level(SWITCHED, CHATML_TOKENS, "<|im_end|>", *INNER))


@pytest.mark.parametrize("content", ["hello", "a<|im_end|>b", "<think>"])
def test_chat_template_kwargs_are_passed_to_the_template(content):
    """The template works like Qwen3's: with enable_thinking false, the answer begins after an empty thought."""
    messages = [Message("user", content)]
    plain = switched().encode_chat(messages)
    assert switched().encode_chat(messages, {"enable_thinking": True, "unknown": 1}) == plain
    without = switched().encode_chat(messages, {"enable_thinking": False})
    assert without[: len(plain)] == plain
    assert switched().decode(without[len(plain) :]) == "<think>\n\n</think>\n\n"
    assert switched().encode_chat(messages) == plain, "nothing of it stays"


@pytest.mark.parametrize(
    "name", ["chat_template", "add_generation_prompt", "tokenize", "messages", "eos_token", "tools"]
)
def test_chat_template_kwargs_that_the_engine_sets_are_rejected(name):
    with pytest.raises(ModelError, match=f"chat_template_kwargs must not set {name}"):
        switched().encode_chat([Message("user", "a")], {name: "x"})


def test_chat_template_kwargs_cannot_contain_control_tokens():
    assert switched().decode(switched().encode_chat([Message("user", "a")], {"note": "now"})).endswith("assistant\nnow")
    with pytest.raises(ModelError, match=r"chat_template_kwargs\.note spells a control token"):
        switched().encode_chat([Message("user", "a")], {"note": "<|im_end|>"})
