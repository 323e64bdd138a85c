"""Hardware tables: TOML files with the time of each operation; docs/understand/simulation.md shows every key."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Final, final

import msgspec

from pipelinerl.errors import UserError
from pipelinerl.simulation.hardware import (
    Contention,
    ControlTimes,
    EngineTimes,
    Hardware,
    Prices,
    TrainerTimes,
    UpdateTimes,
)
from pipelinerl.simulation.lengths import FixedLengths, HeavyTailedLengths, LengthLaw

_SECTIONS: Final[Mapping[str, type[Any]]] = {
    "engine": EngineTimes,
    "trainer": TrainerTimes,
    "update": UpdateTimes,
    "control": ControlTimes,
    "contention": Contention,
    "prices": Prices,
}


@final
@dataclass(frozen=True, slots=True)
class HardwareTable:
    """Times of a hardware; `lengths` has the format of `--lengths`, and is empty if the table has none."""

    hardware: Hardware
    lengths: str = ""
    prompt_tokens: int = 0


def read_table(path: Path) -> HardwareTable:
    """Read a hardware table from a file.

    Raises:
        UserError: it cannot be read, or a key or value of it is wrong.
    """
    try:
        table = tomllib.loads(path.read_text())
    except (OSError, tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"the hardware table {path} cannot be read: {error}") from None
    answers = table.pop("answers", {})
    if unknown := sorted(set(table) - set(_SECTIONS)):
        raise UserError(f"{path}: unknown section {unknown[0]}; there are {', '.join((*_SECTIONS, 'answers'))}")
    if missing := [name for name in ("engine", "trainer") if name not in table]:
        raise UserError(f"{path}: the section {missing[0]} must be given")
    sections = {name: _section(path, name, table[name]) for name in table}
    lengths, prompt_tokens = answers.get("lengths", ""), answers.get("prompt_tokens", 0)
    if (
        not isinstance(lengths, str)
        or not isinstance(prompt_tokens, int)
        or set(answers) - {"lengths", "prompt_tokens"}
    ):
        raise UserError(f"{path}: answers has lengths (text, as --lengths) and prompt_tokens (a whole number) only")
    return HardwareTable(Hardware(**sections), lengths, prompt_tokens)


def parse_lengths(text: str, *, most: int) -> LengthLaw:
    """Parse `fixed:TOKENS` or `heavy:MEDIAN,SIGMA`; no answer has more than `most` tokens.

    Raises:
        UserError: it is neither.
    """
    kind, _, numbers = text.partition(":")
    try:
        match kind, [float(number) for number in numbers.split(",")]:
            case "fixed", [tokens] if tokens >= 1:
                return FixedLengths(min(int(tokens), most))
            case "heavy", [median, sigma] if median > 0 and sigma >= 0:
                return HeavyTailedLengths(median, sigma, most)
    except ValueError:
        pass
    raise UserError(f"lengths are fixed:TOKENS or heavy:MEDIAN,SIGMA, such as heavy:400,0.9; got {text!r}")


def _section(path: Path, name: str, values: Any) -> Any:
    known = [field.name for field in fields(_SECTIONS[name])]
    if not isinstance(values, dict) or set(values) - set(known):
        raise UserError(f"{path}: {name} must be a table with {', '.join(known)} only, got {values!r}")
    if negative := [key for key, value in values.items() if isinstance(value, int | float) and value < 0]:
        raise UserError(f"{path}: {name}.{negative[0]} must not be negative, got {values[negative[0]]!r}")
    try:
        return msgspec.convert(values, _SECTIONS[name])
    except msgspec.ValidationError as error:
        raise UserError(f"{path}: {name}: {error}") from None
