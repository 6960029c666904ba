"""Install the wheel, and once the sdist, of dist/ in fresh environments outside of the repository, and use them.

    python .ci/smoke.py [PYTHON ...]

For each interpreter one environment with the extra torch and one with jax. None may contain the other framework.
"""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

TORCH = """
import importlib.util, pathlib, sys, torch, penstock
from torch import nn
from penstock.torch_frontend import StableAdamW, export_state, release_gradients

assert pathlib.Path(penstock.__file__).is_relative_to(sys.prefix), penstock.__file__
assert not [name for name in ("jax", "jaxlib", "optax", "matplotlib") if importlib.util.find_spec(name)]
model = nn.Sequential(*[nn.Linear(8, 8) for _ in range(4)])
optimizer = StableAdamW(model.parameters(), lr=1e-3)
release = release_gradients(model, optimizer, max_norm=1.0)
release.guard(model(torch.ones(2, 8)).pow(2).mean()).backward()
optimizer.step()
assert 0 < release.ledger.peak < 4 * 8 * 9 * 4
export_state("state.safetensors", optimizer, model)
"""
JAX = """
import importlib.util, pathlib, sys, jax, jax.numpy as jnp, penstock
from penstock.jax_frontend import LayerStack, export_state, init_train_state, make_release_step, stable_adamw

assert pathlib.Path(penstock.__file__).is_relative_to(sys.prefix), penstock.__file__
assert not [name for name in ("torch", "triton", "matplotlib") if importlib.util.find_spec(name)]
stack = LayerStack(lambda outer, batch: batch, lambda w, x: x + jnp.tanh(x @ w), lambda outer, x, batch: jnp.mean(x**2))
tx = stable_adamw(1e-3)
state = init_train_state(tx, {"outer": {}, "layers": jnp.ones((3, 4, 4))})
state, metrics = make_release_step(stack, tx)(state, jnp.ones((2, 4)))
export_state("state.safetensors", tx, state)
"""
PLAN = ["plan", "--layers", "2", "--width", "64", "--heads", "2", "--hidden", "128", "--vocabulary", "128", "--sequence", "32"]
COMMANDS = {
    "torch": [["--version"], ["convert", "state.safetensors"], PLAN],
    "jax": [["--version"], ["convert", "state.safetensors"]],
}


def use(python: str, package: Path, extra: str) -> None:
    """Install a package with an extra in a new environment, and run its program and commands."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | {"JAX_PLATFORMS": "cpu"}
    with tempfile.TemporaryDirectory() as folder:

        def run(*command: str) -> None:
            subprocess.run(command, check=True, cwd=folder, env=environment)

        run(python, "-m", "venv", "venv")
        installed = str(Path(folder) / "venv" / "bin" / "python")
        run(installed, "-m", "pip", "install", "-q", "-c", str(ROOT / "constraints.txt"), f"{package}[{extra}]")
        run(installed, "-W", "error", "-c", {"torch": TORCH, "jax": JAX}[extra])
        for command in COMMANDS[extra]:
            run(installed, "-m", "penstock", *command)
    print(f"{package.name}[{extra}] works with {python}", flush=True)


if __name__ == "__main__":
    [wheel], [sdist] = (ROOT / "dist").glob("*.whl"), (ROOT / "dist").glob("*.tar.gz")
    pythons = [str(Path(python).absolute()) if os.sep in python else python for python in sys.argv[1:] or [sys.executable]]
    for number, interpreter in enumerate(pythons):
        use(interpreter, wheel, "torch")
        use(interpreter, wheel if number else sdist, "jax")
