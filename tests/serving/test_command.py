"""`quantmla serve`: the command that it makes, and what it refuses before vLLM starts."""

import json
import types
from functools import partial
from pathlib import Path

import pytest
from serving_checkpoint import MANIFEST, checkpoint

from quantmla.arch.families import FAMILIES
from quantmla.cli import main
from quantmla.errors import QuantMLAError, UnsupportedModel, UsageError
from quantmla.quant.format import parse_format
from quantmla.serve.settings import NOT_COMPILED, SERVED_FAMILIES
from quantmla.serving import command as serving
from quantmla.serving.command import check_machine, serve_command


@pytest.fixture
def folder(tmp_path):
    """Makes a checkpoint folder with this manifest, None for an unfused one."""
    return partial(checkpoint, tmp_path)


def test_the_command_is_vllms_with_our_backend_and_the_users_arguments(folder):
    out = folder()
    arguments = ["--port", "8001", "--kv-cache-dtype=auto", "--block_size", "64"]
    assert serve_command(out, arguments) == [
        *("vllm", "serve", out, "--attention-backend", "CUSTOM"),
        *arguments,
    ]


def test_the_backend_is_not_named_twice(folder):
    out = folder()
    given = ["--attention_backend", "CUSTOM"]
    assert serve_command(out, given) == ["vllm", "serve", out, *given]
    given = ["--attention-config.backend", "CUSTOM"]  # vLLM takes one of the two alone
    assert serve_command(out, given) == ["vllm", "serve", out, *given]


def test_a_model_that_is_not_quantized_is_refused(folder):
    with pytest.raises(UsageError, match="was not written by quantmla: no quantmla_config"):
        serve_command(folder(None), [])
    with pytest.raises(QuantMLAError, match="version 2, not 1"):
        serve_command(folder({**MANIFEST, "version": 2}), [])
    with pytest.raises(UnsupportedModel, match=r"layers \[0\] in bf16"):
        serve_command(folder({**MANIFEST, "ignored_layers": [0]}), [])
    for other in (None, 0, {}, [0.0], "0"):
        with pytest.raises(UsageError, match="ignored_layers of quantmla_config are"):
            serve_command(folder({**MANIFEST, "ignored_layers": other}), [])
    mixed = MANIFEST["format"] | {"layers": {"0": {"content_bits": 2}}}
    with pytest.raises(UnsupportedModel, match="formats of their own"):
        serve_command(folder({**MANIFEST, "format": mixed}), [])


@pytest.mark.parametrize("name", ["c4r4", "c2r4"])
def test_formats_of_the_kernels_are_served(folder, name):
    out = folder({**MANIFEST, "format": parse_format(name).to_json()})
    assert serve_command(out, [])[:3] == ["vllm", "serve", out]


@pytest.mark.parametrize("name", ["c3r4", "c4r8", "c16r16"])
def test_formats_that_no_kernel_reads_are_refused_before_vllm_loads(folder, name):
    out = folder({**MANIFEST, "format": parse_format(name).to_json()})
    with pytest.raises(UnsupportedModel, match=f"in {name}, .* read c4r4 and c2r4"):
        serve_command(out, [])


def test_a_tied_head_is_refused_before_vllm_fails_to_load_it(folder):
    out = folder()
    path = Path(out) / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps(config | {"tie_word_embeddings": True}))
    with pytest.raises(UnsupportedModel, match="ties its head to its embeddings"):
        serve_command(out, [])
    path.write_text(json.dumps(config | {"tie_word_embeddings": False}))
    assert serve_command(out, [])[:3] == ["vllm", "serve", out]


def of_family(folder, model_type, **more):
    out = folder()
    path = Path(out) / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"model_type": model_type} | more))
    return out


@pytest.mark.parametrize("family", sorted({*FAMILIES} - {*SERVED_FAMILIES}))
def test_families_that_the_plugin_does_not_serve_are_refused(folder, capsys, family):
    out = of_family(folder, family)
    assert main(["serve", "--print", out]) == 3
    said = capsys.readouterr().err
    assert f"is a {family}, and the plugin serves deepseek_v2, deepseek_v3, kimi_k2" in said
    assert said.count("\n") == 1


