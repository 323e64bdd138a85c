"""The inference contract: the HTTP routes that an engine serves, listed in `routes`, and the types of their bodies.

The package needs only pydantic. The conformance kit tests an engine over HTTP; it also needs httpx and torch, and is
imported on demand. Source: PipelineRL's post, section "inference contract".
"""
