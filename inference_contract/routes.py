"""Paths of the inference contract, shared by servers and clients.

    POST /init_process_group      join the process group for weights      InitProcessGroupRequest, ProcessGroupStatus
    POST /request_weight_update   run one phase of a weight update        WeightUpdateRequest, WeightUpdateResponse
    POST /v1/chat/completions     sample answers to a conversation        ChatCompletionRequest, ChatCompletion
    POST /v1/completions          sample continuations of prompts         CompletionRequest, TextCompletion
    GET  /v1/models               the served model and its layout         ModelList
    GET  /health                  state and supported features            Health
    GET  /metrics                 load and totals, Prometheus text        EngineMetrics

All routes except `/health` require the bearer token, if the engine has one. `errors` describes the shape of errors.
"""

from typing import Final

INIT_PROCESS_GROUP: Final = "/init_process_group"
REQUEST_WEIGHT_UPDATE: Final = "/request_weight_update"
CHAT_COMPLETIONS: Final = "/v1/chat/completions"
#: PipelineRL's post spells this route in the singular; engines serve both spellings.
CHAT_COMPLETION_ALIAS: Final = "/v1/chat/completion"
#: OpenAI's older route, which takes a prompt instead of messages.
COMPLETIONS: Final = "/v1/completions"
MODELS: Final = "/v1/models"
HEALTH: Final = "/health"
METRICS: Final = "/metrics"
#: Route of parameter servers, not of engines: the bytes of one version, whole or in ranges (transport `pull`).
WEIGHTS: Final = "/weights/{epoch}/{version}"
