"""Data files on disk, as the rows that lm-eval's own task definitions expect.

A reader takes the paths of one source and gives rows by lm-eval task and by split. Files of the
hub's own rows (.jsonl) pass unchanged; other public formats are renamed field by field.
"""

import base64
import bz2
import csv
import gzip
import io
import json
import pickle
import zipfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from quantmla.capture.tokens import json_line
from quantmla.errors import QuantMLAError, require

Row = dict[str, Any]
Splits = dict[str, list[Row]]
Data = dict[str, Splits]  # by lm-eval task
Reader = Callable[[Sequence[Path]], Data]
SUBJECT_FILE = "_test.csv"


def read_text(path: Path) -> str:
    """A file's text, unpacked if its name ends with .gz or .bz2."""
    unpack = {".gz": gzip.decompress, ".bz2": bz2.decompress}.get(path.suffix, bytes)
    try:
        return unpack(path.read_bytes()).decode("utf-8")
    except (OSError, EOFError, ValueError) as error:
        raise QuantMLAError(f"cannot read {path}: {error}") from error


def json_rows(path: Path, keys: Sequence[str]) -> list[Row]:
    """Rows of a .jsonl file; refuses rows that lack one of `keys`, and a file without rows."""
    rows: list[Row] = []
    for number, line in enumerate(read_text(path).split("\n"), 1):
        if not line.strip():
            continue
        try:
            row = json_line(line)
        except ValueError as error:
            raise QuantMLAError(
                f"line {number} of {path} cannot be read as JSON: {error}"
            ) from None
        whole = isinstance(row, dict) and all(key in row for key in keys)
        require(whole, f"line {number} of {path} lacks one of the keys {', '.join(keys)}")
        rows.append(row)
    require(bool(rows), f"{path} holds no rows")
    return rows


def hub_rows(task: str, split: str, *keys: str) -> Reader:
    """A file of the rows that the hub has."""
    return lambda paths: {task: {split: json_rows(paths[0], keys)}}


def converted(task: str, split: str, convert: Callable[[Row], Row], *keys: str) -> Reader:
    """A .jsonl file whose rows are changed one by one."""
    return lambda paths: {task: {split: [convert(row) for row in json_rows(paths[0], keys)]}}


def piqa_row(row: Row) -> Row:
    goal = str(row["query"]).removeprefix("Question: ").removesuffix("\n")
    first, second = row["choices"]
    return {"goal": goal, "sol1": first, "sol2": second, "label": int(row["gold"])}


def arc_row(row: Row) -> Row:
    letters = [chr(ord("A") + i) for i in range(len(row["choices"]))]
    return {
        "question": str(row["query"]).removeprefix("Question: "),
        "choices": {"text": row["choices"], "label": letters},
        "answerKey": letters[int(row["gold"])],
    }


def winogrande_row(row: Row) -> Row:
    """Two beginnings with one continuation, as a sentence with a gap."""
    first, second = (str(option) for option in row["context_options"])
    shorter = min(len(first), len(second))
    same = next((i for i in range(shorter) if first[i] != second[i]), shorter)
    shared = first[: first.rfind(" ", 0, same) + 1]
    require("_" not in shared, f"the WinoGrande sentence {first!r} holds a gap of its own")
    return {
        "sentence": f"{shared}_ {row['continuation']}",
        "option1": first[len(shared) :],
        "option2": second[len(shared) :],
        "answer": str(int(row["gold"]) + 1),
    }


def hellaswag_text(paths: Sequence[Path]) -> Data:
    """Six lines an item: the context, the number of the right ending, four endings."""
    # not splitlines(): a text may hold other ends of lines, such as U+2028
    lines = read_text(paths[0]).replace("\r\n", "\n").removesuffix("\n").split("\n")
    require(len(lines) % 6 == 0, f"{paths[0]} is not made of six lines an item")
    rows = []
    for at in range(0, len(lines), 6):
        label, _, context = lines[at].partition(": ")
        rows.append(
            {
                "activity_label": label,
                "ctx_a": context,
                "ctx_b": "",
                "endings": lines[at + 2 : at + 6],
                "label": lines[at + 1].strip(),
            }
        )
    return {"hellaswag": {"validation": rows}}


