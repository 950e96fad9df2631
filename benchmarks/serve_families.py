"""Does each family start in vLLM with a packed cache, and decode? Few layers, no weights.

    python benchmarks/serve_families.py [--families deepseek_v3,...] [--format c4r4] [--eager]
        [--output benchmarks/results/families_<gpu>_<yyyymmdd>.json]

Attention has the family's own sizes; layers and experts are few. Every family is a process, and
all run side by side on one GPU. Prints one line of JSON for each; exit code 1 if one failed.
"""

import argparse
import json
import math
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from bench_serve import environment

from quantmla.arguments import names, new_or_old_file, run_script, seconds
from quantmla.bench.results import write
from quantmla.errors import UsageError, require
from quantmla.quant.format import parse_format
from quantmla.serve.settings import NOT_COMPILED, SERVED_FORMATS
from quantmla.serving.command import check_machine

YARN = {"type": "yarn", "factor": 40, "original_max_position_embeddings": 4096}
YARN |= {"beta_fast": 32, "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 1.0}
DEEPSEEK_V3 = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "hidden_size": 7168,
    "intermediate_size": 18_432,
    "moe_intermediate_size": 2048,
    "num_hidden_layers": 2,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "n_routed_experts": 16,
    "n_shared_experts": 1,
    "num_experts_per_tok": 4,
    "n_group": 4,
    "topk_group": 2,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "vocab_size": 8192,
    "max_position_embeddings": 163_840,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10_000,
    "rope_scaling": YARN,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "bos_token_id": 0,
    "eos_token_id": 1,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "deepseek_v2": DEEPSEEK_V3
    | {
        "architectures": ["DeepseekV2ForCausalLM"],
        "model_type": "deepseek_v2",
        "hidden_size": 5120,
        "intermediate_size": 12_288,
        "moe_intermediate_size": 1536,
        "n_shared_experts": 2,
        "topk_method": "group_limited_greedy",
        "scoring_func": "softmax",
        "norm_topk_prob": False,
        "routed_scaling_factor": 16.0,
    },
    "deepseek_v3": DEEPSEEK_V3,
    "kimi_k2": DEEPSEEK_V3
    | {
        "model_type": "kimi_k2",
        "num_attention_heads": 64,
        "num_key_value_heads": 64,
        "n_group": 1,
        "topk_group": 1,
        "rope_theta": 50_000,
    },
    "glm4_moe_lite": {
        "architectures": ["Glm4MoeLiteForCausalLM"],
        "model_type": "glm4_moe_lite",
        "hidden_size": 2048,
        "intermediate_size": 10_240,
        "moe_intermediate_size": 1536,
        "num_hidden_layers": 2,
        "first_k_dense_replace": 1,
        "num_attention_heads": 20,
        "num_key_value_heads": 20,
        "q_lora_rank": 768,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 192,
        "qk_rope_head_dim": 64,
        "v_head_dim": 256,
        "n_routed_experts": 16,
        "n_shared_experts": 1,
        "num_experts_per_tok": 4,
        "n_group": 1,
        "topk_group": 1,
        "topk_method": "noaux_tc",
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.8,
        "vocab_size": 8192,
        "max_position_embeddings": 131_072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1_000_000,
        "torch_dtype": "bfloat16",
        "eos_token_id": 1,
    },
    "longcat_flash": {
        "architectures": ["LongcatFlashForCausalLM"],
        "model_type": "longcat_flash",
        "hidden_size": 6144,
        "ffn_hidden_size": 12_288,
        "expert_ffn_hidden_size": 2048,
        "num_hidden_layers": 2,  # releases of transformers differ in what it counts: 1 or 2 layers
        "num_attention_heads": 64,
        "q_lora_rank": 1536,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "mla_scale_q_lora": True,
        "mla_scale_kv_lora": True,
        "n_routed_experts": 16,
        "zero_expert_num": 8,
        "zero_expert_type": "identity",
        "moe_topk": 4,
        "routed_scaling_factor": 6.0,
        "vocab_size": 8192,
        "max_position_embeddings": 131_072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10_000_000.0,
        "torch_dtype": "bfloat16",
        "eos_token_id": 1,
    },
}


