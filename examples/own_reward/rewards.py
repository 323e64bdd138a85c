def letters(completion, answer):
    """Return the share of the answer's letters that the completion has in the right place."""
    right = sum(a == b for a, b in zip(completion, answer))
    return right / max(len(completion), len(answer))
