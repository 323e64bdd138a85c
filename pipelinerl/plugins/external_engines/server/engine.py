"""The engines `vllm_server` and `sglang_server`, which put the contract in front of a stock server that the user runs.

This process receives, checks and stages weights as every engine does, and passes them on through the server's own API.
It also computes chat, text and stop strings from the server's tokens. The server must serve the recipe's model, and
nothing else may update it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Final

from inference_contract.engine import Engine
from inference_contract.schemas import Continuation
from inference_contract.weights import WeightLayout
from pipelinerl.engines.batching.batching_engine import BatchingEngine
from pipelinerl.engines.batching.model_runner import Capacity
from pipelinerl.engines.batching.sample_loop import UNTRAINED
from pipelinerl.engines.options import EngineOptions
from pipelinerl.errors import AddressError, EngineUnreachable, ModelError
from pipelinerl.models.tokenizer import ChatTokenizer
from pipelinerl.plugins.external_engines.core_loop import CoreLoop, CoreModel, EngineCore, label_of
from pipelinerl.plugins.external_engines.server.server_core import ServerApi, ServerCore, ServerHttp
from pipelinerl.system.secret_variables import read_secret

#: Environment variable for the server's own API key, because a recipe should hold no secrets.
KEY_VARIABLE: Final = "PIPELINERL_SERVER_KEY"

#: Function that builds the client of a server from the connection, the model's layout and the shared staging buffer.
ApiFactory = Callable[[ServerHttp, WeightLayout, Any], ServerApi]


def vllm_server(options: EngineOptions) -> Engine:
    """Return an engine over the vLLM server at `options.server`. Raises `ModelError` for unsupported options."""
    from pipelinerl.plugins.external_engines.vllm.server_api import VllmServerApi

    return _engine(options, VllmServerApi, Continuation.OWN_NOISE)


def sglang_server(options: EngineOptions) -> Engine:
    """Return an engine over the SGLang server at `options.server`. Raises `ModelError` for unsupported options."""
    from pipelinerl.plugins.external_engines.server.sglang_api import SglangServerApi

    return _engine(options, SglangServerApi, Continuation.SAME_NOISE)


def _engine(options: EngineOptions, new_api: ApiFactory, continuation: Continuation) -> Engine:
    if options.server is None:
        raise ModelError('this engine needs a server to drive; set engine.servers=["http://host:port"]')
    options.refuse("the adapter of a server that you started", "receiver")
    options.refuse("the adapter of a server that you started with options of its own", "options")
    options.refuse("the adapter of a server", "memory_share", "weights", "kernels")
    options.refuse("the server", "head_precision")
    return BatchingEngine(
        options,
        loop=lambda deliver: CoreLoop(
            start_core=partial(_started, options, new_api),
            capacity=Capacity(options.slots, options.max_waiting),
            deliver=deliver,
        ),
        tokenizer=ChatTokenizer.load(options.model_path),
        continuation=continuation,
    )


async def _started(options: EngineOptions, new_api: ApiFactory) -> tuple[EngineCore, CoreModel]:
    from pipelinerl.engines.torch.weights import layout_of
    from pipelinerl.engines.weights.torch_shared_bytes import SharedBytes
    from pipelinerl.models.checkpoint import load_skeleton

    assert options.server is not None
    model = load_skeleton(options.model_path, dtype=options.dtype)
    options.check_context(model.config)
    layout, text = layout_of(model), model.config.get_text_config()
    http = ServerHttp(options.server, token=read_secret(KEY_VARIABLE))
    opened = False
    try:
        with SharedBytes(layout.num_bytes) as staged:
            api = new_api(http, layout, staged)
            dtype, context_length = await api.open(label_of(*UNTRAINED))
        if options.dtype != dtype:
            raise ModelError(
                f"engine.dtype must be the server's, {dtype}, got {options.dtype}; "
                f"or start the server with --dtype {options.dtype}"
            )
        if options.context_length > context_length:
            raise ModelError(
                f"engine.context_length must be at most the server's, {context_length}, got {options.context_length}"
            )
        opened = True
    except EngineUnreachable as error:
        raise AddressError(f"{error}; is {options.server} running, and does engine.type match it?") from error
    finally:
        if not opened:
            await http.close()
    return ServerCore(api, http, serving=UNTRAINED), CoreModel(
        slots=options.slots,
        context_length=options.context_length,
        vocab_size=int(text.vocab_size),
        layout=layout,
        cache_bytes=0,  # the server manages its own cache
        staged=staged.tensor,
    )
