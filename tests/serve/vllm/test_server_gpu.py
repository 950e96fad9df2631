"""A chat over HTTP, as someone who follows docs/serving.md has it; `make serve-test` runs this.

nano in DeepSeek's latent width (benchmarks/wide_nano.py), quantized, served by `quantmla serve`:
the kernels for Hopper run. nano's tokenizer knows no chats, so a template is given.
"""

import json
import socket
import subprocess
import sys
import time
import urllib.request
from importlib.util import find_spec

import pytest
from answers_reference import compare

from quantmla.checkpoint.locate import locate

TEMPLATE = "{% for message in messages %}{{ message['content'] }}\n{% endfor %}"
SECONDS = 300  # until the server is up
OUTPUT = 96  # tokens

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.sm90,
    pytest.mark.skipif(find_spec("vllm") is None, reason="vllm is not installed"),
]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    from eval_vllm import make_model

    _, out = make_model(tmp_path_factory.mktemp("wide"), "auto")
    return out


@pytest.fixture(scope="module")
def server(checkpoint, tmp_path_factory):
    """Its address and its log; stopped as Ctrl-C stops it."""
    from bench_serve import environment

    folder = tmp_path_factory.mktemp("server")
    (folder / "template.jinja").write_text(TEMPLATE)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "quantmla", "serve", str(checkpoint), "--port", str(port)]
    command += ["--max-model-len", "2048", "--chat-template", str(folder / "template.jinja")]
    command += ["--gpu-memory-utilization", "0.1", "--kv-cache-memory-bytes", str(2**28)]
    plain = environment()
    del plain["VLLM_ENABLE_V1_MULTIPROCESSING"]  # a server's engine is a process of its own
    log = folder / "log.txt"
    with log.open("w") as file:
        process = subprocess.Popen(command, env=plain, stdout=file, stderr=subprocess.STDOUT)
    try:
        wait_until_up(process, f"http://127.0.0.1:{port}/health", log)
        yield f"http://127.0.0.1:{port}", log
    finally:
        process.send_signal(2)
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()


def wait_until_up(process, address, log):
    end = time.monotonic() + SECONDS
    while time.monotonic() < end:
        assert process.poll() is None, log.read_text()[-6000:]
        try:
            with urllib.request.urlopen(address, timeout=5):
                return
        except OSError:
            time.sleep(0.5)
    raise AssertionError(f"not up after {SECONDS} s: {log.read_text()[-6000:]}")


def ask(address, checkpoint, question):
    body = {"model": str(checkpoint), "messages": [{"role": "user", "content": question}]}
    body |= {"temperature": 0, "max_tokens": OUTPUT, "ignore_eos": True}
    body |= {"logprobs": True, "return_token_ids": True}
    request = urllib.request.Request(
        f"{address}/v1/chat/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=120) as answer:
        return json.load(answer)


def test_chats_over_http_are_answered_as_transformers_answers_them(server, checkpoint):
    """The prompt is one step, every token after it another: those steps are computed again."""
    address, log = server
    text = (locate("nano").parent / "text" / "heldout.txt").read_text()
    requests = []
    for i in range(3):
        found = ask(address, checkpoint, text[4000 * i :][: 1200 + 500 * i])
        (choice,), prompt = found["choices"], found["prompt_token_ids"]
        assert choice["message"]["content"].strip()
        assert found["usage"]["completion_tokens"] == OUTPUT
        assert len(prompt) == found["usage"]["prompt_tokens"] > 256  # some pages are packed
        steps = [(0, len(prompt)), *((len(prompt) + n, 1) for n in range(OUTPUT - 1))]
        logprobs = [token["logprob"] for token in choice["logprobs"]["content"]]
        requests.append(
            {
                "case": "chat",
                "name": f"chat{i}",
                "prompt": prompt,
                "answer": choice["token_ids"],
                "logprobs": logprobs,
                "steps": steps,
            }
        )
    (line,) = compare(str(checkpoint), {"requests": requests})
    print(line)
    assert line["tokens"] == 3 * OUTPUT
    assert line["fault"] is None, line
    said = log.read_text()
    assert "QuantMLA c4r4" in said
    assert "--attention-backend CUSTOM" in said  # the command it became
