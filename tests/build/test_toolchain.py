"""The search for compilers, with scripts that stand in for them, and the choice of what to compile for."""

import os
import stat
from pathlib import Path

import pytest

from fagen.errors import ToolchainError, UsageError
from fagen.run import toolchain
from fagen.run.toolchain import Cxx, Nvcc, Target, choose_target, find_cxx, find_nvcc

ODD = "a b (c) é"
NAMES = ("FAGEN_NVCC", "CUDA_HOME", "FAGEN_CXX", "CXX")


def program(path: Path, text: str) -> Path:
    """Write a shell script that can be run."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n", encoding="utf-8")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


def fake_nvcc(path: Path, release: str = "12.4", archs: tuple[int, ...] = (75, 80, 86, 90)) -> Path:
    listed = "\\n".join(f"compute_{arch}" for arch in archs)
    return program(
        path,
        f'case "$1" in --version) echo "Cuda compilation tools, release {release}, V{release}.99" ;;\n'
        f"--list-gpu-arch) printf '{listed}\\n' ;; *) exit 7 ;; esac",
    )


def nvcc_with(*archs: int, release: str = "12.4") -> Nvcc:
    nvcc = Nvcc(
        Path("/opt/cuda/bin/nvcc"), "PATH", f"Cuda compilation tools, release {release}, V{release}.99"
    )
    nvcc.__dict__["archs"] = archs  # as if it had been asked
    return nvcc


@pytest.fixture(autouse=True)
def bare(tmp_path, monkeypatch):
    """No compiler anywhere: an empty PATH, no variables, no wheels."""
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)
    empty = tmp_path / "empty"
    empty.mkdir()
    monkeypatch.setenv("PATH", str(empty))
    monkeypatch.setattr(toolchain, "_wheel_nvccs", lambda: iter(()))
    return tmp_path


def test_order_of_the_search(bare, monkeypatch):
    wheel = fake_nvcc(bare / "wheel" / "nvcc", "13.5")
    monkeypatch.setattr(toolchain, "_wheel_nvccs", lambda: iter([wheel]))
    assert (find_nvcc().path, find_nvcc().found_by) == (wheel, "wheels")
    in_path = fake_nvcc(bare / "path" / "nvcc", "12.1")
    monkeypatch.setenv("PATH", str(in_path.parent))
    assert (find_nvcc().path, find_nvcc().found_by) == (in_path, "PATH")
    home = fake_nvcc(bare / "home" / "bin" / "nvcc", "12.2")
    monkeypatch.setenv("CUDA_HOME", str(bare / "home"))
    assert (find_nvcc().path, find_nvcc().found_by) == (home, "CUDA_HOME")
    own = fake_nvcc(bare / "own" / "nvcc-13", "13.0")
    monkeypatch.setenv("FAGEN_NVCC", str(own))
    assert (find_nvcc().path, find_nvcc().found_by, find_nvcc().version) == (own, "FAGEN_NVCC", (13, 0))


def test_cuda_home_without_nvcc_does_not_end_the_search(bare, monkeypatch):
    monkeypatch.setenv("CUDA_HOME", str(bare / "no such home"))
    in_path = fake_nvcc(bare / "path" / "nvcc")
    monkeypatch.setenv("PATH", str(in_path.parent))
    assert find_nvcc().path == in_path


@pytest.mark.parametrize("layout", ["cu13", "cuda_nvcc"])
def test_wheels_are_found_by_where_they_install(bare, monkeypatch, layout):
    monkeypatch.undo()
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)
    site = bare / "site-packages"
    expected = fake_nvcc(site / "nvidia" / layout / "bin" / "nvcc")
    monkeypatch.setenv("PATH", str(bare / "empty"))
    monkeypatch.syspath_prepend(str(site))
    assert find_nvcc().path == expected


def test_missing_nvcc_names_every_place_and_the_remedy(bare, monkeypatch):
    monkeypatch.setenv("CUDA_HOME", "/opt/no-cuda")
    with pytest.raises(ToolchainError) as caught:
        find_nvcc()
    text = str(caught.value)
    for part in (
        "nvcc is needed",
        "FAGEN_NVCC",
        "/opt/no-cuda/bin/nvcc",
        str(bare / "empty"),
        "nvidia-cuda-nvcc",
        "pip install '.[nvcc]'",
    ):
        assert part in text
    assert "\n" not in text


def test_mending_path_is_enough(bare):
    with pytest.raises(ToolchainError, match="nvcc"):
        find_nvcc()
    fake_nvcc(bare / "empty" / "nvcc")
    assert find_nvcc().version == (12, 4)


def test_a_named_compiler_that_is_none_is_an_error_and_not_skipped(bare, monkeypatch):
    fake_nvcc(bare / "empty" / "nvcc")
    monkeypatch.setenv("FAGEN_NVCC", "/no/such/nvcc")
    with pytest.raises(ToolchainError, match="FAGEN_NVCC names /no/such/nvcc"):
        find_nvcc()
    monkeypatch.setenv("FAGEN_CXX", "/no/such/cxx")
    with pytest.raises(ToolchainError, match="FAGEN_CXX names /no/such/cxx"):
        find_cxx()


def test_a_replaced_compiler_is_asked_again_even_with_an_old_mtime(bare):
    path = fake_nvcc(bare / "empty" / "nvcc", "12.4")
    old = path.stat()
    assert find_nvcc().version == (12, 4)
    fake_nvcc(path, "12.8")
    os.utime(path, ns=(old.st_atime_ns, old.st_mtime_ns))
    assert path.stat().st_size == old.st_size
    assert find_nvcc().version == (12, 8)


def test_version_text_is_the_same_by_any_path(bare, monkeypatch):
    path = fake_nvcc(bare / "one" / "nvcc")
    link = bare / ODD / "nvcc"
    link.parent.mkdir()
    link.symlink_to(path)
    texts = []
    for each in (path, link):
        monkeypatch.setenv("FAGEN_NVCC", str(each))
        texts.append(find_nvcc().version_text)
    assert texts[0] == texts[1]
    assert "12.4" in texts[0]


def test_a_compiler_that_fails_when_asked_says_so(bare):
    program(bare / "empty" / "nvcc", "echo broken library >&2; exit 3")
    with pytest.raises(ToolchainError, match=r"nvcc --version failed.*exit code = 3") as caught:
        find_nvcc()
    assert "broken library" in caught.value.details


def test_archs_in_order_from_a_real_answer(bare):
    fake_nvcc(bare / "empty" / "nvcc", archs=(75, 110, 103, 90))
    assert find_nvcc().archs == (75, 90, 103, 110)


@pytest.mark.parametrize(
    ("arch", "target"),
    [
        ((7, 5), "sm_75"),
        ((8, 6), "sm_86"),
        ((9, 0), "sm_90a"),  # wgmma needs the letter
        ("sm_90", "sm_90"),
        ("sm_90a", "sm_90a"),
        ((8, 9), "compute_86"),  # between two it knows: the newest that both know
        ((10, 0), "compute_90"),
        ((12, 1), "compute_90"),
        ("sm_120", "compute_90"),
    ],
)
def test_target_for_a_device(arch, target):
    assert choose_target(arch, nvcc_with(75, 80, 86, 90)) == Target(target)
    assert Target(target).is_ptx == target.startswith("compute")


@pytest.mark.parametrize(("arch", "target"), [((9, 0), "sm_90"), ((8, 0), "sm_80")])
def test_target_of_a_release_before_letters(arch, target):
    assert choose_target(arch, nvcc_with(75, 80, 90, release="11.8")) == Target(target)


def test_a_device_newer_than_the_compiler_never_gets_its_own_number():
    """CUDA 11.0 knows no sm_86, CUDA 7.5 no sm_61: neither is asked for it."""
    assert choose_target((8, 6), nvcc_with(75, 80, release="11.0")) == Target("compute_80")


@pytest.mark.parametrize(
    ("arch", "release", "archs", "parts"),
    [
        (
            (6, 1),
            "13.0",
            (75, 90),
            ("nvcc 13.0", "sm_61", "sm_75, sm_90", "older CUDA toolkit", "FAGEN_NVCC"),
        ),
        ("sm_90a", "11.8", (75, 90), ("nvcc 11.8", "sm_90a", "newer CUDA toolkit", "--upgrade '.[nvcc]'")),
        ("sm_100a", "12.4", (75, 90), ("nvcc 12.4", "sm_100a", "newer CUDA toolkit")),
    ],
)
def test_no_architecture_in_common_names_device_version_and_remedy(arch, release, archs, parts):
    with pytest.raises(ToolchainError) as caught:
        choose_target(arch, nvcc_with(*archs, release=release))
    for part in parts:
        assert part in str(caught.value)


@pytest.mark.parametrize("arch", ["90a", "sm90", "sm_", "compute_90", "gfx942", "sm_90b"])
def test_no_architecture_at_all(arch):
    with pytest.raises(UsageError, match=f"{arch} is no CUDA architecture"):
        choose_target(arch, None)


def test_without_a_compiler_the_target_is_the_devices_own():
    assert choose_target((9, 0), None) == Target("sm_90a")
    assert choose_target((8, 6), None) == Target("sm_86")


def test_search_for_cxx(bare, monkeypatch):
    with pytest.raises(ToolchainError) as caught:
        find_cxx()
    for part in (
        "C++ compiler is needed",
        "FAGEN_CXX (not set)",
        "CXX (not set)",
        str(bare / "empty"),
        "g++",
    ):
        assert part in str(caught.value)
    clang = program(bare / "empty" / "clang++", "echo 'Debian clang version 14.0.6'; echo 'InstalledDir: /x'")
    assert find_cxx() == Cxx(clang, "PATH", "Debian clang version 14.0.6")
    gcc = program(bare / "empty" / "g++", "echo 'g++ (Debian 12.2.0) 12.2.0'")
    assert find_cxx() == Cxx(gcc, "PATH", "(Debian 12.2.0) 12.2.0")
    other = program(bare / ODD / "g++-12", "echo 'g++-12 (Debian 12.2.0) 12.2.0'")
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert find_cxx().path == gcc
    monkeypatch.setenv("CXX", str(other))
    assert find_cxx() == Cxx(other, "CXX", "(Debian 12.2.0) 12.2.0")
    monkeypatch.setenv("FAGEN_CXX", "clang++")
    assert (find_cxx().path, find_cxx().found_by) == (clang, "FAGEN_CXX")
