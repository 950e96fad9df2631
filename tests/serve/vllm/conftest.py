"""What vLLM needs to run a latent attention on a CPU; for the tests alone."""

import pytest
import torch

from quantmla.quant.format import parse_format


def attend(q, k, v, scale: float, causal: bool):
    """Attention of one sequence's queries over keys, and its log-sum-exp [heads, queries]."""
    scores = torch.einsum("qhd,khd->hqk", q, k) * scale
    if causal:
        late = torch.ones(scores.shape[1:], dtype=torch.bool).triu(1)
        scores = scores.masked_fill(late, float("-inf"))
    lse = scores.logsumexp(dim=-1)
    weights = (scores - lse[..., None]).exp().nan_to_num()
    return torch.einsum("hqk,khd->qhd", weights, v), lse


def merge(  # noqa: PLR0913
    output,
    prefix_output,
    prefix_lse,
    suffix_output,
    suffix_lse,
    output_lse=None,
    prefill_tokens_with_context=None,
):
    """vLLM's merge_attn_states; queries without any key in the prefix have lse -inf there.

    From `prefill_tokens_with_context` on it takes the suffix, whatever the prefix has.
    """
    lse = torch.logaddexp(prefix_lse, suffix_lse)
    weights = ((x - lse).exp().nan_to_num() for x in (prefix_lse, suffix_lse))
    for_prefix, for_suffix = (w.T[..., None] for w in weights)
    output.copy_(prefix_output * for_prefix + suffix_output * for_suffix)
    if output_lse is not None:
        output_lse.copy_(lse)
    if prefill_tokens_with_context is not None:
        assert output_lse is None
        output[prefill_tokens_with_context:] = suffix_output[prefill_tokens_with_context:]


@pytest.fixture(scope="module")
def cpu_vllm():
    """vLLM with the plugin, torch in place of what needs a GPU."""
    patch = pytest.MonkeyPatch()
    import vllm.model_executor.layers.attention.mla_attention as mla
    from vllm.v1.attention.backends.mla.prefill.base import MLAPrefillBackend
    from vllm.v1.attention.backends.mla.prefill.registry import MLAPrefillBackendEnum

    from quantmla.serve.vllm import impl, plugin

    plugin.install()

    class TorchPrefill(MLAPrefillBackend):
        @staticmethod
        def get_name():
            return "TORCH"

        def _run(self, q, k, v, ends_k, most_k, causal):
            ends_q = self._prefill_metadata.query_start_loc.tolist()
            out = torch.full((q.shape[0], q.shape[1], v.shape[-1]), torch.nan)
            lse = torch.zeros(q.shape[1], q.shape[0])  # of queries without keys: anything
            bounds = zip(ends_q, ends_q[1:], ends_k, ends_k[1:], strict=False)
            for a, b, c, d in bounds:
                assert b - a <= self._prefill_metadata.max_query_len
                assert d - c <= most_k  # a kernel's grid is of these
                if d > c:
                    out[a:b], lse[:, a:b] = attend(q[a:b], k[c:d], v[c:d], self.scale, causal)
            return out, lse

        def run_prefill_new_tokens(self, q, k, v, return_softmax_lse, out=None, output_scale=None):
            ends = self._prefill_metadata.query_start_loc.tolist()
            most = self._prefill_metadata.max_query_len
            result = self._run(q, k, v, ends, most, causal=True)
            return result if return_softmax_lse else result[0]

        def run_prefill_context_chunk(self, chunk_idx, q, k, v):
            context = self._prefill_metadata.chunked_context
            ends, most = context.cu_seq_lens[chunk_idx].tolist(), context.max_seq_lens[chunk_idx]
            return self._run(q, k, v, ends, most, causal=False)

    patch.setattr(
        MLAPrefillBackendEnum.FLASH_ATTN, "get_class", lambda: TorchPrefill, raising=False
    )
    for module in (mla, impl):
        patch.setattr(module, "merge_attn_states", merge)
    for name in ("empty", "zeros"):  # there is no pinned memory without a GPU
        plain = getattr(torch, name)
        patch.setattr(
            torch,
            name,
            lambda *a, plain=plain, **k: plain(
                *a, **{i: j for i, j in k.items() if i != "pin_memory"}
            ),
        )
    yield
    patch.undo()


@pytest.fixture
def engine(cpu_vllm, tmp_path):
    """Makes one latent attention in vLLM's scheduler; `runner` is which of vLLM's two orders it."""
    from vllm_harness import Engine, model_config, vllm_config

    def make(fmt="c4r4", pages=200, runner=2, **changes):
        config = vllm_config(model_config(tmp_path, parse_format(fmt)), **changes)
        return Engine(config, pages, runner)

    return make
