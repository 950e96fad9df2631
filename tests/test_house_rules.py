"""Rules of the house that no other tool checks."""

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SOURCES = sorted((ROOT / "src").rglob("*.py"))
MODULE_LINES, KERNEL_LINES = 300, 600
TREE_BYTES, FILE_BYTES = 25_000_000, 8_000_000
# parts of words, so that this file does not hold what it looks for
FOREIGN = re.compile("|".join(["/" + "work/", "/" + "tmp/", "sha" + r"red/(?:design|spec|data)"]))
BINARY = {".safetensors", ".png"}


def tracked() -> list[Path]:
    try:
        done = subprocess.run(
            ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("not a git checkout: nothing is tracked")
    return [ROOT / name for name in done.stdout.split("\0") if name and (ROOT / name).is_file()]


def line_limit(path: Path) -> int:
    kernels = {"gluon", "cuda"} & set(path.parts) and "kernels" in path.parts
    return KERNEL_LINES if kernels else MODULE_LINES


def test_modules_are_small():
    long = {p.name: n for p in SOURCES if (n := len(p.read_text().splitlines())) > line_limit(p)}
    assert not long


def test_settings_are_flags_or_recipe_keys_never_environment_variables():
    readers = [
        p.name for p in SOURCES if re.search(r"os\.environ|os\.getenv|getenv\(", p.read_text())
    ]
    assert not readers


def test_no_module_is_a_drawer_for_everything():
    names = {p.stem for p in SOURCES} | {p.parent.name for p in SOURCES}
    assert not names & {"utils", "util", "helpers", "common", "manager", "misc"}


def test_every_package_says_what_it_is():
    for init in (ROOT / "src").rglob("__init__.py"):
        assert init.read_text().startswith('"""'), init


def test_the_tree_is_light():
    sizes = {p: p.stat().st_size for p in tracked()}
    assert sum(sizes.values()) < TREE_BYTES
    assert not [p.name for p, size in sizes.items() if size > FILE_BYTES]


def test_no_file_speaks_of_a_place_outside_the_project():
    for path in tracked():
        if path.suffix not in BINARY and "assets" not in path.parts:
            found = FOREIGN.search(path.read_text(encoding="utf-8", errors="ignore"))
            assert found is None, f"{path}: {found}"


def test_the_wheel_holds_the_embedded_model_and_texts():
    assets = ROOT / "src" / "quantmla" / "assets"
    assert (assets / "nano" / "config.json").is_file()
    assert (assets / "nano" / "tokenizer.json").is_file()
    for name in ("calibration.txt.xz", "heldout.txt"):
        assert (assets / "text" / name).stat().st_size > 100_000


def test_what_depends_on_vllms_release_stands_in_few_modules():
    """One names all of the engine; prefill.py wraps a class that needs a GPU to load."""
    named = re.compile(r"^\s*(?:from|import) vllm\b", re.MULTILINE)
    found = {
        p.relative_to(ROOT / "src" / "quantmla") for p in SOURCES if named.search(p.read_text())
    }
    assert found == {Path("serve/vllm/engine.py"), Path("serve/vllm/prefill.py")}
