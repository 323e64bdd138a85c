"""The inference contract: what an engine must serve so that anybody can drive it.

Three POSTs (`/init_process_group`, `/request_weight_update`, `/v1/chat/completions`) and three GETs
(`/health`, `/v1/models`, `/metrics`). The package needs pydantic only; the conformance kit, which drives an engine
over HTTP, needs httpx and torch besides and is imported on demand.

Source: PipelineRL's post, section "inference contract".
"""
