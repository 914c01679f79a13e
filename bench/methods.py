"""The ways of computing token log-probabilities that are measured.

`TABLES` holds, for what is computed and for each library, the methods by name. Every table has the limit of the
machine first; the method after it is the library's usual way, which the others are compared with as well.
"""

import dataclasses
import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from xlogprobs_cpu import core

import xlogprobs
from bench import peers
from bench.libraries import Inputs
from xlogprobs import logprobs

Function = Callable[[Any, Any], Any]
Call = Callable[[], Any]

LIMIT = "read limit"
COPY_LIMIT = "read and write limit"
MATMUL_LIMIT = "the matrix product alone"
LIMITS = (LIMIT, COPY_LIMIT, MATMUL_LIMIT)
OURS = "xlogprobs"
IN_PLACE = "xlogprobs, in place"
PLAIN = "xlogprobs, without Numba"
COMPILED = "-cross_entropy, torch.compile"
EAGER = "log_softmax, gather"
OPTAX = "-optax cross-entropy, jax.jit"
TEXTBOOK = "textbook formula"


@dataclass(frozen=True)
class Method:
    """``make(inputs)`` gives the call that is timed; nothing is imported or compiled before it.

    A call returns log-probabilities, or a tuple that begins with them, with the logits' gradient second.
    """

    make: Callable[[Inputs], Call]
    available: Callable[[str], str | None] = lambda device: None
    """Why the method can't run on a device, or None."""
    per_token: bool = True
    """False where only the sum over the tokens comes out."""


# -- functions of (logits, ids), each made when it is needed ---------------------------------------------------------


def torch_cross_entropy() -> Function:
    """What trainers compile today: one graph per shape, as the recompile limit is lifted for it."""
    import torch

    @functools.partial(torch.compile, dynamic=False)
    def cross_entropy(logits: Any, ids: Any) -> Any:
        flat = logits.float().view(-1, logits.shape[-1])
        return -torch.nn.functional.cross_entropy(flat, ids.view(-1), reduction="none").view(ids.shape)

    torch._dynamo.config.recompile_limit = 1000
    return cross_entropy


def torch_log_softmax() -> Function:
    import torch

    return lambda logits, ids: torch.log_softmax(logits.float(), -1).gather(-1, ids[..., None])[..., 0]


def optax_cross_entropy() -> Function:
    import jax
    import optax

    return jax.jit(lambda logits, ids: -optax.softmax_cross_entropy_with_integer_labels(logits, ids))


def jax_log_softmax() -> Function:
    import jax
    import jax.numpy as jnp

    def log_softmax(logits: Any, ids: Any) -> Any:
        wide = jax.nn.log_softmax(logits.astype(jnp.float32), axis=-1)
        return jnp.take_along_axis(wide, ids[..., None], axis=-1)[..., 0]

    return jax.jit(log_softmax)


def textbook() -> Function:
    def formula(logits: Any, ids: Any) -> Any:
        wide = logits.astype(np.float32, copy=False)
        shifted = wide - wide.max(axis=-1, keepdims=True)
        log_softmax = shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
        return np.take_along_axis(log_softmax, ids[..., None], axis=-1)[..., 0]

    return formula


def ours() -> Function:
    return logprobs


# -- from such a function to the call that is timed ------------------------------------------------------------------


def forward(function: Callable[[], Function], **options: Any) -> Method:
    def make(inputs: Inputs) -> Call:
        return functools.partial(function(), inputs.logits, inputs.ids)

    return Method(make, **options)


def torch_gradient(function: Callable[[], Function], **options: Any) -> Method:
    """Forward and backward of logits that some producer made, as a model's head does.

    The logits must be neither a leaf nor a view, or no method could overwrite them. So they come out of an autograd
    function that costs nothing: forward hands out the prepared memory, backward keeps the gradient that arrives. All
    methods pay for what lies between the two, and for nothing else: no product, no accumulation into a leaf.
    """

    def make(inputs: Inputs) -> Call:
        produced, computed = _producer(), function()

        def run() -> Any:
            out = computed(produced(inputs), inputs.ids)
            out.backward(inputs.upstream)
            gradient, inputs.grad = inputs.grad, None
            return out.detach(), gradient

        return run

    return Method(make, **options)


