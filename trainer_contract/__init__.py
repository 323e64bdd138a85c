"""The trainer contract: what a training backend must offer so that the training loop can drive it.

The five verbs of PipelineRL's post (init worker, forward, backward, optimizer step, gather weights) and exact state.
The package needs numpy only; the conformance kit is imported on demand.
"""
