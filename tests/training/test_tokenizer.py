"""nano's tokenizer: digits apart, and one sentence for files that cannot be meant."""

import lzma

import pytest
import tokenizer
from tokenizers import Tokenizer


def test_digits_are_tokens_of_their_own(tmp_path):
    mix, out = tmp_path / "mix.txt.xz", tmp_path / "tokenizer.json"
    mix.write_bytes(lzma.compress(b"12 12 12 of one\n\x1e\n12 12 of two"))
    tokenizer.main([str(mix), str(out)])
    assert Tokenizer.from_file(str(out)).encode("12 12").tokens == ["1", "2", "Ġ", "1", "2"]


@pytest.mark.parametrize(
    ("mix", "out", "words"),
    [("none.xz", "out.json", "no file at"), ("mix.xz", "none/out.json", "is not a file in")],
)
def test_files_that_cannot_be_meant(mix, out, words, tmp_path, capsys):
    (tmp_path / "mix.xz").write_bytes(lzma.compress(b"text"))
    with pytest.raises(SystemExit, match="2"):
        tokenizer.main([str(tmp_path / mix), str(tmp_path / out)])
    assert words in capsys.readouterr().err
