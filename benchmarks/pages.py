"""The pages docs/benchmarks.md and docs/parity_report.md, and the front pages' tables and figure, of benchmarks/results.

    python -m benchmarks.pages [--parity FILE]

With --parity, what `penstock parity --report DIR` wrote to DIR/parity.json is first put into benchmarks/results/parity.json,
without its rows.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import front_page
from benchmarks.bench import figure, tables
from benchmarks.codings import figure as codings_figure
from benchmarks.codings import verdicts
from benchmarks.codings.rows import LAST, LIMIT
from benchmarks.support import RESULTS, ROOT, markdown_table, parser_of, result

DOCS = ROOT / "docs"
GIB, MIB = 2**30, 2**20
BENCHMARKS, PARITY, PNG, CODINGS_PNG = "benchmarks.md", "parity_report.md", "bench.png", "codings.png"


def conditions(name: str, content: dict[str, Any]) -> str:
    """Return the sentence under a table: command, machine, versions, file."""
    command = content["command"] if isinstance(content["command"], str) else " ".join(content["command"])
    machine = content.get("machine") or content.get("device")
    where = f"{machine['cores']} cores of {machine['processor']}. " if machine and "processor" in machine else ""
    versions = ", ".join(f"{package} {content['versions'][package]}" for package in ("torch", "jax", "optax", "torch-optimi"))
    return f"```\n{command}\n```\n\n{where}{versions}. File: `benchmarks/results/{name}.json`."


def sizes() -> str:
    """Return the section on sizes of models."""
    content = conditions("plan_sizes", result("plan_sizes"))
    return "\n\n".join(["## By size of the model", front_page.sizes_table(), front_page.sizes_conditions(), content])


def beside_others() -> str:
    """Return the section on `penstock bench`."""
    content = result("bench")
    parts = ["## Beside other libraries", f"![Peak bytes by method, and their losses]({PNG})", front_page.figure_conditions()]
    for framework, heading, rows in (
        ("torch", tables.TORCH, tables.torch_rows(content)),
        ("jax", tables.JAX, tables.jax_rows(content)),
    ):
        if rows:
            parts += [markdown_table(heading, rows), tables.note(framework, content)]
    parts += [f"- {name} did not run: {reason}" for name, reason in content["skipped"].items()]
    return "\n\n".join([*parts, conditions("bench", content)])


def codings() -> str:
    """Return the section on the losses with each coding."""
    content = result("codings")
    settings, losses = content["settings"], content["losses"]
    shape, seeds = settings["shape"], len(losses["torch"]["float32"])
    return "\n\n".join(
        [
            "## Loss with each coding",
            f"![Loss with each coding less that of float32, one dot a seed, in both frameworks]({CODINGS_PNG})",
            f"Mean loss of the last {LAST} of {settings['steps']} steps, nats per byte, over {seeds} seeds, and the difference "
            "from the float32 runs of the same seeds with its standard error: a byte-level transformer of "
            f"{shape['layers']} layers and width {shape['width']}, {settings['batch']} x {shape['context']} tokens; AdamW and "
            "bfloat16 parameters where the row does not say otherwise, all else in float32. States in 8 bits are those of the "
            "large matrices. A warm-up and a cosine to 0: steps become so small that bfloat16 without compensation loses them.",
            markdown_table(verdicts.HEADING, verdicts.table_rows(losses)),
            f"The law is a difference of at most {LIMIT}, and of more without compensation. "
            + _exceptions([goal for goal in content["goals"] if not goal["met"]]),
            conditions("codings", content),
        ]
    )


def _exceptions(broken: Sequence[dict[str, Any]]) -> str:
    if not broken:
        return "It holds for every row, in both frameworks."
    return "It does not hold for " + "; ".join(goal["what"].removesuffix(f" / {LIMIT}") for goal in broken) + "."


def planned() -> str:
    """Return the section on the planner's figures."""
    parts = ["## The planned step of a large model"]
    for name in ("plan_llama_7b", "plan_llama_7b_uncompensated", "plan_llama_7b_batch_4"):
        content = result(name)
        shape, training = content["shape"], content["training"]
        setting = "" if training["compensation"] == "auto" else f", compensation={training['compensation']!r}"
        micro = f" in {training['micro_batches']} micro-batches" if training["micro_batches"] > 1 else ""
        [plain] = [plan["peak"] for plan in content["plans"] if plan["mode"] == "plain"]
        rows = [
            [
                plan["mode"],
                f"{plan['peak'] / GIB:.2f}",
                *(f"{plan['by_kind'].get(kind, 0) / GIB:.2f}" for kind in ("parameters", "optimizer state", "gradients")),
                f"{plan['by_kind'].get('activations and temporaries', 0) / GIB:.2f}",
                f"{1 - plan['peak'] / plain:z.1%}",
            ]
            for plan in content["plans"]
        ]
        heading = ["mode", "peak, GiB", "parameters", "optimizer state", "gradients", "activations, temporaries", "saved"]
        parts += [
            f"{shape['parameters'] / 1e9:.2f}e9 parameters in {training['dtype']}, {training['optimizer']}{setting}: "
            f"{training['kept_bytes']} bytes kept for each parameter; "
            f"{training['batch']} x {training['sequence']} tokens{micro}, "
            f"{'with' if training['checkpointing'] else 'without'} activation checkpointing.",
            markdown_table(heading, rows),
            conditions(name, content),
        ]
    parts.append(
        "`torch` is torch.optim.AdamW, which keeps no compensation: in bfloat16 it loses small steps. "
        "Computed, not measured: the real model, autograd and release on tensors without memory. Workspaces of kernels and an "
        "allocator's rounding and fragmentation come on top."
    )
    return "\n\n".join(parts)


