"""Findings of what is done again in each request, with near misses: copies, times, kernels."""

import ctypes
import gc

import pytest
from auxhead.autotune.doctor.diagnosis import find_all
from auxhead.autotune.doctor.trace import Collection, Load, Watched
from auxhead.autotune.doctor.watching import loads
from auxhead.autotune.doctor.watching.collections import CollectionWatcher
from auxhead.autotune.doctor.watching.loads import LoadWatcher
from support.doctor_requests import kinds, run, trace_of
from support.example_traces import H100, Program, read

# Copies and fills without Async.


@pytest.mark.parametrize("name", ["cudaMemset", "cudaMemcpy", "cudaMemcpy2D", "cuMemcpyHtoD_v2", "cuMemsetD32_v2"])
def test_a_call_that_is_not_asynchronous_is_found_with_its_function(name, tmp_path):
    def make(program):
        run(program, "trunk 8")
        with program.function("net.py(12): forward"):
            program.call(name, 40.0)
        run(program, "trunk 8")

    [finding] = find_all(trace_of(make, tmp_path))
    assert finding.kind == "synchronous-copy" and finding.lines == ("net.py:12 in forward",)
    assert finding.cost_us == pytest.approx(40.0)
    assert finding.evidence == (f"{name.partition('_')[0]} once a request, 40.0 us of the host",)
    assert [(mark.end_us - mark.start_us, mark.stream) for mark in finding.marks] == [(pytest.approx(40.0), None)]
    compile(finding.snippet, "snippet", "exec")


def synchronous(way, before=8, after=8):
    def make(program):
        run(program, f"trunk {before}")
        program.work("gpu_memcpy", f"Memcpy {way}", 30.0, 7, program.call("cudaMemcpy", 60.0))
        if after:
            run(program, f"trunk {after}")

    return make


def test_a_copy_that_waits_is_one_finding_whatever_memory_it_is_of(tmp_path):
    for way in ("HtoD (Pageable -> Device)", "HtoD (Pinned -> Device)", "DtoH (Device -> Pageable)", "DtoD"):
        assert kinds(trace_of(synchronous(way), tmp_path)) == ["synchronous-copy"], way


@pytest.mark.parametrize(
    "make",
    [
        "trunk 8; call cudaMemsetAsync 40; trunk 8",
        "trunk 8; call cudaMemcpy2DAsync 40; trunk 8",
        "trunk 8; call cudaMemset 4; trunk 8",
        "trunk 8; call cudaMemGetInfo 40; trunk 8",
        synchronous("DtoH (Device -> Pageable)", before=16, after=0),  # reads the answer
    ],
)
def test_asynchronous_and_short_calls_and_the_answers_copy_are_none(make, tmp_path):
    assert kinds(trace_of(make, tmp_path)) == []


# Timed requests, one beside the other.


def timed(tmp_path, samples, collections=(), loads=()):
    watched = Watched(4, 1000.0, samples_us=tuple(samples), collections=tuple(collections), loads=tuple(loads))
    return find_all(trace_of("trunk 16", tmp_path, watched=watched))


def test_requests_that_take_twice_the_median_are_jitter(tmp_path):
    [finding] = timed(tmp_path, [1000.0] * 27 + [2500.0] * 3)
    assert finding.kind == "jitter" and finding.cost_us == pytest.approx(150.0)
    assert finding.what.endswith("the 99th percentile is 2.5 times the median.")
    assert "3 of them took 1.5 times" in finding.evidence[1]
    compile(finding.snippet, "snippet", "exec")


@pytest.mark.parametrize(
    "samples",
    [
        [1000.0] * 27 + [1900.0] * 3,  # less than twice as long
        [1000.0] * 16 + [2500.0] * 3,  # too few to tell
        [40.0] * 27 + [100.0] * 3,  # by a matter of microseconds
        [2500.0] * 15 + [1000.0] * 15,  # mostly the long ones
    ],
)
def test_what_is_little_longer_or_told_by_few_is_none(samples, tmp_path):
    assert timed(tmp_path, samples) == []


def test_garbage_collected_within_requests_is_found_with_its_line(tmp_path):
    collections = [Collection(index, 2, 400.0, "net.py:33") for index in range(30)]
    [finding] = timed(tmp_path, [1000.0] * 30, [*collections, Collection(5, 0, 200.0, "net.py:7")])
    assert finding.kind == "garbage-collection" and finding.cost_us == pytest.approx(400.0 + 200.0 / 30)
    assert finding.lines == ("net.py:33", "net.py:7") and finding.spread_us == (400.0, 600.0)
    assert finding.what == "Python collects garbage in 30 of 30 requests, 600.0 us in the longest."
    assert finding.evidence[0] == "generation 2: 30 times in 30 requests, 12,000.0 us together"


