"""What README.md and docs/index.md show of benchmarks/results and of the planner, each part between its marks."""

from __future__ import annotations

from collections.abc import Callable

from benchmarks.support import ROOT, markdown_table, result
from penstock.planner.settings import Training, kept_sizes

GIB = 2**30
PAGES = (ROOT / "README.md", ROOT / "docs" / "index.md")
RELEASED = {
    "AdamW, released": Training(optimizer="AdamW"),
    'AdamW, released, `precision="compact"`': Training(optimizer="AdamW", precision="compact"),
    'AdamW, released, `precision="smallest"`': Training(optimizer="AdamW", precision="smallest"),
    "StableAdamW, released": Training(),
    'Lion, released, `precision="smallest"`': Training(optimizer="Lion", precision="smallest"),
}
"""bfloat16; for matrices. Another row is another entry."""


def bytes_table() -> str:
    """Return what is kept for each parameter."""
    rows = [["torch.optim.AdamW", "2", "0", "4", "2", "8"], ["torch.optim.AdamW in hooks", "2", "0", "4", "about 0", "6"]]
    for name, training in RELEASED.items():
        kept = kept_sizes(training.kept)
        sizes = [kept.pop("parameter"), kept.pop("compensation", 0.0), sum(kept.values())]
        rows.append([name, *(f"{size:.3g}" for size in sizes), "about 0", f"{training.kept_bytes:.3g}"])
    return markdown_table(
        ["bytes for each bfloat16 parameter", "parameter", "lost bits", "moments", "gradient", "together"], rows
    )


def sizes_table() -> str:
    """Return the table of planned peaks by size."""
    rows = result("plan_sizes")["figures"]
    columns = [name for name in next(iter(rows.values())) if name != "parameters"]
    cells = [[size, *(f"{row[name] / GIB:.1f}" for name in columns)] for size, row in rows.items()]
    return markdown_table(["peak of a step, GiB", *columns], cells)


def sizes_conditions() -> str:
    """Return the sentence under `sizes_table`."""
    content = result("plan_sizes")
    settings = content["settings"]
    return (
        f"Computed by `{content['command']}` for Llama's shapes in {settings['dtype']}, {settings['batch']} x "
        f"{settings['sequence']} tokens, activation checkpointing; an allocator's rounding comes on top."
    )


def figure_conditions() -> str:
    """Return the sentence under the figure."""
    content = result("bench")
    memory, loss, trained = content["memory"]["model"], content["loss"], content["loss"]["model"]
    steps = len(next(iter(loss["rows"].values())))
    return (
        f"`{content['command']}`, {content['machine']['cores']} CPU cores, torch {content['versions']['torch']}. Left: a Llama "
        f"of {memory['layers']} layers, width {memory['width']}, 3 steps of 64 tokens, activation checkpointing, one process a "
        f"bar. Right: {steps} steps of a byte-level transformer of {trained['layers']} layers and width {trained['width']} on "
        f"the source of Python's standard library, learning rate {loss['lr']:g}, batch {loss['batch']}."
    )


PARTS: dict[str, Callable[[], str]] = {
    "bytes": bytes_table,
    "sizes": lambda: f"{sizes_table()}\n\n{sizes_conditions()}",
    "figure": figure_conditions,
}


def made_again(text: str) -> str:
    """Return a page with its parts made again; a page need not have all of them."""
    for name, make in PARTS.items():
        start = f"<!-- made by benchmarks.pages: {name} -->\n"
        before, found, after = text.partition(start)
        if found:
            text = f"{before}{start}\n{make()}\n\n<!-- end -->{after.partition('<!-- end -->')[2]}"
    return text
