"""Commands for developers: check an engine or trainer against its contract; run benchmarks and fault tests."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from pipelinerl import registry
from pipelinerl.component import imported
from pipelinerl.config.recipe import MODELS, load
from pipelinerl.enums import WeightFormat
from pipelinerl.errors import AddressError, ModelError, UserError
from pipelinerl.plugins.conformance import CHECKOUT
from pipelinerl.system import http_client
from pipelinerl.system.machine import free_ports
from trainer_contract.types import TrainerSpec

if TYPE_CHECKING:
    from inference_contract.conformance.session import Expected

_TokenFile = Annotated[Path | None, typer.Option(help="File with the bearer token.")]
_Precision = Annotated[
    str | None,
    typer.Option(
        help="Precision of the engine's arithmetic: float32, bfloat16, float16, int8 or int4. Default: dtype."
    ),
]
#: Longest wait in seconds for an answer or an update while faults are sent.
_FAULT_S: Final = 60.0
#: Longest time in seconds that an engine of a recipe takes to load its model.
_START_S: Final = 600.0

conformance_app = typer.Typer(help="Check an engine or a trainer against its contract.", no_args_is_help=True)


@conformance_app.command("engine")
def conformance_engine(
    url: Annotated[str, typer.Argument(help="Base URL of the engine, such as http://127.0.0.1:8001.")],
    token_file: _TokenFile = None,
    model: Annotated[
        Path | None,
        typer.Option(help="Directory of the model that the engine serves; without it, no check knows its log-probs."),
    ] = None,
    precision: _Precision = None,
    temperature: Annotated[float, typer.Option(help="Temperature of the run.")] = 1.0,
) -> None:
    """Check a live engine against the inference contract. The engine's weights are replaced."""
    from inference_contract.conformance.session import Expected
    from pipelinerl.roles.process import read_token

    expected = model and Expected(model=_directory(model), precision=precision, temperature=temperature)
    kept = check_engine(url.rstrip("/"), token=read_token(token_file), say=typer.echo, expected=expected or None)
    raise typer.Exit(0 if kept else 1)


@conformance_app.command("faults")
def conformance_faults(
    target: Annotated[str, typer.Argument(help="Base URL of an engine, or a recipe, whose engine is started.")],
    model: Annotated[Path | None, typer.Option(help="Directory of the model that the engine at a URL serves.")] = None,
    token_file: _TokenFile = None,
    precision: _Precision = None,
) -> None:
    """Send wrong weights to a correct engine, and show which of them the comparison with transformers catches."""
    from inference_contract.conformance.faults import sent_to
    from inference_contract.conformance.session import Expected, NotOffered, Session
    from pipelinerl.roles.process import read_token

    if "://" not in target:
        config = load(target)
        quantised = None if config.engine.weights is WeightFormat.NATIVE else config.engine.weights.value
        model, precision = config.model.resolved, precision or quantised
    elif model is None:
        raise UserError("the model of an engine at a URL must be given; add --model DIR")
    expected = Expected(model=_directory(model), precision=precision)
    token = read_token(token_file)
    with ExitStack() as stack:
        url = target.rstrip("/") if "://" in target else stack.enter_context(_engine_of(target))
        _reachable(url)
        session = Session(url, token=token, timeout_s=_FAULT_S, host="127.0.0.1", expected=expected)
        try:
            for trial in sent_to(stack.enter_context(session)):
                typer.echo(str(trial))
        except (NotOffered, AssertionError) as error:
            raise UserError(
                f"faults cannot be sent to {url}: {error}; run `pipelinerl conformance engine` first"
            ) from None


@contextmanager
def _engine_of(recipe: str) -> Iterator[str]:
    """Start an engine of the recipe without a run; yield its URL, and stop the engine at the end of the block."""
    (port,) = free_ports(1)
    url = f"http://127.0.0.1:{port}"
    words = ["engine", "--recipe", recipe, "--controller-url=", "--no-token", "--port", str(port)]
    engine = subprocess.Popen([sys.executable, "-m", "pipelinerl", *words])
    try:
        deadline = time.monotonic() + _START_S
        while True:
            with suppress(AddressError):
                _reachable(url)
                break
            if engine.poll() is not None or time.monotonic() > deadline:
                raise UserError(f"the engine of {recipe} has not started; see its message above")
            time.sleep(0.2)
        yield url
    finally:
        engine.terminate()
        engine.wait(_FAULT_S)


