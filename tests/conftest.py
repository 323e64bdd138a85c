"""What tests of several rooms share. Roles configure the logging of their process: a test's gets its own back."""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Iterator
from functools import partial
from shutil import rmtree
from tempfile import mkdtemp

import hypothesis
import pytest

from pipelinerl.system.addresses import address_towards
from tests.collection import pytest_collection, pytest_collection_modifyitems, pytest_make_collect_report  # noqa: F401  hooks
from tests.open_sessions import left_open

#: Read when JAX is first used in a process: as many CPU devices, so that meshes can be tried, and machine code that is
#: quicker to make than to run, since a test runs a program a few times only: one thread emits it, loop by loop, and by
#: no pipeline of MLIR's. Compiling takes two fifths of the processor time that it took with the second flag alone.
_XLA_FLAGS = (
    "--xla_force_host_platform_device_count=8",
    "--xla_backend_optimization_level=0",
    "--xla_llvm_disable_expensive_passes=true",
    "--xla_cpu_use_fusion_emitters=false",
    "--xla_cpu_parallel_codegen_split_count=1",
)
os.environ.setdefault("XLA_FLAGS", " ".join(_XLA_FLAGS))

#: Programs that XLA has compiled are kept while the session lasts: tests, and their processes, compile the same ones
#: again and again. With a bound on its size JAX locks the folder, so that none reads what another has half written.
_JAX_CACHE = {
    "JAX_COMPILATION_CACHE_MAX_SIZE": str(2**30),
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
}

# A shell's background job ignores Ctrl-C and hands that down; tests send it.
signal.signal(signal.SIGINT, signal.default_int_handler)


# A machine that is busy draws examples slowly, which says nothing of the strategy.
hypothesis.settings.register_profile("busy", suppress_health_check=[hypothesis.HealthCheck.too_slow])
hypothesis.settings.load_profile("busy")


def pytest_configure(config: pytest.Config) -> None:
    """The cache of the whole session: test processes beside each other, and what they start, inherit where it is."""
    if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
        place = mkdtemp(prefix="jax-programs-")
        os.environ.update(_JAX_CACHE, JAX_COMPILATION_CACHE_DIR=place)
        config.add_cleanup(partial(rmtree, place, ignore_errors=True))


@pytest.fixture(autouse=True)
def closed_sessions() -> Iterator[None]:
    """A test fails that leaves an HTTP session open, and says who opened it."""
    yield
    openers = left_open()
    assert not openers, "an HTTP session was left open by " + "\n".join(openers)


@pytest.fixture(autouse=True)
def own_signals() -> Iterator[None]:
    """A role that ran in the test's process leaves its loop's handlers behind; the next test has Python's."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture
def outward() -> str:
    """The address of this machine that faces others; 198.51.100.0/24 is for documentation, and no host's."""
    try:
        return address_towards("198.51.100.7", 80)
    except OSError:
        pytest.skip("this machine has no network, and so no address but loopback")


@pytest.fixture(autouse=True)
def own_logging() -> Iterator[None]:
    """A role that ran in the test's process has configured its logging; the next test has what was there before."""
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    yield
    if root.handlers != handlers:
        root.handlers[:] = handlers
    root.setLevel(level)
    logging.captureWarnings(False)
