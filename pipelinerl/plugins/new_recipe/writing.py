"""`pipelinerl new`: a recipe and a reward for a user's model and data file, ready for `check` and `run`.

Every value follows from the model's size, the lengths of prompts and answers, and the presence of an accelerator. The
recipe states the reason for each.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final

import msgspec
import typer

from pipelinerl.data.files.field_map import FieldMap, value_of
from pipelinerl.data.files.rows import ArrowRows, FirstRows, JsonRows, suffix_of
from pipelinerl.data.files.source import open_files
from pipelinerl.data.source import SourceRequest, Split
from pipelinerl.errors import RecipeError, UserError
from pipelinerl.models.chat_template import check_chat_template
from pipelinerl.models.checkpoint import check_directory, model_dtype
from pipelinerl.models.directory_files import text_config
from pipelinerl.models.model_shape import read_shape
from pipelinerl.models.tokenizer import ChatTokenizer
from pipelinerl.system.machine import has_accelerator

_PROMPTS: Final = ("prompt", "messages", "question", "problem", "instruction", "query", "input")
_ANSWERS: Final = (
    *("answer", "solution", "ground_truth", "target", "label", "output", "response", "completion"),
    "reward_model.ground_truth",
)
_HEAD: Final = FirstRows(rows=512, bytes=2**24)
#: Learning rates of AdamW when all weights are trained: (largest model in millions of parameters, rate).
_RATES: Final = ((200, 2e-5), (700, 1e-5), (2000, 5e-6), (10_000, 2e-6))
_SMALLEST_RATE: Final = 1e-6
#: The variable with which chat templates (Qwen3's and others) turn reasoning off, and the recipe's line that sets it.
_NO_THINKING: Final = {"enable_thinking": False}
_NO_THINKING_LINE: Final = (
    "chat_template_kwargs = { enable_thinking = false }  # true needs max_tokens of 1024 or more\n"
)
_TEMPLATE: Final = Path(__file__).with_name("new_recipe.toml.txt")
_REWARDS: Final = Path(__file__).with_name("new_rewards.py.txt")


@dataclass(frozen=True, slots=True, kw_only=True)
class Lengths:
    """Lengths in tokens: the longest prompt and reference answer, and the limits on an answer and on a sequence.

    `thinks` is True for a model that reasons and whose chat template can turn this off; no length includes reasoning.
    """

    prompt: int
    answer: int
    max_tokens: int
    context: int
    thinks: bool


def new(
    directory: Annotated[Path, typer.Argument(help="Directory to create for the recipe and its rewards.")],
    model: Annotated[Path, typer.Option(help="A local Hugging Face model directory.")],
    data: Annotated[
        Path, typer.Option(help="Rows with a prompt and an answer: JSON lines, JSON, CSV, Parquet, Arrow.")
    ],
    prompt_field: Annotated[str | None, typer.Option(help="Field with the prompt (default: detected by name).")] = None,
    answer_field: Annotated[str | None, typer.Option(help="Field with the answer (default: by name).")] = None,
) -> None:
    """Write a recipe and a reward function for your model and data file, ready to check and run."""
    path = write_new(directory, model=model, data=data, prompt_field=prompt_field, answer_field=answer_field)
    typer.echo(f"{path} and {path.with_name('rewards.py').name} are written; next: pipelinerl check {path}")


def write_new(directory: Path, *, model: Path, data: Path, prompt_field: str | None, answer_field: str | None) -> Path:
    """Write `recipe.toml` and `rewards.py` into a new directory; return the recipe's path, or raise `UserError`."""
    model, data = Path(model).expanduser(), Path(data).expanduser()
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise UserError(f"{directory} exists and is not empty; give a new directory")
    check_directory(model)
    check_chat_template(model)
    if not data.is_file():
        raise UserError(
            f"--data must be a file of JSON lines, JSON, CSV, Parquet or Arrow, got {data}, which is "
            f"{'a folder' if data.is_dir() else 'missing'}; other layouts: docs/start/data.md"
        )
    rows = _first_rows(data)
    if not rows:
        raise UserError(f"{data} has no rows; each row needs a prompt and an answer")
    prompt = _chosen("prompt", prompt_field, _PROMPTS, rows, data)
    is_conversation = prompt == "messages"
    first = rows[0][prompt]
    last = first[-1] if isinstance(first, list) and first else None
    is_answered = isinstance(last, dict) and last.get("role") == "assistant"
    usual = (*_ANSWERS, prompt) if is_answered else _ANSWERS
    fields = FieldMap(
        prompt_field="" if is_conversation else prompt,
        messages_field=prompt if is_conversation else "",
        answer_field=_chosen("answer", answer_field, usual, rows, data),
    )
    lengths, held_out = _lengths(model, fields, rows, data), _held_out(fields, data)
    directory.mkdir(parents=True, exist_ok=True)
    recipe = directory / "recipe.toml"
    (directory / "rewards.py").write_text(_REWARDS.read_text(), encoding="utf-8")
    recipe.write_text(_filled(directory, model, data, fields, lengths, held_out), encoding="utf-8")
    return recipe


