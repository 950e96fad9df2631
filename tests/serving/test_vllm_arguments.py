"""Arguments are read as vLLM's own parser reads them."""

import contextlib
import io
import random
from importlib.util import find_spec
from itertools import chain

import pytest

from quantmla.errors import UsageError
from quantmla.serving.vllm_arguments import ATTENTION, COMPILATION, SPECULATIVE, Known, given

PLAIN = ("--dtype", "--block-size", "--scheduling-policy")
SWITCHES = ("--enforce-eager", "--enable-prefix-caching", "--enable-dbo", "--enable-sleep-mode")
KNOWN = Known((*PLAIN, "--decode-context-parallel-size", "--pipeline-parallel-size"), SWITCHES)
NOTHING = Known((), ())
WORDS = (
    *(["--dtype", value] for value in ("auto", "half", "bfloat16")),
    *(["--block-size=16"], ["--block_size", "64"], ["--scheduling_policy", "priority"]),
    *([switch] for switch in SWITCHES),
    *([f"--no-{switch[2:]}"] for switch in SWITCHES),
    *(["--no-enforce_eager"], ["--enforce-e"], ["--no-enforce-e"], ["--port", "8001"]),
    *(["-dcp", "2"], ["-dcp=4"], ["--decode-context-parallel-size", "1"], ["-pc", "2"]),
    *(["-pp", "2"], ["-pp=3"], ["--pipeline-parallel-size", "1"]),
    *(["-sc", '{"method":"ngram"}'], ["--speculative-config.method", "mtp"]),
    *(["-sc.num_speculative_tokens", "3"], ["-sc.method=suffix"], ["-s.method", "mtp"]),
    *(["--speculative-config={}"], ["--speculative_config", "None"]),
    *(["-ac.backend", "CUSTOM"], ["-ac", '{"flash_attn_version":3}'], ["-a.backend", "CUSTOM"]),
    *(["--attention-config.flash_attn_version", "2"], ["--attention_config.backend=CUSTOM"]),
    *(["--spec-tokens", "4"], ["--spec-method", "ngram"], ["--spec-m", "mtp"]),
    *(["-O2.0"], ["-O", "2"], ["-O3"], ["--kv-cache-dtype", "auto"]),
    *(["-cc.pass_config.fuse_norm_quant", "true"], ["-cc", '{"pass_config":{}}']),
)


def test_the_last_of_a_flag_counts():
    arguments = ["--dtype", "half", "--dtype=auto", "--enforce-eager", "--no-enforce_eager"]
    assert given(arguments, KNOWN) == {"--dtype": "auto", "--enforce-eager": False}


def test_settings_under_dotted_names_are_one_config():
    arguments = [
        "-cc.a.b",
        "1",
        "-cc.a.c=x",
        "-ac.backend",
        "--dtype",
        "--speculative-config",
        "{}",
    ]
    wanted = {COMPILATION: {"a": {"b": 1, "c": "x"}}, ATTENTION: {"backend": "--dtype"}}
    assert given(arguments, KNOWN) == wanted | {SPECULATIVE: {}}


@pytest.mark.parametrize(
    "arguments",
    [
        ["-ac", '{"backend":"CUSTOM"}', "-ac.flash_attn_version", "3"],
        ["-ac.backend", "CUSTOM", "--attention-config.flash_attn_version", "3"],
        ["--attention-config={}", "-ac", "{}"],
        ["-ac.a", "1", "-ac", "{}"],
    ],
)
def test_a_config_in_parts_of_which_vllm_keeps_one_is_refused(arguments):
    with pytest.raises(UsageError, match="--attention-config is given in several parts"):
        given(arguments, NOTHING)


def test_json_that_is_nested_too_deeply_is_a_sentence():
    with pytest.raises(UsageError, match="-ac "):
        given(["-ac", "[" * 100_000], NOTHING)


@pytest.mark.skipif(find_spec("vllm") is None, reason="vllm is not installed")
def test_vllms_parser_ends_with_the_same(monkeypatch):
    """Random lists: whatever is taken here is what vLLM sets, or vLLM refuses the list itself."""
    from vllm import platforms
    from vllm.entrypoints.openai.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    monkeypatch.setattr(platforms.current_platform, "device_type", "cpu")
    parser = make_arg_parser(FlexibleArgumentParser())
    unset = parser.parse_args([])
    draw, compared, refused = random.Random(3), 0, 0
    for _ in range(600):
        arguments = list(chain.from_iterable(draw.choices(WORDS, k=draw.randint(1, 5))))
        try:
            with contextlib.redirect_stderr(io.StringIO()):
                vllm = parser.parse_args(arguments)
        except (SystemExit, IndexError):
            continue
        try:
            found = given(arguments, KNOWN)
        except UsageError:
            refused += 1
            continue
        compared += 1
        for flag in PLAIN:
            seen, wanted = (getattr(x, flag[2:].replace("-", "_")) for x in (unset, vllm))
            assert str(found.get(flag, seen)) == str(wanted)
        for flag in SWITCHES:
            seen, wanted = (getattr(x, flag[2:].replace("-", "_")) for x in (unset, vllm))
            assert bool(found.get(flag, seen)) == bool(wanted)
        parallel = found.get("--decode-context-parallel-size", 1)
        assert int(parallel) == vllm.decode_context_parallel_size
        drafts = {"method": vllm.spec_method, "num_speculative_tokens": vllm.spec_tokens}
        drafts = {key: str(value) for key, value in drafts.items() if value is not None}
        assert (found.get(SPECULATIVE) or {}) == (vllm.speculative_config or {}) | drafts
        backend = vllm.attention_config.backend
        named = found.get(ATTENTION, {}).get("backend")
        assert (None if backend is None else backend.name) == named
        passes = found.get(COMPILATION, {}).get("pass_config", {})
        fused = vllm.compilation_config.pass_config.fuse_norm_quant
        assert passes.get("fuse_norm_quant") in (fused, None)
    assert compared > 150
    assert refused > 20
