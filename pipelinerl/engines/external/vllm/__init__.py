"""vLLM: its engine core in a child process, and the client of a stock `vllm serve`."""
