"""The table of combinations as a page of the documentation: equal rows are put together."""

from __future__ import annotations

from .combinations import AXES, Kind, Verdict, table
from .rules import RULES

Box = tuple[tuple[str, ...], ...]
"""For every axis, some of its values: all cells that these make."""

COMMAND = "penstock combinations --write docs/combinations.md"


def boxes() -> dict[Verdict, list[Box]]:
    """Every verdict with boxes that hold exactly its cells, each cell once."""
    found: dict[Verdict, list[Box]] = {}
    for combination, verdict in table():
        found.setdefault(verdict, []).append(tuple((getattr(combination, axis),) for axis in AXES))
    return {verdict: _merged(cells) for verdict, cells in found.items()}


def _merged(cells: list[Box]) -> list[Box]:
    """Put boxes together that differ in one axis only, axis by axis, until none do."""
    while True:
        before = len(cells)
        for axis, values in reversed(list(enumerate(AXES.values()))):
            alike: dict[Box, set[str]] = {}
            for box in cells:
                alike.setdefault((*box[:axis], (), *box[axis + 1 :]), set()).update(box[axis])
            cells = [
                (*key[:axis], tuple(value for value in values if value in chosen), *key[axis + 1 :])
                for key, chosen in alike.items()
            ]
        if len(cells) == before:
            return cells


def markdown() -> str:
    """The page: exact, approximate and refused, each with its reason and the combinations it holds for."""
    found = boxes()
    cells = sum(1 for _ in table())
    lines = [
        "# What goes together",
        "",
        f"Every combination that PyTorch's gradient release can be asked for: {cells} cells, each exact, approximate or",
        "refused. Optimizers and `release_gradients` consult the same table (`core/combinations.py`) and refuse with these",
        "sentences, before anything is changed; a test visits every cell. Made by",
        "",
        "```bash",
        COMMAND,
        "```",
        "",
        '- clipping: `global_norm` is max_norm=..., `per_tensor` is max_norm=... with clipping="per_tensor".',
        "- loss_scaling: `dynamic` is scaler=torch.amp.GradScaler().",
        "- accumulation: micro-batches between two calls of step(), `hold` or `state`.",
        "- communication: what averages gradients over processes: nothing (`local`), release itself (`process_group`, a plain",
        "  module), DistributedDataParallel (`ddp`), or fully_shard (`fsdp2`).",
        "- compensation and backend: of the optimizer, which refuses `triton` for rules that have no kernels.",
        *_rules(),
        "",
        "`microbatch_blocks` is not an axis: it gives each parameter one gradient of the whole batch in a backward, as any",
        "model does. A row holds for every combination of the values in it.",
    ]
    for kind in Kind:
        lines += ["", f"## {kind.value.capitalize()}"]
        for verdict, members in found.items():
            if verdict.kind is not kind:
                continue
            lines += ["", f"**{verdict.why}**", ""]
            lines += [f"| {' | '.join(axis.replace('_', ' ') for axis in AXES)} |", "|" + "---|" * len(AXES)]
            lines += [f"| {' | '.join(map(_shown, box, AXES.values()))} |" for box in members]
    return "\n".join([*lines, ""])


def _rules() -> list[str]:
    """The axis of rules, with their names."""
    named = {kind: [rule.name for rule in RULES.values() if rule.accumulation == kind] for kind in AXES["rule"]}
    about = {
        "squares": "keeps means of squares",
        "linear": "keeps what is linear in the gradient",
        "gradient": "needs the whole gradient for its step",
    }
    return [f"- rule: `{kind}` {about[kind]} ({', '.join(f'`{name}`' for name in names)})." for kind, names in named.items()]


def _shown(chosen: tuple[str, ...], values: tuple[str, ...]) -> str:
    return "any" if chosen == values else ", ".join(chosen)
