"""Small models of several architectures, and micro-batches of different lengths."""

import numpy as np
import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    LlamaConfig,
    MistralConfig,
    Olmo3Config,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

from pipelinerl.rng import generator
from trainer_contract.types import MicroBatch

VOCAB = 48
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
WINDOWS = {"sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"]}
CONFIGS = {
    "qwen2": lambda: Qwen2Config(**SIZES, tie_word_embeddings=True),
    "qwen3": lambda: Qwen3Config(**SIZES, head_dim=8),
    "llama": lambda: LlamaConfig(**SIZES),
    "mistral": lambda: MistralConfig(**SIZES, sliding_window=5),
    "gemma3": lambda: Gemma3TextConfig(**SIZES, head_dim=8, query_pre_attn_scalar=12, pad_token_id=None, **WINDOWS),
    "olmo3": lambda: Olmo3Config(**SIZES, pad_token_id=None, **WINDOWS),
    "qwen3_moe": lambda: Qwen3MoeConfig(
        **SIZES, head_dim=8, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24, norm_topk_prob=True
    ),
    "gpt2": lambda: GPT2Config(vocab_size=VOCAB, n_embd=32, n_layer=2, n_head=4, n_positions=128),
}


@pytest.fixture(scope="session")
def model_path(tmp_path_factory):
    """Map a name to the directory of a random model; its weights are large, so that mistakes show."""

    def make(name):
        path = root / name
        if not path.exists():
            torch.manual_seed(3)
            model = AutoModelForCausalLM.from_config(CONFIGS[name]())
            with torch.no_grad():
                for parameter in model.parameters():
                    if parameter.ndim >= 2:
                        parameter.mul_(5.0)
            model.save_pretrained(path)
        return path

    root = tmp_path_factory.mktemp("models")
    return make


@pytest.fixture
def micro_batch():
    """Return a function that makes a micro-batch of random rollouts; `select` lists those to keep, in order."""

    def make(lengths=(9, 4, 40, 2, 17, 9), *, select=None, seed=0, tempered=True):
        chosen = list(range(len(lengths))) if select is None else select
        rows = [_rollout(lengths[i], seed, i, tempered) for i in chosen]
        columns = {name: np.concatenate([row[name] for row in rows]) for name in rows[0]}
        ids = np.repeat(np.arange(len(chosen)), [lengths[i] for i in chosen]).astype(np.int32)
        return MicroBatch(**columns, segment_ids=ids, num_segments=len(chosen))

    return make


def _rollout(length, seed, index, tempered):
    draw = generator(seed, "rollout", index)
    positions = np.arange(length, dtype=np.int32)
    mask = (positions > 0) & (positions >= min(3, length - 1))

    def inside(values):
        return np.where(mask, values, 0.0).astype(np.float32)

    return {
        "token_ids": draw.integers(0, VOCAB, length).astype(np.int32),
        "position_ids": positions,
        "loss_mask": mask,
        "advantages": inside(draw.normal(size=length)),
        "weights": inside(np.full(length, 0.05)),
        "behavior_logprobs": inside(-np.log(VOCAB) + draw.normal(0, 0.3, length)),
        "temperatures": np.full(length, 0.5 + index / 4 if tempered else 1.0, dtype=np.float32),
    }
