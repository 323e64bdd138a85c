"""`bigram_recipe`: the recipe of the lightest whole run, for tests of the processes of a run, not of computation.

Launcher, roles, streams, engine and trainer are real and run in separate processes. The model needs only numpy: no role
imports transformers' models, so it starts in two seconds of processor time instead of seven. Problems come from
reasoning-gym; every second answer is "2", so that there is something to learn.

With `walking`, the verifier pauses before each verdict, so that a run without end uses little processor time.
"""

from pipelinerl.plugins.bigram.model import BigramModel
from pipelinerl.plugins.warmstart.tiny_decoder import char_tokenizer

_CONTEXT = 160
_RECIPE = """
[run]
name = "bigram"
steps = 12
[model]
path = "{model}"
[engine]
type = "bigram"
slots = 32
context_length = {context}
[trainer]
type = "bigram"
[optimizer]
learning_rate = 0.05
[[domains]]
name = "divisors"
source = "reasoning_gym:gcd"
verifier = "{verifier}"
[objective]
preset = "pipelinerl"
adv.scale = "none"
is_weight = "one"
grad1 = {{ kind = "clipped_ratio", epsilon_low = 0.2, epsilon_high = 0.28 }}
[sampling]
group_size = 8
max_tokens = 4
[training]
rollouts_per_step = 64
no_signal = "train"
[staleness]
j = 1
k = 2
[actor]  # one order after the other: while a test waits for a process to start, the run takes little from it
groups_in_flight = 1
"""

_WALKING = """
import asyncio

async def judge(answer, completion):
    await asyncio.sleep(0.05)
    return 1.0 if completion == answer else len(completion) / 1000  # a step is taken where rewards differ
"""


def lightest(model, *, alphabet):
    """Create a bigram model with this alphabet in `model`; return overrides with which any recipe trains this model."""
    _written(model, alphabet)
    return (
        f"model.path={model}",
        "engine.type=bigram",
        "trainer.type=bigram",
        f"engine.context_length={_CONTEXT}",
        "training.no_signal=train",
    )


def bigram_recipe(folder, *, walking=False):
    """Write a recipe and its model into the new folder `folder`; return the recipe's path."""
    model = folder / "model"
    _written(model, "0123456789")
    recipe = folder / "bigram.toml"
    (folder / "walking.py").write_text(_WALKING)
    verifier = "walking.py:judge" if walking else "reasoning_gym"
    recipe.write_text(_RECIPE.format(model=model, context=_CONTEXT, verifier=verifier))
    return recipe


def _written(model, alphabet):
    tokenizer = char_tokenizer(alphabet=alphabet)
    BigramModel.random(len(tokenizer), seed=0, scale=0.0, context_length=_CONTEXT).save(model)
    tokenizer.save_pretrained(str(model), save_jinja_files=False)
