"""Trains nano, the embedded DeepSeek-V3-style MLA model, on one GPU.

    python training/train.py --text MIX.txt.xz --tokenizer tokenizer.json \
        --held-out heldout.txt --out OUT --minutes 7.3

`training/README.md` says where the text comes from. Half of the rows carry the recall tasks of
`tasks.py`. Writes an ordinary Hugging Face folder (bf16, shards under 8 MB) and `training.json`
with what was measured: held-out perplexity, and exact-match recall on unseen needles.
"""

import argparse
import json
import lzma
import math
import random
import time
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from tasks import TaskMaker, corpus_words
from tokenizer import SEPARATOR
from tokenizers import Tokenizer
from torch.utils.data import DataLoader, IterableDataset, get_worker_info
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

CONTEXT = 4096
PLANTED = 0.55  # share of the rows with a recall task


def nano_config(vocab_size: int, layers: int = 8) -> DeepseekV3Config:
    return DeepseekV3Config(
        vocab_size=vocab_size,
        hidden_size=320,
        intermediate_size=512,
        num_hidden_layers=layers,
        num_attention_heads=6,
        num_key_value_heads=6,
        q_lora_rank=None,
        kv_lora_rank=128,
        qk_rope_head_dim=64,
        qk_nope_head_dim=64,
        v_head_dim=64,
        first_k_dense_replace=layers,  # every MLP is dense
        num_nextn_predict_layers=0,
        max_position_embeddings=CONTEXT,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        tie_word_embeddings=True,
        rms_norm_eps=1e-6,
        bos_token_id=0,
        eos_token_id=0,
        pad_token_id=1,
    )


def encode(tokenizer: Tokenizer, documents: list[str]) -> np.ndarray:
    """All documents in one stream of token ids, <|endoftext|> (0) before each."""
    parts = []
    for start in range(0, len(documents), 2048):
        for encoding in tokenizer.encode_batch_fast(documents[start : start + 2048]):
            parts.append(np.array([0, *encoding.ids], dtype=np.int16))
    return np.concatenate(parts)


class Rows(IterableDataset):
    def __init__(self, tokens: np.ndarray, maker: TaskMaker, seed: int):
        self.tokens, self.maker, self.seed = tokens, maker, seed

    def __iter__(self):
        info = get_worker_info()
        rng = random.Random(self.seed * 1000 + (info.id if info else 0))
        while True:
            start = rng.randrange(0, self.tokens.size - CONTEXT - 1)
            yield self.maker.row(rng, self.tokens[start : start + CONTEXT + 1], PLANTED)


@torch.no_grad()
def recall(model, maker: TaskMaker, text: np.ndarray, count: int, device: str) -> dict[str, float]:
    """Exact-match recall: the needle lies more than 1,024 tokens back in a 4,096-token input.

    `plain` plants one needle; `hard` plants seven near-duplicates of it as well.
    """
    out = {}
    for name, distractors in (("plain", 0), ("hard", 7)):
        rng, right = random.Random(12345), 0
        for _ in range(count):
            key, (value, noun) = maker._key(rng), maker._value(rng)
            ids = maker._ids
            fact = ids(f" One of the special magic {noun} for {key} is: {value}.")
            what = f"special magic {noun[:-1]} for {key} mentioned in the provided text"
            ask = ids(f"\nWhat is the {what}? The {what} is")
            answer = ids(f" {value}.")
            start = rng.randrange(0, text.size - CONTEXT - 1)
            row = text[start : start + CONTEXT].astype(np.int64)
            tail = len(ask) + len(answer)
            for _ in range(distractors):
                other_key, other = maker._near(rng, key, value)
                if other_key != key:
                    near = ids(f" One of the special magic {noun} for {other_key} is: {other}.")
                    at = rng.randrange(0, CONTEXT - tail - len(near))
                    row[at : at + len(near)] = near
            at = rng.randrange(0, CONTEXT - tail - len(fact) - 1024)
            row[at : at + len(fact)] = fact
            row[CONTEXT - tail :] = np.concatenate([ask, answer])
            with torch.autocast(device, dtype=torch.bfloat16, enabled=device == "cuda"):
                logits = model(
                    input_ids=torch.from_numpy(row)[None].to(device), use_cache=False
                ).logits
            said = logits[0, CONTEXT - len(answer) - 1 : CONTEXT - 1].argmax(-1).cpu().numpy()
            right += bool((said == answer).all())
        out[name] = right / count
    return out