def _first_rows(data: Path) -> list[dict[str, Any]]:
    kind = suffix_of(data)
    if kind in (".parquet", ".arrow"):
        read: Any = ArrowRows.read(data, None, _HEAD)
    elif kind in (".jsonl", ".ndjson", ".json", ".csv"):
        read = JsonRows.read(data, _HEAD)
    else:
        raise UserError(f"--data must end in .jsonl, .ndjson, .json, .csv, .parquet or .arrow, got {data.name}")
    return [dict(read.row(number)) for number in range(len(read))]


def _chosen(what: str, named: str | None, usual: Sequence[str], rows: Sequence[dict[str, Any]], data: Path) -> str:
    there = list(rows[0])
    if named is not None:
        if named.partition(".")[0] not in there:
            raise UserError(f"--{what}-field: {data} has no field {named!r}; it has {', '.join(there)}")
        return named
    field = next((name for name in usual if value_of(rows[0], name) is not None), None)
    if field is None:
        raise UserError(f"no field of {data} looks like the {what}; set --{what}-field to one of {', '.join(there)}")
    return field


def _lengths(model: Path, fields: FieldMap, rows: Sequence[dict[str, Any]], data: Path) -> Lengths:
    tokenizer = ChatTokenizer.load(model)
    chats, answers = [], []
    for number, row in enumerate(rows):
        try:
            draft = fields.draft(row)
        except RecipeError as error:
            raise UserError(f"{data} row {number}: {error}; fix the row, or name another field") from None
        chats.append(draft.messages)
        answers.append(len(tokenizer.encode(draft.ground_truth)))
    prompts = [tokenizer.encode_chat(messages, _NO_THINKING) for messages in chats]
    thinks = prompts[0] != tokenizer.encode_chat(chats[0])
    longest, answer = max(map(len, prompts)), max(answers)
    twice_longest = min(1024, max(32, 16 * -(-2 * answer // 16)))
    positions = text_config(model).get("max_position_embeddings") or 1 << 20
    room = int(positions) - longest
    if room < answer + 1:
        raise UserError(
            f"the model has {positions} positions; the longest prompt of {data} takes {longest} and its answer "
            f"{answer}; use shorter rows, or a model with more positions"
        )
    max_tokens = min(twice_longest, room)
    context = min(int(positions), 16 * -(-(longest + max_tokens + 1) // 16))
    max_tokens = min(max_tokens, context - 1)
    return Lengths(prompt=longest, answer=answer, max_tokens=max_tokens, context=context, thinks=thinks)


def _held_out(fields: FieldMap, data: Path) -> int:
    prompt = fields.messages_field or fields.prompt_field
    parameters = {
        "path": str(data),
        "messages_field" if fields.messages_field else "prompt_field": prompt,
        "answer_field": fields.answer_field,
    }
    request = SourceRequest(domain="mine", split=Split.HELD_OUT, seed=0, parameters=parameters)
    try:
        return len(open_files(request))
    except RecipeError as error:
        sentence = str(error).removeprefix(f"{request.where}: ")
        raise UserError(
            f"{data}: {sentence} (a tenth of the different prompts is held out for evaluations: provide at least 50)"
        ) from None


def _filled(directory: Path, model: Path, data: Path, fields: FieldMap, lengths: Lengths, held_out: int) -> str:
    millions, on_cpu = read_shape(model).count / 1e6, not has_accelerator()
    rate = next((rate for most, rate in _RATES if millions <= most), _SMALLEST_RATE)
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", directory.absolute().name).lstrip("._-")[:64] or "mine"
    values = {
        "name": _text(name),
        "domain": _text(re.sub(r"[^A-Za-z0-9_-]+", "_", data.stem).strip("_-")[:64] or "mine"),
        "model": _text(str(model.absolute())),
        "data": _text(os.path.relpath(data.absolute(), directory.absolute())),
        "prompt_key": "messages_field" if fields.messages_field else "prompt_field",
        "prompt_field": _text(fields.messages_field or fields.prompt_field),
        "answer_field": _text(fields.answer_field),
        "millions": f"{millions:,.0f}" if millions >= 1 else f"{millions:.2g}",
        "dtype": model_dtype(model).value,
        "rate": f"{rate:g}".replace("e-0", "e-"),
        "longest_prompt": str(lengths.prompt),
        "longest_answer": str(lengths.answer),
        "max_tokens": str(lengths.max_tokens),
        "context": str(lengths.context),
        "groups": "4" if on_cpu else "16",
        "rollouts": "32" if on_cpu else "128",
        "slots": "32" if on_cpu else "128",
        "mode": "on_policy" if on_cpu else "auto",
        "thinking": _NO_THINKING_LINE if lengths.thinks else "",
        "problems": str(min(64, held_out)),
        "threads": str(len(os.sched_getaffinity(0)) if on_cpu else 1),
    }
    return re.sub(r"@(\w+)@", lambda place: values[place[1]], _TEMPLATE.read_text(encoding="utf-8"))


def _text(value: str) -> str:
    # JSON strings are valid TOML strings.
    return msgspec.json.encode(value).decode()