def resident() -> str:
    """Return the section on resident memory."""
    content = result("resident")
    dtypes = content["rows"]
    names = [name for name in next(iter(dtypes.values())) if name != "the compiler's runtime"]
    rows = [
        [name, *(f"{of[name]['above_model_bytes'] / MIB:.0f} ({of[name]['multiples']:.2f})" for of in dtypes.values())]
        for name in names
        if all(name in of for of in dtypes.values())
    ]
    settings = content["settings"]
    return "\n\n".join(
        [
            "## Resident memory",
            "Peak resident memory above the model, in MiB and in multiples of the parameters' bytes: "
            f"{settings['steps']} steps of a Llama of {settings['layers']} layers and width {settings['width']}, "
            f"{settings['tokens']} tokens, activation checkpointing. It contains gradients, optimizer state and activations.",
            markdown_table(["", *dtypes], rows),
            "In bfloat16 torch's AdamW keeps 4 bytes of state for each parameter, optimi's 6 (with a Kahan term), and "
            "penstock's 8: 16 more bits of the parameter, and a second moment in float32.",
            conditions("resident", content),
        ]
    )


def host_time() -> str:
    """Return the section on the time of released steps."""
    content = result("release_overhead")
    parts = ["## Time of a step on a CPU"]
    for model, figures in content["host"].items():
        rows = [
            [name, f"{row['step_ms']:.2f}", f"{row['over_ms']:.2f}"]
            for name, row in figures["rows"].items()
            if name.startswith(("torch", "optimi", "penstock")) and name.count(",") < 2
        ]
        parts += [
            f"The {model} model, {figures['tensors']} tensors, {figures['threads']} threads; "
            f"medians of {figures['rounds']} rounds.",
            markdown_table(["", "step, ms", "over forward and backward, ms"], rows),
        ]
    return "\n\n".join(
        [
            *parts,
            'A row of a plain optimizer has the time of step() and zero_grad() only. "Over" is a step minus the forward and '
            "backward passes that it makes, without an optimizer; `python -m benchmarks.release_overhead --help` says more.",
            conditions("release_overhead", content),
        ]
    )


def step_time() -> str:
    """Return the section on the time of an update."""
    parts = ["## Time of one update"]
    for name in ("step_time_cpu_float32", "step_time_cpu_bfloat16"):
        content = result(name)
        settings = content["settings"]
        rows = [[row, f"{of['median_ms']:.1f}", f"{of['ratio_to_fused_adamw']:.2f}"] for row, of in content["figures"].items()]
        parts += [
            f"{settings['elements']:,} elements in {settings['tensors']} tensors of {settings['dtype']}; medians of "
            f"{settings['rounds']} rounds.",
            markdown_table(["", "ms", "times torch's fused AdamW"], rows),
            conditions(name, content),
        ]
    return "\n\n".join(parts)


