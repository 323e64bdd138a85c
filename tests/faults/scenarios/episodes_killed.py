"""Processes are killed (kill -9) in mid-episode: no group is lost or trained twice, no reward or version is wrong.

The run plays `examples/guess_letter` on two engines: three turns per episode, with hints in between and
changing weights. Its model is a bigram, or the shipped one with torch (`uses_torch`). An engine, an environment's
process, the actor or the trainer is killed during episodes. Then the promises of `role_killed` hold, and these:

    tokens       a step's loss contains each token that the model sampled in its rollouts exactly once
    versions     the published weights of a span's version give the recorded log-prob of each of its tokens (bigram)
    rewards      each judged reward follows from the guesses in the rollout's tokens; a lost episode has no reward
    hosts        no process of an environment outlives its actor
    learning     rewards rise to `LEARNT` although processes die (bigram)
"""

from __future__ import annotations

import re
from collections import Counter
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any, Final, final

import numpy as np
import psutil

from benchmarks.games import guessing
from pipelinerl.config.sections import ModelSection
from pipelinerl.errors import PipelineError
from pipelinerl.models.tokenizer import ChatTokenizer
from pipelinerl.numerics.logprobs import log_softmax
from pipelinerl.plugins.bigram.model import PARAMETER
from pipelinerl.rng import generator
from pipelinerl.streams.records import decode_group
from tests.fakes import paced_bigram
from tests.fakes.watched_game import EXAMPLE, REFERENCE, example, open_episodes
from tests.faults.cluster import GROUP_SIZE, running
from tests.faults.scenarios.role_killed import Findings, settle
from tests.faults.scenarios.scenario import Verdict
from tests.patience import PATIENCE_S

SHORT = range(1)
LONG = range(25)

KILLS: Final = 4
#: Kinds of processes to kill; each block of four kills has one of each, in random order. A `host` is the process of an
#: environment, in which an episode runs.
VICTIMS: Final = ("engine", "host", "actor", "trainer")
#: The operations around which a role may be killed; `none` means at any moment.
POINTS: Final = {
    "trainer": ("read", "update", "checkpoint", "append"),
    "actor": ("turn", "turn", "append", "none"),
    "engine": ("none",),
}
#: The probability that the replacement of a killed host is killed too. An episode that loses two hosts is dropped from
#: its group.
KILLED_TWICE: Final = 0.5
ENGINES: Final = ("engine", "other_engine")
LONGEST_PAUSE_S: Final = 0.05
#: The mean reward that the last `STEPS_JUDGED` steps must reach; the first steps have about 0.25.
LEARNT: Final = 0.5
STEPS_JUDGED: Final = 10
#: The largest difference at which two float32 log-probs count as equal.
CLOSE: Final = 1e-4
_SPECIAL: Final = re.compile(r"<\|\w+\|>")


def uses_torch(seed):
    """Return True if the run of this seed uses a torch model: one seed in five, since these runs take longer."""
    return seed % 5 == 4


def play(seed, directory, *, mutant="", kills=KILLS):
    broken: list[str] = []
    figures = Counter[str]()
    playing = directory / "open_episodes"
    playing.mkdir(parents=True)
    with running(directory, seed=seed, mutant=mutant, engines=ENGINES, **sections(seed, playing)) as cluster:
        try:
            for number, victim in enumerate(victims(seed, kills)):
                disturb(cluster, seed, number, victim, figures)
            if not uses_torch(seed):
                cluster.until(lambda: reward(cluster) >= LEARNT, f"a mean reward of {LEARNT} over {STEPS_JUDGED} steps")
            settle(cluster)
        except (AssertionError, PipelineError) as error:
            broken.append(str(error))
        found = Findings(cluster, set())
        evidence = Evidence(cluster, knows_weights=not uses_torch(seed))
    order = ("kills", *(f"of {victim}s" for victim in VICTIMS))
    counted = {
        "steps": len(cluster.events("step")),
        "acknowledged groups": len(found.made),
        "lost": len(found.lost),
        "trained twice": len(found.twice),
        "failed": sum(event["ledger"]["failed"] for event in cluster.events("run_finished")),
        **evidence.figures,
    }
    broken += [f"order {index} is lost: {why}" for index, why in found.lost]
    broken += [f"order {index} was trained {times} times" for index, times in found.twice]
    broken += [*found.unbalanced, *evidence.broken]
    return Verdict({name: figures[name] for name in order} | counted, tuple(broken))


def sections(seed, playing):
    path = ModelSection(path="shipped:tiny_speller").resolved if uses_torch(seed) else model()
    kind = "torch" if uses_torch(seed) else paced_bigram.ENGINE
    return {
        "model": {"path": str(path)},
        "engine": {"type": kind, "slots": 32, "context_length": 64, "count": len(ENGINES)},
        "trainer": {"type": "torch" if uses_torch(seed) else "bigram"},
        "optimizer": {"learning_rate": 3e-3 if uses_torch(seed) else 0.4},
        "objective": {"preset": "pipelinerl", "grad2": {"kind": "exact_entropy", "beta": 0.01}},
        "sampling": {"group_size": GROUP_SIZE, "max_tokens": 8},
        "domains": [
            {
                "name": "guess",
                "source": f"{EXAMPLE}:problems",
                "environment": REFERENCE,
                "environment_options": {"directory": str(playing), "longest_pause_s": LONGEST_PAUSE_S},
                "episode": {"max_turns": 3, "timeout_s": 60.0},
            }
        ],
    }


@cache
def model() -> Path:
    """Return a bigram model that can play the game and decodes slowly, so that weights change during answers."""
    path = Path(mkdtemp(prefix="guessing-bigram-"))
    guessing(path)
    paced_bigram.set_pace(path, decode_s=0.002, step_s=0.0)
    return path


def victims(seed, kills):
    draw = generator(seed, "victims")
    return [str(each) for _ in range(0, kills, len(VICTIMS)) for each in draw.permutation(VICTIMS)][:kills]


def disturb(cluster, seed, number, victim, figures):
    """Wait for two steps and an open episode; then kill a process, and restart it unless it is a host."""
    random = generator(seed, "kill", number)
    cluster.more_steps(2, f"two steps before kill {number}")
    hosts = playing_hosts(cluster, number)
    if victim == "host":
        hosts[0].kill()
        psutil.wait_procs(hosts, timeout=PATIENCE_S)
        if random.random() < KILLED_TWICE:
            playing_hosts(cluster, number)[0].kill()
            figures["kills"] += 1
            figures["of hosts"] += 1
    else:
        name = str(random.choice(ENGINES)) if victim == "engine" else victim
        operation = str(random.choice(POINTS[victim]))
        grace_s = float(random.uniform(0, 0.3)) if operation == "none" else 0.4
        cluster.kill(name, operation=operation, points=int(random.integers(0, 24)), grace_s=grace_s)
        if victim == "actor":
            _, alive = psutil.wait_procs(hosts, timeout=PATIENCE_S)
            assert not alive, "a process of an environment outlives its actor"
        cluster.start(name)
    figures["kills"] += 1
    figures[f"of {victim}s"] += 1


def playing_hosts(cluster, number):
    """Wait until an episode is open, and return the environment processes of all open episodes."""
    playing = cluster.directory / "open_episodes"
    cluster.until(lambda: open_episodes(playing), f"an open episode before kill {number}")
    return open_episodes(playing)


def reward(cluster):
    """Return the mean reward of the last `STEPS_JUDGED` steps, or 0 before there are enough."""
    rewards = [event["reward"] for event in cluster.events("step")][-STEPS_JUDGED:]
    return sum(rewards) / STEPS_JUDGED if len(rewards) == STEPS_JUDGED else 0.0


@final
class Evidence:
    """Checks of a run's tokens against the published weights and the rules of the game."""

    def __init__(self, cluster, *, knows_weights):
        self.figures = {
            "episodes": 0,
            "lost with their hosts": 0,
            "masked": 0,
            "tokens": 0,
            "answers across versions": 0,
        }
        self.broken: list[str] = []
        self._logprobs = _published(cluster.directory / "published") if knows_weights else None
        self._tokenizer = ChatTokenizer.load(cluster.model)
        for path in sorted((cluster.directory / "groups").iterdir()):
            group = decode_group(path.read_bytes())
            self.figures["lost with their hosts"] += GROUP_SIZE - len(group.rollouts)
            for rollout in group.rollouts:
                self._see(group, rollout)
        for step in cluster.witnessed("trained"):
            if step["sampled"] != step["in_loss"]:
                self.broken.append(f"step {step['version']} has {step['in_loss']} of {step['sampled']} sampled tokens")

    def _see(self, group, rollout):
        name = f"an episode of order {group.index}"
        self.figures["episodes"] += 1
        if rollout.parents:
            self.broken.append(f"{name} is not one segment: {rollout.parents}")
            return
        tokens = np.concatenate([ids for turn in rollout.turns for ids in (turn.context_token_ids, turn.token_ids)])
        at = 0
        for turn in rollout.turns:
            at += len(turn.context_token_ids)
            self._see_turn(name, turn, tokens[at - 1 : at + len(turn.token_ids) - 1], rollout.epoch)
            at += len(turn.token_ids)
        if not rollout.verdict.outcome.is_judgement:
            self.figures["masked"] += 1
        elif rollout.verdict.reward != (expected := self._score(name, group.problem.ground_truth, rollout.turns)):
            self.broken.append(f"{name} has the reward {rollout.verdict.reward}, its guesses earn {expected}")

    def _see_turn(self, name, turn, previous, epoch):
        """Compare a turn's log-probs with those that the published weights of each span's version give.

        If several epochs published the version, any of them from the rollout's epoch on may match.
        """
        self.figures["tokens"] += len(turn.token_ids)
        self.figures["answers across versions"] += len(turn.spans) > 1
        if self._logprobs is None:
            return
        begin = 0
        for span in turn.spans:
            part = slice(begin, begin + span.num_tokens)
            begin += span.num_tokens
            worst = min(
                (
                    float(np.abs(table[previous[part], turn.token_ids[part]] - turn.behavior_logprobs[part]).max())
                    for published, table in self._logprobs.get(span.model_version, [])
                    if published >= epoch
                ),
                default=np.inf,
            )
            if worst > CLOSE:
                self.broken.append(f"{name}: a span of version {span.model_version} is off by {worst:.3g}")

    def _score(self, name, letter, turns):
        """Return the reward that the guesses earn; record each hint that does not fit the guess before it."""
        guesses = [self._text(turn.token_ids)[:1] for turn in turns]
        for guess, turn in zip(guesses, turns[1:], strict=False):
            hint = _SPECIAL.sub("", self._text(turn.context_token_ids))
            expected = example().hint(guess, letter)
            if hint != expected:
                self.broken.append(f"{name}: the hint after {guess!r} is {hint!r}, not {expected!r}")
        return float(letter in guesses)

    def _text(self, token_ids):
        return self._tokenizer.decode(token_ids.tolist())


def _published(folder):
    found: dict[int, list[tuple[int, Any]]] = {}
    for path in folder.glob("*.npz"):
        epoch, version = map(int, path.stem.split("-"))
        with np.load(path) as arrays:
            logits = arrays[PARAMETER]
        found.setdefault(version, []).append((epoch, log_softmax(logits, np.ones(len(logits), np.float32))))
    return found
