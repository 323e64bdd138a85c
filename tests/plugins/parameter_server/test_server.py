"""A parameter server over real HTTP and real shared memory: uploads, pulls, and rejected requests."""

import time
from contextlib import ExitStack, closing
from dataclasses import replace

import httpx
import numpy as np
import pytest

from inference_contract.errors import DigestMismatch
from inference_contract.weights import DType, ParameterSpec, WeightLayout
from pipelinerl.errors import DeadlineError, UpdateError
from pipelinerl.plugins.parameter_server.download import WeightPuller
from pipelinerl.plugins.parameter_server.upload import Uploader
from tests.fakes.parameter_server import (
    LAYOUT,
    TOKEN,
    application,
    digest,
    flat,
    held,
    order,
    publication,
    pulled,
    soon,
)
from tests.fakes.served import in_thread
from tests.patience import PATIENCE_S

#: A layout so large that its weights are transferred in several parts, over HTTP and over shared memory.
LARGE = WeightLayout(parameters=(ParameterSpec(name="a", shape=(5, 2**19), dtype=DType.FLOAT32),))


@pytest.fixture
def server():
    with in_thread(application()) as url:
        yield url


@pytest.fixture
def servers():
    with ExitStack() as stack:
        yield [stack.enter_context(in_thread(application())) for _ in range(3)]


def place(urls, publication, progress=None):
    with closing(Uploader(urls, token=TOKEN)) as placement:
        return placement.upload(publication, progress or {}, deadline=soon())


def ask(url, method, path, **options):
    headers = {"authorization": f"Bearer {TOKEN}"} | options.pop("headers", {})
    return httpx.request(method, url + path, headers=headers, trust_env=False, timeout=PATIENCE_S, **options)


@pytest.mark.parametrize("layout", [LAYOUT, LARGE], ids=["odd", "large"])
@pytest.mark.parametrize("pushed_by_memory", [True, False], ids=["push-memory", "push-http"])
@pytest.mark.parametrize("pulled_by_memory", [True, False], ids=["pull-memory", "pull-http"])
def test_weights_are_the_same_whether_pushed_and_pulled_over_http_or_shared_memory(
    server, layout, pushed_by_memory, pulled_by_memory
):
    placement = Uploader([server], token=TOKEN, shared_memory=pushed_by_memory)
    puller = WeightPuller(token=TOKEN, shared_memory=pulled_by_memory)
    for version in (1, 2, 3):  # three versions, so that the server reuses the memory of the first
        placed = placement.upload(publication(version, layout=layout), {}, deadline=soon())
        assert placed.sources == ((server,),) and placed.digest == digest(version, layout)
        into, came = np.zeros(layout.num_bytes, np.uint8), []
        assert puller.fetch(order(version, server, layout=layout), into=into, on_progress=came.append) == placed.digest
        assert np.array_equal(into, flat(version, layout))
        assert came == sorted(came) and came[-1] == layout.num_bytes
    placement.close()


def test_upload_reports_an_unreachable_parameter_server_and_the_others_serve_the_same_bytes(servers):
    placed = place(["http://127.0.0.1:9", *servers], publication(1))
    assert placed.sources == (tuple(servers),)
    assert "Connection refused" in placed.failed["http://127.0.0.1:9"]
    for url in servers:
        assert np.array_equal(pulled(order(1, url)), flat(1))


def test_upload_to_a_full_parameter_server_is_retried_until_a_deadline_and_names_the_lagging_engines():
    with (
        in_thread(application(room=2)) as url,
        closing(Uploader([url], token=TOKEN)) as placement,
        closing(Uploader([url], token=TOKEN)) as copying,
    ):
        placement.upload(publication(1), {"a": None}, deadline=soon())
        placement.upload(publication(2), {"a": (1, 1)}, deadline=soon())
        with pytest.raises(UpdateError, match=r"all 2 versions are still needed: 1\.1 is held for a \(at 1\.1\)"):
            placement.upload(publication(3), {"a": (1, 1)}, deadline=time.monotonic() + 0.4)
        copying.confirm(1, {"a": (1, 2)}, deadline=soon())
        placement.upload(publication(3), {"a": (1, 2)}, deadline=soon())
        assert held(url) == [(1, 2), (1, 3)]


def test_upload_whose_parameters_differ_from_the_announced_layout_is_never_served(server):
    def wrong():
        yield "embed", np.zeros((3, 3), np.float32)

    with pytest.raises(UpdateError, match="the trainer must gather"):
        place([server], publication(1, weights=wrong))
    assert held(server) == []
    place([server], publication(1))
    assert held(server) == [(1, 1)]


