"""Windows of calibration text."""

import json
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from quantmla.capture.tokens import (
    calibration_tokens,
    load_tokenizer,
    packaged_texts,
    read_text,
)
from quantmla.errors import QuantMLAError, UsageError
from quantmla.evaluate.perplexity import default_text

WORDS = {str(i): i for i in range(1000)}


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    """Numbers to themselves."""
    inner = Tokenizer(models.WordLevel(WORDS, unk_token="0"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=inner)


TEXT = " ".join(str(i) for i in range(1000))


def test_windows_are_disjoint_pieces_of_the_text(tokenizer: PreTrainedTokenizerFast) -> None:
    found = calibration_tokens(
        tokenizer, TEXT, num_sequences=9, held_out=4, sequence_length=60, seed=3
    )
    assert found.train_BS.shape == (9, 60)
    assert found.held_out_BS.shape == (4, 60)
    windows = torch.cat((found.train_BS, found.held_out_BS))
    assert (windows.diff(dim=1) == 1).all()  # consecutive
    assert (windows[:, 0] % 60 == 0).all()
    assert windows[:, 0].unique().numel() == 13


def test_only_the_seed_decides_the_order(tokenizer: PreTrainedTokenizerFast) -> None:
    def draw(seed: int) -> torch.Tensor:
        torch.rand(seed + 1)
        return calibration_tokens(
            tokenizer, TEXT, num_sequences=16, held_out=0, sequence_length=50, seed=seed
        ).train_BS

    assert torch.equal(draw(0), draw(0))
    assert not torch.equal(draw(0), draw(1))


def test_text_too_short_says_how_much_is_needed(tokenizer: PreTrainedTokenizerFast) -> None:
    with pytest.raises(UsageError, match=r"has 1000 tokens, but 1001 are needed"):
        calibration_tokens(
            tokenizer, TEXT, num_sequences=6, held_out=1, sequence_length=143, seed=0
        )


@pytest.mark.parametrize("change", [{"num_sequences": 0}, {"held_out": -1}, {"sequence_length": 0}])
def test_numbers_that_cannot_be_meant(
    change: dict[str, int], tokenizer: PreTrainedTokenizerFast
) -> None:
    numbers = {"num_sequences": 1, "held_out": 1, "sequence_length": 8} | change
    with pytest.raises(UsageError, match=next(iter(change))):
        calibration_tokens(tokenizer, TEXT, seed=0, **numbers)


def test_packaged_text_is_the_default() -> None:
    text = read_text()
    assert len(text.encode()) == 1_202_379
    (name, same), (_, held_out) = packaged_texts()
    assert (name, same) == ("calibration.txt", text)
    assert held_out == default_text()


def test_text_files(tmp_path: Path) -> None:
    plain = tmp_path / "a.txt"
    plain.write_text("naïve text\n", "utf-8")
    assert read_text(plain) == "naïve text\n"
    rows = tmp_path / "a.jsonl"
    rows.write_text('{"text": "one", "id": 1}\n\n{"text": "two"}\n')
    assert read_text(rows) == "one\n\ntwo"
    rows.write_bytes('{"text": "a\u2028b\u0085c"}\r\n{"text": "\\ud83d\\ude00"}\r\n'.encode())
    assert read_text(rows) == "a\u2028b\u0085c\n\n\U0001f600"


@pytest.mark.parametrize(
    ("name", "content", "sentence"),
    [
        ("a.jsonl", b'{"text": "one"}\n{"txt": "two"}\n', "line 2"),
        ("a.jsonl", b'{"text": 3}\n', "no string"),
        ("a.jsonl", b"not json\n", "line 1"),
        ("a.jsonl", b'\n{"text": "abc \\ud800 def"}\n', "line 2 .* surrogates not allowed"),
        ("a.jsonl", b"[" * 100_000, "line 1 .* too many levels"),
        ("a.jsonl", b'{"text": "a", "id": ' + b"9" * 6000 + b"}", "line 1 .* has 6000 digits"),
        ("a.txt", b"\xed\xa0\x80", "UTF-8"),
        ("a.txt", b"\xff\xfe\x00", "UTF-8"),
        ("a.parquet", b"", "neither"),
        ("a.txt", None, "no text file"),
        ("a" * 300, None, "no text file"),
    ],
)
def test_files_that_cannot_be_read(
    name: str, content: bytes | None, sentence: str, tmp_path: Path
) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(UsageError, match=sentence):
        read_text(tmp_path / name)
    with pytest.raises(UsageError, match="no text file at ''"):
        read_text("")


def test_a_bare_tokenizer_file_is_enough(
    tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    with pytest.raises(QuantMLAError, match=r"tokenizer\.json is missing"):
        load_tokenizer(tmp_path)
    tokenizer.backend_tokenizer.save(str(tmp_path / "tokenizer.json"))
    assert load_tokenizer(tmp_path).encode("7 42") == [7, 42]
    tokenizer.save_pretrained(tmp_path)
    assert load_tokenizer(tmp_path).encode("7 42") == [7, 42]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "NoSuchClass"}))
    (tmp_path / "tokenizer.json").unlink()
    with pytest.raises(QuantMLAError, match="cannot be loaded"):
        load_tokenizer(tmp_path)


def test_a_config_that_the_tokenizer_trips_over_is_blamed_with_its_reason(
    tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    tokenizer.save_pretrained(tmp_path)
    config = {"model_type": "deepseek_v3", "rms_norm_eps": None}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"model_max_length": 64}))
    with pytest.raises(QuantMLAError, match="'rms_norm_eps' expected float, got NoneType"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize(
    ("name", "content"),
    [("tokenizer.json", "{"), ("tokenizer.json", "{}"), ("tokenizer_config.json", "[]")],
)
def test_a_broken_tokenizer_is_one_sentence(name, content, tmp_path):
    (tmp_path / name).write_text(content)
    with pytest.raises(QuantMLAError, match="cannot be loaded"):
        load_tokenizer(tmp_path)