@conformance_app.command("trainer")
def conformance_trainer(
    target: Annotated[str, typer.Argument(help="module:Class, or the name of a registered trainer.")],
    model: Annotated[Path, typer.Option(help="Model directory for the trial.")] = MODELS / "tiny_speller",
) -> None:
    """Check a trainer class against the trainer contract."""
    raise typer.Exit(0 if check_trainer(target, model, say=typer.echo) else 1)


def check_engine(url: str, *, token: str | None, say: Callable[[str], None], expected: Expected | None = None) -> bool:
    """Run the conformance kit against `url`; return True if all pass. Raises `AddressError` if no engine answers."""
    from inference_contract import conformance

    _reachable(url)
    results = conformance.run(url, token, expected=expected)
    return _report([(r.outcome.value, r.name, r.promise, r.reason) for r in results], say)


def _reachable(url: str) -> None:
    import httpx

    try:
        with http_client.session(url) as http:
            http.get("/health")
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise AddressError(f"no engine answers at {url}: {error}; give its base URL, like http://host:port") from None


def _directory(model: Path) -> Path:
    from pipelinerl.models.checkpoint import check_directory

    check_directory(model)
    return model


def check_trainer(target: str, model: Path, *, say: Callable[[str], None]) -> bool:
    """Run the trainer conformance kit against `target`, a registered name or `module:Class`; return True on success."""
    from trainer_contract import conformance
    from trainer_contract.conformance.probes import TrainerUnderTest

    entry = registry.TRAINERS.get(target)
    factory: Any = imported(entry.build if entry else target)
    try:
        vocab_size = int(json.loads((model / "config.json").read_text())["vocab_size"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ModelError(f"{model} must be a model directory whose config.json says vocab_size: {error}") from None
    subject = TrainerUnderTest(factory=factory, spec=TrainerSpec(model_path=model), vocab_size=vocab_size)
    with tempfile.TemporaryDirectory() as directory:
        results = conformance.run(subject, directory=Path(directory))
    return _report([(r.status.value, r.name, r.promise, r.reason) for r in results], say)


def _report(results: list[tuple[str, str, str, str]], say: Callable[[str], None]) -> bool:
    for verdict, name, promise, reason in results:
        say(f"{verdict:<12} {name}: {promise}" + (f"\n             {reason}" if reason else ""))
    failed = sum(verdict == "failed" for verdict, *_ in results)
    say(f"{len(results) - failed} of {len(results)} promises kept or not applicable, {failed} broken")
    return failed == 0


# --- bench and chaos --------------------------------------------------------------------------------------------------


def bench(
    name: Annotated[str, typer.Argument(help="A benchmark's name, or `all`.")] = "all",
    quick: Annotated[bool, typer.Option("--quick", help="Fewer rounds and sizes.")] = False,
) -> None:
    """Run benchmarks and write their records (needs a checkout)."""
    raise typer.Exit(run_in_checkout("benchmarks", name, *(["--quick"] if quick else []), what="benchmarks are"))


def chaos(
    seed: Annotated[int, typer.Option(help="Seed that determines what dies and when.")] = 0,
    scenario: Annotated[str, typer.Option(help="A scenario's name, or `all`.")] = "all",
    count: Annotated[int, typer.Option(min=1, help="Number of seeds, starting at --seed.")] = 1,
    list_only: Annotated[bool, typer.Option("--list", help="List the scenarios.")] = False,
) -> None:
    """Inject seeded faults (kill, replace, starve processes); check that runs lose nothing (needs a checkout)."""
    words = ["--seed", str(seed), "--scenario", scenario, "--count", str(count), *(["--list"] if list_only else [])]
    raise typer.Exit(run_in_checkout("tests.faults.scenarios", *words, what="the fault scenarios are"))


def run_in_checkout(module: str, *words: str, what: str) -> int:
    """Run `python -m module words…`; return its exit status. Raises `UserError` about `what` outside a checkout."""
    if not CHECKOUT.joinpath(*module.split("."), "__main__.py").is_file():
        raise UserError(
            f"{what} part of a checkout, and {CHECKOUT} is not one; clone the repository, run `make install` and "
            "use its command"
        )
    return subprocess.call([sys.executable, "-m", module, *words], cwd=CHECKOUT)
