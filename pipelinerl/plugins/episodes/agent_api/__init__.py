"""The APIs that agents speak to the gateway: one module for each, which translates requests and answers."""