@pytest.mark.parametrize("us", [4.0, 9.0])
def test_short_collections_are_none(us, tmp_path):
    assert timed(tmp_path, [1000.0] * 30, [Collection(index, 0, us) for index in range(30)]) == []


def test_a_collection_is_noted_with_its_request_and_the_line_that_it_begins_at():
    def users_code():
        gc.collect()

    callbacks = list(gc.callbacks)
    with CollectionWatcher() as watcher:
        for index in range(3):
            watcher.request = index
            if index != 1:
                users_code()
    gc.collect()
    assert gc.callbacks == callbacks
    seen = [one for one in watcher.seen if one.generation == 2]
    assert [one.request for one in seen] == [0, 2]
    line = users_code.__code__.co_firstlineno + 1
    assert {one.line for one in seen} == {f"test_findings_recurring.py:{line}"} and min(one.us for one in seen) > 0.0


def test_code_that_is_loaded_within_requests_is_found_with_its_line(tmp_path):
    loads = [Load(3, 900_000, "net.py:33"), Load(7, 1_200_000, "net.py:7"), Load(7, 400_000, "net.py:7")]
    samples = [1000.0] * 30
    samples[3] = samples[7] = 1800.0
    [finding] = timed(tmp_path, samples, loads=loads)
    assert finding.kind == "code-loading" and finding.cost_us == pytest.approx(2 * 800.0 / 30)
    assert finding.lines == ("net.py:7", "net.py:33")
    assert finding.what == "CUDA loads code in 2 of 30 requests, the longest of which takes 1,800.0 us."
    assert finding.evidence == (
        "modules that were loaded: 3, 2.50 MB together",
        "requests that load code take 1,800.0 us, others 1,000.0 us; medians",
    )


def test_code_that_every_request_loads_has_no_cost_that_is_known(tmp_path):
    [finding] = timed(tmp_path, [1000.0] * 30, loads=[Load(index, 9000, None) for index in range(30)])
    assert finding.kind == "code-loading" and finding.cost_us is None and finding.lines == ()


def test_code_that_is_loaded_in_no_time_or_behind_the_last_request_is_none(tmp_path):
    loads = [Load(3, 9000, "net.py:33"), Load(30, 9000, "net.py:33")]
    assert timed(tmp_path, [1000.0] * 30, loads=loads) == [] == timed(tmp_path, [1000.0] * 30, loads=loads[1:])


class Cupti:
    """What of CUPTI is called, as it answers."""

    def __init__(self, answer):
        self.answer, self.calls, self.tell = answer, [], None

    def cuptiSubscribe(self, subscriber, callback, user):
        self.tell = callback
        return self.answer

    def cuptiEnableCallback(self, *arguments):
        self.calls.append(arguments[2:])
        return 0

    def cuptiUnsubscribe(self, subscriber):
        self.calls.append("unsubscribed")
        return 0

    def load(self, size):
        module = loads._Module(1, size, None)
        resource = loads._Resource(None, None, ctypes.pointer(module))
        self.tell(None, 3, 6, ctypes.addressof(resource))


def test_a_load_is_noted_with_its_request_its_size_and_its_line(monkeypatch):
    cupti = Cupti(answer=0)
    monkeypatch.setattr(loads.ctypes, "CDLL", lambda name: cupti)

    with LoadWatcher() as watcher:
        watcher.request = 2
        cupti.load(4096)
    line = Cupti.load.__code__.co_firstlineno + 3  # where this stand-in calls back
    assert watcher.seen == (Load(2, 4096, f"test_findings_recurring.py:{line}"),)
    assert cupti.calls == [(3, 6), "unsubscribed"]


@pytest.mark.parametrize("answer", [39, None], ids=["another has it", "it is not there"])
def test_without_cupti_it_is_said_that_nothing_was_looked_for(answer, monkeypatch):
    def opened(name):
        if answer is None:
            raise OSError(name)
        return cupti

    cupti = Cupti(answer)
    monkeypatch.setattr(loads.ctypes, "CDLL", opened)
    with LoadWatcher() as watcher:
        pass
    assert watcher.seen is None and cupti.calls == []


# Kernels.

