"""The mix holds what it should, and nothing of the held-out text."""

import lzma
import random
from pathlib import Path

import pytest
from prepare_text import documents, main, prepare, spans, text_files
from tokenizer import SEPARATOR

ASSETS = Path(__file__).parents[2] / "src" / "quantmla" / "assets" / "text"


def words(count: int, seed: int) -> str:
    draw = random.Random(seed)
    return " ".join("".join(draw.choices("abcdefgh", k=7)) for _ in range(count))


def read_mix(path: Path) -> list[str]:
    with lzma.open(path, "rt", encoding="utf-8") as file:
        return file.read().split(SEPARATOR)


def test_folders_and_files_become_one_shuffled_mix(tmp_path):
    folder = tmp_path / "books"
    (folder / "old").mkdir(parents=True)
    texts = [words(20, seed) for seed in range(30)]
    for number, text in enumerate(texts[:20]):
        (folder / "old" / f"{number:02}.txt").write_text(text + "\n")
    (folder / "notes.md").write_text("not text to train on")
    several = tmp_path / "several.txt"
    several.write_text(SEPARATOR.join([*texts[20:], "  \n"]))
    main([str(folder), str(several), "--out", str(tmp_path / "mix.txt.xz")])
    found = read_mix(tmp_path / "mix.txt.xz")
    assert sorted(found) == sorted(texts)
    assert found != texts
    assert [p.name for p in tmp_path.iterdir() if p.suffix == ".part"] == []


def test_the_same_files_give_the_same_mix():
    texts = [words(5, seed) for seed in range(40)]
    assert prepare(texts).documents == prepare(texts).documents
    assert prepare(texts, seed=1).documents != prepare(texts).documents


def test_long_documents_are_cut_and_repeated_ones_dropped():
    made = prepare(["a" * 11, "b" * 10, "b" * 10], max_chars=10)
    assert sorted(made.documents) == ["a" * 10, "b" * 10]
    assert (made.cut, made.repeated, made.held_out) == (1, 1, 0)


@pytest.mark.parametrize(("shared", "dropped"), [(12, 0), (13, 1)])
def test_thirteen_shared_words_drop_a_document_whatever_their_layout(shared, dropped):
    held_out = words(200, 1)
    part = held_out.split()[50 : 50 + shared]
    copied = "\n> ".join(w.upper() + "," for w in part)
    made = prepare([f"{words(40, 2)}. {copied} {words(40, 3)}", words(90, 4)], [held_out])
    assert made.held_out == dropped
    assert len(made.documents) == 2 - dropped


def test_what_is_cut_off_does_not_count_as_shared():
    held_out = words(20, 1)
    made = prepare([words(20, 2) + held_out], [held_out], max_chars=len(words(20, 2)))
    assert made.documents == [words(20, 2)]


def test_spans_are_every_run_of_words():
    assert list(spans("One, two_three\n4!", 2)) == ["one two", "two three", "three 4"]
    assert list(spans("too short", 3)) == []


def test_faults_are_named(tmp_path, capsys):
    with pytest.raises(ValueError, match="absent"):
        text_files([tmp_path / "absent"])
    bad = tmp_path / "bad.txt"
    bad.write_bytes(b"\xff\xfe\xff")
    with pytest.raises(ValueError, match=r"bad\.txt is not UTF-8"):
        list(documents([bad]))
    cut = tmp_path / "cut.txt.xz"
    for content in (b"plain", lzma.compress(b"packed" * 100)[:-20]):
        cut.write_bytes(content)
        with pytest.raises(ValueError, match=r"cut\.txt\.xz is not a whole xz file"):
            list(documents([cut]))
    empty = tmp_path / "empty.txt"
    empty.write_text(" \n")
    with pytest.raises(SystemExit):
        main([str(empty), "--out", str(tmp_path / "mix.txt.xz")])
    assert "no document is left" in capsys.readouterr().err
    assert not (tmp_path / "mix.txt.xz").exists()


def test_a_folders_packed_texts_are_kept_out_too(tmp_path):
    """The command of training/README.md names the folder of the packaged texts."""
    folder = tmp_path / "books"
    folder.mkdir()
    packed, plain = (next(documents([ASSETS / n])) for n in ("calibration.txt.xz", "heldout.txt"))
    for name, text in (("a", packed[5000:9000]), ("b", plain[5000:9000]), ("c", words(300, 1))):
        (folder / f"{name}.txt").write_text(text)
    arguments = [str(folder), "--out", str(folder / "mix.txt.xz"), "--held-out", str(ASSETS)]
    for _ in range(2):  # the second time, an earlier mix is in the folder
        main(arguments)
        assert read_mix(folder / "mix.txt.xz") == [words(300, 1)]


def test_packaged_texts_share_no_span():
    calibration, held_out = (
        set(spans("\n".join(documents([ASSETS / name]))))
        for name in ("calibration.txt.xz", "heldout.txt")
    )
    assert len(held_out) > 50_000
    assert not calibration & held_out
