"""LoRA in the torch trainer: adapters train over a frozen base, and engines are sent the two as one."""
