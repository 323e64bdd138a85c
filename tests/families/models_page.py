"""The page docs/reference/models.md and the README's list of families, made from the records of `survey`."""

import json
import re
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[2]
PAGE: Final = ROOT / "docs" / "reference" / "models.md"
README: Final = ROOT / "README.md"
RECORDS: Final = Path(__file__).with_name("records.json")
COMMAND: Final = "python -m tests.families.survey"

#: Models by which a family is known.
EXAMPLES: Final[Mapping[str, str]] = {
    "llama": "Llama 2 and 3, SmolLM2", "qwen2": "Qwen2, Qwen2.5", "qwen2_moe": "Qwen1.5-MoE", "qwen3": "Qwen3",
    "qwen3_moe": "Qwen3-30B-A3B", "qwen3_next": "Qwen3-Next", "qwen3_5": "Qwen3.5", "qwen3_5_moe": "Qwen3.5-MoE",
    "mistral": "Mistral 7B", "mixtral": "Mixtral", "ministral3": "Ministral 3", "gemma": "Gemma", "gemma2": "Gemma 2",
    "gemma3": "Gemma 3 4B and larger", "gemma3_text": "Gemma 3 1B", "gemma4": "Gemma 4", "phi": "Phi-2",
    "phi3": "Phi-3, Phi-4", "phimoe": "Phi-3.5-MoE", "olmo": "OLMo", "olmo2": "OLMo 2", "olmo3": "OLMo 3",
    "olmoe": "OLMoE", "smollm3": "SmolLM3", "gpt_oss": "gpt-oss", "glm4": "GLM-4", "glm4_moe": "GLM-4.5",
    "glm4_moe_lite": "GLM-4.7-Flash", "glm_moe_dsa": "GLM-5", "deepseek_v2": "DeepSeek-V2",
    "deepseek_v3": "DeepSeek-V3 and R1", "deepseek_v32": "DeepSeek-V3.2", "kimi_linear": "Kimi-Linear",
    "minimax_m2": "MiniMax-M2", "nemotron": "Nemotron-4", "nemotron_h": "Nemotron-H", "granite": "Granite 3",
    "granitemoehybrid": "Granite 4", "falcon": "Falcon", "falcon_h1": "Falcon-H1", "lfm2": "LFM2", "jamba": "Jamba",
    "seed_oss": "Seed-OSS", "hunyuan_v1_dense": "Hunyuan", "ernie4_5": "ERNIE 4.5", "exaone4": "EXAONE 4",
    "apertus": "Apertus", "cohere": "Command R", "cohere2": "Command A", "starcoder2": "StarCoder2", "gpt2": "GPT-2",
    "gpt_neox": "GPT-NeoX, Pythia", "opt": "OPT", "bloom": "BLOOM", "llama4": "Llama 4", "mamba2": "Mamba-2",
    "stablelm": "StableLM", "qwen3_vl": "Qwen3-VL", "mistral3": "Ministral 3 with images", "lfm2_moe": "LFM2-8B-A1B",
    "minicpm3": "MiniCPM3", "falcon_mamba": "Falcon-Mamba",
}  # fmt: skip
#: Families that the README names if every use of `ALL` works, or all but the torch engine.
POPULAR: Final = (
    "llama", "qwen2", "qwen3", "qwen3_moe", "mistral", "mixtral", "gemma3_text", "phi3", "olmo2", "olmoe", "smollm3",
    "glm4_moe", "seed_oss", "ernie4_5", "exaone4", "apertus", "gpt2", "gpt_neox", "gpt_oss", "qwen3_next", "qwen3_5",
    "qwen3_5_moe", "qwen3_vl", "gemma4", "lfm2", "nemotron_h", "glm4_moe_lite", "ministral3", "deepseek_v3", "granite",
    "granitemoehybrid", "llama4",
)  # fmt: skip
ALL: Final = ("trains", "checkpoint", "lora", "serves")
COLUMNS: Final[Mapping[str, str]] = {
    "trains": "trains", "rows": "rows", "checkpoint": "checkpoint", "lora": "LoRA", "serves": "torch engine",
    "bf16": "bf16", "jax": "JAX trainer", "vllm": "vLLM",
}  # fmt: skip
#: Uses that tests of other environments have shown.
ELSEWHERE: Final[Mapping[str, Mapping[str, str]]] = {"qwen3": {"vllm": "yes"}}


@dataclass(frozen=True)
class Records:
    """Verdicts by family and use, and the versions of libraries with which they were measured."""

    versions: Mapping[str, str] = field(default_factory=dict)
    families: Mapping[str, Mapping[str, str]] = field(default_factory=dict)

    @classmethod
    def read(cls):
        return cls(**json.loads(RECORDS.read_text())) if RECORDS.exists() else cls()

    def write(self):
        """Write the records, the page and the README's sentence."""
        RECORDS.write_text(json.dumps({"versions": self.versions, "families": self.families}, indent=1) + "\n")
        PAGE.write_text(page(self))
        README.write_text(
            re.sub(r"^Tested families: .*?\n\n", f"{sentence(self)}\n\n", README.read_text(), flags=re.M | re.S)
        )


