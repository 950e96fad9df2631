"""What is captured: batches of decodes of one length, whatever else the decode kernel takes."""

import pytest
import torch


def common(lengths: list[int], context: int | torch.Tensor = 300):
    """Of sequences with so many new tokens after `context` others."""
    from vllm.v1.attention.backend import CommonAttentionMetadata

    starts = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    whole = torch.tensor(lengths, dtype=torch.int32) + context
    return CommonAttentionMetadata(
        query_start_loc=starts,
        query_start_loc_cpu=starts,
        seq_lens=whole,
        seq_lens_cpu_upper_bound=whole,
        num_reqs=len(lengths),
        num_actual_tokens=int(starts[-1]),
        max_query_len=max(lengths),
        max_seq_len=int(whole.max()),
        block_table_tensor=torch.ones(len(lengths), 64, dtype=torch.int32),
        slot_mapping=torch.arange(int(starts[-1])),
        is_prefilling=torch.zeros(len(lengths), dtype=torch.bool),
    )


@pytest.mark.parametrize("drafts", [0, 3])
def test_uniform_decodes_are_captured_in_one_call(engine, drafts):
    builder = engine(drafts=drafts).builders[0]
    assert (builder.piece, builder.reorder_batch_threshold) == (64, 191)
    for length in {1, 1 + drafts}:
        metadata = builder.build_for_cudagraph_capture(common([length] * 5))
        assert metadata.calls is None
        assert (metadata.num_decodes, metadata.num_prefills) == (5, 0)
        assert metadata.tokens.sequence_T.data_ptr() == builder.tokens.sequence_T.data_ptr()


@pytest.mark.parametrize("drafts", [0, 3])
def test_the_host_only_prepares_a_captured_step(engine, drafts):
    """The first layer writes what all read, so that a replay reads this step's lengths."""
    e = engine(drafts=drafts)
    step = common([1 + drafts] * 5)
    captured = [builder.build_for_cudagraph_capture(step) for builder in e.builders]
    packed, window = captured
    assert window.starts.data_ptr() == e.builders[1].starts.data_ptr()  # a graph reads it again
    for tensor in (*packed.tokens, window.starts):
        tensor.fill_(77)
    step.seq_lens.add_(9)
    for builder in e.builders:
        builder.build(0, step)
    assert (torch.cat((*packed.tokens, window.starts)) == 77).all()
    for metadata in captured:
        metadata.first_layer.enter("first")
    assert packed.tokens.position_T.view(5, -1)[:, -1].tolist() == [300 + drafts + 9] * 5
    assert packed.tokens.sequence_T.tolist() == [i for i in range(5) for _ in range(1 + drafts)]
    assert window.starts.tolist() == [0] * 5


@pytest.mark.parametrize("drafts", [0, 3])
def test_both_groups_leave_decodes_their_full_graphs(engine, drafts):
    """vLLM takes the least that any group's builder supports, for all of them."""
    from vllm.config import CUDAGraphMode
    from vllm.v1.attention.backend import AttentionCGSupport

    from quantmla.serve.vllm.backend import QuantMLABackend, WindowBackend

    e = engine(drafts=drafts)
    config, kv = e.pool.config, e.pool.kv
    specs = [group.kv_cache_spec for group in kv.kv_cache_groups]
    least = min(
        (
            backend.get_builder_cls().get_cudagraph_support(config, spec)
            for backend, spec in zip((QuantMLABackend, WindowBackend), specs, strict=True)
        ),
        key=lambda support: support.value,
    )
    assert least is AttentionCGSupport.UNIFORM_BATCH
    compilation = config.compilation_config
    compilation.cudagraph_mode = CUDAGraphMode.FULL_AND_PIECEWISE
    found = compilation.resolve_cudagraph_mode_and_sizes(
        least,
        "the least of both",
        uniform_decode_query_len=1 + drafts,
        use_v2_model_runner=True,
        kv_cache_config=kv,
        max_num_reqs=8,
    )
    assert found is CUDAGraphMode.FULL_AND_PIECEWISE


