"""From CUDA text to a cubin: what the key follows, what ptxas says, odd folders, a compiler gone missing."""

import os
import shutil
import subprocess
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from fagen.errors import BuildError, ToolchainError, UsageError
from fagen.run import build as build_module
from fagen.run import toolchain
from fagen.run.build import build, parse_resources, parse_warnings
from fagen.run.source import included, without_comments
from fagen.run.toolchain import find_nvcc

ODD = "a b (c) é"
KERNEL = '#include "scale.cuh"\nextern "C" __global__ void half_of(float* x) { x[threadIdx.x] *= SCALE; }\n'

# Stands in for nvcc where only what happens around it matters: its image is its arguments and the text.
FAKE_NVCC = """#!/bin/sh
case "$1" in
  --version) echo "Cuda compilation tools, release RELEASE, VRELEASE.1"; exit ;;
  --list-gpu-arch) printf 'compute_75\\ncompute_80\\ncompute_90\\n'; exit ;;
esac
echo run >> "LOG"
while [ "$1" != -o ]; do shift; done
{ echo "image RELEASE"; cat "$3"; } > "$2"
echo "ptxas info    : Function properties for half_of"
echo "    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads"
echo "ptxas info    : Used 8 registers, used 0 barriers"
"""


@pytest.fixture
def headers(tmp_path: Path) -> Path:
    folder = tmp_path / "headers"
    folder.mkdir()
    (folder / "scale.cuh").write_text("#pragma once\n#define SCALE 0.5f\n")
    return folder


@pytest.fixture
def fake(tmp_path, monkeypatch, cold_cache):
    """Put a script in place of nvcc: ``fake(release)`` puts another, ``fake.runs()`` counts compilations."""
    path, log = tmp_path / "bin" / "nvcc", tmp_path / "log"
    path.parent.mkdir()
    monkeypatch.setenv("FAGEN_NVCC", str(path))
    monkeypatch.delenv("FAGEN_CXX", raising=False)
    monkeypatch.setenv("NVCC_CCBIN", "any")

    def write(release: str = "12.4") -> Path:
        path.write_text(FAKE_NVCC.replace("RELEASE", release).replace("LOG", str(log)))
        path.chmod(0o755)
        return path

    write.runs = lambda: len(log.read_text().split()) if log.exists() else 0
    write()
    return write


def entry_dir(root: Path) -> Path:
    (folder,) = (root / "objects").glob("*/*")
    return folder


# ---- the key -----------------------------------------------------------------------------------------


def test_key_follows_what_the_compiler_sees(fake, headers):
    def key(text=KERNEL, arch="sm_80", **more):
        return build(text, name="half_of", arch=arch, include_dir=headers, **more).key

    first = key()
    commented = KERNEL.replace(") {", ") { /* here */").replace("};", "}; // and there")
    assert key("// another user's words\n\n" + commented) == first
    keys = {first, key(KERNEL.replace("*=", "+=")), key(arch="sm_90"), key(arch=(9, 0)), key(lineinfo=True)}
    (headers / "scale.cuh").write_text("#pragma once\n#define SCALE 0.25f\n")
    keys.add(key())
    (headers / "scale.cuh").write_text('#include "deeper.cuh"\n')
    (headers / "deeper.cuh").write_text("#define SCALE 0.25f\n")
    keys.add(key())
    (headers / "deeper.cuh").write_text("#define SCALE 0.75f\n")
    keys.add(key())
    fake("12.5")
    keys.add(key())
    assert len(keys) == 9


def test_key_follows_flags_nvcc_takes_from_the_environment(fake, headers, monkeypatch):
    first = build(KERNEL, name="half_of", arch="sm_80", include_dir=headers).key
    monkeypatch.setenv("NVCC_APPEND_FLAGS", "--use_fast_math")
    assert build(KERNEL, name="half_of", arch="sm_80", include_dir=headers).key != first