def walk() -> str:
    """Return the section on JAX's memory."""
    content = result("peak_memory_jax")
    settings = content["settings"]
    optimizers = list(next(iter(content["figures"].values())))
    rows = [
        [method, *(f"{of[name]['peak_over_parameters']:.2f}" if name in of else "-" for name in optimizers)]
        for method, of in content["figures"].items()
    ]
    return "\n\n".join(
        [
            "## JAX: peak bytes of a step",
            f"Over the bytes of the parameters, of a decoder of {settings['layers']} layers and width {settings['width']} in "
            f"{settings['dtype']}: XLA's memory analysis of the compiled programs. Parameters and Adam's two moments are 3.00. "
            "[What the rows are, other sizes (`peak_memory_jax_sizes.json`), several devices](jax.md#memory), and "
            "[states in 8 bits (`peak_memory_jax_codings.json`)](jax.md#states-in-8-bits).",
            markdown_table(["step", *optimizers], rows),
            conditions("peak_memory_jax", content),
        ]
    )


def benchmarks_page() -> str:
    """Return docs/benchmarks.md."""
    start = (
        "# Benchmarks\n\nEvery figure on this page is from a file in `benchmarks/results/`, and under each table is the "
        "command that writes it. None was measured on a GPU. Made by\n\n    python -m benchmarks.pages"
    )
    sections = (beside_others, codings, sizes, planned, resident, host_time, step_time, walk)
    return "\n\n".join([start, *(section() for section in sections)]) + "\n"


def parity_page() -> str:
    """Return docs/parity_report.md."""
    content = result("parity")
    own = [backend["name"] for backend in content["backends"] if not backend["peer"]]
    rows, peers = [], []
    for section in content["sections"]:
        verdicts = {verdict["backend"]: verdict for verdict in section["verdicts"] if verdict["judged"]}
        if any(name in verdicts for name in own):
            cells = [_within(verdicts[name]) if name in verdicts else "" for name in own]
            rows.append([f"**{section['name']}** {section['title']}", *cells])
        peers += [[name, section["name"], _within(each)] for name, each in verdicts.items() if name not in own]
    missing = [f"- {name} did not run: {reason}" for name, reason in content["not_available"].items()]
    missing += [f"- {name} is not covered: {reason}" for name, reason in content.get("not_covered", {}).items()]
    return (
        "\n\n".join(
            [
                "# Parity report",
                "What `penstock parity` found in its last recorded run: how many comparisons of each backend are within their "
                "bounds, of how many. The bounds are derived from dtypes and numbers of operations ([the guide](parity.md)). "
                "Made by\n\n"
                "    penstock parity --quick --report parity-report\n"
                "    python -m benchmarks.pages --parity parity-report/parity.json",
                markdown_table(["section", *own], rows),
                f"Bounds that are broken: {content['broken']}. An empty cell: the backend has nothing of that kind, and the "
                "report says why, case by case." + ("\n\n" + "\n".join(missing) if missing else ""),
                "Other libraries, for information; they decide nothing. Many are beyond the bounds of float32, as they "
                "multiply the parameter by 1 - lr * weight_decay before they add the step, which rounds it once more.",
                markdown_table(["optimizer", "section", "within"], peers),
                "`parity-report/parity.html` of the first command is a page with every case and with figures; it needs no "
                "network.",
                conditions("parity", content).split("\n\n", 1)[1],
            ]
        )
        + "\n"
    )


def _within(verdict: dict[str, Any]) -> str:
    return f"{verdict['judged'] - verdict['beyond']} / {verdict['judged']}"


def without_rows(report: dict[str, Any]) -> dict[str, Any]:
    """Return a parity report without its rows and its times."""
    sections = [{key: section[key] for key in ("name", "title", "verdicts")} for section in report["sections"]]
    return {**report, "sections": sections}


def main() -> None:
    """Write the pages, the figure, and the README's figures."""
    parser = parser_of(__doc__)
    parser.add_argument("--parity", type=Path, metavar="FILE")
    given = parser.parse_args()
    if given.parity is not None:
        content = without_rows(json.loads(given.parity.read_text()))
        (RESULTS / "parity.json").write_text(json.dumps(content, indent=1) + "\n")
    figure.draw(result("bench"), DOCS / PNG)
    codings_figure.draw(result("codings"), DOCS / CODINGS_PNG)
    for name, text in ((BENCHMARKS, benchmarks_page()), (PARITY, parity_page())):
        (DOCS / name).write_text(text)
    for path in front_page.PAGES:
        path.write_text(front_page.made_again(path.read_text()))


if __name__ == "__main__":
    main()
