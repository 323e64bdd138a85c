"""Model directories, tokenizers and the warm start (supervised training of a small model), on real files."""

import json

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from inference_contract.schemas import ChatMessage
from pipelinerl.config.recipe import MODELS
from pipelinerl.data.problems import Split, open_source
from pipelinerl.errors import ModelError
from pipelinerl.models import tokenizer
from pipelinerl.models.checkpoint import check_directory, load_model, save_model, vocab_size
from pipelinerl.models.tokenizer import ChatTokenizer, decoder_of
from pipelinerl.plugins.warmstart.tiny_decoder import (
    CHAT_TEMPLATE,
    SPECIAL_TOKENS,
    DecoderShape,
    Demonstrations,
    accuracies,
    char_tokenizer,
    random_decoder,
)
from pipelinerl.types import Message

SHAPE = DecoderShape(hidden=32, layers=1, heads=2, intermediate=48, vocab=64)
SHIPPED = MODELS / "tiny_speller"


def chat_tokenizer(**options):
    raw = char_tokenizer(**options)
    return ChatTokenizer(raw, {raw.eos_token_id})


@pytest.fixture
def directory(tmp_path):
    save_model(random_decoder(SHAPE, seed=1), chat_tokenizer(), tmp_path / "model")
    return tmp_path / "model"


def rewrite(file, **changes):
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


