"""Engines that sample in another process: vLLM's engine core, or an inference server that the user runs."""
