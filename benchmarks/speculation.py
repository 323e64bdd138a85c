"""Compare decoding with and without drafts from the prompt, on answers that repeat it and on free text.

    edit    a source file with one name replaced, after the file itself
    json    records with the same keys
    text    a page of documentation after its beginning

Each answer is real text in tokens of a BPE vocabulary that is trained on this repository. A GPT-2 of 21 million
parameters writes it: its position embeddings hold the text, all its other weights are random. So the engine computes,
samples and verifies as it does with any model, and accepts as often as a sure model's answer repeats itself. An arm
measures the processor seconds of a token on one thread. Target: drafts pay on answers that repeat, and cost at most 5 %
on free text.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch
from tokenizers import ByteLevelBPETokenizer
from transformers import GPT2Config, GPT2LMHeadModel

from benchmarks.measure import Row, paired, report
from pipelinerl.engines.batching.model_runner import Prefill, RowState
from pipelinerl.engines.options import EngineOptions
from pipelinerl.engines.torch.engine import load_runner
from pipelinerl.engines.torch.runner import TorchRunner
from trainer_contract.types import Device

_ROOT: Final = Path(__file__).parents[1]
_VOCAB: Final = 4096
_DRAFT: Final = 4
_ROWS: Final = (1, 16)
_PROMPT: Final = 400
_ANSWER: Final = 200


def texts() -> dict[str, tuple[list[int], list[int]]]:
    """Return the prompt and the answer of each kind, in tokens."""
    files = [*sorted((_ROOT / "docs").rglob("*.md")), *sorted((_ROOT / "pipelinerl" / "engines").rglob("*.py"))]
    tokenizer = ByteLevelBPETokenizer()
    tokenizer.train_from_iterator([file.read_text() for file in files], vocab_size=_VOCAB, show_progress=False)
    source = (_ROOT / "pipelinerl" / "engines" / "torch" / "sampling.py").read_text()
    page = (_ROOT / "docs" / "understand" / "mismatch.md").read_text()
    records = [
        {"name": word, "id": place * 37 % 101, "score": place % 7 / 8, "tags": [word[:3], word[-2:]], "active": True}
        for place, word in enumerate(sorted({word for word in page.split() if word.isalpha() and len(word) > 4}))
    ]
    pieces = {
        "edit": (source, source.replace("temperature", "heat")),
        "json": ("Return the words as records:\n", json.dumps(records, indent=1)),
        "text": (page, ""),
    }
    made = {}
    for kind, (given, wanted) in pieces.items():
        prompt, answer = tokenizer.encode(given).ids, tokenizer.encode(wanted).ids
        answer = answer or prompt[_PROMPT:]
        made[kind] = (prompt[:_PROMPT], answer[:_ANSWER])
    return made


@torch.no_grad()
def save(folder: Path, prompt: list[int], answer: list[int]) -> Path:
    """Write the model that continues `prompt` with `answer` into `folder`."""
    tokens = prompt + answer
    model: Any = GPT2LMHeadModel(
        GPT2Config(vocab_size=_VOCAB, n_embd=512, n_layer=6, n_head=8, n_positions=len(tokens) + 32)
    )
    model.transformer.wpe.weight[: len(tokens) - 1] = 8 * model.transformer.wte.weight[tokens[1:]]
    model.save_pretrained(folder)
    return folder


def decoded(runner: TorchRunner, prompt: list[int], answer: list[int], rows: int, seen: dict[str, float]) -> float:
    """Decode `answer` in `rows` rows; return the processor seconds of a token. `seen` gets the tokens of a pass."""
    prompts = [[row, *prompt[1:]] for row in range(rows)]  # different, so that no row is computed for another
    runner.prefill([Prefill(each[:-1], [row]) for row, each in enumerate(prompts)])
    runner.place(
        [
            RowState(row, prompt[-1], len(prompt) - 1, noise_key=row, temperature=0.0, top_p=1.0, top_k=0)
            for row in range(rows)
        ]
    )
    found: list[list[int]] = [[] for _ in range(rows)]
    passes, start = 0, time.process_time()
    while min(map(len, found)) < len(answer):
        for row, token in enumerate(runner.decode(rows)[0]):
            found[row] += [token, *(each.token_id for each in runner.further.get(row, ()))]
        passes += 1
    seconds = time.process_time() - start
    assert all(each[: len(answer)] == answer for each in found), "the model writes another text"
    runner.release(range(rows))
    seen["tokens per pass"] = len(answer) / passes
    return seconds / (rows * len(answer))


def run(quick: bool = False) -> None:
    """Run the benchmark, print its table and, unless `quick`, write its record."""
    torch.set_num_threads(1)
    arms: dict[str, Callable[[], float]] = {}
    seen: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for kind, (prompt, answer) in texts().items():
            path = save(Path(folder) / kind, prompt, answer)
            for count in _ROWS:
                for draft in (0, _DRAFT):
                    options = EngineOptions(
                        model_path=path,
                        model_id="m",
                        slots=count,
                        max_waiting=0,
                        context_length=len(prompt) + len(answer) + 32,
                        device=Device.CPU,
                        options={"speculate": draft},
                    )
                    name = f"{kind}, {count} rows, {'drafts' if draft else 'plain'}"
                    seen[name] = {}
                    arms[name] = partial(decoded, load_runner(options), prompt, answer, count, seen[name])
        timings = paired(arms, rounds=1 if quick else 3, warmup=0 if quick else 1)
    rows = []
    for name in (name for name in arms if name.endswith("drafts")):
        faster = timings.ratio(name.replace("drafts", "plain"), name)
        target = 0.95 if name.startswith("text") else 1.0
        rows += [
            Row(f"{name.removesuffix(', drafts')}: tokens per pass", round(seen[name]["tokens per pass"], 2)),
            Row("〃 tokens per second; ÷ plain", f"{1 / timings.median(name):,.0f}; {faster}", f">= {target}",
                faster.median >= target),
        ]  # fmt: skip
    report("speculation", rows, {"tokens_per_pass": seen, **timings.as_dict()}, quick=quick)
