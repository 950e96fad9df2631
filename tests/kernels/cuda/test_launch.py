"""Launches as the driver sees them; the emulator takes the GPU's place."""

import ctypes
from types import SimpleNamespace

import pytest
import torch
from cases import Case, all_tokens, empty_cache, keep_all_rows, random_rows
from emulation import emulate, library, random_case

from quantmla.errors import QuantMLAError
from quantmla.kernels import reference
from quantmla.kernels.cuda import backend, rows
from quantmla.kernels.cuda.launch import Kernels, Launch, on
from quantmla.quant.format import parse_format

driver = pytest.importorskip("cuda.bindings.driver")
CPU = torch.device("cpu")


@pytest.fixture
def gpu(monkeypatch):
    """`launches`: what every launch was configured with; `kernels` get the addresses of theirs."""
    seen = SimpleNamespace(launches=[], stream=7, error=0, kernels={})

    def launch(config, kernel, parameters, extra):
        assert extra == 0
        attributes = [attribute.id.name for attribute in config.attrs]
        grid = (config.gridDimX, config.gridDimY, config.gridDimZ)
        threads, shared = config.blockDimX, config.sharedMemBytes
        seen.launches.append((grid, threads, shared, int(config.hStream), attributes))
        if kernel in seen.kernels:
            found = (ctypes.c_void_p * 2).from_address(parameters)
            seen.kernels[kernel](found, grid, threads)
        return (driver.CUresult(seen.error),)

    monkeypatch.setattr(driver, "cuLaunchKernelEx", launch)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: None)  # the CPU's index
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda _: seen.stream, raising=False)
    return seen


def same_bits(a, b):
    return torch.equal(a.view(torch.int16), b.view(torch.int16))


PARAMETERS = (ctypes.c_void_p * 1)(0)
SERIALIZED = "CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION"


def test_a_launch_keeps_its_configuration_and_follows_the_stream(gpu):
    launch = Launch("kernel", (5, 4), 128, 2048, overlaps=True)
    for gpu.stream in (7, 7, 9, 0):
        launch.start(PARAMETERS, CPU)
    Launch("kernel", (3, 1), 64, 0).start(PARAMETERS, CPU)
    assert gpu.launches == [
        *(((5, 4, 1), 128, 2048, stream, [SERIALIZED]) for stream in (7, 7, 9, 0)),
        ((3, 1, 1), 64, 0, 0, []),
    ]


def test_an_error_of_the_driver_has_its_name(gpu):
    gpu.error = 1
    with pytest.raises(QuantMLAError, match="the CUDA driver says CUDA_ERROR_INVALID_VALUE"):
        Launch("kernel", (1, 1), 64, 0).start(PARAMETERS, CPU)


def test_a_device_is_entered_where_another_is_current(monkeypatch):
    entered = []
    monkeypatch.setattr(torch.cuda, "device", entered.append)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    on(torch.device("cuda", 1))
    assert entered == []
    on(torch.device("cuda", 0))
    assert entered == [torch.device("cuda", 0)]


def test_a_decode_plan_serves_all_layers(gpu, monkeypatch, tmp_path_factory):
    """From `plan_decode` to the kernels' bits, with the addresses that a launch finds."""
    fmt = parse_format("c4r4")
    variant = backend.variant_for(5)
    emulated = library(tmp_path_factory, fmt, variant)
    maps = []

    def decode(addresses, grid, threads):
        assert threads == variant.threads
        assert addresses[1] == 1000 + len(maps)
        emulated.run_decode(ctypes.c_void_p(addresses[0]), grid[0])

    def combine(addresses, grid, threads):
        emulated.run_combine(ctypes.c_void_p(addresses[0]), grid[0], threads)

    def tensor_map(*pool):
        maps.append(pool)
        return SimpleNamespace(getPtr=lambda: 1000 + len(maps))

    gpu.kernels = {"decode": decode, "combine": combine}
    monkeypatch.setattr(backend, "kernels", lambda *_: Kernels(None, "decode", "combine", 1000))
    monkeypatch.setattr(backend, "multiprocessors", lambda _: 4)
    monkeypatch.setattr(backend, "tensor_map", tensor_map)
    query, view = random_case([150, 500], (1, 5), fmt, seed=1)
    other = query._replace(latent_BSNR=query.latent_BSNR.flip(2))
    moved = view.with_pools(view.pages_JY.roll(1, 0), view.window_pages_JMC.nan_to_num(0.5))
    run = backend.plan_decode(query, view, None)
    for q, v in ((query, view), (other, moved)):
        part, wanted = run(q, v.pages_JY, v.window_pages_JMC), emulate(emulated, 16, q, v)
        assert torch.equal(part.out_BSNR, wanted.out_BSNR)
        assert torch.equal(part.lse_BSN, wanted.lse_BSN)
        given = torch.full_like(part.out_BSNR, torch.nan)
        assert run(q, v.pages_JY, v.window_pages_JMC, given).out_BSNR is given
        assert torch.equal(given, wanted.out_BSNR)
    addresses = [found[0] for found in maps]
    assert addresses == [x.pages_JY.data_ptr() for x in (view, moved) for _ in range(2)]
    assert [attributes for *_, attributes in gpu.launches] == [[SERIALIZED]] * 8


def test_append_and_gather_plans_serve_all_layers(gpu, monkeypatch, emulated_rows):
    case = Case(name="prompts", lengths=(130, 200), window_page=16)
    generator = torch.Generator().manual_seed(3)
    view = keep_all_rows(empty_cache(case, generator))
    tokens, count = all_tokens(case.lengths), sum(case.lengths)
    model = [random_rows(count, case, generator) for _ in range(2)]
    for name in ("append", "gather"):
        kernel = emulated_rows(name, view.fmt.name)
        gpu.kernels[name] = lambda addresses, grid, _, kernel=kernel: kernel.run(
            ctypes.c_void_p(addresses[0]), grid[0]
        )
    monkeypatch.setattr(rows, "_load", lambda name, *_: rows.Loaded(None, name))
    monkeypatch.setattr(rows, "multiprocessors", lambda _: 4)
    out = torch.zeros(count, 576, dtype=torch.bfloat16)
    append = rows.plan_append(model[0], tokens, view)
    gather = rows.plan_gather(tokens, view, out)
    for layer in model:
        mine, wanted = (
            view.with_pools(view.pages_JY.clone(), view.window_pages_JMC.clone()) for _ in range(2)
        )
        append(layer, mine.pages_JY, mine.window_pages_JMC)
        gather(out, mine.pages_JY, mine.window_pages_JMC)
        reference.append(layer, tokens, wanted)
        read = torch.zeros_like(out)
        reference.gather(tokens, wanted, read)
        assert torch.equal(mine.pages_JY, wanted.pages_JY)
        assert same_bits(mine.window_pages_JMC, wanted.window_pages_JMC)
        assert same_bits(out, read)
    assert len(gpu.launches) == 4


def test_no_rows_are_no_launch(gpu):
    case = Case(name="none", lengths=(130,))
    view = empty_cache(case, torch.Generator())
    tokens, none = all_tokens((0,)), random_rows(0, case, torch.Generator())
    pools = view.pages_JY, view.window_pages_JMC
    rows.plan_append(none, tokens, view)(none, *pools)
    out = torch.zeros(0, 576, dtype=torch.bfloat16)
    rows.plan_gather(tokens, view, out)(out, *pools)
    assert gpu.launches == []
