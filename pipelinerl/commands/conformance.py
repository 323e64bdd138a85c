"""`pipelinerl conformance`: run a contract's kit against a live engine or a trainer class, and tell what was found."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx

from pipelinerl import registry
from pipelinerl.errors import AddressError, ModelError
from pipelinerl.system import http_client
from trainer_contract.types import TrainerSpec


def check_engine(url: str, *, token: str | None, say: Callable[[str], None]) -> bool:
    """Run the inference kit against `url`; True when nothing failed.

    Raises:
        AddressError: nobody answers there.
    """
    from inference_contract import conformance

    try:
        with http_client.session(url) as http:
            http.get("/health")
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise AddressError(f"no engine answers at {url}: {error}; give its base URL, like http://host:port") from None
    return _told([(r.outcome.value, r.name, r.promise, r.reason) for r in conformance.run(url, token)], say)


def check_trainer(target: str, model: Path, *, say: Callable[[str], None]) -> bool:
    """Run the trainer kit against `target`, a registered name or `module:Class`; True when nothing failed."""
    from trainer_contract import conformance
    from trainer_contract.conformance.probes import Subject

    entry = registry.TRAINERS.get(target)
    factory: Any = registry.resolve(entry.target if entry else target)
    try:
        vocab_size = int(json.loads((model / "config.json").read_text())["vocab_size"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ModelError(f"{model} must be a model directory whose config.json says vocab_size: {error}") from None
    subject = Subject(factory=factory, spec=TrainerSpec(model_path=model), vocab_size=vocab_size)
    with tempfile.TemporaryDirectory() as directory:
        results = conformance.run(subject, directory=Path(directory))
    return _told([(r.status.value, r.name, r.promise, r.reason) for r in results], say)


def _told(results: list[tuple[str, str, str, str]], say: Callable[[str], None]) -> bool:
    for verdict, name, promise, reason in results:
        say(f"{verdict:<12} {name}: {promise}" + (f"\n             {reason}" if reason else ""))
    failed = sum(verdict == "failed" for verdict, *_ in results)
    say(f"{len(results) - failed} of {len(results)} promises kept or not applicable, {failed} broken")
    return failed == 0
