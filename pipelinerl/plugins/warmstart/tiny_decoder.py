"""Tiny decoders built from scratch: random ones for tests and benchmarks, and warm starts by supervised training.

They are ordinary Qwen3 checkpoints with an ordinary fast tokenizer, so code that runs them also runs real models. The
same seed gives the same weights.

A supervised warm start teaches a tiny decoder part of a task, and leaves the rest to RL. It stops at a given skill in
every domain; a domain that reaches it early gets less data until the others catch up. Skill is measured on validation
problems, never on held-out ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

import numpy as np

from pipelinerl import rng
from pipelinerl.errors import ModelError
from pipelinerl.models.tokenizer import ChatTokenizer
from pipelinerl.types import Problem

if TYPE_CHECKING:
    import torch
    from tokenizers import AddedToken, Tokenizer
    from transformers import PreTrainedModel, PreTrainedTokenizerFast

PAD, SYSTEM, USER, ASSISTANT, END, UNKNOWN = "<|pad|>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>", "<|unk|>"
SPECIAL_TOKENS = (PAD, SYSTEM, USER, ASSISTANT, END, UNKNOWN)
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
ALPHABET = "abcdefghijklmnopqrstuvwxyz0123456789 +-*/=.,:?()>\n"
SPELL_BACKWARD_PHRASE = "Spell this word backward (example: sun -> nus): "


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderShape:
    """Sizes of a decoder with tied embeddings. `heads` must divide `hidden`; `kv_heads` must divide `heads`."""

    hidden: int
    layers: int
    heads: int
    intermediate: int
    vocab: int
    kv_heads: int | None = None
    max_positions: int = 64

    def __post_init__(self) -> None:
        kv_heads = self.kv_heads or self.heads
        if self.hidden % self.heads or (self.hidden // self.heads) % 2 or self.heads % kv_heads:
            raise ValueError(
                "expected heads to divide hidden into even parts and kv_heads to divide heads; got "
                f"hidden={self.hidden}, heads={self.heads}, kv_heads={kv_heads}; choose e.g. 64, 4 and 2"
            )


class DebugSize(Enum):
    """Random decoders, named by the size of their float32 weights; the value of a member is the decoder's shape."""

    MB_3 = DecoderShape(hidden=128, layers=4, heads=4, kv_heads=2, intermediate=384, vocab=512, max_positions=2048)
    MB_24 = DecoderShape(hidden=320, layers=5, heads=5, kv_heads=5, intermediate=832, vocab=512, max_positions=2048)
    MB_310 = DecoderShape(
        hidden=768, layers=11, heads=12, kv_heads=12, intermediate=2048, vocab=512, max_positions=2048
    )


def random_decoder(shape: DecoderShape | DebugSize, *, seed: int = 0) -> PreTrainedModel:
    """Return a Qwen3 causal LM, float32 on CPU, in eval mode; its weights depend only on (shape, seed)."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    sizes = shape.value if isinstance(shape, DebugSize) else shape
    config = Qwen3Config(
        vocab_size=sizes.vocab,
        hidden_size=sizes.hidden,
        num_hidden_layers=sizes.layers,
        num_attention_heads=sizes.heads,
        num_key_value_heads=sizes.kv_heads or sizes.heads,
        head_dim=sizes.hidden // sizes.heads,
        intermediate_size=sizes.intermediate,
        max_position_embeddings=sizes.max_positions,
        # Small widths need larger initial weights; otherwise the first hundreds of steps only grow them.
        initializer_range=max(0.02, min(0.05, 3.2 / sizes.hidden)),
        tie_word_embeddings=True,
        pad_token_id=SPECIAL_TOKENS.index(PAD),
        eos_token_id=SPECIAL_TOKENS.index(END),
        bos_token_id=None,
    )
    model = Qwen3ForCausalLM(config).float().eval()
    for name, parameter in model.named_parameters():
        if parameter.ndim == 1:  # only norms have one dimension, because a Qwen3 has no biases
            values = np.ones(parameter.shape, dtype=np.float32)
        else:
            normal = rng.generator(seed, "tiny_decoder", name).standard_normal(tuple(parameter.shape), dtype=np.float32)
            values = normal * np.float32(config.initializer_range)
        parameter.data.copy_(torch.from_numpy(values))
    return model


def word_tokenizer(texts: Iterable[str], *, vocab: int) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE of `vocab` tokens on `texts`, one token per digit; it encodes every text exactly."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=_added(SPECIAL_TOKENS, special=True),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    backend.train_from_iterator(texts, trainer)
    return _with_template(backend)


def char_tokenizer(*, phrases: Sequence[str] = (), alphabet: str = ALPHABET) -> PreTrainedTokenizerFast:
    """Return a tokenizer of roles, the characters of `alphabet`, and `phrases`; else `<|unk|>`."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    vocab = {token: index for index, token in enumerate((*SPECIAL_TOKENS, *alphabet))}
    backend = Tokenizer(models.WordLevel(vocab, unk_token=UNKNOWN))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex("[\\s\\S]"), "isolated")
    backend.decoder = decoders.Fuse()
    backend.add_special_tokens(_added(SPECIAL_TOKENS, special=True))
    backend.add_tokens(_added(phrases, special=False))
    return _with_template(backend)


