"""The simulated cache at its limits: with room for everything a step moves the floor, with none both phases' reads."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

from benchmarks.cache_model import Cache, moved_bytes
from benchmarks.gpu.setting import STORAGES, Storage

from penstock.torch_frontend.backends.triton.configuration import Configuration, Device

NUMELS = [5000, 3, 1024, 70_000, 8192, 1]
SMALL, DEVICE = Configuration(block=256, tiles=4, programs=1), Device(4, 2**16)


@pytest.mark.parametrize("storage", STORAGES, ids=lambda storage: storage.name)
def test_the_limits_are_the_floor_and_two_readings(storage: Storage) -> None:
    floor = storage.floor_bytes(sum(NUMELS))
    assert moved_bytes(NUMELS, storage, SMALL, DEVICE, 2**30) == floor
    assert moved_bytes(NUMELS, storage, SMALL, DEVICE, 0) == floor + 2 * storage.dtype.itemsize * sum(NUMELS)
    between = moved_bytes(NUMELS, storage, SMALL, DEVICE, 2**16)
    assert floor < between < floor + 2 * storage.dtype.itemsize * sum(NUMELS)


def test_streamed_lines_are_evicted_first_then_the_least_recently_used() -> None:
    cache = Cache(3)
    for name in (1, 2):
        assert not cache.touch(name, 1, passing=False)
    assert cache.touch(1, 1, passing=False)
    assert not cache.touch(3, 1, passing=True)
    assert not cache.touch(4, 1, passing=False)  # 3 goes
    assert not cache.touch(5, 1, passing=False)  # 2 goes
    assert cache.touch(1, 1, passing=False)
    assert not cache.touch(3, 1, passing=False)
