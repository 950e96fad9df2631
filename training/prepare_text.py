"""Turns .txt and .txt.xz files into the mix that `tokenizer.py` and `train.py` read.

    python training/prepare_text.py BOOKS_FOLDER docs.txt ... --out MIX.txt.xz \
        --held-out src/quantmla/assets/text/heldout.txt src/quantmla/assets/text/calibration.txt.xz

A folder stands for every such file below it. A file is one document, or several with a line that
holds only U+001E between them. Documents are cut to `--max-chars`; those that share a run of
`--span` words with a held-out text, and empty and repeated ones, are dropped. What is left is
shuffled, since `train.py` takes the words of its tasks from the front, and written as xz.
"""

import argparse
import lzma
import random
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tokenizer import SEPARATOR

MAX_CHARS = 400_000  # of one document, so that no long book outweighs the others
SPAN_WORDS = 13
SUFFIXES = (".txt", ".txt.xz")
WORD = re.compile(r"[^\W_]+")


@dataclass(slots=True)
class Prepared:
    """The documents of the mix, and how many were not taken."""

    documents: list[str] = field(default_factory=list)
    cut: int = 0
    repeated: int = 0
    held_out: int = 0  # shared a span with a held-out text


def text_files(paths: Iterable[Path]) -> list[Path]:
    """The files named and those in the folders named, folders sorted; ValueError for any other."""
    files: list[Path] = []
    for path in paths:
        if path.is_dir():
            files += sorted(f for end in SUFFIXES for f in path.rglob(f"*{end}") if f.is_file())
        elif path.name.endswith(SUFFIXES) and path.is_file():
            files.append(path)
        else:
            raise ValueError(f"{path} is neither a .txt or .txt.xz file nor a folder")
    return files


def documents(files: Iterable[Path]) -> Iterator[str]:
    """All documents of the files, stripped; ValueError for a file that is no xz or not UTF-8."""
    for path in files:
        try:
            opener = lzma.open if path.suffix == ".xz" else open
            with opener(path, "rt", encoding="utf-8") as file:
                text = file.read()
        except UnicodeDecodeError as error:
            raise ValueError(f"{path} is not UTF-8 text: {error}") from error
        except (lzma.LZMAError, EOFError) as error:
            raise ValueError(f"{path} is not a whole xz file: {error}") from error
        for document in text.split(SEPARATOR):
            if document.strip():
                yield document.strip()


def spans(text: str, words: int = SPAN_WORDS) -> Iterator[str]:
    """Every run of `words` words; case, punctuation, markup and line breaks do not count."""
    found = WORD.findall(text.lower())
    for start in range(len(found) - words + 1):
        yield " ".join(found[start : start + words])


def prepare(
    texts: Iterable[str],
    held_out: Sequence[str] = (),
    *,
    max_chars: int = MAX_CHARS,
    words: int = SPAN_WORDS,
    seed: int = 0,
) -> Prepared:
    """Cuts, drops and shuffles; the same for the same texts in the same order."""
    kept_out = {span for text in held_out for span in spans(text, words)}
    result, seen = Prepared(), set()
    for text in texts:
        document = text[:max_chars]
        if document in seen:
            result.repeated += 1
        elif kept_out and any(span in kept_out for span in spans(document, words)):
            result.held_out += 1
        else:
            result.cut += len(text) > max_chars
            seen.add(document)
            result.documents.append(document)
    random.Random(seed).shuffle(result.documents)
    return result


def write(mix: Sequence[str], out: Path) -> None:
    """Writes beside `out` first, so that a mix is whole or not there."""
    part = out.with_name(out.name + ".part")
    with lzma.open(part, "wt", encoding="utf-8", newline="\n") as file:
        for number, document in enumerate(mix):
            file.write((SEPARATOR if number else "") + document)
    part.replace(out)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("text", nargs="+", type=Path, help=".txt(.xz) files, or folders of them")
    parser.add_argument("--out", type=Path, required=True, help="the mix, an .xz file")
    parser.add_argument("--held-out", nargs="+", type=Path, default=[], help="texts to keep out")
    parser.add_argument("--max-chars", type=int, default=MAX_CHARS, help="of one document")
    parser.add_argument("--span", type=int, default=SPAN_WORDS, help="words that count as shared")
    args = parser.parse_args(arguments)
    if args.max_chars < 1 or args.span < 1:
        parser.error(f"--max-chars {args.max_chars} and --span {args.span} must be at least 1")
    try:
        held_out = list(documents(text_files(args.held_out)))
        files = [path for path in text_files(args.text) if path.resolve() != args.out.resolve()]
        made = prepare(documents(files), held_out, max_chars=args.max_chars, words=args.span)
    except ValueError as error:
        parser.error(str(error))
    if not made.documents:
        parser.error("no document is left: nothing is written")
    write(made.documents, args.out)
    size = sum(map(len, made.documents)) / 1e6
    print(
        f"{len(made.documents):,} documents, {size:.1f} M characters; "
        f"cut {made.cut}, dropped {made.repeated} repeated and {made.held_out} held out"
    )


if __name__ == "__main__":
    main()