@functools.cache
def _producer() -> Callable[[Inputs], Any]:
    import torch

    class Produced(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, anchor: Any, inputs: Inputs) -> Any:
            ctx.inputs = inputs
            return inputs.logits.new_empty(0).set_(inputs.logits)  # the same memory, and not a view for autograd

        @staticmethod
        def backward(ctx: Any, gradient: Any) -> Any:
            ctx.inputs.grad = gradient
            return None, None

    return lambda inputs: Produced.apply(inputs.logits.new_zeros(()).requires_grad_(), inputs)


def jax_gradient(function: Callable[[], Function], **options: Any) -> Method:
    """`jax.value_and_grad` of the log-probabilities weighed by token, compiled as one. JAX arrays can't be overwritten,
    so the logits are a plain argument."""

    def make(inputs: Inputs) -> Call:
        import jax

        computed = function()

        def loss(logits: Any, ids: Any, upstream: Any) -> Any:
            out = computed(logits, ids)
            return (out * upstream).sum(), out

        step = jax.jit(jax.value_and_grad(loss, has_aux=True))

        def run() -> Any:
            (_, out), gradient = step(inputs.logits, inputs.ids, inputs.upstream)
            return out, gradient

        return run

    return Method(make, **options)


def torch_head(function: Callable[[], Function]) -> Method:
    """The product with the head's weight, then ``function``: the logits exist in full."""

    def make(inputs: Inputs) -> Call:
        computed = function()
        return lambda: computed(inputs.hidden @ inputs.weight.T, inputs.ids)

    return Method(make)


def jax_head(function: Callable[[], Function]) -> Method:
    def make(inputs: Inputs) -> Call:
        import jax

        computed = function()
        step = jax.jit(lambda hidden, weight, ids: computed(hidden @ weight.T, ids))
        return lambda: step(inputs.hidden, inputs.weight, inputs.ids)

    return Method(make)


# -- the limits ------------------------------------------------------------------------------------------------------


def _numpy_read(inputs: Inputs) -> Call:
    bits = inputs.logits.view(np.int16 if inputs.logits.itemsize == 2 else np.int32)  # no fast bfloat16 maximum
    return lambda: bits.max(axis=-1)


def _torch_read(inputs: Inputs) -> Call:
    import torch

    # as integers: a maximum of bfloat16 takes twice the time of reading it
    bits = inputs.logits.view(torch.int16 if inputs.logits.itemsize == 2 else torch.int32)
    return lambda: bits.amax(-1)


def _jax_read(inputs: Inputs) -> Call:
    import jax

    read = jax.jit(lambda logits: logits.max(-1))
    return lambda: read(inputs.logits)


def _torch_copy(inputs: Inputs) -> Call:
    written = inputs.logits.clone()  # memory that is already there: the first touch of fresh pages costs more
    return lambda: written.copy_(inputs.logits)


def _jax_copy(inputs: Inputs) -> Call:
    import jax
    import jax.numpy as jnp

    copy = jax.jit(lambda logits, written: written.at[:].set(logits), donate_argnums=1)
    kept = [jnp.zeros_like(inputs.logits)]

    def run() -> Any:
        kept[0] = copy(inputs.logits, kept[0])
        return kept[0]

    return run


def _torch_matmul(inputs: Inputs) -> Call:
    return lambda: inputs.hidden @ inputs.weight.T


def _jax_matmul(inputs: Inputs) -> Call:
    import jax

    product = jax.jit(lambda hidden, weight: hidden @ weight.T)
    return lambda: product(inputs.hidden, inputs.weight)


# -- the benchmark this project began with ---------------------------------------------------------------------------


def gather_minus_logsumexp() -> Function:
    import torch

    return lambda logits, ids: logits.gather(-1, ids[..., None])[..., 0] - torch.logsumexp(logits, -1)


def over_batch(function: Callable[[], Function]) -> Function:
    import torch

    of_row = function()
    return lambda logits, ids: torch.stack([of_row(x, row) for x, row in zip(logits, ids, strict=True)])


