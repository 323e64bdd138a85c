"""Many almost valid requests cause no server to fail, to stall other clients or to leak memory.

The long test runs in parts with the seeds 0, 1, 2, …, each with its own servers, so that one part can be repeated:
`make chaos ARGS="-k test_server_survives_many_fuzzed_requests"`, then add `--lf` to repeat the failed parts.
"""

from __future__ import annotations

from typing import Final

import pytest

from tests.security.campaign import campaign
from tests.security.servers import FUZZED, SERVERS

#: By how many bytes a server may grow after its first requests; not 0, since allocators keep memory of large bodies.
_MOST_GROWN_BYTES: Final = 32 * 2**20
_PARTS: Final = 7


@pytest.mark.parametrize(
    ("server", "part"),
    [
        *((server, 0) for server in SERVERS),
        *(pytest.param(server, part, marks=[pytest.mark.chaos, pytest.mark.timeout(1800)])
          for server in FUZZED for part in range(1, _PARTS + 1)),
    ],
)  # fmt: skip
async def test_server_survives_many_fuzzed_requests(server, part, tmp_path, capsys):
    """Part 0 has a few hundred requests, any other 5,000."""
    result = await campaign(server, tmp_path, seed=part, count=5_000 if part else 350)
    assert result.failures == [], "\n".join([str(result), *result.failures[:5]])
    assert result.stall_s < 1.0, "\n".join([str(result), "stalled by one of", *result.stalled_by])
    assert result.statuses[200] > 10 and result.statuses[422] + result.statuses[400] > 50, str(result)
    if part:
        with capsys.disabled():
            print(f"\n{server}, part {part} of {_PARTS}: {result}")
        assert result.grown_bytes < _MOST_GROWN_BYTES, str(result)
