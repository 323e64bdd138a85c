"""Quantised (integer) linear layers give the results of a slow reference, which multiplies rounded floats."""

import numpy as np
import pytest
import torch
import transformers as hf
from torch import nn
from torch.nn.functional import linear

from pipelinerl.engines.torch.forward import ModuleForward, load_for_decoding
from pipelinerl.engines.torch.quantized import QuantizedLinear, quantize
from pipelinerl.engines.torch.runner import TorchRunner
from pipelinerl.enums import WeightFormat
from pipelinerl.errors import ModelError
from pipelinerl.plugins.warmstart.tiny_decoder import DecoderShape, random_decoder
from tests.fakes.engine_options import engine_options
from tests.fakes.torch_rows import Row, bytes_of, decode, start
from trainer_contract.types import Device, WeightDType

VOCAB, CONTEXT, STEPS = 50, 64, 12
SHAPE = DecoderShape(hidden=32, layers=2, heads=4, kv_heads=2, intermediate=48, vocab=VOCAB, max_positions=CONTEXT)
PROMPTS = [[7, 8, 9], [11, 3], [40, 41, 42, 43, 44]]
QUANTIZED = [WeightFormat.INT8, WeightFormat.INT4]


def _save(path, *, seed, dtype=torch.float32):
    """Save a random model with larger weights than at initialisation, so that its layers matter."""
    model = random_decoder(SHAPE, seed=seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(3)
    model.to(dtype).save_pretrained(path)
    return path


@pytest.fixture(scope="session")
def path(tmp_path_factory):
    return _save(tmp_path_factory.mktemp("quantized") / "a", seed=1)


@pytest.fixture(scope="session")
def other(tmp_path_factory):
    return _save(tmp_path_factory.mktemp("quantized") / "b", seed=2)


def _runner(path, weights, *, modules=False, dtype=WeightDType.FLOAT32, device=Device.CPU):
    model = load_for_decoding(path, dtype=dtype, device=torch.device(device))
    runner = TorchRunner(model, engine_options(slots=4, context_length=CONTEXT, weights=weights))
    if modules:
        runner._forward = ModuleForward(model)
    return runner


def _sampled(runner):
    """Start all prompts in new rows; return their sampled tokens and log-probs [STEPS, rows]."""
    rows = [Row(prompt, noise_key=key) for key, prompt in enumerate(PROMPTS)]
    start(runner, rows)
    decode(runner, rows, STEPS)
    return np.array([row.sampled for row in rows]).T, np.array([row.logprobs for row in rows]).T


def _rescored(model, tokens):
    """Return the log-probs [STEPS, rows] that a transformers model gives to `tokens`, from one forward pass per row."""
    columns = []
    for prompt, sampled in zip(PROMPTS, tokens.T.tolist(), strict=True):
        with torch.no_grad():
            logp = model(torch.tensor([prompt + sampled])).logits[0].float().log_softmax(-1)
        columns.append(logp[len(prompt) - 1 : -1].gather(1, torch.tensor(sampled)[:, None])[:, 0].numpy())
    return np.stack(columns, axis=1)


def _rounded(x, levels):
    """Return `x` in float64, rounded to the values that quantisation can represent: the reference for `quantize`."""
    steps = x.double().abs().amax(-1, keepdim=True) / levels
    return (x.double() / steps).round() * steps


def _rounding_model(path, weights):
    """Return transformers' model with linear layers, except the output layer, that multiply rounded floats."""
    model = hf.AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager")
    levels = {WeightFormat.INT8: 127, WeightFormat.INT4: 7}[weights]
    for module in model.model.modules():
        if isinstance(module, nn.Linear):
            weight = _rounded(module.weight.detach(), levels)
            bias = None if module.bias is None else module.bias.detach().double()

            def forward(x, weight=weight, bias=bias):
                return linear(_rounded(x, 127), weight, bias).float()

            module.forward = forward
    return model


def test_quantized_values_and_step_sizes_match_precomputed_values():
    values, steps = quantize(torch.tensor([[1.0, -4.0, 2.0], [0.0, 0.0, 0.0], [0.5, 127.0, -63.4]]), 127)
    # Values halfway between two integers round to the even one.
    assert values.tolist() == [[32, -127, 64], [0, 0, 0], [0, 127, -63]]
    assert steps[0].item() == pytest.approx(4 / 127)
    assert (values[1] * steps[1]).tolist() == [0.0, 0.0, 0.0]
    assert quantize(torch.tensor([[1.0, -4.0, 1.5]]), 7)[0].tolist() == [[2, -7, 3]]


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_quantized_layer_gives_nonfinite_output_for_a_row_with_nan_or_infinity(bad):
    layer = QuantizedLinear(*_layer(torch.eye(2)))
    y = layer(torch.tensor([[1.0, bad], [1.0, 2.0]]))
    assert not torch.isfinite(y[0]).any()
    assert torch.isfinite(y[1]).all()


def _layer(weight):
    values, step = quantize(weight, 127)
    return values, step[:, 0], None


def test_quantized_layer_computes_each_row_independently_of_the_batch():
    generator = torch.Generator().manual_seed(0)
    layer = QuantizedLinear(*_layer(torch.randn(48, 32, generator=generator)))
    x = torch.randn(5, 7, 32, generator=generator)
    whole = layer(x)
    assert whole.shape == (5, 7, 48)
    for row in range(5):
        assert torch.equal(layer(x[row, 3:4]), whole[row, 3:4])


@pytest.mark.parametrize("weights", QUANTIZED)
def test_logprobs_of_quantized_decoding_are_those_of_the_rounded_model(path, weights, device):
    """The engine may round a value to a neighbouring step; this changes few log-probs, by less than quantisation."""
    tokens, logprobs = _sampled(_runner(path, weights, device=device))
    native = _rescored(hf.AutoModelForCausalLM.from_pretrained(path), tokens)
    difference = np.abs(logprobs - _rescored(_rounding_model(path, weights), tokens))
    mismatch = np.abs(logprobs - native)
    assert np.median(difference) < 2e-5
    assert difference.max() < mismatch.max() / 4
    low, high = {WeightFormat.INT8: (1e-3, 0.1), WeightFormat.INT4: (0.05, 1.0)}[weights]
    assert low < mismatch.mean() < high


@pytest.mark.parametrize("weights", QUANTIZED)
def test_both_forward_implementations_of_a_quantized_model_agree(path, weights):
    straight, by_modules = (_sampled(_runner(path, weights, modules=modules)) for modules in (False, True))
    assert np.array_equal(straight[0], by_modules[0])
    assert np.median(np.abs(straight[1] - by_modules[1])) < 2e-5


def test_quantized_bfloat16_model_stays_close_to_full_precision(tmp_path):
    path = _save(tmp_path / "half", seed=1, dtype=torch.bfloat16)
    tokens, logprobs = _sampled(_runner(path, WeightFormat.INT8, dtype="bfloat16"))
    reference = _rescored(hf.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32), tokens)
    assert np.abs(logprobs - reference).mean() < 0.1


