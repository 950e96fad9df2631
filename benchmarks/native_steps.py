"""Steps of generation with the native cache, with the same cache in torch, and with a bf16 one.

    python benchmarks/native_steps.py OUT [--layers 4]

A DeepSeek-V3 shape with random weights and 16 heads; the time a step takes includes all that
transformers does on the host. Writes native_<gpu>_<yyyymmdd>.json.
"""

import argparse
import time
from pathlib import Path
from typing import Any

import torch
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM, DynamicCache

from quantmla.arguments import positive, run_script
from quantmla.bench.results import result_path, write
from quantmla.device import resolve_device
from quantmla.quant.format import parse_format
from quantmla.serve.native import native_cache
from quantmla.serve.transformers import QuantMLACache
from quantmla.workdir import check_makeable

SHAPES = ((4, 8192), (8, 16384))
CHUNK = 2048  # of the prompt
STEPS = {"native": 30, "torch": 5, "bf16": 30}


def build(layers: int) -> DeepseekV3ForCausalLM:
    config = DeepseekV3Config(
        vocab_size=1000,
        hidden_size=2048,
        intermediate_size=2048,
        num_hidden_layers=layers,
        num_attention_heads=16,
        num_key_value_heads=16,
        q_lora_rank=None,
        first_k_dense_replace=layers,
        max_position_embeddings=65536,
        eos_token_id=None,
    )
    torch.manual_seed(0)
    with torch.device("cuda"):
        return DeepseekV3ForCausalLM(config).to(torch.bfloat16).eval()


@torch.inference_mode()
def step_ms(model: Any, cache: Any, ids: torch.Tensor, steps: int) -> float:
    for chunk in ids.split(CHUNK, 1):
        out = model(chunk, past_key_values=cache, use_cache=True, logits_to_keep=1)
    for step in range(steps + 2):
        if step == 2:  # warm
            torch.cuda.synchronize()
            began = time.perf_counter()
        token = out.logits[:, -1:].argmax(-1)
        out = model(token, past_key_values=cache, use_cache=True)
    torch.cuda.synchronize()
    return (time.perf_counter() - began) / steps * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--layers", type=positive, default=4)
    run_script(parser, run)


def run(options: argparse.Namespace) -> None:
    resolve_device("cuda")
    check_makeable(options.out, options.out)
    model, fmt, rows = build(options.layers), parse_format("c4r4"), []
    for batch, context in SHAPES:
        ids = torch.randint(2, 1000, (batch, context), device="cuda")
        for name, steps in STEPS.items():
            cache = {
                "native": lambda: native_cache(model, fmt),
                "torch": lambda: QuantMLACache(model.config, fmt),
                "bf16": lambda: DynamicCache(config=model.config),
            }[name]()
            ms = step_ms(model, cache, ids, steps)
            row = {"cache": name, "layers": options.layers, "batch": batch, "context": context}
            rows.append(row | {"ms_per_step": round(ms, 2)})
            print(rows[-1], flush=True)
            write(result_path(options.out, "native"), rows)
            del cache
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
