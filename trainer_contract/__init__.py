"""The trainer contract: the interface between the training loop and a training backend.

It consists of the five verbs of PipelineRL's post (init worker, forward, backward, optimizer step, gather weights) and
of exact state. The package needs only numpy; the conformance kit is imported on demand.
"""
