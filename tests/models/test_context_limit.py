"""Scaled rotary embeddings: engine and trainer equal transformers up to a limit; longer sequences are rejected."""

from typing import Any

import numpy as np
import pytest
import torch
import transformers as hf
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from pipelinerl.engines.batching.model_runner import Prefill, RowState
from pipelinerl.engines.torch.engine import load_runner
from pipelinerl.engines.torch.forward import ModuleForward
from pipelinerl.errors import ModelError
from pipelinerl.models.context_limit import rotary_limit
from pipelinerl.trainers.torch.trainer import TorchTrainer
from tests.fakes.engine_options import engine_options
from trainer_contract.errors import BatchError
from trainer_contract.types import Device, MicroBatch, TrainerSpec

VOCAB, ORIGINAL, POSITIONS = 48, 32, 64
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "max_position_embeddings": POSITIONS,
    "pad_token_id": 0,
}
#: Settings of every type of rotary embedding that transformers scales, on a head of 8 dimensions.
SCALED: dict[str, dict[str, Any]] = {
    "linear": {},
    "dynamic": {},
    "yarn": {"original_max_position_embeddings": ORIGINAL},
    "llama3": {"original_max_position_embeddings": ORIGINAL, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    "longrope": {
        "original_max_position_embeddings": ORIGINAL,
        "short_factor": [1.0, 1.1, 1.2, 1.3],
        "long_factor": [4.0, 8.0, 16.0, 32.0],
    },
    "proportional": {},
}
#: Lengths of prompts in one batch; 6 tokens are decoded after each.
PROMPTS = (2, 9, 20, ORIGINAL - 6)


def rope(kind):
    return {"rope_type": kind, "rope_theta": 10_000.0, "factor": 2.0, **SCALED[kind]}


def config_of(kind):
    if kind == "longrope":
        settings = {name: value for name, value in rope(kind).items() if name != "factor"}
        return hf.Phi3Config(
            **SIZES, rope_parameters=settings, original_max_position_embeddings=ORIGINAL, sliding_window=None
        )
    return hf.LlamaConfig(**SIZES, rope_parameters=rope(kind))


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    def save(kind):
        path = tmp_path_factory.mktemp(kind)
        torch.manual_seed(5)
        model = hf.AutoModelForCausalLM.from_config(config_of(kind))
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.ndim > 1:
                    parameter.mul_(4)
        model.save_pretrained(path)
        return path

    return save


def texts_of(lengths):
    return [[1 + (7 * row + 5 * i + i * i) % (VOCAB - 1) for i in range(length)] for row, length in enumerate(lengths)]


def batch_of(texts):
    lengths = [len(text) for text in texts]
    positions = np.concatenate([np.arange(length, dtype=np.int32) for length in lengths])
    zeros = np.zeros(len(positions), np.float32)
    return MicroBatch(
        token_ids=np.concatenate(texts).astype(np.int32),
        position_ids=positions,
        segment_ids=np.repeat(np.arange(len(texts), dtype=np.int32), lengths),
        loss_mask=positions > 0,
        advantages=zeros,
        weights=zeros,
        behavior_logprobs=zeros,
        temperatures=np.ones(len(positions), np.float32),
        num_segments=len(texts),
    )


@torch.no_grad()
def reference(model, text):
    tokens = torch.tensor(text)
    logprobs = torch.log_softmax(model(input_ids=tokens[None], use_cache=False).logits[0, :-1], dim=-1)
    return [0.0, *logprobs.gather(1, tokens[1:, None])[:, 0].tolist()]


def trainer_on(path):
    trainer = TorchTrainer()
    trainer.init_worker(TrainerSpec(model_path=path, device=Device.CPU))
    return trainer


@pytest.mark.parametrize("modules", [False, True])
@pytest.mark.parametrize("kind", [each for each in SCALED if each != "proportional"])
def test_engine_and_trainer_equal_transformers_on_texts_of_several_lengths(kind, modules, saved):
    path = saved(kind)
    context = rotary_limit(config_of(kind).to_dict()) or POSITIONS
    runner = load_runner(engine_options(model_path=path, slots=4, context_length=context, device=Device.CPU))
    if modules:
        runner._forward = ModuleForward(runner._model)
    model, trainer = hf.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval(), trainer_on(path)
    prompts = texts_of(PROMPTS)
    for again in range(2):  # the second time, the cache has blocks of the prompts
        texts = [list(prompt) for prompt in prompts]
        runner.prefill([Prefill(prompt[:-1], [row]) for row, prompt in enumerate(prompts)])
        runner.place(
            [
                RowState(row, prompt[-1], len(prompt) - 1, 9 * again + row, temperature=1.0, top_p=1.0, top_k=0)
                for row, prompt in enumerate(prompts)
            ]
        )
        sampled = [[] for _ in prompts]
        for _ in range(6):
            for row, (token, logprob) in enumerate(zip(*runner.decode(len(prompts)), strict=True)):
                texts[row].append(token)
                sampled[row].append(logprob)
        expected = [reference(model, text) for text in texts]
        for own, whole in zip(sampled, expected, strict=True):
            np.testing.assert_allclose(own, whole[-6:], atol=2e-5)
        trained = trainer.forward([batch_of(texts)])[0]
        np.testing.assert_allclose(trained, np.concatenate(expected), atol=2e-5)


@pytest.mark.parametrize("kind", ["longrope", "dynamic"])
def test_sequences_beyond_the_limit_are_rejected_by_engine_and_trainer(kind, saved):
    path, limit = saved(kind), {"longrope": ORIGINAL, "dynamic": POSITIONS}[kind]
    with pytest.raises(ModelError, match=f"context_length must be at most .*{limit}.* got {limit + 1}"):
        load_runner(engine_options(model_path=path, slots=1, context_length=limit + 1, device=Device.CPU))
    trainer = trainer_on(path)
    assert trainer.forward([batch_of(texts_of((3, limit)))])[0].shape == (limit + 3,)
    with pytest.raises(BatchError, match=f"a segment must have at most {limit} tokens, got {limit + 1}"):
        trainer.forward([batch_of(texts_of((3, limit + 1)))])


@pytest.mark.parametrize("kind", sorted(ROPE_INIT_FUNCTIONS))
def test_limit_is_the_length_from_which_transformers_angles_depend_on_the_sequence(kind):
    """A type of rotary embedding that is new in transformers fails here until `SCALED` has it."""
    limit = rotary_limit(config_of(kind).to_dict())
    for longest in (ORIGINAL, ORIGINAL + 1, POSITIONS, POSITIONS + 1):
        tables = []
        for length in (4, longest):
            config = config_of(kind)
            model = hf.AutoModelForCausalLM.from_config(config)
            cos, sin = model.model.rotary_emb(torch.zeros(1, 1, 32), torch.arange(length)[None])
            tables.append(torch.stack((cos[0, :4], sin[0, :4])))
        assert torch.equal(*tables) == (limit is None or longest <= limit), longest


@pytest.mark.parametrize(
    ("table", "limit"),
    [
        ({"rope_scaling": {"type": "longrope"}, "original_max_position_embeddings": 4096}, 4096),
        ({"rope_scaling": {"type": "su"}, "original_max_position_embeddings": 4096}, 4096),
        ({"rope_parameters": {"rope_type": "longrope", "original_max_position_embeddings": 8}}, 8),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}, "max_position_embeddings": 2048}, 2048),
        ({"rope_parameters": {"full": {"rope_type": "default"}, "sliding": {"rope_type": "longrope"}}}, 512),
        ({"rope_scaling": {"type": "yarn", "original_max_position_embeddings": 8}}, None),
        ({"rope_scaling": None}, None),
        ({}, None),
    ],
)
def test_limit_is_read_from_current_and_older_configurations(table, limit):
    assert rotary_limit({"max_position_embeddings": 512, **table}) == limit
