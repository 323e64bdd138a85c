"""Paths of the inference contract. A server mounts them, a client calls them; nobody spells one by hand."""

from typing import Final

INIT_PROCESS_GROUP: Final = "/init_process_group"
REQUEST_WEIGHT_UPDATE: Final = "/request_weight_update"
CHAT_COMPLETIONS: Final = "/v1/chat/completions"
#: PipelineRL's post spells the route without the plural; both are served.
CHAT_COMPLETION_ALIAS: Final = "/v1/chat/completion"
#: OpenAI's older route: a prompt in place of messages.
COMPLETIONS: Final = "/v1/completions"
MODELS: Final = "/v1/models"
HEALTH: Final = "/health"
METRICS: Final = "/metrics"
#: Of a parameter server, not of an engine: the flat bytes of one version, whole or in ranges (transport `pull`).
WEIGHTS: Final = "/weights/{epoch}/{version}"
