import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness import profiles
from harness.case import Case
from harness.errors import UsageError
from harness.families import GIB, H2D, MIB
from harness.plans import plan_h2d, shortage
from harness.suites import TIERS, select

H200, CPU = profiles.packaged()["h200"], profiles.packaged()["cpu"]
WIDE = msgspec.structs.replace(H200, width=1 << 16)
ROTATE_LITTLE = msgspec.structs.replace(CPU, rotate_bytes=4 * MIB)


def case(profile=H200, **axes):
    base = {"memory": "pinned", "stream": "side", "chunks": 8, "size": 256 * MIB, "ratio": 1.0, "gate": "on"}
    return Case.of(H2D, **base | {"profile": profile.key} | axes)


def plan(profile=H200, **axes):
    return plan_h2d(case(profile, **axes), profile)


ROWS = st.integers(MIB // H200.row_bytes, GIB // H200.row_bytes)
PLANS = st.builds(
    plan,
    st.sampled_from([H200, CPU, ROTATE_LITTLE]),
    memory=st.sampled_from(["pinned", "pageable"]),
    chunks=st.integers(1, 64),
    size=ROWS.map(lambda rows: rows * H200.row_bytes),
    ratio=st.floats(0.125, 8.0),
    issue=st.sampled_from(["alternate", "copies-first"]),
)


def test_the_shapes_are_the_profile_s():
    made = plan()
    assert (made.rows, made.width, made.element_bytes) == (256 * MIB // (2048 * 2), 2048, 2)
    assert made.rows * made.width * made.element_bytes == 256 * MIB
    assert made.columns * made.gemms == H200.h2d.columns["pinned"]["256MiB"]
    assert made.repeats == H200.h2d.repeats["pinned"]["256MiB"]
    assert made.flops == 2 * made.rows * 2048 * H200.h2d.columns["pinned"]["256MiB"] * made.repeats
    assert made.launches == made.repeats * 8 * (made.gemms + 2)


@pytest.mark.parametrize(
    ("memory", "size", "listed"),
    [
        ("pinned", MIB, "1MiB"),
        ("pinned", 3 * MIB, "1MiB"),
        ("pinned", 4 * MIB, "4MiB"),
        ("pinned", GIB, "1GiB"),
        ("pageable", 255 * MIB, "64MiB"),
    ],
)
def test_a_size_between_two_of_the_profile_takes_the_smaller_one_s_numbers(memory, size, listed):
    made = plan(memory=memory, size=size)
    assert made.columns * made.gemms == H200.h2d.columns[memory][listed]


def test_a_size_below_all_takes_the_smallest_one_s_numbers():
    sizes = {memory: {"4MiB": 512, "64MiB": 1024} for memory in ("pinned", "pageable")}
    profile = msgspec.structs.replace(H200, h2d=msgspec.structs.replace(H200.h2d, columns=sizes))
    assert plan(profile, size=MIB).columns == 512


@pytest.mark.parametrize("profile", [H200, CPU], ids=lambda profile: profile.name)
@pytest.mark.parametrize("tier", TIERS)
def test_the_work_is_the_same_in_every_number_of_chunks(profile, tier):
    for one in select(["h2d"], tier, profile):
        made, other = plan_h2d(one, profile), plan_h2d(one.replace(chunks=1), profile)
        assert (made.flops, made.rows, made.repeats) == (other.flops, other.rows, other.repeats)


@given(st.sampled_from([H200, CPU]), st.sampled_from(["pinned", "pageable"]), st.floats(0.125, 8.0))
def test_the_ratio_scales_the_work_as_near_as_the_column_step_allows(profile, memory, ratio):
    one, scaled = plan(profile, memory=memory), plan(profile, memory=memory, ratio=ratio)
    wanted = profile.h2d.columns[memory]["256MiB" if profile is H200 else "1MiB"] * ratio
    assert abs(scaled.columns * scaled.gemms - wanted) <= scaled.gemms * profile.column_step / 2
    assert scaled.flops / one.flops == pytest.approx(ratio, rel=profile.column_step * scaled.gemms / wanted)
    assert 0 < scaled.columns <= profile.max_columns
    assert scaled.columns % profile.column_step == 0


def test_columns_never_fall_to_none():
    sizes = {memory: {"1MiB": 1} for memory in ("pinned", "pageable")}
    profile = msgspec.structs.replace(H200, h2d=msgspec.structs.replace(H200.h2d, columns=sizes))
    assert plan(profile, ratio=0.125).columns == profile.column_step


@given(PLANS)
def test_layouts_cover_the_rows_and_nothing_but_the_rows(made):
    for layout in (made.split, made.whole):
        assert layout.longest * layout.chunks >= made.rows > (layout.longest - 1) * layout.chunks
        assert layout.rows == layout.slots * layout.longest <= made.ring_rows
    assert (made.whole.chunks, made.whole.longest) == (1, made.rows)


@given(PLANS)
def test_two_stages_get_two_buffers_or_more_but_none_that_is_never_used(made):
    for layout in (made.split, made.whole):
        pieces = layout.chunks * made.repeats
        assert min(2, pieces) <= layout.slots <= pieces


@given(
    st.sampled_from([H200, CPU, ROTATE_LITTLE]),
    st.integers(1, 64),
    st.sampled_from([MIB, 3 * MIB, 64 * MIB, 100 * MIB, GIB]),
)
def test_inputs_rotate_over_more_than_the_cache(profile, chunks, size):
    """Unless a sample is smaller than that, in which case every piece has a buffer of its own."""
    made = plan(profile, chunks=chunks, size=size)
    assert made.pool_batches >= 2
    assert made.pool_batches * size >= profile.rotate_bytes
    for layout in (made.split, made.whole):
        ring = layout.rows * profile.row_bytes
        assert ring >= profile.rotate_bytes or layout.slots == layout.chunks * made.repeats


def test_copies_first_needs_a_buffer_for_every_piece():
    """No buffer is free again before the last copy has been issued."""
    axes = {"chunks": 32, "size": 512 * MIB}
    assert plan(**axes).split.slots < 32
    assert plan(issue="copies-first", **axes).split.slots == 32 * plan(**axes).repeats


@pytest.mark.parametrize(
    ("profile", "axes", "words"),
    [
        (WIDE, {"size": MIB, "chunks": 9}, "got 9 with size 1MiB, want at most its 8 rows of 131072 bytes"),
        (H200, {"size": MIB + 1}, "a size of whole rows"),
        (H200, {"size": MIB + 2048}, "a size of whole rows"),
    ],
)
def test_more_chunks_than_rows_or_a_part_of_a_row_is_refused(profile, axes, words):
    with pytest.raises(UsageError, match=words) as caught:
        plan(profile, **axes)
    assert profile.key in str(caught.value)


def test_as_many_chunks_as_rows_are_accepted():
    assert plan(WIDE, size=MIB, chunks=8).split.longest == 1


def test_a_profile_without_sizes_for_a_memory_is_refused():
    sizes = {"pinned": {"1MiB": 256}, "pageable": {}}
    profile = msgspec.structs.replace(H200, h2d=msgspec.structs.replace(H200.h2d, columns=sizes))
    with pytest.raises(UsageError, match="has no sizes for pageable memory"):
        plan(profile, memory="pageable")


@pytest.mark.parametrize(
    ("device", "free_host", "free_device", "words"),
    [
        ("cuda", None, None, None),
        ("cuda", 1 << 40, 1 << 40, None),
        ("cuda", 1 << 30, 1 << 40, "needs 2.00 GiB of host memory, and 1.00 GiB are free"),
        ("cuda", 1 << 40, 3 << 30, "GiB of device memory, and 3.00 GiB are free"),
        ("cpu", 1 << 40, 0, None),  # its device memory is host memory
        ("cpu", 3 << 30, None, "GiB of host memory, and 3.00 GiB are free"),
    ],
)
def test_a_shortage_is_said_in_words(device, free_host, free_device, words):
    short = shortage(plan(size=GIB), device, free_host=free_host, free_device=free_device)
    assert short is None if words is None else words in (short or "")


def test_what_just_fits_fits():
    made = plan()
    assert shortage(made, "cuda", free_host=made.host_bytes, free_device=made.device_bytes) is None
    assert shortage(made, "cuda", free_host=made.host_bytes - 1, free_device=made.device_bytes) is not None
    assert shortage(made, "cuda", free_host=made.host_bytes, free_device=made.device_bytes - 1) is not None


def test_a_pinned_pool_takes_a_power_of_two():
    """torch's allocator of pinned memory rounds up; ordinary memory is taken as it is."""
    assert plan(size=192 * MIB).host_bytes == 512 * MIB
    assert plan(size=192 * MIB, memory="pageable").host_bytes == 384 * MIB
    assert plan(size=GIB).host_bytes == 2 * GIB


@pytest.mark.gpu
@pytest.mark.parametrize("size", [96 * MIB, 64 * MIB])
def test_a_pinned_pool_takes_from_the_host_what_the_plan_says(size):
    """pytorch/pytorch#95823: up to twice its bytes. By torch's own count of the blocks it hands out."""
    import torch

    from harness.backends.cuda import CudaBackend
    from harness.workloads.h2d import H2DWorkload

    if not hasattr(torch.cuda, "host_memory_stats"):
        pytest.skip("this torch does not tell what pinned memory takes")
    backend = CudaBackend()

    def handed_out():
        stats = torch.cuda.host_memory_stats()
        # Of a torch before 2.10 `allocated_bytes` are those in use; of a later one the cached ones too.
        return stats.get("active_bytes.allocated", stats["allocated_bytes.allocated"])

    before = handed_out()
    workload = H2DWorkload(case(gate="off", size=size), H200, backend)
    taken, plan = handed_out() - before, workload.plan
    workload.close()
    backend.close()
    assert plan.host_bytes <= taken < plan.host_bytes + MIB
    pool = plan.pool_batches * plan.rows * plan.width * plan.element_bytes
    assert (plan.host_bytes > pool) == (pool.bit_count() > 1)


# Each is dominated by another part: the pool, the ring, the products.
ALLOCATING = {
    "pool": (CPU, {"size": 3 * MIB, "chunks": 4}),
    "ring": (ROTATE_LITTLE, {"size": 4 * MIB, "chunks": 16, "issue": "copies-first"}),
    "products": (ROTATE_LITTLE, {"size": 2 * MIB, "chunks": 2, "ratio": 8.0}),
}


@pytest.mark.parametrize("name", ALLOCATING)
def test_the_memory_estimate_is_what_a_workload_takes(name):
    from harness.backends.cpu import CpuBackend
    from harness.workloads.h2d import H2DWorkload

    taken = []

    class Counting(CpuBackend):
        def host_tensor(self, rows, width, dtype, *, pinned):
            return self._count(super().host_tensor(rows, width, dtype, pinned=pinned))

        def device_tensor(self, rows, width, dtype):
            return self._count(super().device_tensor(rows, width, dtype))

        def _count(self, tensor):
            taken.append(tensor.nbytes)
            return tensor

    profile, axes = ALLOCATING[name]
    backend = Counting()
    workload = H2DWorkload(case(profile, memory="pageable", gate="off", **axes), profile, backend)
    estimate = workload.plan.host_bytes + workload.plan.device_bytes
    workload.close()
    backend.close()
    assert sum(taken) <= estimate <= 1.25 * sum(taken)


@pytest.mark.gpu
@pytest.mark.parametrize("axes", [{}, {"size": 64 * MIB, "issue": "copies-first"}, {"ratio": 4.0}], ids=str)
def test_the_memory_estimate_is_what_a_gpu_gives(axes):
    """The highest point over building, warming up and checking every arm."""
    import torch

    from harness.backends.cuda import CudaBackend
    from harness.workloads.h2d import H2DWorkload

    backend = CudaBackend()
    torch.ones(8, 8, device="cuda").mm(torch.ones(8, 8, device="cuda"))  # cuBLAS takes its workspace now
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    workload = H2DWorkload(case(gate="off", **axes), H200, backend)
    assert workload.warm_up() is None
    peak = torch.cuda.max_memory_allocated() - before
    estimate = workload.plan.device_bytes
    workload.close()
    backend.close()
    # cuBLAS may take a further workspace, which is not the workload's.
    assert peak - 64 * MIB <= estimate <= 1.25 * peak
