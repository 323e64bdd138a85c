"""Environments that are OpenEnv servers, reached over WebSockets."""