def gather_minus_logsumexp_over_batch() -> Function:
    import torch

    def chunked(logits: Any, ids: Any) -> Any:
        chosen = logits.gather(-1, ids[..., None])[..., 0]
        return chosen - torch.stack([torch.logsumexp(x, -1) for x in logits])

    return chunked


REFERENCE = {
    "naive: log_softmax, gather": torch_log_softmax,
    "gather - logsumexp": gather_minus_logsumexp,
    "batch loop: log_softmax, gather": lambda: over_batch(torch_log_softmax),
    "batch loop: gather - logsumexp": lambda: over_batch(gather_minus_logsumexp),
    "gather, batch loop: logsumexp (old chunked)": gather_minus_logsumexp_over_batch,
    COMPILED: torch_cross_entropy,
}
LOGITS_MB = 2147.61
PUBLISHED = {
    "device": "one H100",
    "logits_mb": LOGITS_MB,
    "methods": {
        name: {"ms": ms, "peak_mb": peak_mb, "mb_above": round(peak_mb - LOGITS_MB, 2), "to_usual": to_usual}
        for name, (ms, peak_mb, to_usual) in zip(
            REFERENCE,
            [
                (5.133, 4295.16, None),
                (8.121, 4295.36, 1.9e-6),
                (4.993, 2416.24, 0.0),
                (9.120, 2282.10, 1.9e-6),
                (8.911, 2282.23, 1.9e-6),
                (1.566, 2190.02, 9.5e-7),
            ],
            strict=True,
        )
    },
    "training": {
        "what": "Qwen3-8B on 8 GPUs, GB",
        "old chunked": {"reserved": 139.55, "allocated": 115.91},
        "compiled": {"reserved": 129.19, "allocated": 115.91},
    },
}


# -- tables ----------------------------------------------------------------------------------------------------------


def has(function: str) -> bool:
    return hasattr(xlogprobs, function)


def _in_place() -> Function:
    return functools.partial(logprobs, inplace_backward=True)


def without_kernels(method: Method) -> Method:
    """The method as it runs where Numba is not installed."""

    def make(inputs: Inputs) -> Call:
        call = method.make(inputs)

        def run() -> Any:
            with core.disabled():
                return call()

        return run

    return dataclasses.replace(method, make=make)


def _stats(want: tuple[str, ...]) -> Callable[[], Function]:
    def function() -> Function:
        def run(logits: Any, ids: Any) -> Any:
            stats = xlogprobs.token_stats(logits, ids, want=want)
            return tuple(getattr(stats, name) for name in want)

        return run

    return function


def _linear(inputs: Inputs) -> Call:
    linear_logprobs = xlogprobs.linear_logprobs  # type: ignore[attr-defined]
    return lambda: linear_logprobs(inputs.hidden, inputs.weight, inputs.ids)


def _stats_methods() -> dict[str, Method]:
    wanted = (("logprob", "entropy"), ("logprob", "entropy", "lse"), ("logprob", "entropy", "rank"))
    found = {f"{OURS}.token_stats: {', '.join(want)}": forward(_stats(want)) for want in wanted}
    plain = {f"{PLAIN}: {', '.join(want)}": without_kernels(forward(_stats(want))) for want in wanted[::2]}
    return {**found, PLAIN: without_kernels(forward(ours)), **plain}


FORWARD = {OURS: forward(ours), PLAIN: without_kernels(forward(ours))}
TORCH_READ, JAX_READ = {LIMIT: Method(_torch_read)}, {LIMIT: Method(_jax_read)}
NUMPY_READ = {LIMIT: Method(_numpy_read)}
LINEAR = {f"{OURS}.linear_logprobs": Method(_linear)} if has("linear_logprobs") else {}
INPLACE = {IN_PLACE: torch_gradient(_in_place)} if "inplace_backward" in inspect.signature(logprobs).parameters else {}