def test_families_without_a_packed_cache_are_refused_with_their_reason(folder):
    with pytest.raises(UnsupportedModel, match="deepseek_v32 is not supported: its sparse"):
        serve_command(of_family(folder, "deepseek_v32"), [])
    with pytest.raises(UnsupportedModel, match="llama has no latent attention"):
        serve_command(of_family(folder, "llama"), [])


@pytest.mark.parametrize("family", SERVED_FAMILIES)
def test_families_of_the_plugin_are_served(folder, family):
    out = of_family(folder, family)
    assert serve_command(out, ["--enforce-eager"])[-1] == "--enforce-eager"
    if family in NOT_COMPILED:
        with pytest.raises(UsageError, match="add --enforce-eager"):
            serve_command(out, ["--enforce-eager", "--no-enforce-eager"])
        with pytest.raises(UsageError, match=f"cannot compile a {family}.* add --enforce-eager"):
            serve_command(out, [])
    else:
        assert serve_command(out, [])[:3] == ["vllm", "serve", out]


def test_the_family_inside_a_wrapper_counts(folder):
    inner = {"model_type": "mistral4", "kv_lora_rank": 512}
    with pytest.raises(UnsupportedModel, match="is a mistral4"):
        serve_command(of_family(folder, "mistral3", text_config=inner), [])


def machine(monkeypatch, vllm="0.26.0", capabilities=("9.0",)):
    monkeypatch.setattr(serving, "versions", lambda: {"vllm": vllm})
    monkeypatch.setattr(serving, "gpus", lambda: [{"capability": c} for c in capabilities])


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        ({"vllm": None}, r'vllm 0.26 is needed and none is installed: pip install "quantmla'),
        ({"vllm": "0.33.0"}, "vllm 0.26 is needed and 0.33.0 is installed"),
        ({"capabilities": ()}, "compute capability 9.0 .* torch sees none"),
        ({"capabilities": ("8.0",)}, "torch sees 8.0"),
    ],
)
def test_another_vllm_or_gpu_is_named(monkeypatch, facts, words):
    machine(monkeypatch, **facts)
    with pytest.raises(UsageError, match=words):
        check_machine()


def test_the_command_is_printed_and_run(folder, monkeypatch, capsys):
    out, ran = folder(), []
    machine(monkeypatch)
    monkeypatch.setattr(serving.shutil, "which", lambda name: f"/bin/{name}")
    monkeypatch.setattr(serving, "sys", types.SimpleNamespace(executable="/nowhere/python"))
    monkeypatch.setattr(serving.os, "execv", lambda *call: ran.append(call))
    assert main(["serve", out, "--max-model-len", "4096"]) == 0
    printed = f"vllm serve {out} --attention-backend CUSTOM --max-model-len 4096\n"
    assert capsys.readouterr().out == printed
    assert ran == [("/bin/vllm", printed.split())]


@pytest.mark.parametrize("place", [0, 1, 3])
def test_print_alone_needs_no_gpu(folder, monkeypatch, capsys, place):
    out = folder()
    machine(monkeypatch, vllm=None, capabilities=())
    argv = [out, "--hf-overrides", '{"a": 1}']
    argv.insert(place, "--print")
    assert main(["serve", *argv]) == 0
    shown = capsys.readouterr().out
    assert shown == (f"vllm serve {out} --attention-backend CUSTOM --hf-overrides '{{\"a\": 1}}'\n")


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--print"], "the following arguments are required: OUT (see quantmla serve --help)"),
        (["--bad", "out"], "unrecognized arguments: --bad (see quantmla serve --help)"),
    ],
)
def test_what_lacks_or_is_not_known_points_to_the_help_of_serve(argv, words, capsys):
    assert main(["serve", *argv]) == 2
    assert capsys.readouterr().err == f"quantmla: error: {words}\n"


def test_a_refusal_is_one_line_and_exit_code_2(folder, capsys):
    assert main(["serve", folder(), "--enable-dbo"]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.startswith("quantmla: error: --enable-dbo cannot be used")
    assert shown.err.count("\n") == 1
