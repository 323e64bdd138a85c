def letters(completion, answer):
    """The share of letters that are right and in their place."""
    right = sum(a == b for a, b in zip(completion, answer))
    return right / max(len(completion), len(answer))
