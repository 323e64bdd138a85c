"""The client raises the engine's own errors, and names the URL if no engine answers."""

import pytest

from inference_contract.errors import ContractError, InvalidRequest, NotPrepared, Unauthorized, UnknownModel
from inference_contract.schemas import ChatCompletionRequest, ChatMessage
from inference_contract.weights import UpdatePhase, WeightUpdateRequest
from pipelinerl.engines.http.client import EngineClient
from pipelinerl.errors import EngineUnreachable
from tests.fakes.raw_server import raw_server, response, sending
from tests.fakes.scripted_engine import LAYOUT, application
from tests.fakes.served import in_thread
from tests.patience import PATIENCE_S


@pytest.fixture(scope="module")
def url():
    with in_thread(application(token="t")) as served:
        yield served


@pytest.fixture
async def client():
    async with EngineClient(token="t", chat_timeout_s=PATIENCE_S, state_timeout_s=PATIENCE_S) as made:
        yield made


def ask(**fields):
    return ChatCompletionRequest(messages=[ChatMessage(role="user", content="1 + 2")], max_tokens=4, **fields)


async def test_engine_client_calls_every_route(client, url):
    completion = await client.chat(url, ask(n=3, seed=1, return_token_ids=True))
    assert len(completion.choices) == 3 and completion.choices[2].token_ids
    assert (await client.health(url)).model_version == 0
    card = (await client.models(url)).data[0]
    assert card.layout == LAYOUT
    assert (await client.metrics(url))["generated_tokens_total"] >= 3


@pytest.mark.parametrize(
    ("request_", "kind"),
    [(ask(model="another"), UnknownModel), (ask(n=1).model_copy(update={"prompt_token_ids": [99]}), InvalidRequest)],
)
async def test_engine_client_raises_the_engines_error_classes(client, url, request_, kind):
    with pytest.raises(kind):
        await client.chat(url, request_)


async def test_engine_client_raises_update_errors_with_class_and_param(client, url):
    request = WeightUpdateRequest(phase=UpdatePhase.PREPARE, version=1, group="g", generation=1, layout=LAYOUT)
    with pytest.raises(NotPrepared) as refused:
        await client.request_weight_update(url, request)
    assert refused.value.param == "group"


async def test_client_with_a_wrong_access_token_may_request_only_the_health_route(url):
    async with EngineClient(token="wrong") as stranger:
        assert (await stranger.health(url)).model_version == 0
        with pytest.raises(Unauthorized):
            await stranger.models(url)


async def test_closed_port_raises_engine_unreachable(client):
    with pytest.raises(
        EngineUnreachable, match=r"^GET http://127\.0\.0\.1:9/health failed: .*is the engine running\?$"
    ):
        await client.health("http://127.0.0.1:9")


@pytest.mark.parametrize(
    ("answer", "raised", "sentence"),
    [
        (response(b"{}"), EngineUnreachable, "must answer with a Health; state: Field required"),
        (b"SSH-2.0-OpenSSH\r\n", EngineUnreachable, "is the engine running"),
        (response(b"<html>", status=502), EngineUnreachable, "HTTP 502 without the contract's error"),
        (response(b"Internal Server Error", status=500), EngineUnreachable, "HTTP 500 without"),
        (response(b"", status=302, location="/login"), ContractError, "got HTTP 302 with another body"),
    ],
    ids=["JSON outside the contract", "not HTTP", "proxy error", "internal server error", "redirect to a login page"],
)
async def test_server_that_is_no_engine_gives_an_error_that_says_so(answer, raised, sentence):
    async with raw_server(sending(answer)) as url, EngineClient() as client:
        with pytest.raises(raised, match=sentence):
            await client.health(url)
