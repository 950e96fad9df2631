"""Calibration text to windows of token ids.

B sequences, S tokens of each.
"""

import json
import lzma
import os
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from quantmla.errors import QuantMLAError, UsageError, one_line, require

_TEXTS = resources.files("quantmla") / "assets/text"


@dataclass(frozen=True, slots=True)
class CalibrationTokens:
    """Disjoint windows of one text, int64."""

    train_BS: Tensor
    held_out_BS: Tensor


def calibration_tokens(
    tokenizer: Any, text: str, *, num_sequences: int, held_out: int, sequence_length: int, seed: int
) -> CalibrationTokens:
    """Non-overlapping windows of the tokenised text, in an order that only `seed` decides.

    `num_sequences` windows to learn from and `held_out` others to choose by. No special tokens are
    added. Raises UsageError when the text is too short.
    """
    require(num_sequences >= 1, f"num_sequences {num_sequences} must be at least 1", UsageError)
    require(held_out >= 0, f"held_out {held_out} is negative", UsageError)
    require(
        sequence_length >= 1, f"sequence_length {sequence_length} must be at least 1", UsageError
    )
    ids = torch.tensor(
        tokenizer.encode(text, add_special_tokens=False, verbose=False), dtype=torch.long
    )
    needed = (num_sequences + held_out) * sequence_length
    require(
        len(ids) >= needed,
        f"the calibration text has {len(ids)} tokens, but {needed} are needed: "
        f"({num_sequences} + {held_out} held out) x {sequence_length}",
        UsageError,
    )
    available = len(ids) // sequence_length
    windows = ids[: available * sequence_length].view(available, sequence_length)
    order = torch.randperm(available, generator=torch.Generator().manual_seed(seed))
    last = num_sequences + held_out
    return CalibrationTokens(windows[order[:num_sequences]], windows[order[num_sequences:last]])


def packaged_texts() -> tuple[tuple[str, str], ...]:
    """Name and content of both packaged texts: the calibration and the held-out one."""
    held_out = (_TEXTS / "heldout.txt").read_text("utf-8")
    return ("calibration.txt", read_text()), ("heldout.txt", held_out)


def read_text(path: str | Path | None = None) -> str:
    """A .txt file, or the `text` column of a .jsonl file; None gives the packaged text."""
    if path is None:
        return lzma.decompress((_TEXTS / "calibration.txt.xz").read_bytes()).decode("utf-8")
    require(os.path.isfile(path), f"no text file at {str(path)!r}", UsageError)
    path = Path(path)
    require(
        path.suffix in (".txt", ".jsonl"), f"{path} is neither a .txt nor a .jsonl file", UsageError
    )
    try:
        content = path.read_text("utf-8")
    except UnicodeDecodeError as error:
        raise UsageError(f"{path} is not UTF-8 text: {error}") from error
    return content if path.suffix == ".txt" else _text_column(path, content)


def json_line(line: str) -> Any:
    """A row of a .jsonl file; ValueError for all that cannot be read or is no text."""
    try:
        row = json.loads(line)
    except RecursionError:
        raise ValueError("it has too many levels") from None
    if "\\ud" in line.lower():  # an escape of half a surrogate pair stands for no character
        json.dumps(row, ensure_ascii=False).encode()
    return row


def _text_column(path: Path, content: str) -> str:
    rows = []
    # not splitlines(): a string of JSON may hold other ends of lines, such as U+2028
    for number, line in enumerate(content.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            rows.append(json_line(line)["text"])
        except ValueError as error:
            raise UsageError(f"line {number} of {path} cannot be read as JSON: {error}") from None
        except (KeyError, TypeError) as error:
            raise UsageError(
                f"line {number} of {path} is not a JSON object with a `text`"
            ) from error
        require(
            isinstance(rows[-1], str), f"`text` in line {number} of {path} is no string", UsageError
        )
    return "\n\n".join(rows)


def load_tokenizer(folder: Path) -> Any:
    """The tokenizer of a checkpoint folder; a bare tokenizer.json is enough."""
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    file = folder / "tokenizer.json"
    configured = (folder / "tokenizer_config.json").is_file()
    require(configured or file.is_file(), f"{folder} has no tokenizer: tokenizer.json is missing")
    try:
        if configured:
            return AutoTokenizer.from_pretrained(folder, local_files_only=True)
        return PreTrainedTokenizerFast(tokenizer_file=str(file))
    except Exception as error:  # tokenizers raises plain ones
        raise QuantMLAError(
            f"the tokenizer in {folder} cannot be loaded: {one_line(error)}"
        ) from error
