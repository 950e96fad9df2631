"""Trains nano's byte-level BPE tokenizer: 4,096 entries, every digit a token of its own.

python training/tokenizer.py MIX.txt.xz OUT/tokenizer.json
"""

import lzma
import random
import sys
from collections.abc import Iterator

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

SEPARATOR = "\n\x1e\n"  # a line that holds only U+001E stands between documents
SPECIAL = ["<|endoftext|>", "<|pad|>", "<|im_start|>", "<|im_end|>"]
SAMPLE_CHARS = 40_000_000


def sample(path: str) -> Iterator[str]:
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


def main(mix: str, out: str) -> None:
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
    tokenizer.train_from_iterator(sample(mix), trainer)
    tokenizer.save(out, pretty=False)


if __name__ == "__main__":
    main(*sys.argv[1:])
