"""Plug-ins: everything that `pipelinerl run tiny` does not need, a folder each. The core never imports one."""
