"""LoRA in the torch trainer: adapters train on a frozen base, and engines receive merged weights."""
