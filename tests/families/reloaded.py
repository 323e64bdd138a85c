"""Log-probs of model directories with a transformers of any version: `python tests/families/reloaded.py DIRECTORY…`.

Prints a JSON object: for each directory, the tensors that it lacks, that do not fit and that are not used, and the
log-probs of a fixed sequence; or an error. The module imports nothing of this project.
"""

import json
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM
from transformers.utils import logging


def reloaded(path):
    """Return the result for one directory."""
    try:
        model, report = AutoModelForCausalLM.from_pretrained(path, output_loading_info=True)
        tokens = torch.arange(20, 40)[None]
        with torch.no_grad():
            predicted = model.float().eval()(input_ids=tokens, use_cache=False).logits[0, :-1].log_softmax(-1)
    except Exception as error:  # each version of transformers fails in its own way
        return {"error": f"{type(error).__name__}: {error}".splitlines()[0][:200]}
    kinds = ("missing_keys", "mismatched_keys", "unexpected_keys")
    return {
        "tensors": {kind: sorted(map(str, report[kind])) for kind in kinds if report[kind]},
        "logprobs": predicted.gather(1, tokens[0, 1:, None])[:, 0].tolist(),
    }


if __name__ == "__main__":
    logging.set_verbosity_error()
    print(json.dumps({name: reloaded(Path(name)) for name in sys.argv[1:]}))