# --- rejected requests -------------------------------------------------------------------------------------------


def test_client_with_a_wrong_token_says_so(server):
    place([server], publication(1))
    with pytest.raises(UpdateError, match="the bearer token is not the one of this run"):
        WeightPuller(token="wrong").fetch(order(1, server), into=np.zeros(LAYOUT.num_bytes, np.uint8))
    with closing(Uploader([server], token="wrong")) as unauthorized:
        assert "the bearer token is not the one" in unauthorized.confirm(1, {}, deadline=soon())[server]


def test_byte_ranges_of_weights_are_served_exactly_and_invalid_ranges_are_rejected(server):
    place([server], publication(1))
    data, size = flat(1).tobytes(), LAYOUT.num_bytes
    assert ask(server, "GET", "/weights/1/1").content == data
    for first, last in ((0, 0), (5, 999), (size - 3, size - 1)):
        part = ask(server, "GET", "/weights/1/1", headers={"range": f"bytes={first}-{last}"})
        assert part.status_code == 206 and part.content == data[first : last + 1]
        assert part.headers["content-range"] == f"bytes {first}-{last}/{size}"
    assert ask(server, "GET", "/weights/1/1", headers={"range": f"bytes={size - 9}-"}).content == data[-9:]
    for wrong in (f"bytes=0-{size}", "bytes=9-3", "bytes=-5", "bytes=0-1,4-5", "lines=0-1"):
        refused = ask(server, "GET", "/weights/1/1", headers={"range": wrong})
        assert refused.status_code == 400 and "must lie within" in refused.json()["error"]["message"], wrong
    missing = ask(server, "GET", "/weights/1/2")
    assert missing.status_code == 409 and missing.json()["error"]["code"] == "not_prepared"
    assert ask(server, "GET", "/weights/1/one").status_code == 400


def test_uploaded_weights_are_served_only_after_their_digest_was_checked(server):
    announced = {"epoch": 1, "version": 1, "layout": LAYOUT.model_dump(mode="json")}
    assert ask(server, "POST", "/versions", json=announced).status_code == 200
    assert ask(server, "GET", "/weights/1/1").status_code == 409
    data, size = flat(1).tobytes(), LAYOUT.num_bytes
    for wrong in ({"content-range": f"bytes 0-9/{size + 1}"}, {"content-range": f"bytes 0-8/{size}"}):
        assert ask(server, "PUT", "/weights/1/1", content=data[:10], headers=wrong).status_code == 400
    assert ask(server, "PUT", "/weights/1/1", content=data[:-1] + b"x").status_code == 204
    sealed = ask(server, "POST", "/versions/1/1/seal", json={"digest": digest(1), "whole": digest(1)})
    assert sealed.status_code == 502 and sealed.json()["error"]["code"] == "digest_mismatch"
    end = {"content-range": f"bytes {size - 1}-{size - 1}/{size}"}
    assert ask(server, "PUT", "/weights/1/1", content=data[-1:], headers=end).status_code == 204
    assert ask(server, "POST", "/versions/1/1/seal", json={"digest": digest(1), "whole": digest(1)}).status_code == 200
    assert ask(server, "GET", "/weights/1/1").content == data
    assert ask(server, "PUT", "/weights/1/1", content=data).status_code == 400, (
        "a complete version can no longer be written"
    )


def test_pulled_weights_whose_digest_differs_from_the_announced_one_are_rejected(server):
    place([server], publication(1))
    for by_memory in (True, False):
        with pytest.raises(DigestMismatch, match="digest must be 0000"):
            pulled(replace(order(1, server), digest="0" * 32), by_memory=by_memory)


def test_pull_of_a_missing_weight_version_fails_with_the_reason_of_each_server(servers):
    with pytest.raises(UpdateError, match=r"no source gave version 1\.4: .*1\.4 is not held here.*; .*is not held"):
        pulled(order(4, *servers))


def test_weight_pull_fails_if_it_misses_its_deadline_or_is_cancelled(server):
    place([server], publication(1))
    with pytest.raises(DeadlineError):
        pulled(order(1, server, timeout_s=-1.0))
    cancelled = order(1, server)
    cancelled.given_up.set()
    with pytest.raises(UpdateError, match="cancelled"):
        pulled(cancelled)