TABLES: dict[str, dict[str, dict[str, Method]]] = {
    "forward": {
        "numpy": {**NUMPY_READ, TEXTBOOK: forward(textbook), **FORWARD},
        "torch": {**TORCH_READ, COMPILED: forward(torch_cross_entropy), **FORWARD},
        "jax": {**JAX_READ, OPTAX: forward(optax_cross_entropy), **FORWARD},
    },
    "peers": {
        "numpy": {
            **NUMPY_READ,
            TEXTBOOK: forward(textbook),
            "scipy log_softmax, take": forward(peers.scipy_log_softmax, available=peers.needs("scipy.special")),
            **FORWARD,
        },
        "torch": {
            **TORCH_READ,
            COMPILED: forward(torch_cross_entropy),
            EAGER: forward(torch_log_softmax),
            "TRL selective_log_softmax": forward(peers.trl, available=peers.needs("trl.trainer.utils")),
            "Liger cross-entropy": forward(
                peers.liger, available=peers.on_cuda("liger_kernel.transformers.functional")
            ),
            "flash-attn cross-entropy": forward(
                peers.flash_attn, available=peers.on_cuda("flash_attn.ops.triton.cross_entropy")
            ),
            "quack cross-entropy": forward(peers.quack, available=peers.on_cuda("quack")),
            **FORWARD,
        },
        "jax": {
            **JAX_READ,
            OPTAX: forward(optax_cross_entropy, available=peers.needs("optax")),
            "log_softmax, take, jax.jit": forward(jax_log_softmax),
            **FORWARD,
        },
    },
    "reference": {
        "torch": {
            **TORCH_READ,
            **{name: forward(function) for name, function in REFERENCE.items()},
            **FORWARD,
        }
    },
    "small": {
        "numpy": {**NUMPY_READ, TEXTBOOK: forward(textbook), **FORWARD},
        "torch": {**TORCH_READ, EAGER: forward(torch_log_softmax), **FORWARD},
        "jax": {**JAX_READ, "log_softmax, take, jax.jit": forward(jax_log_softmax), **FORWARD},
    },
    "grad": {
        "torch": {
            COPY_LIMIT: Method(_torch_copy),
            COMPILED: torch_gradient(torch_cross_entropy),
            EAGER: torch_gradient(torch_log_softmax),
            OURS: torch_gradient(ours),
            **INPLACE,
            PLAIN: without_kernels(torch_gradient(ours)),
        },
        "jax": {
            COPY_LIMIT: Method(_jax_copy),
            OPTAX: jax_gradient(optax_cross_entropy, available=peers.needs("optax")),
            OURS: jax_gradient(ours),
        },
    },
    "head": {
        "torch": {
            MATMUL_LIMIT: Method(_torch_matmul),
            f"product, {COMPILED}": torch_head(torch_cross_entropy),
            "torch linear_cross_entropy, in chunks": Method(
                peers.torch_linear, available=peers.needs("torch.nn.functional", "linear_cross_entropy")
            ),
            "cut-cross-entropy, torch_compile": Method(
                peers.cut_cross_entropy, available=peers.needs("cut_cross_entropy")
            ),
            f"product, {OURS}": torch_head(ours),
            **LINEAR,
        },
        "jax": {
            MATMUL_LIMIT: Method(_jax_matmul),
            f"product, {OPTAX}": jax_head(optax_cross_entropy),
            "tokamax, xla (the sum alone)": Method(peers.tokamax, available=peers.needs("tokamax"), per_token=False),
            f"product, {OURS}": jax_head(ours),
            **LINEAR,
        },
    },
    "stats": {
        "numpy": {**NUMPY_READ, OURS: forward(ours), **_stats_methods()},
        "torch": {
            **TORCH_READ,
            OURS: forward(ours),
            "TRL selective_log_softmax, entropy_from_logits": forward(
                peers.trl_with_entropy, available=peers.needs("trl.trainer.utils")
            ),
            **_stats_methods(),
        },
        "jax": {**JAX_READ, OURS: forward(ours), **_stats_methods()},
    },
}


def methods(what: str, library: str) -> dict[str, Method]:
    return TABLES[what][library]


def usual(what: str, library: str) -> str:
    """The method that the others are compared with."""
    return list(methods(what, library))[1]


def is_ours(name: str) -> bool:
    return OURS in name
