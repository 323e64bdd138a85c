"""The strong tier: gVisor."""
