"""Fixtures and settings for all tests."""

import logging
import os
import signal
from functools import cache, partial
from importlib.metadata import version
from importlib.util import find_spec
from shutil import rmtree, which
from tempfile import mkdtemp

import httpx
import hypothesis
import pytest
import typer.testing
from httpx._transports import default as httpx_transports

from pipelinerl.system.machine import address_towards
from tests.collection import pytest_collection, pytest_collection_modifyitems, pytest_make_collect_report  # noqa: F401  hooks
from tests.open_sessions import left_open

#: Flags that JAX reads when it first runs in a process. They provide several CPU devices for meshes, and cheap
#: compilation (one thread, loop by loop, without MLIR pipelines), because a test runs each program only a few times.
_XLA_FLAGS = (
    "--xla_force_host_platform_device_count=8",
    "--xla_backend_optimization_level=0",
    "--xla_llvm_disable_expensive_passes=true",
    "--xla_cpu_parallel_codegen_split_count=1",
    # XLA ends a process that gives it a flag which it does not know.
    *(["--xla_cpu_use_fusion_emitters=false"] if find_spec("jax") and version("jax").startswith("0.10.") else []),
)
os.environ.setdefault("XLA_FLAGS", " ".join(_XLA_FLAGS))

#: Compiled XLA programs are kept for the session, because several tests and processes compile the same programs. If the
#: cache has a size limit, JAX locks the folder, so that no process reads a half-written program.
_JAX_CACHE = {
    "JAX_COMPILATION_CACHE_MAX_SIZE": str(2**30),
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
}

# Without a GPU, triton interprets its kernels. Triton reads this variable when it is imported.
os.environ.setdefault("TRITON_INTERPRET", "0" if which("nvidia-smi") else "1")

# httpx reads all trusted certificates for each client, which takes 36 ms. Here all clients share them.
httpx_transports.create_ssl_context = cache(httpx.create_ssl_context)

# typer builds all commands for each invocation, which takes 40 ms. Here it builds them once.
typer.main.get_command = typer.testing._get_command = cache(typer.main.get_command)

# A background job of a shell ignores Ctrl-C (SIGINT), and so do its child processes; but some tests send it.
signal.signal(signal.SIGINT, signal.default_int_handler)


# hypothesis may draw examples slowly because the machine is busy, not because a strategy is too slow.
hypothesis.settings.register_profile("busy", suppress_health_check=[hypothesis.HealthCheck.too_slow])
hypothesis.settings.load_profile("busy")


def pytest_configure(config):
    """Set the session's compilation cache; parallel test processes and their children inherit its location."""
    if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
        place = mkdtemp(prefix="jax-programs-")
        os.environ.update(_JAX_CACHE, JAX_COMPILATION_CACHE_DIR=place)
        config.add_cleanup(partial(rmtree, place, ignore_errors=True))


@pytest.fixture(autouse=True)
def closed_sessions():
    """Fail a test that leaves an HTTP session open, and name the code that opened the session."""
    yield
    openers = left_open()
    assert not openers, "an HTTP session was left open by " + "\n".join(openers)


@pytest.fixture(autouse=True)
def own_signals():
    """Restore Python's signal handlers, which a test changes if it runs one of the run's processes within its own."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture
def outward():
    """Return the address at which other hosts reach this machine; the test is skipped if it has only loopback."""
    try:
        return address_towards("198.51.100.7", 80)
    except OSError:
        pytest.skip("this machine has no network, and so no address but loopback")


@pytest.fixture(autouse=True)
def own_logging():
    """Restore logging, which a test changes if it runs one of the run's processes within its own process."""
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    yield
    if root.handlers != handlers:
        root.handlers[:] = handlers
    root.setLevel(level)
    logging.captureWarnings(False)