def test_key_ignores_paths_names_and_headers_not_included(fake, headers, tmp_path, monkeypatch):
    first = build(KERNEL, name="half_of", arch="sm_80", include_dir=headers)
    (headers / "unrelated.cuh").write_text("#define OTHER 1\n")
    moved = shutil.copytree(headers, tmp_path / ODD / "headers")
    linked = tmp_path / "linked-nvcc"
    linked.symlink_to(fake())
    monkeypatch.setenv("FAGEN_NVCC", str(linked))
    second = build(KERNEL, name="another_name", arch="sm_80", include_dir=moved)
    assert (second.key, second.fresh, fake.runs()) == (first.key, False, 1)


def test_b50b_another_version_at_the_same_path_size_and_mtime_builds_again(fake, headers):
    """A toolkit replaced in place."""
    path = fake("12.4")
    before = path.stat()
    assert build(KERNEL, name="half_of", arch="sm_80", include_dir=headers).image.startswith(b"image 12.4")
    os.utime(fake("12.8"), ns=(before.st_atime_ns, before.st_mtime_ns))
    again = build(KERNEL, name="half_of", arch="sm_80", include_dir=headers)
    assert again.fresh
    assert again.image.startswith(b"image 12.8")


def test_b50a_a_header_changed_at_the_same_size_and_mtime_builds_again(fake, headers):
    """One byte of a template, with its time kept."""
    header = headers / "scale.cuh"
    before = header.stat()
    first = build(KERNEL, name="half_of", arch="sm_80", include_dir=headers)
    header.write_text(header.read_text().replace("0.5f", "0.7f"))
    os.utime(header, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert header.stat().st_size == before.st_size
    again = build(KERNEL, name="half_of", arch="sm_80", include_dir=headers)
    assert again.fresh
    assert again.key != first.key


def test_b50c_a_truncated_cubin_is_built_again_with_one_warning(fake, headers, cold_cache):
    """An entry cut to 10 bytes does not fail for ever."""
    first = build(KERNEL, name="half_of", arch="sm_80", include_dir=headers)
    os.truncate(entry_dir(cold_cache) / "kernel.image", 10)
    with pytest.warns(RuntimeWarning, match="is damaged") as warned:
        again = build(KERNEL, name="half_of", arch="sm_80", include_dir=headers)
    assert len(warned) == 1
    assert (again.fresh, again.image, fake.runs()) == (True, first.image, 2)


def test_b50d_another_architecture_is_another_build(fake, headers):
    for arch in ("sm_80", "sm_90", (8, 0)):
        build(KERNEL, name="half_of", arch=arch, include_dir=headers)
    assert fake.runs() == 2


# ---- text --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "bare"),
    [
        ("a; // one\nb; /* two\nlines */ c;", "a;\nb; c;"),
        ('s = "// no /* comment */"; // one', 's = "// no /* comment */";'),
        (r's = "\"// in"; x /* out */', r's = "\"// in"; x'),
        ("c = '\"'; d; // out", "c = '\"';" + " d;"),
        ("c = '\\''; // it's out", "c = '\\'';"),
        ("n = 1'000'000; // it's out", "n = 1'000'000;"),
        ("n = 0x1'F; m = '/'; // it's out", "n = 0x1'F; m = '/';"),
        ("x // goes on \\\n to here\ny", "x\ny"),
        ('r = R"(// " in)"; // out', 'r = R"(// " in)";'),
        ('r = R"x(/* )" )x"; /* out */ y', 'r = R"x(/* )" )x"; y'),
        ("a /*/ still */ b", "a b"),
        ("a / b / c", "a / b / c"),
        ("x; /* never ends", "x;"),
        ("\n\n  x  \n\n", "  x"),
    ],
)
def test_comments_leave_and_nothing_else(text, bare):
    assert without_comments(text) == bare


def test_headers_are_followed_once_and_in_circles(tmp_path):
    (tmp_path / "deep").mkdir()
    (tmp_path / "a.cuh").write_text('#include "deep/b.cuh"\n#include <cuda_fp16.h>\n')
    (tmp_path / "deep" / "b.cuh").write_text('#include "c.cuh"\n#include "a.cuh"\n')
    (tmp_path / "deep" / "c.cuh").write_text('  #  include "../a.cuh"\n')
    (tmp_path / "unused.cuh").write_text("")
    names = list(included('#include "a.cuh"\n#include "missing.cuh"\n', tmp_path))
    assert names == ["a.cuh", "deep/b.cuh", "deep/c.cuh"]


