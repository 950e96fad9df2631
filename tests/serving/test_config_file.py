"""Settings of `--config FILE` are looked at as vLLM reads them."""

import json
import os
from importlib.util import find_spec

import pytest
from serving_checkpoint import checkpoint

from quantmla.errors import UsageError
from quantmla.serving.command import serve_command
from quantmla.serving.config_file import with_config_file

SETTINGS = """
port: 8001
enable-prefix-caching: true
enforce_eager: false
allowed-origins: [a, b]
middleware: []
compilation-config:
  pass_config: {fuse_norm_quant: true}
seed: null
"""


@pytest.fixture
def file(tmp_path):
    def write(text: str) -> str:
        (tmp_path / "vllm.yaml").write_text(text)
        return str(tmp_path / "vllm.yaml")

    return write


def test_settings_become_flags_before_those_beside_them(file):
    name = file(SETTINGS)
    seen = with_config_file(["--port", "1", "--config", name, "-dcp", "1"])
    passes = json.dumps({"pass_config": {"fuse_norm_quant": True}})
    assert seen == [
        *("--port", "8001", "--enable-prefix-caching", "--allowed-origins", "a", "b"),
        *("--compilation-config", passes, "--seed", "None"),
        *("--port", "1", "-dcp", "1"),
    ]


@pytest.mark.skipif(find_spec("vllm") is None, reason="vllm is not installed")
def test_vllm_reads_them_so(file):
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    name = file(SETTINGS)
    read = FlexibleArgumentParser().load_config_file(name)
    assert with_config_file(["--config", name]) == read


def test_the_command_is_not_changed_and_its_file_is_checked(file, tmp_path):
    out = checkpoint(tmp_path)
    arguments = ["--config", file("attention-backend: CUSTOM\nport: 8001\n")]
    assert serve_command(out, arguments) == ["vllm", "serve", out, *arguments]
    arguments = ["--config", file("port: 8001\n")]
    wanted = ["vllm", "serve", out, "--attention-backend", "CUSTOM", *arguments]
    assert serve_command(out, arguments) == wanted


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ("kv-cache-dtype: fp8", "--kv-cache-dtype fp8: .* auto or bfloat16"),
        ("kv_cache_dtype: fp8", "--kv-cache-dtype fp8: .* auto or bfloat16"),
        ("block-size: 16", "--block-size 16: .* must be 64"),
        ("enable-dbo: true", "--enable-dbo"),
        ("speculative-config: {method: mtp}", "'mtp'.* as those of ngram,"),
        ("attention-config: {backend: FLASHMLA}", "backend FLASHMLA: .* must be CUSTOM"),
        ("scheduling-policy: priority", "add --no-enable-prefix-caching"),
    ],
)
def test_what_cannot_hold_is_refused_there_too(file, tmp_path, settings, words):
    with pytest.raises(UsageError, match=words):
        serve_command(checkpoint(tmp_path), ["--config", file(settings)])


def test_flags_beside_a_file_win(file, tmp_path):
    out, name = checkpoint(tmp_path), file("kv-cache-dtype: fp8\nenable-dbo: true")
    arguments = ["--config", name, "--kv-cache-dtype", "auto", "--no-enable-dbo"]
    assert serve_command(out, arguments)[-5:] == arguments
    with pytest.raises(UsageError, match="--kv-cache-dtype fp8"):
        serve_command(
            out,
            [
                "--kv-cache-dtype",
                "auto",
                "--config",
                file("kv-cache-dtype: auto"),
                "--kv-cache-dtype=fp8",
            ],
        )


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "holds no settings by name"),
        ("- port\n- 8001", "holds no settings by name"),
        ("port: [8001", "is not valid YAML"),
        ("1: 2", "holds no settings by name"),
        ("config: x.yaml", "names a file itself, which vLLM ignores"),
        ("port: !!bool x", "is not valid YAML"),
        ("port: !!timestamp x", "is not valid YAML"),
        ("port: !!int ''", "is not valid YAML"),
        ("speculative-config: &a {b: *a}", "holds what is no setting"),
        ("attention-config: {2024-01-01: x}", "holds what is no setting"),
        ("attention-config: {a: 2024-01-01}", "holds what is no setting"),
        (f"port: 0x{'f' * 5000}", "holds what is no setting"),
        (f"port: {'[' * 900}{']' * 900}", "(is not valid YAML|holds what is no setting)"),
    ],
)
def test_a_file_without_settings_is_named(file, text, words):
    name = file(text)
    with pytest.raises(UsageError, match=rf"--config .*vllm\.yaml {words}"):
        with_config_file(["--config", name])


def test_files_that_vllm_cannot_read_are_named(file, tmp_path):
    with pytest.raises(UsageError, match=r"absent\.yaml cannot be read: No such file"):
        with_config_file(["--config", str(tmp_path / "absent.yaml")])
    with pytest.raises(UsageError, match=r"a\.json: must be a \.yaml or \.yml file"):
        with_config_file(["--config", "a.json"])
    (tmp_path / "folder.yaml").mkdir()
    with pytest.raises(UsageError, match=r"folder\.yaml is no file"):
        with_config_file(["--config", str(tmp_path / "folder.yaml")])
    os.mkfifo(tmp_path / "pipe.yaml")
    with pytest.raises(UsageError, match=r"pipe\.yaml is no file"):
        with_config_file(["--config", str(tmp_path / "pipe.yaml")])
    with pytest.raises(UsageError, match="--config needs a value"):
        with_config_file(["--port", "1", "--config"])
    name = file("port: 1")
    with pytest.raises(UsageError, match="--config is given more than once"):
        with_config_file(["--config", name, "--config", name])
    (tmp_path / "vllm.yaml").write_bytes(b"port: \xff")
    with pytest.raises(UsageError, match="is not valid YAML"):
        with_config_file(["--config", name])
