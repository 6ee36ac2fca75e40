"""The cache: entries by content, damage found and mended, one build for many callers."""

import errno
import json
import multiprocessing
import os
import threading
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from fagen.errors import BuildError
from fagen.run import cache
from fagen.run.cache import cache_clear, cache_key, cache_stats, cached, index_get, index_put, load

PARTS = {"text": "int x;", "flags": ["-O3"]}
ODD = "a b (c) é"


def writes(text: str = "result", calls: list[str] | None = None):
    """Return a producer that writes one file and counts its calls."""

    def produce(folder: Path):
        if calls is not None:
            calls.append(text)
        (folder / "out.bin").write_text(text)
        return {"length": len(text)}

    return produce


def entry_dir(root: Path) -> Path:
    (folder,) = (root / "objects").glob("*/*")
    return folder


def test_second_call_builds_nothing(cold_cache):
    calls: list[str] = []
    first = cached(PARTS, writes(calls=calls))
    second = cached(PARTS, writes("other", calls=calls))
    assert calls == ["result"]
    assert (first.fresh, second.fresh) == (True, False)
    assert first.files == second.files == {"out.bin": b"result"}
    assert first.notes == second.notes == {"length": 6}
    assert (second.folder / "out.bin").read_bytes() == b"result"
    assert second.folder.is_relative_to(cold_cache)


def test_key_follows_content_and_not_order():
    assert cache_key({"a": 1, "b": [1, 2]}) == cache_key({"b": [1, 2], "a": 1})
    variants = [{"a": 1, "b": [1, 2]}, {"a": 1, "b": [2, 1]}, {"a": "1", "b": [1, 2]}, {"a": 1}, {"ab": "12"}]
    assert len({cache_key(parts) for parts in variants}) == len(variants)


def test_key_is_the_same_in_every_process():
    assert cache_key(PARTS) == "97c80643e2ab15f3475bb9826dc7a2e8da229305f67fd69e798448133a6bb410"