def test_what_lies_outside_the_pool_is_small(engine):
    """Builders allocate after vLLM has measured what is free; its own workspace does, too."""
    e = engine(chunk=8192)
    buffers = {}
    for builder in e.builders:
        for name, value in vars(builder).items():
            for x in value if isinstance(value, tuple) else (value,):
                if torch.is_tensor(x) and name != "chunked_prefill_workspace":
                    buffers[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
    assert 4 * 8192 * 3 <= sum(buffers.values()) < 1 << 20


def test_equal_chunks_are_no_uniform_decodes(engine):
    """To vLLM, either: a graph for decodes has one query length."""
    from vllm.v1.worker.gpu.cudagraph_utils import get_uniform_token_count
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    builder = engine(drafts=3).builders[0]
    metadata = builder.build(0, common([40, 40]))
    assert [call.batch for call in metadata.calls] == [2]
    assert not GPUModelRunner._is_uniform_decode(40, 4, 80, 2)
    assert get_uniform_token_count(2, 80, 40) not in (1, 4)


def test_many_chunks_are_divided(engine, monkeypatch):
    from quantmla.serve.vllm import metadata as module

    monkeypatch.setattr(module, "CALL_ROWS", 2 * 128)  # two heads, 128 queries
    calls = engine(chunk=512).builders[0].build(0, common([1, 1, 64, 64, 64, 64, 64])).calls
    assert [call.batch for call in calls] == [2, 2, 2, 1]
    assert all(call.places is None for call in calls)


@pytest.mark.parametrize(
    ("window", "piece", "longest"), [(128, 64, 191), (40, 20, 60), (0, 1, 3), (512, 64, 192)]
)
def test_a_smaller_window_allows_less(cpu_vllm, tmp_path, window, piece, longest):
    from vllm_harness import Engine, model_config, vllm_config

    from quantmla.quant.format import parse_format

    fmt = parse_format("c4r4", recent_window=window)
    e = Engine(vllm_config(model_config(tmp_path, fmt)), 300)
    builder = e.builders[0]
    assert (builder.piece, builder.reorder_batch_threshold) == (piece, longest)


def test_longer_chunks_are_divided_where_one_has_a_context(engine):
    """As vLLM orders a step: decodes first. The threshold is what it was when that is done."""
    builder = engine(chunk=1024).builders[0]

    def decodes(lengths, context):
        step = common(lengths)
        step.seq_lens_cpu_upper_bound = torch.tensor(lengths) + torch.tensor(context)
        step.seq_lens.copy_(step.seq_lens_cpu_upper_bound)
        metadata = builder.build(0, step)
        assert builder.reorder_batch_threshold == 191
        calls = metadata.calls or ()
        return metadata.num_decodes, [call.batch for call in calls]

    assert decodes([1, 64, 65, 192], [5, 0, 0, 9]) == (2, [1, 1])
    assert decodes([1, 64, 65, 192], [5, 0, 64, 9]) == (3, [2, 2])
    assert decodes([65, 191], [0, 1]) == (2, [1, 4])
    assert decodes([192, 100], [0, 100]) == (0, [])
    assert decodes([100, 192, 100], [0, 100, 100]) == (0, [])
    assert decodes([100, 192, 100], [1, 100, 100]) == (1, [2])


def test_a_remainder_takes_no_prompts_along(engine):
    """Prompts that begin beside a chunk with a context, and are longer, stay prompts."""
    builder = engine(chunk=8192).builders[0]
    lengths, context = [1] * 30 + [100] + [190] * 42, [500] * 30 + [90] + [0] * 42
    step = common(lengths, torch.tensor(context, dtype=torch.int32))
    metadata = builder.build(0, step)
    assert metadata.num_prefills == 42
    assert [call.batch for call in metadata.calls] == [30, 2]


@pytest.mark.parametrize("fmt", ["c4r4", "c2r4"])
def test_every_context_of_a_step_has_room_for_a_packed_page(cpu_vllm, tmp_path, fmt):
    """A worker within the engine's process finds the window's page in vLLM's config by then."""
    from vllm_harness import Engine, model_config, vllm_config

    from quantmla.quant.format import parse_format

    settings = {"chunk": 1 << 15, "max_len": 1024, "max_num_seqs": 256}
    config = vllm_config(model_config(tmp_path, parse_format(fmt)), **settings)
    config.cache_config.block_size = {"c4r4": 16, "c2r4": 8}[fmt]
    builder = Engine(config, 200).builders[0]
    assert builder.chunked_prefill_workspace_size == 1 << 16  # as with vLLM's own cache
    metadata = builder.build(0, common([192] * 170, 64))
    assert metadata.num_prefills == 170
    assert [len(chunk.rows_TC) for chunk in metadata.context] == [170 * 64]