def _subjects(archive: zipfile.ZipFile) -> Iterator[tuple[str, str]]:
    for name in archive.namelist():
        if "/test/" in f"/{name}" and name.endswith(SUBJECT_FILE):
            yield name, Path(name).name.removesuffix(SUBJECT_FILE)


def mmlu_zip(paths: Sequence[Path]) -> Data:
    """The authors' archive: test/SUBJECT_test.csv and dev/SUBJECT_dev.csv, six columns a row."""

    def rows(archive: zipfile.ZipFile, name: str) -> list[Row]:
        with archive.open(name) as file:
            table = list(csv.reader(io.TextIOWrapper(file, encoding="utf-8")))
        six = all(len(row) == 6 and row[5].strip() in tuple("ABCD") for row in table)
        require(
            six and bool(table), f"{name} in {paths[0]} is not a table of question, A-D, answer"
        )
        return [
            {"question": row[0], "choices": row[1:5], "answer": "ABCD".index(row[5].strip())}
            for row in table
        ]

    try:
        with zipfile.ZipFile(paths[0]) as archive:
            found: Data = {}
            for name, subject in sorted(_subjects(archive)):
                shots = f"{name.rpartition('test/')[0]}dev/{subject}_dev.csv"
                splits = {"test": rows(archive, name), "dev": rows(archive, shots)}
                found[f"mmlu_{subject}"] = splits
    except (zipfile.BadZipFile, KeyError, UnicodeDecodeError, OSError) as error:
        raise QuantMLAError(f"{paths[0]} is not the MMLU archive: {error}") from error
    require(bool(found), f"{paths[0]} holds no test/SUBJECT{SUBJECT_FILE}")
    return found


def gsm8k(paths: Sequence[Path]) -> Data:
    """Test items, and training items to take the shots from where that file is there."""
    keys = ("question", "answer")
    splits = {"test": json_rows(paths[0], keys)}
    if len(paths) > 1:
        splits["train"] = json_rows(paths[1], keys)
    return {"gsm8k": splits}


def gpqa_csv(paths: Sequence[Path]) -> Data:
    keys = ("Question", "Correct Answer", *(f"Incorrect Answer {i}" for i in (1, 2, 3)))
    table = csv.DictReader(io.StringIO(read_text(paths[0]), newline=""))
    rows = [{key: row.get(key) for key in keys} for row in table]
    whole = bool(rows) and all(value is not None for row in rows for value in row.values())
    require(whole, f"{paths[0]} lacks one of the columns {', '.join(keys)}")
    return {"gpqa_diamond_zeroshot": {"train": rows}}


def livecodebench_row(row: Row) -> Row:
    """Tests as JSON text, those that the hub packs unpacked; `func_name` is empty for programs."""
    tests = json.loads(row["public_test_cases"]) + _packed_tests(row["private_test_cases"])
    metadata = json.loads(row.get("metadata") or "{}")
    return {
        "question_content": row["question_content"],
        "starter_code": row.get("starter_code") or "",
        "func_name": metadata.get("func_name") or "",
        "tests": json.dumps(tests),
    }


class _PlainUnpickler(pickle.Unpickler):
    """Reads texts, numbers and lists; a pickle that names any class or function is refused."""

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"it names {module}.{name}")


def _packed_tests(text: str) -> list[Any]:
    try:
        return json.loads(text)
    except ValueError:
        pass  # the hub's packed form
    try:
        packed = zlib.decompress(base64.b64decode(text))
        return json.loads(_PlainUnpickler(io.BytesIO(packed)).load())
    except (ValueError, zlib.error, pickle.UnpicklingError, EOFError, TypeError) as error:
        raise QuantMLAError(
            f"private_test_cases of LiveCodeBench cannot be read: {error}"
        ) from None
