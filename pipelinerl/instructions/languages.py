"""Language detection by script and, for languages that share their script, by `py3langid`.

py3langid (Barbaresi; the model of Lui and Baldwin 2012) chooses only among the languages with the script of the
required one. It is an extra, `pip install 'pipelinerl[languages]'`, and takes seconds to load. Without it, languages
that share a script are rejected, never guessed. A text without letters matches no language.
"""

from __future__ import annotations

import importlib.util
from functools import cache
from typing import TYPE_CHECKING, Final, NamedTuple

from pipelinerl.instructions.text import script_shares

if TYPE_CHECKING:
    from py3langid.langid import LanguageIdentifier

#: The minimum share of letters in the language's scripts. It is below 1, since names and terms may be foreign.
_MOSTLY: Final = 0.7
_LIBRARY: Final = "py3langid"


class Language(NamedTuple):
    """A language by name, with its scripts. A text of the language contains the first script; the others may be
    absent.
    """

    name: str
    scripts: tuple[str, ...]


LANGUAGES: Final = {
    "ar": Language("Arabic", ("ARABIC",)), "bg": Language("Bulgarian", ("CYRILLIC",)),
    "bn": Language("Bengali", ("BENGALI",)), "cs": Language("Czech", ("LATIN",)),
    "da": Language("Danish", ("LATIN",)), "de": Language("German", ("LATIN",)),
    "el": Language("Greek", ("GREEK",)), "en": Language("English", ("LATIN",)),
    "es": Language("Spanish", ("LATIN",)), "fa": Language("Persian", ("ARABIC",)),
    "fi": Language("Finnish", ("LATIN",)), "fr": Language("French", ("LATIN",)),
    "gu": Language("Gujarati", ("GUJARATI",)), "he": Language("Hebrew", ("HEBREW",)),
    "hi": Language("Hindi", ("DEVANAGARI",)), "hu": Language("Hungarian", ("LATIN",)),
    "id": Language("Indonesian", ("LATIN",)), "it": Language("Italian", ("LATIN",)),
    "ja": Language("Japanese", ("HIRAGANA", "KATAKANA", "CJK")), "kn": Language("Kannada", ("KANNADA",)),
    "ko": Language("Korean", ("HANGUL",)), "ml": Language("Malayalam", ("MALAYALAM",)),
    "mr": Language("Marathi", ("DEVANAGARI",)), "ne": Language("Nepali", ("DEVANAGARI",)),
    "nl": Language("Dutch", ("LATIN",)), "no": Language("Norwegian", ("LATIN",)),
    "pa": Language("Punjabi", ("GURMUKHI",)), "pl": Language("Polish", ("LATIN",)),
    "pt": Language("Portuguese", ("LATIN",)), "ro": Language("Romanian", ("LATIN",)),
    "ru": Language("Russian", ("CYRILLIC",)), "sv": Language("Swedish", ("LATIN",)),
    "sw": Language("Swahili", ("LATIN",)), "ta": Language("Tamil", ("TAMIL",)),
    "te": Language("Telugu", ("TELUGU",)), "th": Language("Thai", ("THAI",)),
    "tr": Language("Turkish", ("LATIN",)), "uk": Language("Ukrainian", ("CYRILLIC",)),
    "ur": Language("Urdu", ("ARABIC",)), "vi": Language("Vietnamese", ("LATIN",)),
    "zh": Language("Chinese", ("CJK",)),
}  # fmt: skip


def check(code: str) -> None:
    """Raise `ValueError` for a language that cannot be detected here; the message names the remedy."""
    if code not in LANGUAGES:
        raise ValueError(f"language must be one of {', '.join(LANGUAGES)}, got {code!r}")
    if is_slow(code) and importlib.util.find_spec(_LIBRARY) is None:
        raise ValueError(
            f"language {code!r} shares its script with others and can be detected only by {_LIBRARY}, which is not "
            "installed; pip install 'pipelinerl[languages]'"
        )


def is_in(text: str, code: str) -> bool:
    """Return whether the text is in the language `code`, which must have passed `check`."""
    scripts, shares = LANGUAGES[code].scripts, script_shares(text)
    if not shares.get(scripts[0]) or sum(shares.get(script, 0.0) for script in scripts) < _MOSTLY:
        return False
    if code == "zh" and shares.get("HIRAGANA", 0.0):
        return False
    rivals = _rivals(code)
    if len(rivals) == 1:
        return True
    return next(found for found, _ in _identifier().rank(text) if found in rivals) == code


def is_slow(code: str) -> bool:
    """Return whether detecting this language needs the library, which takes seconds to load."""
    return len(_rivals(code)) > 1


def preload() -> None:
    """Load the library now, if it is installed."""
    if importlib.util.find_spec(_LIBRARY) is not None:
        _identifier()


def _rivals(code: str) -> tuple[str, ...]:
    """Return the languages that share the first script of `code`, including `code` itself."""
    script = LANGUAGES[code].scripts[0]
    return tuple(other for other, language in LANGUAGES.items() if language.scripts[0] == script)


@cache
def _identifier() -> LanguageIdentifier:
    from py3langid.langid import MODEL_FILE, LanguageIdentifier

    return LanguageIdentifier.from_model_file(MODEL_FILE)
