"""Other libraries' ways, as installed from PyPI, each with the reason where it can't run."""

import functools
import importlib
import importlib.util
from collections.abc import Callable
from typing import Any

INSTALL = {
    "liger_kernel": "liger-kernel",
    "flash_attn": "flash-attn",
    "quack": "quack-kernels",
}
Available = Callable[[str], str | None]


def needs(module: str, attribute: str | None = None) -> Available:
    """The reason why ``module`` (or one of its names) is not there, None where it is."""

    def available(device: str) -> str | None:
        package = module.split(".")[0]
        if importlib.util.find_spec(package) is None:
            install = INSTALL.get(package, "'xlogprobs[peers]'")
            return f"{package} is not installed: pip install {install}"
        try:
            found = importlib.import_module(module)
        except Exception as error:  # peers fail in many ways where a library of theirs is missing or too new
            return f"{module} does not import: {type(error).__name__}: {error}"
        if attribute is not None and not hasattr(found, attribute):
            return f"{module} has no {attribute} in this version"
        return None

    return available


def on_cuda(module: str) -> Available:
    def available(device: str) -> str | None:
        return needs(module)(device) if device == "cuda" else "its kernels are for CUDA alone"

    return available


def scipy_log_softmax() -> Any:
    import numpy as np
    from scipy.special import log_softmax

    return lambda logits, ids: np.take_along_axis(
        log_softmax(logits.astype(np.float32, copy=False), axis=-1), ids[..., None], axis=-1
    )[..., 0]


def trl() -> Any:
    from trl.trainer.utils import selective_log_softmax

    return selective_log_softmax


def trl_with_entropy() -> Any:
    from trl.trainer.utils import entropy_from_logits, selective_log_softmax

    return lambda logits, ids: (selective_log_softmax(logits, ids), entropy_from_logits(logits))


def liger() -> Any:
    from liger_kernel.transformers.functional import liger_cross_entropy

    return _negative_of_flat(functools.partial(liger_cross_entropy, reduction="none"))


def flash_attn() -> Any:
    from flash_attn.ops.triton.cross_entropy import cross_entropy_loss

    return _negative_of_flat(lambda logits, ids: cross_entropy_loss(logits, ids)[0])


def quack() -> Any:
    from quack import cross_entropy

    return _negative_of_flat(functools.partial(cross_entropy, reduction="none"))


def _negative_of_flat(loss: Callable[[Any, Any], Any]) -> Any:
    return lambda logits, ids: -loss(logits.view(-1, logits.shape[-1]), ids.view(-1)).view(ids.shape)


def torch_linear(inputs: Any) -> Callable[[], Any]:
    import torch

    loss = functools.partial(
        torch.nn.functional.linear_cross_entropy,
        reduction="none",
        options=torch.nn.LinearCrossEntropyOptions(),
    )
    return lambda: -loss(inputs.hidden, inputs.weight, inputs.ids)


def cut_cross_entropy(inputs: Any) -> Callable[[], Any]:
    from cut_cross_entropy import linear_cross_entropy

    loss = functools.partial(linear_cross_entropy, reduction="none", impl="torch_compile")
    return lambda: -loss(inputs.hidden, inputs.weight, inputs.ids)


def tokamax(inputs: Any) -> Callable[[], Any]:
    import jax
    import tokamax as library

    loss = jax.jit(
        lambda hidden, ids, weight: library.linear_softmax_cross_entropy_loss(
            hidden, ids, weight.T, reduction="sum", implementation="xla"
        )
    )
    return lambda: -loss(inputs.hidden, inputs.ids, inputs.weight)
