"""The inference contract: the HTTP routes that an engine serves, and their types.

An engine serves three POST routes (`/init_process_group`, `/request_weight_update`, `/v1/chat/completions`) and three
GET routes (`/health`, `/v1/models`, `/metrics`). The package needs only pydantic. The conformance kit tests an engine
over HTTP; it also needs httpx and torch, and is imported on demand.

Source: PipelineRL's post, section "inference contract".
"""