TRANSPOSE = "void cudnn::engines_precompiled::nchwToNhwcKernel<float, float, float, false, true>(float const*, float*)"
FOLD = "void cudnn::ops::nhwcToFoldedNhwcKernel<__half, __half, float, true>(__half const*, __half*)"
CONVOLUTION = "sm80_xmma_fprop_implicit_gemm_tf32f32_tf32f32_f32_nhwckrsc_nchw_tilesize128x64x32_execute_kernel"
DIRECT = "at::native::direct_copy_kernel_cuda(at::TensorIteratorBase&)::{lambda()#3}::operator()() const"
CAST = f"void at::native::unrolled_elementwise_kernel<{DIRECT}, at::native::memory::LoadWithCast<1>>(int, float)"
STRIDED_CAST = f"void at::native::elementwise_kernel<128, 4, at::native::gpu_kernel_impl<{DIRECT}>>(int)"
HALF = (
    "void at::native::vectorized_elementwise_kernel<4, at::native::float16_copy_kernel_cuda(at::T&)::{lambda(float)#1}>"
)
FLOAT = "void at::native::vectorized_elementwise_kernel<4, at::native::bfloat16tofloat32_copy_kernel_cuda(at::T&)>(int)"
STRIDED = f"void at::native::elementwise_kernel<128, 4, at::native::gpu_kernel_impl_nocast<{DIRECT}>>(int)"
SGEMM = "ampere_sgemm_128x64_tn"
SIMT = "void cutlass::Kernel2<cutlass_80_simt_sgemm_128x128_8x4_tn_align1>(cutlass_80_simt_sgemm::Params)"
FFMA = "sm80_xmma_gemm_f32f32_f32f32_f32_tn_n_tilesize64x64x8_stage3_warpsize1x4x1_ffma_aligna4_alignc4_execute_kernel"
FFMA_CONVOLUTION = "sm80_xmma_fprop_implicit_gemm_f32f32_f32f32_f32_nchwkcrs_nchw_tilesize128x32x8_ffma_execute_kernel"
TF32 = "sm90_xmma_gemm_f32f32_tf32f32_f32_tn_n_tilesize64x64x32_warpgroupsize1x1x1_execute_segment_k_off_kernel"
TENSOROP = "void cutlass::Kernel2<cutlass_80_tensorop_s1688gemm_256x64_16x4_nn_align4>(cutlass_80_tensorop::Params)"
OF_HALF = "void precomputed_convolve_sgemm<__half, 128, 6, 7, 3, 3, 5, 1, false>(int, int, int, __half const*)"


def with_kernels(name, us, tmp_path, watched=None, devices=(H100,)):
    """A trace of requests of 1,000 us, so many of which are of one kernel."""
    program = Program()
    for _ in range(3):
        with program.request():
            run(program, "trunk 5 of 100")
            with program.function("net.py(9): forward"), program.operator("aten::something"):
                program.kernel(us, name=name)
            run(program, f"trunk 1 of {500.0 - us}")
        program.rest()
    return read({**program.content(watched), "deviceProperties": list(devices)}, tmp_path)


def off(*families):
    return Watched(requests=4, without_tf32=families)


FOUND = [
    ("layout-transposes", TRANSPOSE, None, 1.0),
    ("dtype-casts", CAST, None, 1.0),
    ("dtype-casts", STRIDED_CAST, None, 1.0),
    ("dtype-casts", HALF, None, 1.0),
    ("dtype-casts", FLOAT, None, 1.0),
    ("tf32-off", SGEMM, off("matmul"), 0.5),
    ("tf32-off", SIMT, off("matmul", "convolution"), 0.5),
    ("tf32-off", FFMA, off("matmul"), 0.5),
    ("tf32-off", FFMA_CONVOLUTION, off("convolution"), 0.5),
]


@pytest.mark.parametrize("kind, name, watched, share", FOUND)
def test_kernels_that_take_a_tenth_are_found_with_their_function(kind, name, watched, share, tmp_path):
    [finding] = find_all(with_kernels(name, 110.0, tmp_path, watched))
    assert finding.kind == kind and finding.cost_us == pytest.approx(share * 110.0)
    assert finding.lines == ("net.py:9 in forward",) and finding.evidence[0].endswith(" once a request, 110.0 us")
    assert finding.what.endswith(": 110.0 us of the 1,000.0 us that the device works.")
    assert [mark.stream for mark in finding.marks] == [7]
    compile(finding.snippet, "snippet", "exec")
    assert kinds(with_kernels(name, 90.0, tmp_path, watched)) == [], "less than a tenth"


@pytest.mark.parametrize("name", [FOLD, CONVOLUTION, STRIDED, TF32, TENSOROP, OF_HALF])
def test_kernels_of_names_alike_are_none(name, tmp_path):
    assert kinds(with_kernels(name, 400.0, tmp_path, off("matmul", "convolution"))) == []


@pytest.mark.parametrize(
    "name, watched, major",
    [
        (SGEMM, off(), 9),  # on, and cuBLAS has its reasons
        (SGEMM, off("convolution"), 9),
        (FFMA_CONVOLUTION, off("matmul"), 9),
        (SGEMM, off("matmul"), 7),  # no TF32
        (SGEMM, None, 9),  # a trace by itself tells no settings
    ],
)
def test_float32_counts_where_tf32_is_there_and_off(name, watched, major, tmp_path):
    devices = [{**H100, "computeMajor": major}]
    assert kinds(with_kernels(name, 400.0, tmp_path, watched, devices)) == []
