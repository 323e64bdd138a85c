"""Environments: users' programs that talk to the model through the gateway, which forwards their requests to an
engine.
"""