def flip_byte(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def record_of_other(path: Path) -> None:
    """A whole, valid record, which belongs to another key."""
    cache._write_record(path, {"key": "0" * 64, "files": {}, "notes": {}})


DAMAGE = {
    "file truncated": lambda folder: os.truncate(folder / "out.bin", 3),
    "file emptied": lambda folder: os.truncate(folder / "out.bin", 0),
    "one bit of the file": lambda folder: flip_byte(folder / "out.bin"),
    "file missing": lambda folder: (folder / "out.bin").unlink(),
    "record truncated": lambda folder: os.truncate(folder / "entry.json", 70),
    "record emptied": lambda folder: os.truncate(folder / "entry.json", 0),
    "one bit of the record": lambda folder: flip_byte(folder / "entry.json"),
    "record missing": lambda folder: (folder / "entry.json").unlink(),
    "record is JSON of something else": lambda folder: (folder / "entry.json").write_text("[1, 2]"),
    "record of another key": lambda folder: record_of_other(folder / "entry.json"),
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
def test_damage_is_found_removed_and_built_again_with_one_warning(cold_cache, damage):
    calls: list[str] = []
    cached(PARTS, writes(calls=calls))
    damage(entry_dir(cold_cache))
    with pytest.warns(RuntimeWarning, match="is damaged") as warned:
        mended = cached(PARTS, writes(calls=calls))
    assert len(warned) == 1
    assert (mended.fresh, mended.files, len(calls)) == (True, {"out.bin": b"result"}, 2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not cached(PARTS, writes(calls=calls)).fresh
    assert len(calls) == 2


def test_damage_met_by_many_threads_is_mended_once(cold_cache, monkeypatch):
    calls: list[str] = []
    cached(PARTS, writes(calls=calls))
    os.truncate(entry_dir(cold_cache) / "out.bin", 2)
    all_met_it = threading.Barrier(16)
    met = threading.local()
    read = cache._read_entry

    def read_together(*arguments, **named):
        try:
            return read(*arguments, **named)
        finally:
            if not hasattr(met, "it"):
                met.it = True
                all_met_it.wait()

    monkeypatch.setattr(cache, "_read_entry", read_together)
    with warnings.catch_warnings(record=True) as warned, ThreadPoolExecutor(16) as pool:
        warnings.simplefilter("always")
        results = pool.map(lambda _: cached(PARTS, writes(calls=calls)).files["out.bin"], range(16))
        assert set(results) == {b"result"}
    assert len(calls) == 2
    assert len(warned) == 1


def test_sixteen_threads_and_eight_keys_build_each_once(cold_cache):
    calls: list[str] = []
    start = threading.Barrier(16)

    def produce_slowly(name: str):
        def produce(folder: Path):
            calls.append(name)
            time.sleep(0.05)
            (folder / "out.bin").write_text(name)
            return {}

        return produce

    def one(number: int) -> tuple[str, bytes]:
        start.wait()
        name = f"config {number % 8}"
        return name, cached({"name": name}, produce_slowly(name)).files["out.bin"]

    with ThreadPoolExecutor(16) as pool:
        for name, content in pool.map(one, range(16)):
            assert content == name.encode()
    assert sorted(calls) == [f"config {number}" for number in range(8)]
    assert not any((cold_cache / "locks").iterdir())
    assert not any((cold_cache / "tmp").iterdir())


def in_process(number: int, log: str) -> bytes:
    def produce(folder: Path):
        with open(log, "a") as file:
            file.write(f"{number % 3}\n")
        time.sleep(0.05)
        (folder / "out.bin").write_text(str(number % 3))
        return {}

    return cached({"number": number % 3}, produce).files["out.bin"]


def test_several_processes_build_each_once(cold_cache, tmp_path):
    log = tmp_path / "log"
    with multiprocessing.get_context("spawn").Pool(4) as pool:
        results = pool.starmap(in_process, [(number, str(log)) for number in range(24)], chunksize=1)
    assert results == [str(number % 3).encode() for number in range(24)]
    assert sorted(log.read_text().split()) == ["0", "1", "2"]


def test_a_failure_reaches_its_caller_and_leaves_nothing(cold_cache):
    def fails(folder: Path):
        (folder / "half").write_text("half")
        raise OSError("no space")

    with pytest.raises(OSError, match="no space"):
        cached(PARTS, fails)
    assert cache_stats().entries == 0
    assert not any((cold_cache / "tmp").iterdir())
    assert cached(PARTS, writes()).fresh


def test_while_one_caller_fails_the_waiting_one_builds(cold_cache):
    inside = threading.Event()

    def fails(folder: Path):
        inside.set()
        time.sleep(0.1)
        raise ValueError("mine")

    def wait_and_build() -> bytes:
        inside.wait()
        return cached(PARTS, writes()).files["out.bin"]

    with ThreadPoolExecutor(2) as pool:
        failing = pool.submit(cached, PARTS, fails)
        waiting = pool.submit(wait_and_build)
        with pytest.raises(ValueError, match="mine"):
            failing.result()
        assert waiting.result() == b"result"


def test_a_build_may_ask_for_another_entry(cold_cache):
    def outer(folder: Path):
        inner = cached({"part": "inner"}, writes("inner"))
        (folder / "out.bin").write_bytes(inner.files["out.bin"] + b" and outer")
        return {}

    assert cached({"part": "outer"}, outer).files["out.bin"] == b"inner and outer"


def test_odd_folder_names(tmp_path, monkeypatch):
    monkeypatch.setenv("FAGEN_CACHE_DIR", str(tmp_path / ODD))
    assert cached(PARTS, writes()).fresh
    assert not cached(PARTS, writes()).fresh


def test_a_cache_that_cannot_be_written_says_which_and_what_to_set(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("FAGEN_CACHE_DIR", str(tmp_path / "file"))
    for call in (lambda: cached(PARTS, writes()), lambda: index_put(PARTS, 1)):
        with pytest.raises(BuildError, match=r"file cannot be written.*set FAGEN_CACHE_DIR"):
            call()
    assert load(PARTS) is None
    assert index_get(PARTS) is None


def test_a_full_disk_is_told(cold_cache, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with pytest.raises(BuildError, match=r"cannot be written \(reason = No space left.*set FAGEN_CACHE_DIR"):
        cached(PARTS, full)
    monkeypatch.setattr(cache, "_write_record", full)
    for call in (lambda: cached(PARTS, writes()), lambda: index_put(PARTS, 1)):
        with pytest.raises(BuildError, match=r"cannot be written \(reason = No space left"):
            call()


def test_what_a_maker_raises_is_no_error_of_the_cache(cold_cache):
    def missing(_):
        raise FileNotFoundError(errno.ENOENT, "gone")

    with pytest.raises(FileNotFoundError):
        cached(PARTS, missing)


def test_index_keeps_replaces_and_forgets_what_is_damaged(cold_cache):
    assert index_get(PARTS) is None
    index_put(PARTS, {"winner": [1, None, "ü"]})
    index_put(PARTS, {"winner": [2]})
    index_put({"other": 1}, 7)
    assert index_get(PARTS) == {"winner": [2]}
    assert index_get({"other": 1}) == 7
    path = next(path for path in (cold_cache / "index").glob("*/*.json") if cache_key(PARTS) in path.name)
    for damage in (flip_byte, lambda path: os.truncate(path, 10), record_of_other):
        damage(path)
        with pytest.warns(RuntimeWarning, match="is damaged"):
            assert index_get(PARTS) is None
        assert index_get(PARTS) is None
        index_put(PARTS, 3)
        assert index_get(PARTS) == 3


def test_index_under_concurrent_writers_is_always_whole(cold_cache):
    values = [{"writer": number, "padding": "x" * 1000 * number} for number in range(8)]
    index_put(PARTS, values[0])

    def write_and_read(value):
        for _ in range(20):
            index_put(PARTS, value)
            assert index_get(PARTS) in values

    with warnings.catch_warnings(), ThreadPoolExecutor(8) as pool:
        warnings.simplefilter("error")
        list(pool.map(write_and_read, values))


def test_stats_count_and_clear_removes_only_what_is_the_caches(cold_cache):
    cached(PARTS, writes())
    cached({"other": 1}, writes("x" * 5000))
    index_put(PARTS, 1)
    (cold_cache / "letter.txt").write_text("not the cache's")
    held = cache_stats()
    assert (held.folder, held.entries, held.index_entries) == (cold_cache, 2, 1)
    assert 5000 < held.total_bytes < 8000
    assert cache_clear() == held
    assert (cold_cache / "letter.txt").read_text() == "not the cache's"
    empty = cache_stats()
    assert (empty.entries, empty.index_entries, empty.total_bytes) == (0, 0, 0)
    assert cached(PARTS, writes()).fresh


def test_b50a_package_digest_follows_content_even_at_equal_size_and_mtime(tmp_path, monkeypatch):
    package, templates = tmp_path / "fagen", tmp_path / "templates"
    for path in (package / "ir" / "graph.py", templates / "step" / "load.cu.jinja"):
        path.parent.mkdir(parents=True)
        path.write_text("a = 1\n")
    monkeypatch.setattr(cache, "PACKAGE_DIR", package)
    monkeypatch.setattr(cache, "templates_dir", lambda: templates)
    digest = cache.package_digest.__wrapped__
    seen = {digest()}
    for path in (package / "ir" / "graph.py", templates / "step" / "load.cu.jinja"):
        before = path.stat()
        path.write_text("a = 2\n")
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
        seen.add(digest())
    path.rename(path.with_name("store.cu.jinja"))
    seen.add(digest())
    assert len(seen) == 4
    (package / "ir" / "__pycache__").mkdir()
    (package / "ir" / "__pycache__" / "graph.pyc").write_bytes(b"\0")
    assert digest() in seen


def test_default_folder_is_the_users_own(monkeypatch):
    monkeypatch.delenv("FAGEN_CACHE_DIR", raising=False)
    assert cache.cache_dir().is_absolute()
    assert cache.cache_dir().name == "fagen"
    monkeypatch.setenv("FAGEN_CACHE_DIR", "relative")
    assert cache.cache_dir() == Path("relative").absolute()


def test_a_record_reads_as_json_below_its_checksum(cold_cache):
    cached(PARTS, writes())
    lines = (entry_dir(cold_cache) / "entry.json").read_text().splitlines()
    assert json.loads(lines[1])["notes"] == {"length": 6}
