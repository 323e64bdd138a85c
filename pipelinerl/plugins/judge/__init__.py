"""A language model as the verifier of answers (LLM as a judge)."""
