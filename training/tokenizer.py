"""Trains nano's byte-level BPE tokenizer: 4,096 entries, every digit a token of its own.

python training/tokenizer.py MIX.txt.xz OUT/tokenizer.json
"""

import argparse
import lzma
import random
from collections.abc import Iterator, Sequence
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

SEPARATOR = "\n\x1e\n"  # a line that holds only U+001E stands between documents
SPECIAL = ["<|endoftext|>", "<|pad|>", "<|im_start|>", "<|im_end|>"]
SAMPLE_CHARS = 40_000_000


def sample(path: Path) -> Iterator[str]:
    """Random documents, in pieces of at most 10,000 characters, up to SAMPLE_CHARS."""
    with lzma.open(path, "rt", errors="ignore") as file:
        documents = file.read().split(SEPARATOR)
    random.Random(0).shuffle(documents)
    taken = 0
    for document in documents:
        for start in range(0, len(document), 10_000):
            yield document[start : start + 10_000]
        taken += len(document)
        if taken > SAMPLE_CHARS:
            return


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("mix", type=Path, help="texts, an .xz file of prepare_text.py")
    parser.add_argument("out", type=Path, help="tokenizer.json to write")
    args = parser.parse_args(arguments)
    if not args.mix.is_file():
        parser.error(f"no file at {args.mix}")
    if not args.out.parent.is_dir() or args.out.is_dir():
        parser.error(f"{args.out} is not a file in a folder that exists")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=4096,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(sample(args.mix), trainer)
    tokenizer.save(str(args.out), pretty=False)


if __name__ == "__main__":
    main()