def sentence(records):
    """Return the README's paragraph, which names the popular families that work for every use."""
    whole, trained = (
        ", ".join(
            EXAMPLES[name]
            for name in POPULAR
            if all((records.families.get(name, {}).get(use) == "yes") is (use in works) for use in ALL)
        )
        for works in (ALL, ALL[:-1])
    )
    more = f" The torch trainer, but not yet the torch engine: {trained}." if trained else ""
    count = sum(each.get("trains") == "yes" for each in records.families.values())
    text = (
        f"Tested families: {whole}.{more} {count} families train, each seen against transformers "
        "([models](docs/reference/models.md))."
    )
    return textwrap.fill(text, 126, break_long_words=False, break_on_hyphens=False)


def page(records):
    """Return the page's Markdown."""
    versions = ", ".join(f"{name} {number}" for name, number in records.versions.items())
    families = {name: {**its, **ELSEWHERE.get(name, {})} for name, its in records.families.items()}
    rows = [
        f"| `{name}` | {EXAMPLES.get(name, '')} | {' | '.join(cell(its.get(use)) for use in COLUMNS)} |"
        for name, its in sorted(families.items())
    ]
    reasons = [
        f"| `{name}` | {COLUMNS[use]} | {its[use]} |".replace("\n", " ")
        for name, its in sorted(families.items())
        for use in COLUMNS
        if use not in ("jax", "rows") and cell(its.get(use)) in ("no", "**fault**")
    ]
    refused = dict[str, list[str]]()
    for name, its in sorted(families.items()):
        if (verdict := its.get("jax", "yes")) != "yes":
            other = "is not supported by the JAX decoder" in verdict
            reason = "an architecture that the decoder does not have" if other else verdict.partition("config.json ")[2]
            refused.setdefault(reason, []).append(f"`{name}`")
    of_jax = [f"| {', '.join(names)} | {reason} |" for reason, names in refused.items()]
    return f"""# Models

`model_type` in a model's `config.json` is its family. `{COMMAND}` writes this table. It tries one tiny
random model per family, on a CPU in float32 ({versions}). The table says nothing about GPUs, speed or real
weights.

- **trains**: log-probs and the gradient's norm equal transformers'; the optimizer steps.
- **rows**: `packed` is the fast path. A model that mixes tokens outside attention, or masks it in its own way, trains
  as `padded` rows with transformers' own attention: about 1.3 × the time, and shared prompts are computed once per
  answer.
- **checkpoint**: a checkpoint has the model directory's tensors, in name, shape and dtype. transformers computes the
  trainer's log-probs from it. A trainer that resumes computes them, too.
- **LoRA**: adapters take a step; transformers computes the trainer's log-probs from the merged checkpoint.
- **torch engine**: log-probs of sampled tokens equal transformers', also after an update from the trainer.
  DeepSeek-V3.2 and GLM-5 are served in contexts of up to `index_topk` tokens, in which their indexers select every
  token: 2,048 in the published models, 4 in these.
- **bf16**: mean errors of the log-probs of trainer and engine in bf16, as multiples of that of transformers in bf16;
  up to 1.2 is accepted. In mixtures of experts it varies by ± 0.2 between draws.
  "–": transformers does not compute the model in bf16, or without error.
- **JAX trainer**: log-probs equal transformers'.
- **vLLM**: the tests of `make test-vllm` have run it, on a CPU.

Other versions of transformers make these differences (`python -m tests.families.survey --cpu`). 5.24: the engine also
serves `gptj` and `codegen`. 5.17: it does not serve `qwen4_exp_text`, DeepSeek-V3.2 and GLM-5; `lfm3` and
`bailing_hybrid` are unknown; results for `gemma2`, `vaultgemma` and `doge` differ from transformers' own, whose default
attention there leaves out a cap of the scores, or disagrees with its own plain one. A GPU has run some families
([machines](../use/machines.md)).

"no" is a refusal with a clear sentence. "**fault**" is an error or a wrong result. An empty cell was not tried: a
model that does not train has no checkpoint. [Mixtures](../understand/mixtures.md) and [vLLM](../use/vllm.md) say more.

| model_type | for example | {" | ".join(COLUMNS.values())} |
|---|---|{"---|" * len(COLUMNS)}
{chr(10).join(rows)}

## Refusals and faults

| model_type | use | result |
|---|---|---|
{chr(10).join(reasons)}

## Refusals of the JAX decoder

| model_type | reason |
|---|---|
{chr(10).join(of_jax)}
"""


def cell(verdict):
    """Return the table's cell for a verdict; None stands for a use that was not tried."""
    if verdict is None or verdict in ("yes", "packed", "padded", "–") or verdict[0].isdigit():
        return verdict or ""
    return "no" if verdict.startswith("refused") else "**fault**"
