"""The optimizers. They differ by their rule only; `ReleasableOptimizer` does the rest."""

from __future__ import annotations

from ..core.rules import ADAM, ADAMW, STABLE_ADAMW
from .releasable import ReleasableOptimizer


class StableAdamW(ReleasableOptimizer):
    r"""AdamW with Adafactor's update clipping: no gradient clipping is needed.

        m += c1*(g-m)      v += c2*(g*g-v)      c = (1-beta)/(1-beta^t)
        eta = lr / max(1, sqrt(mean(g*g / max(v, eps^2))))
        p <- p - eta*(m/(sqrt(v)+eps) + weight_decay*p)

    The arithmetic is float32 (float64 for float64 parameters), with one rounding at the end.

    Args:
        params: tensors, named tensors, or groups of them; float64, float32, bfloat16 or float16, dense, any shape.
        lr: step size: a number in [0, inf), or a 0-d tensor.
        betas: decay of the first and of the second moment, each in [0, 1). Default: (0.9, 0.99). They may
            change from step to step (`OneCycleLR`, `CyclicLR`), as in torch.optim.
        eps: added to the square root of the second moment, in (0, inf). Default: 1e-6.
        weight_decay: decoupled weight decay, in [0, inf). Default: 1e-2. The clip factor applies to it as well.
        decouple_lr: fully decoupled weight decay: scaled by eta/max_lr instead of eta.
        max_lr: highest learning rate of the schedule, in (0, inf). Default: each group's initial lr. `OneCycleLR` writes its
            own into the groups.
        compensation: how low-precision parameters keep the bits that rounding loses: "none", "kahan" (in the parameter's
            dtype), "split" (bfloat16 and an int16 are together the exact float32), or "auto": split for bfloat16, kahan
            for float16.
        state_dtype: dtype of the moments. Default: the parameter's, and float32 for a second moment that it cannot hold.
        backend: "auto", "triton", "compiled" or "eager". "auto" is triton on CUDA devices and eager elsewhere; `.backend`
            tells which was chosen.
        on_nonfinite: what to do with a gradient that contains an infinity or a NaN: "propagate" it, "skip" the step and
            count it in `.skipped`, or "raise" before anything is changed. "skip" and "raise" wait for the device, except
            that backend="triton" with capturable=True skips without waiting.
        maximize: ascend instead of descend.
        capturable: keep the step counts on the parameters' device, so that a step can be captured in a CUDA graph.
        gradient_release: for `prepare_for_gradient_release`; new code calls `release_gradients` instead.

    Raises:
        InvalidArgumentError: a value is out of its range; the text names it and the range.
        UnsupportedTensorError: a parameter is complex, integer or sparse, or a DTensor of partial sums.

    Example:
        optimizer = StableAdamW(model.parameters(), lr=1e-3)
        release_gradients(model, optimizer)  # optional: step inside backward(), and free each gradient
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    Source: Wortsman et al., 2023, https://arxiv.org/abs/2304.13013, algorithm 2.
    """

    rule = STABLE_ADAMW


