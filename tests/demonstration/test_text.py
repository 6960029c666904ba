"""The text and the batches: laws, not examples."""

from __future__ import annotations

import numpy as np
import pytest

from penstock.core.errors import InvalidArgumentError
from penstock.demonstration.initialisation import initial_parameters, nbytes
from penstock.demonstration.settings import ModelShape, Settings
from penstock.demonstration.text import MAXIMAL_BYTES, Batches, read_text, standard_library_files


def test_the_standard_library_is_read_in_order_and_the_same_each_time() -> None:
    first, second = read_text(None, at_least=1), read_text(None, at_least=1)
    assert first.dtype == np.uint8
    assert np.array_equal(first, second)
    assert 2**20 < len(first) <= MAXIMAL_BYTES
    beginning = standard_library_files()[0].read_bytes()
    assert first[: len(beginning)].tobytes() == beginning


def test_at_most_so_many_bytes_are_read(tmp_path) -> None:
    file = tmp_path / "text"
    file.write_bytes(bytes(range(200)))
    assert read_text(file, at_least=1).tolist() == list(range(200))
    assert read_text(file, at_least=1, at_most=7).tolist() == list(range(7))


def test_a_text_that_is_missing_or_too_short_is_named(tmp_path) -> None:
    with pytest.raises(InvalidArgumentError, match=r"nowhere.* cannot be read: no such file"):
        read_text(tmp_path / "nowhere", at_least=1)
    with pytest.raises(InvalidArgumentError, match="cannot be read: is a directory"):
        read_text(tmp_path, at_least=1)
    (tmp_path / "short").write_bytes(b"ab")
    with pytest.raises(InvalidArgumentError, match="has 2 bytes; one training sequence needs 3"):
        read_text(tmp_path / "short", at_least=3)
    assert len(read_text(tmp_path / "short", at_least=2)) == 2


def test_a_batch_depends_on_seed_and_step_only() -> None:
    text = np.arange(251, dtype=np.uint8)
    one, other = (Batches(text, batch_size=4, context=16, seed=3) for _ in range(2))
    forwards = [one.batch(step) for step in range(5)]
    backwards = [other.batch(step) for step in reversed(range(5))][::-1]
    assert all(np.array_equal(a, b) for a, b in zip(forwards, backwards, strict=True))
    assert not np.array_equal(forwards[0], forwards[1])
    assert not np.array_equal(forwards[0], Batches(text, batch_size=4, context=16, seed=4).batch(0))


def test_every_sequence_is_a_piece_of_the_text_and_every_place_is_possible() -> None:
    text = np.arange(20, dtype=np.uint8)
    batches = [Batches(text, batch_size=8, context=16, seed=0).batch(step) for step in range(20)]
    for batch in batches:
        assert batch.shape == (8, 17)
        assert batch.dtype == np.int32
        assert (np.diff(batch, axis=1) == 1).all()
    assert {int(start) for batch in batches for start in batch[:, 0]} == {0, 1, 2, 3}


def test_a_text_of_one_sequence_is_enough() -> None:
    batch = Batches(np.arange(17, dtype=np.uint8), batch_size=2, context=16, seed=0).batch(0)
    assert np.array_equal(batch, np.tile(np.arange(17), (2, 1)))


def test_the_initialisation_is_seeded_and_rounded_from_one() -> None:
    shape = ModelShape(width=16, layers=2, heads=2, context=8)
    wide = initial_parameters(shape, seed=1, dtype="float64")
    narrow = initial_parameters(shape, seed=1, dtype="float32")
    assert all(np.array_equal(narrow[name], value.astype(np.float32)) for name, value in wide.items())
    assert nbytes(wide) == 2 * nbytes(narrow)
    other = initial_parameters(shape, seed=2, dtype="float64")
    assert not np.array_equal(wide["head"], other["head"])


def test_the_default_model_has_one_to_three_million_parameters_and_small_layers() -> None:
    parameters = initial_parameters(Settings().shape, seed=0, dtype="float32")
    assert 1e6 < nbytes(parameters) / 4 < 3e6
    assert max(value.nbytes for value in parameters.values()) < nbytes(parameters) / 20


@pytest.mark.parametrize("wrong", [{"steps": 0}, {"steps": -3}, {"dtype": "float16"}])
def test_settings_refuse(wrong) -> None:
    with pytest.raises(InvalidArgumentError, match=next(iter(wrong))):
        Settings(**wrong)
