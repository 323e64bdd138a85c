"""The bytes of a text's tokens, joined, are the text's bytes, whatever part of a character a token holds."""

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from tests.fakes.tool_model import tool_tokenizer
from tests.models.test_control_tokens import CHATML, chat, guarded, with_template

TEXT = "The café <think> costs 3 €, 日本 😀\n\ttoo"


def byte_fallback():
    """Return a tokenizer like Llama 2's: pieces of SentencePiece, and a token for each byte of all other characters."""
    pieces = ["<unk>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *"▁cehostT,3", "▁c"]
    backend = Tokenizer(models.BPE({piece: at for at, piece in enumerate(pieces)}, [("▁", "c")], byte_fallback=True))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never", split=False)
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens([AddedToken("</s>", normalized=False)])
    return with_template(backend, CHATML, eos_token="</s>")


@pytest.mark.parametrize(
    "tokenizer",
    [guarded(tool_tokenizer()), chat("chatml"), guarded(byte_fallback())],
    ids=["tool", "chatml", "fallback"],
)
def test_joined_bytes_of_tokens_are_the_bytes_of_the_text(tokenizer):
    ids = tokenizer.encode(TEXT)
    spelled = [tokenizer.bytes_of(token_id) for token_id in ids]
    assert b"".join(spelled) == TEXT.encode()
    assert not all(_is_text(each) for each in spelled), "no token holds part of a character"


def test_control_token_has_the_bytes_of_its_name():
    tokenizer = chat("chatml")
    (end,) = tokenizer.eos_token_ids
    assert tokenizer.bytes_of(end) == b"<|im_end|>"


def test_token_of_another_decoder_has_the_bytes_of_its_text():
    tokenizer = chat("tiny")
    for token_id in range(tokenizer.vocab_size):
        assert tokenizer.bytes_of(token_id).decode() == tokenizer.decode([token_id])


def _is_text(spelled):
    try:
        spelled.decode()
    except UnicodeDecodeError:
        return False
    return True