def config_of(family: str, name: str) -> dict[str, Any]:
    settings = {"version": 1, "format": parse_format(name).to_json(), "ignored_layers": []}
    return FAMILIES[family] | {"quantmla_config": settings}


def start(family: str, name: str, eager: bool) -> dict[str, Any]:
    """Serves three prompts, one of them of several chunks; what came out and what was allocated."""
    from vllm import LLM, SamplingParams

    from quantmla.serve.vllm import register

    register()
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(config_of(family, name)))
        llm = LLM(
            model=folder,
            skip_tokenizer_init=True,
            load_format="dummy",
            dtype="bfloat16",
            attention_backend="CUSTOM",
            max_model_len=4096,
            max_num_batched_tokens=512,
            max_num_seqs=4,
            gpu_memory_utilization=0.1,
            kv_cache_memory_bytes=2**28,
            enforce_eager=eager,
            compilation_config={"cudagraph_capture_sizes": [1, 2, 4]},
        )
    params = SamplingParams(temperature=0.0, max_tokens=32, ignore_eos=True, logprobs=1)
    params.detokenize = False
    prompts = [{"prompt_token_ids": list(range(7, 7 + n))} for n in (3, 200, 1300)]
    answers = llm.generate(prompts, params, use_tqdm=False)
    numbers = [
        float(next(iter(step.values())).logprob)
        for answer in answers
        for step in answer.outputs[0].logprobs
    ]
    layers = llm.llm_engine.vllm_config.compilation_config.static_forward_context
    packed = [layer.kv_cache for at, layer in layers.items() if f"{at}.window" in layers]
    return {
        "decoded": [len(answer.outputs[0].token_ids) for answer in answers],
        "finite": all(map(math.isfinite, numbers)),
        "packed_layers": len(packed),
        "bytes_per_token": sorted({cache.shape[1] // 64 for cache in packed}),
        "compiled": not eager,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--families", type=names, default=tuple(FAMILIES), metavar="A,B")
    parser.add_argument("--format", choices=SERVED_FORMATS, default="c4r4")
    parser.add_argument("--eager", action="store_true", help="no compilation, no CUDA graphs")
    parser.add_argument("--seconds", type=seconds, default=240)
    parser.add_argument("--output", type=new_or_old_file, help="result file to write")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    run_script(parser, run)


def run(options: argparse.Namespace) -> None:
    if options.one is not None:
        found = start(options.one, options.format, options.eager or options.one in NOT_COMPILED)
        print("RESULT", json.dumps({"family": options.one, "format": options.format, **found}))
        return
    unknown = ", ".join(name for name in options.families if name not in FAMILIES)
    require(not unknown, f"--families {unknown}: none of {', '.join(FAMILIES)}", UsageError)
    check_machine()
    raise SystemExit(all_at_once(options))


def all_at_once(options: argparse.Namespace) -> int:
    command = [sys.executable, __file__, "--format", options.format]
    command += ["--eager"] if options.eager else []
    processes = {
        family: subprocess.Popen(
            [*command, "--one", family],
            env=environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for family in options.families
    }
    found, end = [], time.monotonic() + options.seconds
    for family, process in processes.items():
        try:
            output, _ = process.communicate(timeout=max(0.1, end - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            output, _ = process.communicate()
        results = [line for line in output.splitlines() if line.startswith("RESULT ")]
        found += [json.loads(line.removeprefix("RESULT ")) for line in results]
        if options.output is not None:
            write(options.output, found)  # first: a reader of stdout may have left
        print(json.dumps(found[-1]) if results else f"{family}:\n{output[-3000:]}", flush=True)
    return int(len(found) < len(processes))


if __name__ == "__main__":
    main()