def _added(texts: Sequence[str], *, special: bool) -> list[AddedToken]:
    from tokenizers import AddedToken

    return [AddedToken(text, normalized=False, special=special) for text in texts]


def _with_template(backend: Tokenizer) -> PreTrainedTokenizerFast:
    from transformers import PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token=PAD, eos_token=END, unk_token=UNKNOWN, clean_up_tokenization_spaces=False
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


_IGNORED = -100
#: Number of demonstrations whose lengths are measured to choose a domain's batch size.
_MEASURED = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmStartSettings:
    """Settings of `warm_start`.

    Attributes:
        demonstrations: for each domain's name, a function that returns problem i of its training split.
        skills: measures each domain's skill on validation problems, such as its accuracy or mean reward.
        shape: sizes of the decoder; its `vocab` must be at least the tokenizer's vocabulary.
        band: (low, high), the bounds of a domain's skill. A domain at `low` or more is only rehearsed, with less data.
            A skill above `high` is a failure, since it would leave RL too little to learn.
        batch_size: demonstrations per step of each domain; None takes about `tokens` tokens.
        rehearsal: multiplies a rehearsed domain's data and loss weight; at 0, the model would forget the domain.
        temperature: divides the logits in the loss, so that above 1 the model learns larger logits and is decisive at
            temperature 1.
        check_every: optimizer steps between two checks.
    """

    demonstrations: Mapping[str, Callable[[int], Problem]]
    skills: Callable[[PreTrainedModel], Mapping[str, float]]
    tokenizer: ChatTokenizer
    shape: DecoderShape
    seed: int = 0
    band: tuple[float, float] = (0.3, 0.6)
    temperature: float = 1.0
    learning_rate: float = 3e-3
    lr_warmup_steps: int = 50
    batch_size: int | None = None
    tokens: int = 1500
    rehearsal: float = 0.125
    max_steps: int = 2000
    check_every: int = 25


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmStartProgress:
    """Results of a check: each domain's skill and number of demonstrations; the mean loss per token in nats."""

    step: int
    skills: Mapping[str, float]
    demonstrations: Mapping[str, int]
    loss: float


