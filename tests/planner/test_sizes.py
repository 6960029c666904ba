"""The table of bytes by model size."""

from __future__ import annotations

import pytest

from penstock.core.precision import PRECISIONS
from penstock.planner.sizes import PEERS, RULES, SHAPES, rows, table


def test_every_rule_and_precision_stands_beside_the_peers_with_and_without_release() -> None:
    found = {row.name: row for row in rows()}
    assert len(found) == len(PEERS) + 2 * len(RULES) * len(PRECISIONS)
    assert (found["AdamW, exact"].kept, found["AdamW, exact"].gradient) == (10, 2)
    assert found["AdamW, compact, released"].kept == pytest.approx(5.0625)
    assert found["Lion, smallest, released"] == ("Lion, smallest, released", 3.03125, 0, None)
    assert found["Muon+AdamW, smallest, released"] == ("Muon+AdamW, smallest, released", 3.03125, 0, 4.0625)


def test_a_size_is_bytes_times_parameters() -> None:
    head, *lines = table()
    (smallest,) = [line for line in lines if line[0] == "Lion, smallest, released"]
    assert head[3:] == list(SHAPES)
    assert float(smallest[head.index("7B")]) == pytest.approx(6.738e9 * 3.03125 / 2**30, abs=0.05)
    (mixed,) = [line for line in lines if line[0] == "Muon+AdamW, smallest, released"]
    rest = 2 * 32000 * 4096  # the embedding and the head; norms are a ten-thousandth of that
    assert float(mixed[head.index("7B")]) == pytest.approx((6.738e9 * 3.03125 + rest * 1.03125) / 2**30, abs=0.05)
