"""What `quantize` wrote under `quantmla_config` is read whole or not at all."""

import json

import pytest

from quantmla.checkpoint.locate import locate
from quantmla.cli import main
from quantmla.quant.format import parse_format


@pytest.mark.parametrize("command", ["inspect", "estimate", "verify", "eval", "serve", "report"])
@pytest.mark.parametrize(
    ("fmt", "words"),
    [
        ({}, "the cache format lacks content_bits"),
        (parse_format("c4r4").to_json() | {"content_bits": 5}, "content_bits 5"),
        (parse_format("c4r4").to_json() | {"version": 0}, "cache format version 0 is not"),
    ],
    ids=["empty", "five", "older"],
)
def test_a_format_that_cannot_be_read_ends_every_command(command, fmt, words, tmp_path, capsys):
    out = tmp_path / "out"
    out.mkdir()
    for path in locate("nano").iterdir():
        (out / path.name).symlink_to(path)
    config = json.loads((out / "config.json").read_text())
    (out / "config.json").unlink()
    own = {"version": 1, "base_model": "nano", "base_sha256": "0", "method": "rtn", "format": fmt}
    (out / "config.json").write_text(json.dumps(config | {"quantmla_config": own}))
    assert main([command, str(out)]) == 1
    said = capsys.readouterr().err
    assert f"quantmla_config in {out} has a format that cannot be read: {words}" in said
    assert said.count("\n") == 1