def warm_start(
    settings: WarmStartSettings, on_progress: Callable[[WarmStartProgress], None] = lambda _: None
) -> tuple[PreTrainedModel, WarmStartProgress]:
    """Fit demonstrations until each skill is in the band; return model and last check. Raises ModelError."""
    import torch

    model = random_decoder(settings.shape, seed=settings.seed).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=settings.learning_rate, betas=(0.9, 0.95), weight_decay=0.0)
    sizes = {}
    for name, problem in settings.demonstrations.items():
        if settings.batch_size is None:
            measured = demonstrations_of([problem(i) for i in range(_MEASURED)], settings.tokenizer)
            sizes[name] = max(1, settings.tokens // measured.token_ids.shape[1])
        else:
            sizes[name] = settings.batch_size
    shown = dict.fromkeys(sizes, 0)
    low, high = settings.band
    shares = dict.fromkeys(sizes, 1.0)
    progress = WarmStartProgress(step=0, skills={}, demonstrations=shown, loss=float("nan"))
    for step in range(1, settings.max_steps + 1):
        batches = []
        for name, share in shares.items():
            count = max(1, round(sizes[name] * share))
            problems = [settings.demonstrations[name](shown[name] + i) for i in range(count)]
            batches.append((demonstrations_of(problems, settings.tokenizer), share))
            shown[name] += count
        for group in optimizer.param_groups:
            group["lr"] = settings.learning_rate * min(1.0, step / max(settings.lr_warmup_steps, 1))
        loss = _step(model, optimizer, batches, temperature=settings.temperature)
        if step % settings.check_every:
            continue
        skills = settings.skills(model.eval())
        model.train()
        progress = WarmStartProgress(step=step, skills=skills, demonstrations=dict(shown), loss=loss)
        on_progress(progress)
        shares = {name: 1.0 if skills[name] < low else settings.rehearsal for name in sizes}
        if min(skills.values()) >= low:
            break
    reached = ", ".join(f"{name} {skill:.3f}" for name, skill in progress.skills.items()) or "none"
    if not progress.skills or not low <= min(progress.skills.values()) <= max(progress.skills.values()) <= high:
        raise ModelError(
            f"expected a skill of {low:g} to {high:g}, got {reached} after {progress.step} steps; try another seed, a "
            "lower learning rate, other problems, a model of another width, or check more often"
        )
    return model.eval(), progress


@dataclass(frozen=True, slots=True)
class Demonstrations:
    """Prompts with their correct answers, padded at the end, i64 [B, L]. `labels` is −100 outside the answers."""

    token_ids: torch.Tensor
    labels: torch.Tensor


def demonstrations_of(problems: Sequence[Problem], tokenizer: ChatTokenizer) -> Demonstrations:
    """Return the prompts of problems with their ground truths as answers."""
    import torch

    end = min(tokenizer.eos_token_ids)
    rows, labels = [], []
    for problem in problems:
        prompt = tokenizer.encode_chat(problem.messages)
        answer = [*tokenizer.encode(problem.ground_truth), end]
        rows.append(prompt + answer)
        labels.append([_IGNORED] * len(prompt) + answer)
    longest = max(map(len, rows))
    return Demonstrations(
        torch.tensor([row + [end] * (longest - len(row)) for row in rows]),
        torch.tensor([label + [_IGNORED] * (longest - len(label)) for label in labels]),
    )


def _step(
    model: PreTrainedModel,
    optimizer: torch.optim.Optimizer,
    batches: Sequence[tuple[Demonstrations, float]],
    *,
    temperature: float,
) -> float:
    """Run one optimizer step; return the mean loss per answer token, averaged over batches by weight."""
    import torch

    optimizer.zero_grad()
    mean, total = 0.0, sum(weight for _, weight in batches)
    for batch, weight in batches:
        logits, labels = model(input_ids=batch.token_ids).logits[:, :-1] / temperature, batch.labels[:, 1:]
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=_IGNORED)
        (loss * (weight / total)).backward()
        mean += float(loss.detach()) * weight / total
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return mean


def accuracies(model: PreTrainedModel, batch: Demonstrations) -> tuple[float, float]:
    """Return greedy accuracy and expected accuracy at temperature 1, on exact answers, without generation.

    Greedy decoding yields an answer if and only if each of its tokens is the likeliest after the tokens before it.
    """
    import torch

    with torch.no_grad():
        logprobs = model(input_ids=batch.token_ids).logits[:, :-1].log_softmax(-1)
    labels = batch.labels[:, 1:]
    outside = labels == _IGNORED
    right = (logprobs.argmax(-1) == labels) | outside
    answer = logprobs.gather(2, labels.clamp(min=0)[..., None])[..., 0].masked_fill(outside, 0.0).sum(1)
    return float(right.all(1).float().mean()), float(answer.exp().mean())


def sampled_answers(
    model: PreTrainedModel, tokenizer: ChatTokenizer, problems: Sequence[Problem], *, max_tokens: int, seed: int
) -> list[str]:
    """Sample one answer to each problem at temperature 1; the same seed gives the same answers."""
    import torch

    noise, ends = rng.generator(seed, "sampled_answers"), tokenizer.eos_token_ids
    prompts = [tokenizer.encode_chat(problem.messages) for problem in problems]
    longest = max(map(len, prompts))
    ids = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    answers: list[list[int]] = [[] for _ in problems]
    live, cache = set(range(len(problems))), None
    for _ in range(max_tokens):
        places = (mask.cumsum(1) - 1).clamp(min=0)[:, -ids.shape[1] :]
        with torch.no_grad():
            output = model(
                input_ids=ids, attention_mask=mask, position_ids=places, past_key_values=cache, use_cache=True
            )
        logits, cache = output.logits[:, -1].float(), output.past_key_values
        # Gumbel-max trick: the argmax of logits plus Gumbel noise is a sample from their softmax.
        drawn = (logits + torch.from_numpy(noise.gumbel(size=tuple(logits.shape))).float()).argmax(-1)
        live -= {row for row in live if int(drawn[row]) in ends}
        for row in live:
            answers[row].append(int(drawn[row]))
        if not live:
            break
        ids, mask = drawn[:, None], torch.cat([mask, torch.ones_like(mask[:, :1])], dim=1)
    return [tokenizer.decode(answer) for answer in answers]
