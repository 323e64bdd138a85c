"""Five hundred weight-update manifests (PREPARE) with one mutation each: all are rejected, the old weights serve."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from copy import deepcopy
from typing import Any

import httpx
import numpy as np
import pytest

from inference_contract import routes
from inference_contract.schemas import ChatCompletionRequest
from pipelinerl import rng
from pipelinerl.engines.http.client import EngineClient
from pipelinerl.weights.broadcast.publisher import BroadcastPublisher
from pipelinerl.weights.publisher import Publication
from tests.fakes.scripted_engine import LAYOUT
from tests.fakes.served import as_process
from tests.patience import PATIENCE_S

MUTATIONS = 500
EPOCH, VERSION = 2, 5

Manifest = dict[str, Any]
Draw = np.random.Generator
Mutation = Callable[[Manifest, Draw], Any]

NOT_NUMBERS: tuple[Any, ...] = ("1", "", None, [], {}, float("nan"), float("inf"), -1, 1.5, True, 10**400)
NOT_SIZES: tuple[Any, ...] = (*NOT_NUMBERS, -(2**40), 2**62, [3], "x" * 10_000)
NOT_TEXTS: tuple[Any, ...] = (None, 7, [], {}, "", "x" * 100_000, ["a"], True)


def _one_of(draw, values):
    return values[draw.integers(len(values))]


def _spec(manifest, draw):
    return _one_of(draw, manifest["layout"]["parameters"])


#: Wrong values of fields. Engines accept float16 and bfloat16, which they convert.
WRONG: dict[str, Sequence[Any]] = {
    "layout": [
        *(None, [], {}, "", 3, {"parameters": None}, {"parameters": []}, {"rows": []}),
        {"parameters": [{"name": f"p{row}", "shape": [2**40, 2**40], "dtype": "float64"} for row in range(2_000)]},
        {"parameters": LAYOUT.model_dump(mode="json")["parameters"][::-1]},
        {"parameters": LAYOUT.model_dump(mode="json")["parameters"][1:]},
    ],
    "version": [*range(VERSION), *NOT_NUMBERS, 2**63],
    "epoch": [*range(EPOCH), *NOT_NUMBERS, 2**63],
    "phase": ["PREPARE", "abort", "commit", "begin", *NOT_TEXTS],
    "on_update": ["restart", "CONTINUE", *NOT_TEXTS],
    "bucket_bytes": [0, -1, 1.5, float("nan"), "x", [], {}],
    "timeout_s": [0, -1, -1e300, float("nan"), float("-inf"), 1e9, 10**400, "x", [], {}],
}
WRONG_OF_A_PARAMETER: dict[str, Sequence[Any]] = {
    "dtype": ["float64", "int8", "FLOAT32", "float32 ", "complex64", "object", *NOT_TEXTS],
    "name": [
        *("table", "table.weight2", "Table.weight", "table.weight\u0000", "../etc/passwd", "table.wei\u200bght"),
        *NOT_TEXTS,
    ],
}


def wrong_value(manifest, draw):
    key = _one_of(draw, [*WRONG])
    manifest[key] = _one_of(draw, WRONG[key])


def wrong_parameter(manifest, draw):
    key = _one_of(draw, [*WRONG_OF_A_PARAMETER])
    _spec(manifest, draw)[key] = _one_of(draw, WRONG_OF_A_PARAMETER[key])


def shape(manifest, draw):
    spec = _spec(manifest, draw)
    dims = spec["shape"]
    at = int(draw.integers(len(dims)))
    changed = [
        [*dims, 1], [*dims, 0], dims[:-1], [*dims[:at], dims[at] + 1, *dims[at + 1 :]],
        [*dims[:at], 0, *dims[at + 1 :]], [*dims[:at], _one_of(draw, NOT_SIZES), *dims[at + 1 :]],
        [32 * 32] if len(dims) == 2 else [4, 8], None, "32", {"0": 32}, [[32]], 32, [1] * 100_000,
    ]  # fmt: skip
    spec["shape"] = _one_of(draw, changed)


def doubled(manifest, draw):
    rows = manifest["layout"]["parameters"]
    rows.insert(int(draw.integers(len(rows) + 1)), deepcopy(_spec(manifest, draw)))


def unknown(manifest, draw):
    extra = {"name": f"extra.{draw.integers(99)}", "shape": [int(draw.integers(9))], "dtype": "float32"}
    rows = manifest["layout"]["parameters"]
    rows.insert(int(draw.integers(len(rows) + 1)), extra)


def layout_id(manifest, draw):
    if draw.integers(2):
        del manifest["layout"]
    manifest["layout_id"] = _one_of(draw, ["", "0" * 32, LAYOUT.layout_id[:-1], 7, [], "x" * 100_000])


def membership(manifest, draw):
    if draw.integers(2):
        manifest["generation"] += int(_one_of(draw, [-(2**40), -1, 1, 2**41]))
    else:
        manifest[_one_of(draw, ["group", "generation"])] = _one_of(draw, ["others", "", None, [], {}, -1, 1.5, 10**400])


def digest(manifest, draw):
    """Mutate the digest of a pull, which must be a text, or send a COMMIT, which is invalid before a PREPARE."""
    if draw.integers(2):
        manifest |= {"transport": "pull", "sources": ["http://127.0.0.1:9"]}
        manifest["digest"] = _one_of(draw, [None, 7, [], {}, True])
    else:
        manifest |= {"phase": "commit", "digest": _one_of(draw, ["", "0" * 32, "x" * 100_000])}


def transport(manifest, draw):
    pulls = [
        {"sources": []}, {"sources": ["file:///etc/passwd"]}, {"sources": ["http://u:p@h"]}, {"sources": "http://a:1"},
        {"shards": [[]]}, {"sources": ["http://a:1"], "shards": [["http://a:1"]]}, {"sources": ["http://a:1/x"]},
    ]  # fmt: skip
    if draw.integers(2):
        manifest |= {"transport": "pull", "digest": "0" * 32, **_one_of(draw, pulls)}
    else:
        manifest["transport"] = _one_of(draw, ["rdma", "Broadcast", *NOT_TEXTS])


def field(manifest, draw):
    if draw.integers(2):
        manifest[_one_of(draw, ["force", "__class__", "Version", "skip_digest"])] = True
    else:
        del manifest[_one_of(draw, ["phase", "version", "group", "generation", "layout"])]


def text(manifest, draw):
    """Return a request body that is not a manifest: not JSON, truncated, or JSON of another form."""
    whole = json.dumps(manifest).encode()
    cut = whole[: int(draw.integers(1, len(whole)))]
    deep = b"[" * 100_000
    other = [b"", b"null", b"[]", b"7", deep, b'{"layout":' * 5_000, whole + b"}", whole[1:], b"\xff\xfe" + whole, cut]
    return _one_of(draw, other)


#: The tables of wrong values have several turns, as they hold most of the mutations.
ALL: tuple[Mutation, ...] = (
    *(wrong_value,) * 9, *(wrong_parameter,) * 2, shape, doubled, unknown, layout_id, membership, digest, transport,
    field, text,
)  # fmt: skip


def mutants(manifest):
    """Yield the name of each mutation and the mutated manifest; the kinds of mutation take turns."""
    for number in range(MUTATIONS):
        kind, changed = ALL[number % len(ALL)], deepcopy(manifest)
        body = kind(changed, rng.generator(number, "manifest"))
        yield f"{kind.__name__} {number}", json.dumps(changed).encode() if body is None else body


def weights():
    for parameter in LAYOUT.parameters:
        values = rng.generator(VERSION, parameter.name).normal(size=parameter.shape)
        yield parameter.name, values.astype(np.float32)


@pytest.mark.timeout(300)
async def test_mutated_weight_update_manifests_are_rejected_and_the_engine_serves_its_old_weights():
    greedy = ChatCompletionRequest(
        prompt_token_ids=[3, 5], max_tokens=24, temperature=0.0, return_token_ids=True, seed=0
    )
    with as_process("tests.fakes.scripted_engine") as (url, process):
        async with EngineClient() as client:
            publisher = BroadcastPublisher(client)

            async def published(number):
                report = await publisher.publish(
                    Publication(
                        version=number,
                        epoch=EPOCH,
                        layout=LAYOUT,
                        weights=weights,
                        engines=(url,),
                        membership=1,
                        timeout_s=PATIENCE_S,
                    )
                )
                assert report.failed == {}

            await published(VERSION)
            assert publisher._group is not None
            before = (await client.chat(url, greedy)).choices
            manifest = {
                "phase": "prepare", "version": VERSION + 1, "epoch": EPOCH, "transport": "broadcast",
                "group": "weights", "generation": publisher._group.generation, "bucket_bytes": 128, "timeout_s": 5.0,
                "layout": LAYOUT.model_dump(mode="json"),
            }  # fmt: skip
            answers = {}
            with httpx.Client(base_url=url, trust_env=False, timeout=PATIENCE_S) as raw:
                for kind, body in mutants(manifest):
                    answer = raw.post(
                        routes.REQUEST_WEIGHT_UPDATE, content=body, headers={"content-type": "application/json"}
                    )
                    answers[kind] = answer.status_code, answer.text[:300]
                    assert 400 <= answer.status_code < 500, f"{kind}: {answers[kind]} for {body[:300]!r}"
                    assert len(answer.content) < 10_000, f"{kind}: the refusal repeats the body"
                assert process.poll() is None
                health = await client.health(url)
                assert (health.epoch, health.model_version, health.state) == (EPOCH, VERSION, "ready")
                assert (await client.chat(url, greedy)).choices == before
                accepted = raw.post(routes.REQUEST_WEIGHT_UPDATE, json=manifest)
                assert accepted.status_code == 200, "what was mutated would have been accepted as it was"
                raw.post(routes.REQUEST_WEIGHT_UPDATE, json={**manifest, "phase": "abort"}).raise_for_status()
            assert len(answers) == MUTATIONS
            await publisher.close()
            publisher = BroadcastPublisher(client)
            publisher._generation = int(manifest["generation"])
            await published(VERSION + 1)
            assert (await client.chat(url, greedy)).choices[0].token_ids == before[0].token_ids, "the same weights"
            await publisher.close()