def byte_level():
    """Return a byte-level tokenizer, as large models have, in which a token may be only a part of a character."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=260, initial_alphabet=alphabet, special_tokens=["<|end|>"], show_progress=False
    )
    backend.train_from_iterator(["hello there"], trainer)
    return ChatTokenizer(PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|end|>"), {0})


def test_saved_model_loads_with_the_same_weights_and_answers(directory):
    original, loaded = random_decoder(SHAPE, seed=1), load_model(directory)
    ids = torch.tensor([[2, 8, 9, 4, 3]])
    with torch.no_grad():
        assert torch.equal(original(ids).logits, loaded(ids).logits)
    assert {p.name for p in directory.parent.iterdir()} == {"model"}
    assert all(p.stat().st_mode & 0o044 == 0o044 for p in directory.iterdir())


def test_saving_a_model_never_overwrites_a_directory(directory):
    with pytest.raises(ModelError, match="exists already"):
        save_model(random_decoder(SHAPE), chat_tokenizer(), directory)


def test_error_for_an_unsupported_tokenizer_names_the_command_that_converts_it(directory):
    (directory / "tokenizer.json").rename(directory / "vocab.json")
    with pytest.raises(ModelError, match=r"lacks tokenizer.json, .*AutoTokenizer.from"):
        check_directory(directory)


def test_error_for_an_unknown_architecture_suggests_another_model_or_transformers_version(directory):
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, "model_type": "zorkmid"}))
    with pytest.raises(ModelError, match=r"`zorkmid` .* is out of date; use another model, or a transformers"):
        load_model(directory)


@pytest.mark.parametrize(
    ("file", "content", "sentence"),
    [
        (
            "adapter_config.json",
            {"base_model_name_or_path": "a/b"},
            "holds a LoRA adapter of a/b; merge it into its model",
        ),
        (
            "config.json",
            {"quantization_config": {"quant_method": "gptq"}},
            r"keeps its weights quantised \(gptq\), which",
        ),
        ("config.json", {"model_type": "clip"}, "holds a clip, which is no causal language model; use one that writes"),
    ],
)
def test_error_for_an_untrainable_model_gives_the_reason(directory, file, content, sentence):
    before = json.loads((directory / file).read_text()) if (directory / file).exists() else {}
    (directory / file).write_text(json.dumps(before | content))
    with pytest.raises(ModelError, match=f"{directory} {sentence}"):
        load_model(directory)


def test_error_names_a_missing_model_directory(tmp_path):
    for load in (load_model, ChatTokenizer.load):
        with pytest.raises(ModelError, match="nowhere"):
            load(tmp_path / "nowhere")


@pytest.mark.parametrize("declared", sorted(tokenizer._PLAIN_CLASSES))
@pytest.mark.parametrize("model_type", sorted(tokenizer._TAKEN_AT_THEIR_WORD))
def test_tokenizer_declared_with_a_generic_class_equals_that_loaded_by_auto_tokenizer(directory, model_type, declared):
    (directory / "config.json").write_text(json.dumps({"model_type": model_type}))
    rewrite(directory / "tokenizer_config.json", tokenizer_class=declared)
    taken, by_auto_class = tokenizer._read(directory).whole, AutoTokenizer.from_pretrained(str(directory))
    assert type(taken) is PreTrainedTokenizerFast is type(by_auto_class)
    assert taken.backend_tokenizer.to_str() == by_auto_class.backend_tokenizer.to_str()
    assert taken.special_tokens_map == by_auto_class.special_tokens_map
    assert taken.chat_template == by_auto_class.chat_template


@pytest.mark.parametrize(
    ("model_type", "declared"),
    [
        *((kind, "PreTrainedTokenizerFast") for kind in ("qwen2", "phi3", "mistral", "of_a_fork")),
        ("gpt2", "Qwen2Tokenizer"),
    ],
)
def test_tokenizer_of_another_model_type_or_class_is_loaded_by_auto_tokenizer(directory, model_type, declared):
    rewrite(directory / "config.json", model_type=model_type)
    rewrite(directory / "tokenizer_config.json", tokenizer_class=declared)
    assert not isinstance(tokenizer._read(directory), tokenizer.PlainTokenizer)


def test_chat_template_of_the_small_models_marks_roles_and_begins_the_assistants_answer(directory):
    tokenizer = ChatTokenizer.load(directory)
    for kind in (Message, lambda role, content: ChatMessage(role=role, content=content)):
        ids = tokenizer.encode_chat([kind("system", "s"), kind("user", "u")])
        assert tokenizer.decode(ids) == "<|system|>s<|end|><|user|>u<|end|><|assistant|>"
    assert tokenizer.eos_token_ids == {SPECIAL_TOKENS.index("<|end|>")}
    assert json.loads((directory / "tokenizer_config.json").read_text())["chat_template"] == CHAT_TEMPLATE


def test_end_tokens_include_those_in_the_models_generation_config(directory):
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": [0, 5]}))
    assert ChatTokenizer.load(directory).eos_token_ids == {0, 4, 5}


@pytest.mark.parametrize("text", ["héllo wörld", "日本語 text", "👩‍👩‍👧 family", "a\u00e9\n\n  b ", ""])
def test_incremental_detokenizer_returns_only_whole_characters_that_together_form_the_text(text):
    tokenizer = byte_level()
    detokenizer = tokenizer.detokenizer()
    parts = [detokenizer.push(i) for i in tokenizer.encode(text)] + [detokenizer.flush()]
    assert "".join(parts) == text
    assert not any("\N{REPLACEMENT CHARACTER}" in part for part in parts)
    assert len(text.encode()) == len(text) or "" in parts[:-1]  # parts of a character give ""


def test_incremental_detokenizer_returns_an_incomplete_character_only_at_the_end():
    tokenizer = byte_level()
    detokenizer = tokenizer.detokenizer()
    parts = [detokenizer.push(i) for i in tokenizer.encode("a日")[:-1]]
    assert "".join(parts) == "a"
    assert detokenizer.flush() == "\N{REPLACEMENT CHARACTER}"
    assert detokenizer.flush() == ""


def test_incremental_detokenizer_does_not_hold_back_invalid_bytes_forever():
    tokenizer = byte_level()
    bad = tokenizer.encode("日")[1]  # the token of a UTF-8 continuation byte, which alone is invalid
    detokenizer = tokenizer.detokenizer()
    assert any(detokenizer.push(bad) for _ in range(40))


def test_weights_of_a_random_decoder_depend_only_on_its_shape_and_seed():
    first, again, other = (random_decoder(SHAPE, seed=s).state_dict() for s in (3, 3, 4))
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert any(not torch.equal(first[name], other[name]) for name in first)
    scale = float(first["model.layers.0.mlp.up_proj.weight"].std())
    assert 0.03 < scale < 0.07


@pytest.mark.parametrize("wrong", [{"heads": 3}, {"heads": 32}, {"kv_heads": 4}])
def test_impossible_decoder_shapes_are_rejected(wrong):
    with pytest.raises(ValueError, match="expected heads to divide"):
        DecoderShape(**{"hidden": 32, "layers": 1, "heads": 2, "intermediate": 48, "vocab": 64, **wrong})


def test_accuracy_computed_in_one_forward_pass_equals_that_of_token_by_token_generation():
    model, tokenizer = load_model(SHIPPED), ChatTokenizer.load(SHIPPED)
    source = open_source(
        "reasoning_gym:spell_backward",
        domain="d",
        split=Split.VALIDATION,
        seed=0,
        parameters={"min_word_len": 3, "max_word_len": 4, "answer_pattern": "[a-z]+"},
    )
    right = 0
    problems = [source.problem(i) for i in range(60)]
    for problem in problems:
        prompt = torch.tensor([tokenizer.encode_chat(problem.messages)])
        output = model.generate(prompt, attention_mask=torch.ones_like(prompt), do_sample=False, max_new_tokens=8)
        right += tokenizer.decode(output[0, prompt.shape[1] :].tolist()) == problem.ground_truth + "<|end|>"
    each = []
    for problem in problems:
        prompt, answer = tokenizer.encode_chat(problem.messages), [*tokenizer.encode(problem.ground_truth), 4]
        labels = torch.tensor([[-100] * len(prompt) + answer])
        each.append(accuracies(model, Demonstrations(torch.tensor([prompt + answer]), labels)))
    assert sum(greedy for greedy, _ in each) == right
    assert 0 < right < 60
    assert all(0.0 <= sampled <= 1.0 for _, sampled in each)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"vocab_size": 7}, 7),
        ({"text_config": {"vocab_size": 9}}, 9),
        ({}, None),
        ([], None),
        ({"text_config": None, "vocab_size": 7}, 7),
    ],
)
def test_vocab_size_is_read_from_config_json(config, expected, tmp_path):
    assert vocab_size(tmp_path) is None
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert vocab_size(tmp_path) == expected


def test_decoding_for_display_shows_special_tokens_or_token_ids_if_there_is_no_tokenizer(tmp_path):
    tokenizer = ChatTokenizer.load(SHIPPED)
    ids = tokenizer.encode_chat([Message("user", "spell it")])
    assert decoder_of(SHIPPED)(ids) == tokenizer.decode(ids) == "<|user|>spell it<|end|><|assistant|>"
    assert decoder_of(tmp_path)([3, 1, 2]) == "3 1 2"
