"""vLLM: its engine core in process, and the routes of a stock `vllm serve`."""
