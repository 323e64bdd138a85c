"""Multi-process trainers for every array library: the training loop calls rank 0, and the other ranks execute its
commands.
"""
