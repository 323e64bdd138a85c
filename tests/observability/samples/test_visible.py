"""Characters that control a terminal or browser are escaped before text is shown; ordinary text is unchanged."""

import unicodedata

import pytest

from pipelinerl.observability.samples import visible


@pytest.mark.parametrize(
    "text", ["plain", "two\nlines\tand a tab", "žluťoučký kůň", "漢字", "שלום", "x² ≤ ½ → ∞", "🙂"]
)
def test_ordinary_text_is_not_escaped(text):
    assert visible(text) == text


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("\x1b[2J", "\\x1b[2J"),
        ("a\rb", "a\\x0db"),
        ("\x9b2J", "\\x9b2J"),
        ("\x00\x7f", "\\x00\\x7f"),
        ("\u202egnorw", "\\u202egnorw"),
        ("a\u200bb\ufeff", "a\\u200bb\\ufeff"),
        ("\u2028", "\\u2028"),
        ("\U000e0041", "\\U000e0041"),
        ("\ud800", "\\ud800"),
    ],
)
def test_invisible_characters_are_escaped_in_shown_text(text, shown):
    assert visible(text) == shown


def test_every_unicode_control_character_is_escaped_in_shown_text():
    everything = "".join(map(chr, range(0x110000)))
    kept = set(visible(everything)) - {"\n", "\t"}
    assert not [hex(ord(c)) for c in kept if unicodedata.category(c)[0] == "C" or unicodedata.bidirectional(c) in
                ("LRE", "RLE", "LRO", "RLO", "PDF", "LRI", "RLI", "FSI", "PDI")]  # fmt: skip