# ---- what ptxas says ---------------------------------------------------------------------------------

REPORT = """kernel.cu(7): warning #177-D: variable "unused" was declared but never referenced
  int unused;
      ^
Remark: The warnings can be suppressed with "-diag-suppress <warning-number>"
ptxas info    : (C7510) Potential Performance Loss: wgmma.mma_async instructions are serialized in 'k2'
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'k2' for 'sm_90a'
ptxas info    : Function properties for k2
    2392 bytes stack frame, 3304 bytes spill stores, 3444 bytes spill loads
ptxas info    : Used 32 registers, used 16 barriers, 2392 bytes cumulative stack size
ptxas info    : Compile time = 122.984 ms
ptxas info    : Compiling entry function 'k1' for 'sm_90a'
ptxas info    : Function properties for k1
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 255 registers, used 1 barriers, 49152 bytes smem, 400 bytes cmem[0]
ptxas info    : Compile time = 18.755 ms
ptxas info    : Function properties for _Z1fPfi
    8 bytes stack frame, 4 bytes spill stores, 4 bytes spill loads
ptxas warning : Value of threads per SM for entry k1 is out of range. .minnctapersm will be ignored
ptxas warning : Value of threads per SM for entry k1 is out of range. .minnctapersm will be ignored
"""


def test_resources_and_warnings_of_a_report():
    rows = [
        (each.name, each.registers, each.stack_bytes, each.spill_store_bytes, each.spill_load_bytes,
         each.static_shared_bytes, each.barriers)
        for each in parse_resources(REPORT)
    ]  # fmt: skip
    assert rows == [
        ("k2", 32, 2392, 3304, 3444, 0, 16),
        ("k1", 255, 0, 0, 0, 49152, 1),
        ("_Z1fPfi", 0, 8, 4, 4, 0, 0),
    ]
    warned = parse_warnings(REPORT)
    assert [line.split(":")[0].strip() for line in warned] == ["kernel.cu(7)", "ptxas info", "ptxas warning"]
    assert "(C7510)" in warned[1]


SPILLING = """
extern "C" __global__ void __launch_bounds__(1024, 2) spills(float* x, int n) {
  float a[100];
#pragma unroll
  for (int i = 0; i < 100; i++) a[i] = x[i * n];
#pragma unroll
  for (int i = 0; i < 100; i++) x[i] = a[99 - i] * a[(i * 7) % 100];
}
extern "C" __global__ void shares(float* x) {
  __shared__ float s[64];
  s[threadIdx.x] = x[threadIdx.x];
  __syncthreads();
  x[threadIdx.x] = s[63 - threadIdx.x];
}
"""


@pytest.mark.nvcc
def test_real_report_of_a_spilling_and_a_sharing_kernel(cold_cache):
    built = build(SPILLING, name="spilling", arch="sm_80")
    spills, shares = built.functions["spills"], built.functions["shares"]
    assert spills.registers == 32
    assert spills.spill_store_bytes > 0
    assert spills.spill_load_bytes > 0
    assert (shares.static_shared_bytes, shares.barriers, shares.spill_store_bytes) == (256, 1, 0)
    assert built.image[:4] == b"\x7fELF"
    assert 0 < built.seconds < 60
    assert build(SPILLING, name="spilling", arch="sm_80") == replace(built, fresh=False)