class AdamW(ReleasableOptimizer):
    r"""Adam with decoupled weight decay. In float64 it equals `torch.optim.AdamW`, and has its defaults.

        m += c1*(g-m)      v += c2*(g*g-v)      c = (1-beta)/(1-beta^t)
        p <- p - lr*(m/(sqrt(v)+eps) + weight_decay*p)

    The arithmetic is float32 (float64 for float64 parameters), with one rounding at the end.

    Args:
        params: tensors, named tensors, or groups of them; float64, float32, bfloat16 or float16, dense, any shape.
        lr: step size: a number in [0, inf), or a 0-d tensor.
        betas: decay of the first and of the second moment, each in [0, 1). Default: (0.9, 0.999). They may
            change from step to step (`OneCycleLR`, `CyclicLR`), as in torch.optim.
        eps: added to the square root of the second moment, in (0, inf). Default: 1e-8.
        weight_decay: decoupled weight decay, in [0, inf). Default: 1e-2.
        decouple_lr: fully decoupled weight decay: scaled by lr/max_lr instead of lr.
        max_lr: highest learning rate of the schedule, in (0, inf). Default: each group's initial lr. `OneCycleLR` writes its
            own into the groups.
        compensation: how low-precision parameters keep the bits that rounding loses: "none", "kahan" (in the parameter's
            dtype), "split" (bfloat16 and an int16 are together the exact float32), or "auto": split for bfloat16, kahan
            for float16.
        state_dtype: dtype of the moments. Default: the parameter's, and float32 for a second moment that it cannot hold.
        backend: "auto", "triton", "compiled" or "eager". "auto" is triton on CUDA devices and eager elsewhere; `.backend`
            tells which was chosen.
        on_nonfinite: what to do with a gradient that contains an infinity or a NaN: "propagate" it, "skip" the step and
            count it in `.skipped`, or "raise" before anything is changed. "skip" and "raise" wait for the device, except
            that backend="triton" with capturable=True skips without waiting.
        maximize: ascend instead of descend.
        capturable: keep the step counts on the parameters' device, so that a step can be captured in a CUDA graph.
        gradient_release: for `prepare_for_gradient_release`; new code calls `release_gradients` instead.

    Raises:
        InvalidArgumentError: a value is out of its range; the text names it and the range.
        UnsupportedTensorError: a parameter is complex, integer or sparse, or a DTensor of partial sums.

    Example:
        optimizer = AdamW(model.parameters(), lr=1e-3)
        release_gradients(model, optimizer)  # optional: step inside backward(), and free each gradient
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    Source: Loshchilov and Hutter, 2019, https://arxiv.org/abs/1711.05101.
    """

    rule = ADAMW


class Adam(ReleasableOptimizer):
    r"""Adam with weight decay as L2 regularisation. In float64 it equals `torch.optim.Adam`, and has its defaults.

        g += weight_decay*p      m += c1*(g-m)      v += c2*(g*g-v)      c = (1-beta)/(1-beta^t)
        p <- p - lr*m/(sqrt(v)+eps)

    The arithmetic is float32 (float64 for float64 parameters), with one rounding at the end.

    Args:
        params: tensors, named tensors, or groups of them; float64, float32, bfloat16 or float16, dense, any shape.
        lr: step size: a number in [0, inf), or a 0-d tensor.
        betas: decay of the first and of the second moment, each in [0, 1). Default: (0.9, 0.999). They may
            change from step to step (`OneCycleLR`, `CyclicLR`), as in torch.optim.
        eps: added to the square root of the second moment, in (0, inf). Default: 1e-8.
        weight_decay: L2 regularisation, in [0, inf). Default: 0.
        decouple_lr: refused if True: L2 is part of the gradient; use `AdamW`.
        max_lr: highest learning rate of the schedule, in (0, inf). Default: each group's initial lr. `OneCycleLR` writes its
            own into the groups.
        compensation: how low-precision parameters keep the bits that rounding loses: "none", "kahan" (in the parameter's
            dtype), "split" (bfloat16 and an int16 are together the exact float32), or "auto": split for bfloat16, kahan
            for float16.
        state_dtype: dtype of the moments. Default: the parameter's, and float32 for a second moment that it cannot hold.
        backend: "auto", "triton", "compiled" or "eager". "auto" is triton on CUDA devices and eager elsewhere; `.backend`
            tells which was chosen.
        on_nonfinite: what to do with a gradient that contains an infinity or a NaN: "propagate" it, "skip" the step and
            count it in `.skipped`, or "raise" before anything is changed. "skip" and "raise" wait for the device, except
            that backend="triton" with capturable=True skips without waiting.
        maximize: ascend instead of descend.
        capturable: keep the step counts on the parameters' device, so that a step can be captured in a CUDA graph.
        gradient_release: for `prepare_for_gradient_release`; new code calls `release_gradients` instead.

    Raises:
        InvalidArgumentError: a value is out of its range; the text names it and the range.
        UnsupportedTensorError: a parameter is complex, integer or sparse, or a DTensor of partial sums.

    Example:
        optimizer = Adam(model.parameters(), lr=1e-3)
        release_gradients(model, optimizer)  # optional: step inside backward(), and free each gradient
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    Source: Kingma and Ba, 2015, https://arxiv.org/abs/1412.6980.
    """

    rule = ADAM
