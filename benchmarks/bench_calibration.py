"""Times the fit of one layer of DeepSeek-V2-Lite's and of DeepSeek-R1's shape on a GPU.

    python benchmarks/bench_calibration.py [--out FILE] [--sequences 128] [--length 2048]

Weights and hidden states are random, with the outlier channels and the biased rope keys that real
models have; time and memory do not depend on them. Rows: shape, method, tokens, seconds, peak_gib.
The captures wait on the CPU, as after a real capture.
"""

import argparse
import json
import time
from datetime import date
from pathlib import Path

import torch

from quantmla.arguments import new_or_old_file
from quantmla.doctor import gpus, versions
from quantmla.learn import resident
from quantmla.method import load_method
from quantmla.method.layer import Layer, Sample
from quantmla.mla.weights import MlaWeights
from quantmla.quant.format import paper_format, parse_format

SHAPES = {  # hidden size, heads, R, P, E, V
    "DeepSeek-V2-Lite": (2048, 16, 512, 128, 64, 128),
    "DeepSeek-R1": (7168, 128, 512, 128, 64, 128),
}
HELD_OUT = 32
# 300 steps for each path; ours has its 300 content steps to first order and 60 on the output
RUNS = {"quantmla": {"rope_steps": 300}, "paper": {}}


def make_layer(shape: tuple[int, ...], sequences: int, length: int, device: str) -> Layer:
    hidden, heads, rank, nope, rope, value = shape
    generator = torch.Generator(device).manual_seed(0)

    def normal(*size: int, scale: float = 1.0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        x = torch.empty(*size, device=device, dtype=dtype)
        return x.normal_(generator=generator) * scale

    weights = MlaWeights(
        w_dkv_RD=normal(1, 1),  # learning looks at captures, not at the projections before them
        b_dkv_R=None,
        w_kr_ED=normal(1, 1),
        b_kr_E=None,
        norm_R=normal(rank).exp(),
        w_uk_NPR=normal(heads, nope, rank, scale=rank**-0.5),
        w_uv_NVR=normal(heads, value, rank, scale=rank**-0.5),
        w_uq_NPX=normal(1, 1, 1),
        w_qr_NEX=normal(1, 1, 1),
        w_o_DNV=normal(hidden, heads, value, scale=(heads * value) ** -0.5),
    )
    spread, bias = normal(rank).exp(), 3 * normal(rope)

    def sample(count: int) -> Sample:
        latent = normal(count, length, rank) * spread
        latent = latent * latent.square().mean(-1, keepdim=True).rsqrt()
        key = normal(count, length, rope) + bias
        content = normal(count, length, heads, nope, dtype=torch.bfloat16)
        query = normal(count, length, heads, rope, dtype=torch.bfloat16)
        return Sample(latent.cpu(), key.bfloat16().cpu(), content.cpu(), query.cpu())

    scale = (nope + rope) ** -0.5
    return Layer(
        weights=weights, softmax_scale=scale, train=sample(sequences), held_out=sample(HELD_OUT)
    )


def time_fit(layer: Layer, name: str, changes: dict[str, int]) -> tuple[float, float]:
    """Seconds, copying the captures to the GPU included, and peak GiB of device memory."""
    method = load_method(name)
    fmt = (paper_format if method.PUBLISHED_FORMAT else parse_format)("c4r4")
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    began = time.perf_counter()
    train, held_out = (resident(x, layer.device) for x in (layer.train, layer.held_out))
    moved = Layer(
        weights=layer.weights,
        softmax_scale=layer.softmax_scale,
        train=Sample(*train),
        held_out=Sample(*held_out),
    )
    method.fit(moved, fmt, method.Options(**changes), torch.Generator().manual_seed(0))
    torch.cuda.synchronize()
    return time.perf_counter() - began, torch.cuda.max_memory_allocated() / 2**30


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=new_or_old_file)
    parser.add_argument("--sequences", type=int, default=128)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--shapes", nargs="*", default=list(SHAPES), choices=list(SHAPES))
    args = parser.parse_args()
    torch.set_float32_matmul_precision("high")
    rows = []
    gpu = gpus()[0]["name"]
    out = args.out or Path(__file__).parent / "results" / (
        f"calibration_{gpu.split()[-1].lower()}_{date.today():%Y%m%d}.json"
    )
    out.parent.mkdir(parents=True, exist_ok=True)
    for shape in args.shapes:
        layer = make_layer(SHAPES[shape], args.sequences, args.length, "cuda")
        for name, changes in RUNS.items():
            seconds, peak = time_fit(layer, name, changes)
            row = {
                "shape": shape,
                "method": name,
                "tokens": args.sequences * args.length,
                "held_out_tokens": HELD_OUT * args.length,
                "seconds": round(seconds, 2),
                "peak_gib": round(peak, 2),
            }
            rows.append(row)
            print(row, flush=True)
            header = {"versions": versions(), "gpus": [gpu]}
            out.write_text(json.dumps({"header": header, "rows": rows}, indent=2) + "\n")
        del layer


if __name__ == "__main__":
    main()
