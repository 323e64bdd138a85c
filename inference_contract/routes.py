"""Paths of the inference contract, shared by servers and clients."""

from typing import Final

INIT_PROCESS_GROUP: Final = "/init_process_group"
REQUEST_WEIGHT_UPDATE: Final = "/request_weight_update"
CHAT_COMPLETIONS: Final = "/v1/chat/completions"
#: PipelineRL's post spells the route without the plural; engines serve both.
CHAT_COMPLETION_ALIAS: Final = "/v1/chat/completion"
#: OpenAI's older route, which takes a prompt instead of messages.
COMPLETIONS: Final = "/v1/completions"
MODELS: Final = "/v1/models"
HEALTH: Final = "/health"
METRICS: Final = "/metrics"
#: Served by parameter servers, not engines: the bytes of one version, whole or in ranges (transport `pull`).
WEIGHTS: Final = "/weights/{epoch}/{version}"
