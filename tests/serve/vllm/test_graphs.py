"""Decodes as a CUDA graph runs them: `e.graphs` keeps the metadata of the first step of a size."""

import pytest
import torch
from vllm_harness import Engine, model_config, vllm_config

from quantmla.quant.format import parse_format


@pytest.mark.parametrize(("window", "drafts"), [(3, 3), (8, 7), (15, 15), (40, 3)])
def test_drafts_of_a_small_window(cpu_vllm, tmp_path, window, drafts):
    """A small recent window makes chunks short; what a graph reads lies where it did.

    A chunk of more than half the window reads another table, which no graph may have seen.
    """
    fmt = parse_format("c4r4", recent_window=window)
    config = vllm_config(model_config(tmp_path, fmt), chunk=128, drafts=drafts)
    e = Engine(config, 200)
    e.draft = lambda request: [7] * drafts
    for i in range(2):
        prompt = torch.arange(150 + 5 * i) % 512
        e.pool.add(f"{i}", prompt.tolist(), 40)
    e.run()
    tables = {m[1].table.data_ptr() for m, counts in e.steps if set(counts) == {1 + drafts}}
    assert len(tables) == 1