@pytest.mark.parametrize("weights", QUANTIZED)
def test_quantized_model_after_an_update_equals_loading_the_new_model(path, other, weights, device):
    """Results equal those of the loaded model bit for bit, change only at the swap, and revert with the old weights."""
    runner = _runner(path, weights, device=device)
    before, after = (_sampled(_runner(each, weights, device=device)) for each in (path, other))
    assert not np.array_equal(before[1], after[1])
    for target, now, then in ((other, before, after), (path, after, before)):
        runner.staging()[:] = bytes_of(hf.AutoModelForCausalLM.from_pretrained(target))
        runner.finish_staging()
        assert np.array_equal(_sampled(runner)[1], now[1])
        runner.swap()
        tokens, logprobs = _sampled(runner)
        assert np.array_equal(tokens, then[0])
        assert np.array_equal(logprobs, then[1])


def test_int8_linear_weights_take_a_quarter_of_the_memory_of_float32_weights(path):
    model = load_for_decoding(path, dtype=WeightDType.FLOAT32, device=torch.device("cpu"))
    linears = sum(m.weight.numel() for m in model.modules() if isinstance(m, nn.Linear) and m.weight.shape[0] != VOCAB)
    rest = sum(parameter.numel() for parameter in model.parameters()) - linears
    TorchRunner(model, engine_options(slots=1, context_length=8, weights=WeightFormat.INT8))
    scales = sum(p.numel() for name, p in model.named_parameters() if name.endswith(".scale"))
    served = sum(parameter.numel() * parameter.itemsize for parameter in model.parameters())
    assert served == linears + 4 * (rest + scales)


def test_quantization_rejects_models_without_linear_layers(tmp_path):
    config = hf.GPT2Config(vocab_size=VOCAB, n_embd=32, n_layer=1, n_head=4, n_positions=CONTEXT)
    hf.GPT2LMHeadModel(config).save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=r"no torch\.nn\.Linear besides its head"):
        _runner(tmp_path, WeightFormat.INT8)


def test_quantization_rejects_linear_layers_that_share_weights(path):
    model = load_for_decoding(path, dtype=WeightDType.FLOAT32, device=torch.device("cpu"))
    model.model.layers[1].mlp.up_proj.weight = model.model.layers[0].mlp.up_proj.weight
    with pytest.raises(ModelError, match=r"layers\.1\.mlp\.up_proj\.weight share their weights"):
        TorchRunner(model, engine_options(slots=1, context_length=8, weights=WeightFormat.INT8))