@torch.no_grad()
def perplexity(model, text: np.ndarray, device: str) -> float:
    total, count = 0.0, 0
    for start in range(0, text.size - CONTEXT, CONTEXT):
        row = torch.from_numpy(text[start : start + CONTEXT].astype(np.int64))[None].to(device)
        with torch.autocast(device, dtype=torch.bfloat16, enabled=device == "cuda"):
            logits = model(input_ids=row, use_cache=False).logits
        total += F.cross_entropy(logits[0, :-1].float(), row[0, 1:], reduction="sum").item()
        count += CONTEXT - 1
    return math.exp(total / count)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--text", required=True)
    parser.add_argument("--tokenizer", required=True)
    parser.add_argument("--held-out", required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--minutes", type=float, default=7.3)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--rate", type=float, default=3e-3)
    parser.add_argument("--device", default="cuda")
    parser.add_argument(
        "--limit-chars", type=int, default=None, help="read less text, to try the script"
    )
    parser.add_argument("--layers", type=int, default=8)
    args = parser.parse_args()

    began = time.time()
    tokenizer = Tokenizer.from_file(args.tokenizer)
    with lzma.open(args.text, "rt", errors="ignore") as file:
        mix = file.read(args.limit_chars)
    tokens = encode(tokenizer, [d for d in mix.split(SEPARATOR) if d.strip()])
    held_out = encode(tokenizer, [Path(args.held_out).read_text()])
    words = corpus_words(mix[:30_000_000])
    del mix
    print(f"{tokens.size / 1e6:.1f} M tokens after {time.time() - began:.0f} s", flush=True)

    maker = TaskMaker(tokenizer, words)
    workers = 12 if args.device == "cuda" else 0
    loader = iter(
        DataLoader(
            Rows(tokens, maker, seed=0),
            batch_size=args.batch,
            num_workers=workers,
            pin_memory=args.device == "cuda",
            prefetch_factor=8 if workers else None,
        )
    )
    torch.manual_seed(0)
    torch.set_float32_matmul_precision("high")
    model = DeepseekV3ForCausalLM(nano_config(tokenizer.get_vocab_size(), args.layers)).to(
        args.device
    )
    parameters = sum(p.numel() for p in model.parameters())
    print(f"{parameters / 1e6:.2f} M parameters", flush=True)
    groups = [
        {"params": [p for p in model.parameters() if p.dim() >= 2], "weight_decay": 0.1},
        {"params": [p for p in model.parameters() if p.dim() < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(
        groups, lr=args.rate, betas=(0.9, 0.95), fused=args.device == "cuda"
    )
    body = torch.compile(model.model) if args.device == "cuda" else model.model

    start, step, timed = time.time(), 0, 0.0
    log = []
    while (minutes := (time.time() - start) / 60) < args.minutes:
        # warm-up, constant, then linear to 2 % over the last 40 % of the time
        done = minutes / args.minutes
        rate = (
            args.rate
            * min(1, (step + 1) / 200)
            * (1 if done < 0.6 else max(0.02, (1 - done) / 0.4))
        )
        for group in optimizer.param_groups:
            group["lr"] = rate
        rows, weight = (t.to(args.device, non_blocking=True) for t in next(loader))
        with torch.autocast(args.device, dtype=torch.bfloat16, enabled=args.device == "cuda"):
            hidden = body(input_ids=rows[:, :-1], use_cache=False).last_hidden_state
            logits = F.linear(hidden, model.lm_head.weight)
            losses = F.cross_entropy(
                logits.float().flatten(0, 1), rows[:, 1:].flatten(), reduction="none"
            )
            weights = weight[:, 1:].flatten()
            loss = (losses * weights).sum() / weights.sum()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if step == 20:
            timed = time.time()
        if step % 200 == 0:
            speed = (step - 20) * args.batch * CONTEXT / (time.time() - timed) if step > 20 else 0
            log.append({"step": step, "minutes": round(minutes, 2), "loss": round(loss.item(), 4)})
            print(
                f"step {step} {minutes:.2f} min loss {loss.item():.4f} {speed:.0f} tokens/s",
                flush=True,
            )
        if step and step % 1000 == 0:
            print(recall(model, maker, held_out, 32, args.device), flush=True)
        step += 1

    model.eval().to(torch.bfloat16)
    args.out.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(args.out, max_shard_size="7MB")
    facts = {
        "parameters": parameters,
        "steps": step,
        "training_tokens": step * args.batch * CONTEXT,
        "minutes": round((time.time() - start) / 60, 2),
        "device": torch.cuda.get_device_name() if args.device == "cuda" else "cpu",
        "torch": torch.__version__,
        "log": log,
    }
    (args.out / "training.json").write_text(json.dumps(facts, indent=1))
    facts["held_out_perplexity"] = perplexity(model, held_out, args.device)
    facts["recall"] = recall(model, maker, held_out, 256, args.device)
    facts["recall_count"] = 256
    (args.out / "training.json").write_text(json.dumps(facts, indent=1))
    print({k: v for k, v in facts.items() if k != "log"}, flush=True)


if __name__ == "__main__":
    main()
