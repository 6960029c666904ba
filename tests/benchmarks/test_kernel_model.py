"""The model of the kernels: its network, its cache, and the direction of what it says. None of it is a measurement."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

pytest.importorskip("triton")

from benchmarks import kernel_model
from benchmarks.gpu.setting import STORAGES
from benchmarks.kernel_model import H200, hits, microseconds, throughput

FIRST = kernel_model.kernels()[0]
NUMELS = [2**21, 3000, 2**16]


def test_throughput_is_that_of_one_customer_and_of_the_saturated_queue() -> None:
    assert throughput(1, 2.0, 3.0) == pytest.approx(1 / 5)
    assert throughput(500, 2.0, 3.0) == pytest.approx(1 / 2)
    assert 1 / 5 < throughput(2, 2.0, 3.0) < 1 / 2


def test_the_cache_holds_a_wave_that_fits_and_the_end_of_one_that_does_not() -> None:
    assert hits(NUMELS, FIRST, 2**16, STORAGES[0]) == 1.0
    small = dataclasses.replace(H200, cache=2**20 * STORAGES[0].measured_bytes)
    assert hits([2**21], FIRST, 2**21, STORAGES[0], small) == pytest.approx(0.5)


@pytest.mark.parametrize("change", [{"chosen": dataclasses.replace(FIRST.chosen, unroll=2)}, {"exposed": 1}], ids=list)
def test_more_in_flight_and_less_exposed_takes_less_time(change: dict[str, Any]) -> None:
    before = microseconds(NUMELS, FIRST, STORAGES[0])
    after = microseconds(NUMELS, dataclasses.replace(FIRST, **change), STORAGES[0])
    assert sum(STORAGES[0].floor_bytes * n for n in NUMELS) / H200.bandwidth < after["total"] < before["total"]
