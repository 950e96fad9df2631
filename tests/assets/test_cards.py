"""The figures of the cards are those of the files beside them."""

import json
import lzma
import re
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
ASSETS = ROOT / "src" / "quantmla" / "assets"
CARD = ASSETS / "nano" / "README.md"


def figures(path: Path) -> dict[str, str]:
    """Every two-column row of the file's tables."""
    rows = re.findall(r"^\| ([^|]+) \| ([^|]+) \|$", path.read_text(encoding="utf-8"), re.MULTILINE)
    return {name: value for name, value in rows if name != "what"}


def trained() -> dict[str, str]:
    facts = json.loads((ASSETS / "nano" / "training.json").read_text())
    return {
        "parameters": f"{facts['parameters']:,}",
        "steps": f"{facts['steps']:,}",
        "training tokens": f"{facts['training_tokens']:,}",
        f"minutes on one {facts['device']}": f"{facts['minutes']:.2f}",
        "perplexity": f"{facts['held_out_perplexity']:.2f}",
        "recall of one needle": f"{facts['recall']['plain']:.3f}",
        "recall of one needle among seven look-alikes": f"{facts['recall']['hard']:.3f}",
    }


@pytest.mark.parametrize("path", [CARD, ROOT / "training" / "README.md"])
def test_training_figures_are_those_of_the_run(path):
    stated = {
        {"perplexity of": "perplexity", "steps of": "steps"}.get(" ".join(k.split()[:2]), k): v
        for k, v in figures(path).items()
    }
    wanted = trained()
    assert {name: stated.get(name) for name in wanted} == wanted
    count = json.loads((ASSETS / "nano" / "training.json").read_text())["recall_count"]
    assert re.search(rf"\b{count} inputs", path.read_text())


def test_architecture_is_that_of_the_config():
    config = json.loads((ASSETS / "nano" / "config.json").read_text())
    channels = (config["qk_nope_head_dim"], config["qk_rope_head_dim"], config["v_head_dim"])
    wanted = {
        "layers": str(config["num_hidden_layers"]),
        "hidden size": str(config["hidden_size"]),
        "heads": str(config["num_attention_heads"]),
        "content, rope and value channels of a head": ", ".join(map(str, channels)),
        "latent channels (kv_lora_rank)": str(config["kv_lora_rank"]),
        "MLP width": str(config["intermediate_size"]),
        "context": f"{config['max_position_embeddings']:,} tokens",
        "vocabulary, embeddings tied": f"{config['vocab_size']:,}",
    }
    stated = figures(CARD)
    assert {name: stated.get(name) for name in wanted} == wanted
    assert config["tie_word_embeddings"]
    assert config["first_k_dense_replace"] == config["num_hidden_layers"]


def test_the_card_has_the_front_matter_that_hubs_read():
    front = yaml.safe_load(CARD.read_text(encoding="utf-8").split("---")[1])
    assert front["license"] == "apache-2.0"
    assert front["library_name"] == "transformers"


def test_sizes_of_the_texts():
    card = (ASSETS / "text" / "README.md").read_text(encoding="utf-8")
    stated = dict(re.findall(r"^\| `(\S+)` \|.*\| ([\d,]+)(?:, packed by xz)? \|$", card, re.M))
    contents = {p.name: p.read_bytes() for p in (ASSETS / "text").glob("*.txt*")}
    assert len(contents) == 2
    unpacked = {n: lzma.decompress(x) if n.endswith(".xz") else x for n, x in contents.items()}
    assert stated == {name: f"{len(content):,}" for name, content in unpacked.items()}