@pytest.mark.nvcc
def test_a_newer_device_gets_ptx(cold_cache):
    newest = find_nvcc().archs[-1]
    built = build(SPILLING, name="spilling", arch=(newest // 10 + 5, 0))
    assert built.target.name == f"compute_{newest}"
    assert b".entry spills" in built.image
    assert not built.functions


@pytest.mark.nvcc
def test_rejected_text_names_kernel_compiler_and_first_error(cold_cache):
    with pytest.raises(
        BuildError, match=r"nvcc .* rejects broken for sm_80: kernel\.cu\(2\): error"
    ) as caught:
        build("void f() {\n  undeclared(); }\n", name="broken", arch="sm_80")
    assert "\n" not in caught.value.sentence
    assert "1 error detected" in caught.value.details
    assert not list((cold_cache / "objects").glob("*/*"))


# ---- folders with odd names --------------------------------------------------------------------------


@pytest.mark.nvcc
@pytest.mark.cxx
def test_b53_every_folder_may_have_an_odd_name(tmp_path, headers, monkeypatch):
    """Cache, temporary folder, headers, CUDA home and host compiler, all at once."""
    odd = tmp_path / ODD
    real = find_nvcc().path
    listing = subprocess.run(
        [str(real), "-dryrun", "-cubin", "x.cu"], capture_output=True, text=True, cwd=tmp_path
    )
    here = next(line.split("=", 1)[1] for line in listing.stderr.splitlines() if "_HERE_=" in line)
    (odd / "host").mkdir(parents=True)
    (odd / "tmp").mkdir()
    (odd / "cuda").symlink_to(Path(here).parent)
    (odd / "host" / "g++").symlink_to(toolchain.find_cxx().path)
    moved = shutil.copytree(headers, odd / "headers")
    monkeypatch.delenv("FAGEN_NVCC", raising=False)
    monkeypatch.setenv("CUDA_HOME", str(odd / "cuda"))
    monkeypatch.setenv("FAGEN_CXX", str(odd / "host" / "g++"))
    monkeypatch.setenv("TMPDIR", str(odd / "tmp"))
    monkeypatch.setenv("FAGEN_CACHE_DIR", str(odd / "cache"))
    built = build(KERNEL, name="half_of", arch="sm_80", include_dir=moved)
    assert built.fresh
    assert built.functions["half_of"].registers > 0
    assert not list((odd / "tmp").iterdir())


def test_b53_paths_travel_as_single_arguments(tmp_path, headers, monkeypatch, fake):
    commands = []
    run = subprocess.run

    def watched(command, **how):
        commands.append((command, how))
        return run(command, **how)

    monkeypatch.setattr(build_module.subprocess, "run", watched)
    moved = shutil.copytree(headers, tmp_path / "quote ' and $HOME" / "headers")
    build(KERNEL, name="half_of", arch="sm_80", include_dir=moved)
    (compiled,) = [(command, how) for command, how in commands if "-cubin" in command]
    assert str(moved) in compiled[0]
    assert not compiled[1].get("shell")
    assert not any("fast" in argument for argument in compiled[0])


# ---- no compiler -------------------------------------------------------------------------------------


def test_b55_what_was_built_needs_no_compiler_and_what_was_not_says_so(fake, headers, monkeypatch):
    """Cached, not cached, and the way back in the same process."""
    path = os.environ["FAGEN_NVCC"]
    built = build(KERNEL, name="half_of", arch=(9, 0), include_dir=headers)
    monkeypatch.setattr(toolchain, "_wheel_nvccs", lambda: iter(()))
    for name in ("FAGEN_NVCC", "CUDA_HOME"):
        monkeypatch.delenv(name, raising=False)
    with monkeypatch.context() as bare:
        bare.setenv("PATH", "/nowhere")
        again = build(KERNEL, name="half_of", arch=(9, 0), include_dir=headers)
        assert (again.key, again.image, again.fresh) == (built.key, built.image, False)
        for text, arch in ((KERNEL.replace("*=", "+="), (9, 0)), (KERNEL, (8, 0))):
            with pytest.raises(ToolchainError, match=r"nvcc is needed.*/nowhere.*set FAGEN_NVCC"):
                build(text, name="half_of", arch=arch, include_dir=headers)
    monkeypatch.setenv("FAGEN_NVCC", path)
    assert build(KERNEL, name="half_of", arch=(8, 0), include_dir=headers).fresh


def test_without_a_compiler_the_last_one_that_built_is_meant(fake, headers, monkeypatch):
    for release in ("12.4", "12.8", "12.4"):
        fake(release)
        build(KERNEL, name="half_of", arch="sm_80", include_dir=headers)
    assert fake.runs() == 2
    monkeypatch.setenv("FAGEN_NVCC", "/nowhere/nvcc")
    assert build(KERNEL, name="half_of", arch="sm_80", include_dir=headers).image.startswith(b"image 12.4")


def test_nvcc_without_any_host_compiler_says_what_it_needs(fake, headers, monkeypatch):
    for name in ("NVCC_CCBIN", "CXX"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(build_module.shutil, "which", lambda name: None)
    with pytest.raises(ToolchainError, match="C\\+\\+ compiler is needed, by nvcc"):
        build(KERNEL, name="half_of", arch="sm_80", include_dir=headers)


@pytest.mark.parametrize("release", ["11.8", "12.4"])
def test_b56_an_arch_the_compiler_does_not_know_is_never_asked_for(fake, headers, release):
    fake(release)
    assert build(KERNEL, name="half_of", arch=(12, 0), include_dir=headers).target.name == "compute_90"
    with pytest.raises(ToolchainError, match=rf"nvcc {release} .*sm_61.*older CUDA toolkit"):
        build(KERNEL, name="half_of", arch=(6, 1), include_dir=headers)
    assert fake.runs() == 1


# ---- many callers ------------------------------------------------------------------------------------


def test_b60_sixteen_threads_with_eight_kernels_compile_each_once(fake, headers):
    """The compiler's part of it."""
    texts = [KERNEL.replace("half_of", f"k{number}") for number in range(8)]
    start = threading.Barrier(16)

    def one(number: int) -> tuple[int, bytes]:
        start.wait()
        text = texts[number % 8]
        return number % 8, build(text, name=f"k{number % 8}", arch="sm_80", include_dir=headers).image

    with ThreadPoolExecutor(16) as pool:
        for number, image in pool.map(one, range(16)):
            assert f"void k{number}(".encode() in image
    assert fake.runs() == 8


# ---- looking inside ----------------------------------------------------------------------------------


def test_override_replaces_the_text_and_its_key(fake, headers, tmp_path, monkeypatch):
    folder = tmp_path / "override"
    folder.mkdir()
    plain = build(KERNEL, name="half_of", arch="sm_80", include_dir=headers)
    monkeypatch.setenv("FAGEN_OVERRIDE", str(folder))
    assert build(KERNEL, name="half_of", arch="sm_80", include_dir=headers).key == plain.key
    (folder / "half_of.cu").write_text(KERNEL.replace("*=", "-="))
    edited = build(KERNEL, name="half_of", arch="sm_80", include_dir=headers)
    assert (edited.fresh, edited.key != plain.key) == (True, True)
    assert b"-=" in edited.image
    assert build(KERNEL, name="other", arch="sm_80", include_dir=headers).key == plain.key
    monkeypatch.setenv("FAGEN_OVERRIDE", str(tmp_path / "no such folder"))
    with pytest.raises(UsageError, match="no such folder, which is no folder"):
        build(KERNEL, name="half_of", arch="sm_80", include_dir=headers)


def test_dump_keeps_each_stage(fake, headers, tmp_path, monkeypatch):
    monkeypatch.setenv("FAGEN_DUMP", str(tmp_path / "dump"))
    built = build(KERNEL, name="half of/it", arch="sm_80", include_dir=headers)
    assert (tmp_path / "dump" / "half_of_it.cu").read_text() == KERNEL
    assert (tmp_path / "dump" / "half_of_it.cubin").read_bytes() == built.image
    assert "Used 8 registers" in (tmp_path / "dump" / "half_of_it.ptxas.txt").read_text()


@pytest.mark.parametrize(
    ("level", "seen", "unseen"),
    [
        ("", (), ("fagen",)),
        ("2", ("compiled in",), ("__global__", "registers")),
        ("5", ("Used 8 registers",), ()),
    ],
)
def test_debug_prints_by_level(fake, headers, monkeypatch, capsys, level, seen, unseen):
    monkeypatch.setenv("FAGEN_DEBUG", level)
    build(KERNEL, name="half_of", arch="sm_80", include_dir=headers)
    printed = capsys.readouterr().err
    assert all(part in printed for part in seen)
    assert not any(part in printed for part in unseen)


def test_debug_level_that_is_none(monkeypatch, fake, headers):
    monkeypatch.setenv("FAGEN_DEBUG", "loud")
    with pytest.raises(UsageError, match="FAGEN_DEBUG is 'loud'"):
        build(KERNEL, name="half_of", arch="sm_80", include_dir=headers)
