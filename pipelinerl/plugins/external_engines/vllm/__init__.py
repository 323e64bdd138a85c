"""Engines over vLLM: vLLM's engine core in a child process, or a client of a stock `vllm serve`."""
