"""Tiny decoders built from scratch: the model of the shipped demonstration, and random ones for tests and benchmarks.

They are ordinary Qwen3 checkpoints with an ordinary fast tokenizer, so code that runs them also runs real models.
Building uses no network and writes no files unless requested; the same seed gives the same weights.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

import numpy as np

from pipelinerl import rng

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerFast

PAD, SYSTEM, USER, ASSISTANT, END, UNKNOWN = "<|pad|>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>", "<|unk|>"
SPECIAL_TOKENS = (PAD, SYSTEM, USER, ASSISTANT, END, UNKNOWN)
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
ALPHABET = "abcdefghijklmnopqrstuvwxyz0123456789 +-*/=.,:?()>\n"
SPELL_BACKWARD_PHRASE = "Spell this word backward (example: sun -> nus): "


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderShape:
    """Sizes of a decoder with tied embeddings. `heads` must divide `hidden`; `kv_heads` must divide `heads`."""

    hidden: int
    layers: int
    heads: int
    intermediate: int
    vocab: int
    kv_heads: int | None = None
    max_positions: int = 64

    def __post_init__(self) -> None:
        """Reject shapes that attention does not support."""
        kv_heads = self.kv_heads or self.heads
        if self.hidden % self.heads or (self.hidden // self.heads) % 2 or self.heads % kv_heads:
            raise ValueError(
                "expected heads to divide hidden into even parts and kv_heads to divide heads; got "
                f"hidden={self.hidden}, heads={self.heads}, kv_heads={kv_heads}; choose e.g. 64, 4 and 2"
            )


class DebugSize(Enum):
    """Random decoders by the size of their float32 weights; the value is the shape."""

    MB_3 = DecoderShape(hidden=128, layers=4, heads=4, kv_heads=2, intermediate=384, vocab=512, max_positions=2048)
    MB_24 = DecoderShape(hidden=320, layers=5, heads=5, kv_heads=5, intermediate=832, vocab=512, max_positions=2048)
    MB_310 = DecoderShape(
        hidden=768, layers=11, heads=12, kv_heads=12, intermediate=2048, vocab=512, max_positions=2048
    )


def random_decoder(shape: DecoderShape | DebugSize, *, seed: int = 0) -> PreTrainedModel:
    """Return a Qwen3 causal LM, float32 on CPU, in eval mode; its weights depend only on (shape, seed)."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    sizes = shape.value if isinstance(shape, DebugSize) else shape
    config = Qwen3Config(
        vocab_size=sizes.vocab,
        hidden_size=sizes.hidden,
        num_hidden_layers=sizes.layers,
        num_attention_heads=sizes.heads,
        num_key_value_heads=sizes.kv_heads or sizes.heads,
        head_dim=sizes.hidden // sizes.heads,
        intermediate_size=sizes.intermediate,
        max_position_embeddings=sizes.max_positions,
        # Small widths need larger initial weights; otherwise the first hundreds of steps only grow them.
        initializer_range=max(0.02, min(0.05, 3.2 / sizes.hidden)),
        tie_word_embeddings=True,
        pad_token_id=SPECIAL_TOKENS.index(PAD),
        eos_token_id=SPECIAL_TOKENS.index(END),
        bos_token_id=None,
    )
    model = Qwen3ForCausalLM(config).float().eval()
    for name, parameter in model.named_parameters():
        if parameter.ndim == 1:  # norms: a Qwen3 has no biases
            values = np.ones(parameter.shape, dtype=np.float32)
        else:
            normal = rng.generator(seed, "tiny_decoder", name).standard_normal(tuple(parameter.shape), dtype=np.float32)
            values = normal * np.float32(config.initializer_range)
        parameter.data.copy_(torch.from_numpy(values))
    return model


def word_tokenizer(texts: Iterable[str], *, vocab: int) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE with `vocab` tokens on `texts`, one token per digit, with the same chat template.

    Every text survives encoding and decoding exactly. The same texts give the same tokens.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=[AddedToken(token, normalized=False, special=True) for token in SPECIAL_TOKENS],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    backend.train_from_iterator(texts, trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token=PAD, eos_token=END, unk_token=UNKNOWN, clean_up_tokenization_spaces=False
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def char_tokenizer(*, phrases: Sequence[str] = (), alphabet: str = ALPHABET) -> PreTrainedTokenizerFast:
    """Return a tokenizer with a token for each character of `alphabet`, each of `phrases`, and each role.

    Text over the alphabet survives encoding and decoding exactly; other characters become `<|unk|>`. Token ids: the
    special tokens first, then the alphabet, then the phrases.
    """
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocab = {token: index for index, token in enumerate((*SPECIAL_TOKENS, *alphabet))}
    backend = Tokenizer(models.WordLevel(vocab, unk_token=UNKNOWN))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex("[\\s\\S]"), "isolated")
    backend.decoder = decoders.Fuse()
    backend.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in SPECIAL_TOKENS])
    backend.add_tokens([AddedToken(phrase, normalized=False, special=False) for phrase in phrases])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token=PAD, eos_token=END, unk_token=UNKNOWN, clean_up_tokenization_spaces=False
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer
