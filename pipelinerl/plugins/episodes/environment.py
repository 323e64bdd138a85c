"""`Environment`, the interface of a user's class, and the values that user code receives.

A user writes one of these:

    async def run(task, client): …              any program; returns a reward, a bool, a `Verdict`, or None
    class Game: reset, step, close              an `Environment`; pipelinerl runs the loop around it
    command = ["python", "cli.py", "{task}"]    a program in a subprocess, whose answers the domain's verifier judges
    environment = "openenv:http://…"            a server that speaks OpenEnv's protocol
    environment = "verifiers:my_taskset"        a taskset of the library verifiers, in a separate Python environment
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

from pipelinerl.types import Problem

#: Prefix of the names of agents whose turns are not trained on.
UNTRAINED: Final = "untrained-"
#: Hosts at which processes of this machine reach each other.
_LOOPBACK: Final = ("127.0.0.1", "localhost")
#: Type of a message from user code: a dict in OpenAI's format, or a `ChatAnswer`.
ChatInput = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """The task of an episode: a problem of the domain's source, and a seed for the environment's randomness."""

    problem_id: str
    domain: str
    messages: tuple[dict[str, str], ...]
    ground_truth: str
    metadata: Mapping[str, Any] = field(default_factory=dict)
    tags: tuple[str, ...] = ()
    seed: int = 0

    @classmethod
    def of(cls, problem: Problem, *, seed: int) -> Task:
        return cls(
            problem_id=problem.problem_id,
            domain=problem.domain,
            messages=tuple({"role": each.role, "content": each.content} for each in problem.messages),
            ground_truth=problem.ground_truth,
            metadata=dict(problem.metadata),
            tags=problem.tags,
            seed=seed,
        )


def variables_of_agents(inherited: Mapping[str, str], **own: str) -> dict[str, str]:
    """Return the environment variables of a process whose agents call the gateway: `inherited`, changed by `own`.

    A proxy named in `HTTP_PROXY` cannot reach the gateway, which listens on loopback, so clients must not use it there.
    """
    direct = [value for name in ("NO_PROXY", "no_proxy") if (value := inherited.get(name))]
    direct = list(dict.fromkeys([*direct, *_LOOPBACK]))
    return {**inherited, "NO_PROXY": ",".join(direct), "no_proxy": ",".join(direct), **own}


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvironmentStep:
    """Reaction to an answer of the model: new messages, the turn's reward, and whether the episode ends."""

    messages: Sequence[ChatInput] = ()
    reward: float = 0.0
    done: bool = False


class Environment(Protocol):
    """Interface of a user's environment: one object per conversation, constructed with `environment_options`.

    Methods may be `async`.
    """

    def reset(self, task: Task, seed: int) -> Any:
        """Begin the conversation: return its first messages, one message, or a text; None uses the task's messages."""
        ...

    def step(self, answer: Any) -> Any:
        """React to the model's answer: return an `EnvironmentStep`, or the tuple (messages, reward, done)."""
        ...

    def close(self) -> Any:
        """Release the conversation's resources; called once, even if the episode fails."""
        ...
