"""The trainer contract: the interface between the training loop and a training backend.

It has the five verbs of PipelineRL's post (init worker, forward, backward, optimizer step, gather weights), and save
and restore of exact state. It needs only numpy; the conformance kit is imported on demand.
"""
