"""Gradients of torch: exact, lean, and composable with what autograd and torch.func offer."""

import subprocess
import sys
import textwrap

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from torch.autograd import forward_ad, gradcheck, gradgradcheck  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402
from xlogprobs_torch import compiled  # noqa: E402

from xlogprobs import logprobs  # noqa: E402

V, WIDE = 11, 500

# of torch's own, in its forward mode
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")


def normal(*shape, seed=0, scale=3.0, dtype=torch.float64):
    return (torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * scale).to(dtype)


def some_ids(*shape, vocab=V, seed=1):
    return torch.randint(0, vocab, shape, generator=torch.Generator().manual_seed(seed))


def plain(logits, ids, temperature=1.0):
    """The definition in torch operations."""
    many = ids if ids.ndim == logits.ndim else ids[..., None]
    scale = temperature if not torch.is_tensor(temperature) or temperature.ndim == 0 else temperature[..., None]
    return torch.log_softmax(logits / scale, -1).gather(-1, many).view(ids.shape)


def is_near(found, expected, tolerance=1e-12):
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


# ids of each kind, the temperature, and which positions are ignored
CALLS = [
    pytest.param((4,), 1.0, id="one id"),
    pytest.param((4, 3), 0.6, id="K ids, temperature"),
    pytest.param((4, 3), torch.tensor([0.5, 1.0, 2.0, 0.7], dtype=torch.float64), id="a temperature per position"),
]


@pytest.mark.parametrize(("shape", "temperature"), CALLS)
@pytest.mark.filterwarnings("ignore:Input #1 requires gradient and is not a double:UserWarning")
def test_gradcheck_of_every_order_and_mode(shape, temperature):
    ids = some_ids(*shape)
    ids[0] = -100
    if len(shape) == 2:
        ids[1] = ids[1, 0]  # repeated ids add up

    def call(x, temperature=temperature):
        return logprobs(x, ids, temperature=temperature, ignore_index=-100)

    inputs = [normal(4, V).requires_grad_()]
    if torch.is_tensor(temperature):
        inputs.append(temperature.clone().requires_grad_())
    assert gradcheck(call, inputs, check_forward_ad=True, check_batched_grad=True, check_batched_forward_grad=True)
    assert gradgradcheck(call, inputs, check_fwd_over_rev=True, check_rev_over_rev=True)


def test_a_temperature_has_its_gradient_number_or_tensor():
    logits, ids = normal(5, V, dtype=torch.float32), some_ids(5)
    for shape in ((), (5,)):
        scale = torch.full(shape, 0.8, requires_grad=True)
        (found,) = torch.autograd.grad(logprobs(logits, ids, temperature=scale).sum(), scale)
        wide = scale.detach().double().requires_grad_()
        (expected,) = torch.autograd.grad(plain(logits.double(), ids, wide).sum(), wide)
        assert found.dtype == torch.float32
        is_near(found.double(), expected, 1e-5)


def test_a_temperature_that_requires_grad_is_refused_inside_torch_compile():
    logits, ids, scale = normal(5, V), some_ids(5), torch.tensor(0.8, requires_grad=True)
    step = torch.compile(lambda x, t: logprobs(x, ids, temperature=t), fullgraph=True)
    with pytest.raises(Exception, match="temperature requires a gradient"):
        step(logits, scale)


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_the_transforms_of_torch_func(temperature):
    logits, ids, batch = normal(4, V), some_ids(4), normal(3, 4, V, seed=2)

    def ours(x):
        return logprobs(x, ids, temperature=temperature)

    def theirs(x):
        return plain(x, ids, temperature)

    func = torch.func
    weights, change = normal(4, seed=3), normal(4, V, seed=4)
    is_near(func.grad(lambda x: ours(x) @ weights)(logits), func.grad(lambda x: theirs(x) @ weights)(logits))
    is_near(func.vjp(ours, logits)[1](weights)[0], func.vjp(theirs, logits)[1](weights)[0])
    for found, expected in zip(
        func.jvp(ours, (logits,), (change,)), func.jvp(theirs, (logits,), (change,)), strict=True
    ):
        is_near(found, expected)
    is_near(func.vmap(ours)(batch), torch.stack([theirs(x) for x in batch]))
    is_near(func.jacrev(ours)(logits), func.jacrev(theirs)(logits))
    is_near(func.jacfwd(ours)(logits), func.jacfwd(theirs)(logits))
    is_near(func.hessian(lambda x: ours(x).sum())(logits), func.hessian(lambda x: theirs(x).sum())(logits))
    is_near(func.jacfwd(func.jacfwd(lambda x: ours(x).sum()))(logits), func.hessian(lambda x: theirs(x).sum())(logits))
    each = func.vmap(func.grad(lambda x, i: logprobs(x, i, temperature=temperature)))(logits, ids)
    is_near(each, func.grad(lambda x: theirs(x).sum())(logits))


def test_vmap_over_each_argument():
    logits, ids, scale = normal(3, 4, V), some_ids(3, 4), torch.tensor([0.5, 1.0, 2.0], dtype=torch.float64)
    vmap = torch.func.vmap

    def call(x, i, t):
        return logprobs(x, i, temperature=t)

    expected = torch.stack([plain(logits[b], ids[b], scale[b]) for b in range(3)])
    is_near(vmap(call)(logits, ids, scale), expected)
    is_near(vmap(call, in_dims=(1, 1, None))(logits.movedim(0, 1), ids.T, scale[0]), plain(logits, ids, scale[0]))
    is_near(vmap(call, in_dims=(None, 0, None))(logits[0], ids, scale[1]), plain(logits[:1].expand(3, 4, V), ids, 1.0))
    per_position = torch.tensor([0.5, 1.0, 2.0, 0.7], dtype=torch.float64)
    is_near(vmap(call, in_dims=(0, 0, None))(logits, ids, per_position), plain(logits, ids, per_position.expand(3, 4)))
    is_near(vmap(vmap(call, in_dims=(0, 0, None)))(logits, ids, scale), expected)


def test_forward_mode_outside_torch_func():
    logits, ids, change = normal(4, V), some_ids(4), normal(4, V, seed=4)
    expected = torch.func.jvp(lambda x: plain(x, ids), (logits,), (change,))[1]
    for mode in (torch.enable_grad, torch.no_grad):
        with mode(), forward_ad.dual_level():
            out = logprobs(forward_ad.make_dual(logits, change), ids)
            is_near(forward_ad.unpack_dual(out).tangent, expected)


def test_forward_over_reverse_without_a_graph_keeps_the_tangent():
    logits, ids, change = normal(4, V), some_ids(4), normal(4, V, seed=4)
    tangents = []
    for call in (logprobs, plain):
        with forward_ad.dual_level():
            dual = forward_ad.make_dual(logits.clone().requires_grad_(), change)
            (found,) = torch.autograd.grad((call(dual, ids) ** 2).sum(), dual)
            tangents.append(forward_ad.unpack_dual(found).tangent)
    is_near(*tangents)


def test_a_temperature_far_from_one_has_its_gradient():
    logits, scale = torch.tensor([[0.0, 3e25, 1e25]]), torch.tensor([1e25], requires_grad=True)
    (found,) = torch.autograd.grad(logprobs(logits, [0], temperature=scale).sum(), scale)
    wide = scale.detach().double().requires_grad_()
    (expected,) = torch.autograd.grad(plain(logits.double(), torch.tensor([0]), wide).sum(), wide)
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=0)


def test_a_temperature_made_in_inference_mode_serves_a_training_step():
    with torch.inference_mode():
        scale = torch.full((3,), 0.7)
    logits = normal(3, V).requires_grad_()
    (found,) = torch.autograd.grad(logprobs(logits, some_ids(3), temperature=scale).sum(), logits)
    (expected,) = torch.autograd.grad(plain(logits, some_ids(3), scale.double().clone()).sum(), logits)
    is_near(found, expected, 1e-7)


def test_derivatives_where_logits_are_minus_infinity_tie_or_are_ignored():
    logits = torch.tensor(
        [[1.0, 1.0, 0.0, -torch.inf], [torch.nan, 0, 0, 0], [2.0, -torch.inf, 2.0, 2.0]], dtype=torch.float64
    )
    ids = torch.tensor([0, -100, 2])
    hessian = torch.func.hessian(lambda x: logprobs(x, ids, ignore_index=-100).sum())(logits)
    expected = torch.zeros(3, 4, 3, 4, dtype=torch.float64)
    for row in (0, 2):
        p = torch.softmax(logits[row], -1)
        expected[row, :, row, :] = torch.outer(p, p) - torch.diag(p)
    is_near(hessian, expected)


@pytest.mark.parametrize("probability", [0.9, 0.99, 0.999])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_gradients_of_a_confident_target(probability, dtype):
    vocab = 1000
    logits = torch.zeros(2, vocab)
    logits[:, 3] = np.log(probability / (1 - probability) * (vocab - 1))
    logits = logits.to(dtype).requires_grad_()
    (found,) = torch.autograd.grad(logprobs(logits, [3, 3]).sum(), logits)
    wide = logits.detach().double().requires_grad_()
    (expected,) = torch.autograd.grad(plain(wide, torch.tensor([3, 3])).sum(), wide)
    assert found.dtype == dtype
    torch.testing.assert_close(found[:, 3].double(), expected[:, 3], rtol=0.01, atol=0)


def test_the_gradient_of_a_row_has_the_same_bits_in_any_batch_and_at_any_time():
    for dtype in (torch.float32, torch.bfloat16):
        logits, ids, upstream = normal(300, WIDE, dtype=dtype), some_ids(300, 2, vocab=WIDE), normal(300, 2, seed=5)

        def gradient(part, logits=logits, ids=ids, upstream=upstream):
            source = logits[part].clone().requires_grad_()
            (found,) = torch.autograd.grad(logprobs(source, ids[part]), source, upstream[part].float())
            return found

        whole = gradient(slice(None))
        assert torch.equal(whole, gradient(slice(None)))
        for rows in (1, 2, 3, 7, 64):
            for first in (0, 131, 300 - rows):
                part = slice(first, first + rows)
                assert torch.equal(gradient(part), whole[part])


# the backward pass that overwrites the logits


def in_place_and_not(make, *arguments, **options):
    """Gradients of the logits' source, with and without inplace_backward; ``make`` gives (source, logits)."""
    results = []
    for in_place in (True, False):
        source, logits = make()
        out = logprobs(logits, *arguments, inplace_backward=in_place, **options)
        out.backward(normal(*out.shape, seed=7).to(out.dtype))
        results.append(source.grad)
    return results


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("stance", ["default", "force_eager"])
@pytest.mark.parametrize("rows", [1, 7, 300])
def test_in_place_gives_the_same_bits(dtype, stance, rows):
    ids = some_ids(rows, 2, vocab=WIDE)

    def make():
        source = normal(rows, WIDE, dtype=dtype).requires_grad_()
        return source, source * 1.0

    with torch.compiler.set_stance(stance):
        found, expected = in_place_and_not(make, ids)
    assert torch.equal(found, expected)


VIEWS = {
    "all but the last": lambda x: x[:, :-1, :WIDE],
    "padded vocabulary": lambda x: x[..., :WIDE],
    "transposed": lambda x: x.transpose(0, 1)[..., 10 : WIDE + 10],
    "strided": lambda x: x[:, ::2, 20:],
    "one row": lambda x: x.flatten(0, 1)[3, 20:],
}


@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS)
def test_in_place_takes_views_of_results(view):
    def make():
        source = normal(9, 5, WIDE + 20, dtype=torch.float32).requires_grad_()
        return source, view(source * 1.0)

    ids = some_ids(*make()[1].shape[:-1], 2, vocab=WIDE)
    found, expected = in_place_and_not(make, ids)
    assert torch.equal(found, expected)


def test_in_place_writes_into_the_logits_and_nowhere_else():
    whole = normal(6, 40, dtype=torch.float32).requires_grad_() * 1.0
    logits = whole[1:4, :30]
    before = whole.detach().clone()
    (found,) = torch.autograd.grad(logprobs(logits, some_ids(3), inplace_backward=True).sum(), logits)
    assert found.data_ptr() == logits.data_ptr()
    changed = whole.detach() != before
    assert changed[1:4, :30].all()
    assert not changed[0].any()
    assert not changed[4:].any()
    assert not changed[:, 30:].any()


def test_in_place_gives_ignored_and_empty_rows_a_zero_gradient():
    logits = torch.full((3, 20), torch.nan).requires_grad_() * 1.0
    (found,) = torch.autograd.grad(logprobs(logits, [-1, -1, -1], ignore_index=-1, inplace_backward=True).sum(), logits)
    assert (found == 0).all()
    logits = normal(3, 20).requires_grad_() * 1.0
    (found,) = torch.autograd.grad(logprobs(logits, some_ids(3, 0), inplace_backward=True).sum(), logits)
    assert (found == 0).all()


def test_in_place_without_a_graph_changes_nothing():
    logits = normal(3, V)
    before = logits.clone()
    assert torch.equal(logprobs(logits, some_ids(3), inplace_backward=True), logprobs(logits, some_ids(3)))
    with torch.no_grad():
        logprobs(logits.requires_grad_(), some_ids(3), inplace_backward=True)
    assert torch.equal(logits.detach(), before)


def refused(logits, match, call=lambda x: logprobs(x, some_ids(*x.shape[:-1]), inplace_backward=True)):
    with pytest.raises(ValueError, match=match):
        call(logits)


def test_in_place_refuses_what_it_would_corrupt():
    leaf = normal(3, V).requires_grad_()
    refused(leaf, "leaf")
    refused(leaf[:2], "leaf")
    refused(leaf.view(1, 3, V), "leaf")
    result = leaf * 1.0
    refused(result[:1].expand(4, V), r"share: shape \(4, 11\), strides \(0, 1\)")
    refused(result.flatten().unfold(0, V, 1), "share")
    with torch.autograd.graph.save_on_cpu():
        refused(result, "saved_tensors_hooks")
    refused(
        result,
        "saved_tensors_hooks",
        lambda x: checkpoint(lambda y: logprobs(y * 1.0, some_ids(3), inplace_backward=True), x, use_reentrant=False),
    )
    refused(
        leaf.detach(),
        "torch.func",
        lambda x: torch.func.grad(lambda y: logprobs(y * 1.0, some_ids(3), inplace_backward=True).sum())(x),
    )
    scales = torch.tensor([0.5, 1.0], dtype=torch.float64)
    refused(
        result,
        "torch.func",
        lambda x: torch.func.vmap(lambda t: logprobs(x, [0, 1, 2], temperature=t, inplace_backward=True))(scales),
    )
    ids = some_ids(3)
    with pytest.raises(Exception, match=r"inside torch\.compile"):
        torch.compile(lambda x: logprobs(x * 1.0, ids, inplace_backward=True), fullgraph=True)(leaf)


def test_in_place_is_for_torch():
    with pytest.raises(ValueError, match=r"inplace_backward=True .* array of numpy"):
        logprobs(np.zeros((2, 3)), [0, 1], inplace_backward=True)


def test_in_place_is_once_differentiable():
    logits = normal(3, V).requires_grad_() * 1.0
    out = logprobs(logits, some_ids(3), inplace_backward=True)
    with pytest.raises(RuntimeError, match="can be taken once only"):
        torch.autograd.grad(out.sum(), logits, create_graph=True)


USES = {
    "squared": lambda logits: (logits * logits).sum(),
    "our own": lambda logits: logprobs(logits, some_ids(3)).sum(),
    "in place": lambda logits: logprobs(logits, some_ids(3), inplace_backward=True).sum(),
}


@pytest.mark.parametrize("use", USES.values(), ids=USES)
def test_in_place_with_the_logits_needed_afterwards_is_autograds_own_error(use):
    logits = normal(3, V).requires_grad_() * 1.0
    used = use(logits)  # autograd runs backward in the reverse order: this, last
    out = logprobs(logits, some_ids(3), inplace_backward=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        (used + out.sum()).backward()


@pytest.mark.parametrize("use", [USES["squared"], USES["our own"]], ids=["squared", "our own"])
def test_in_place_with_the_logits_needed_before_is_right(use):
    def make():
        source = normal(3, V).requires_grad_()
        return source, source * 1.0

    results = []
    for in_place in (True, False):
        source, logits = make()
        out = logprobs(logits, some_ids(3), inplace_backward=in_place)
        (out.sum() + use(logits)).backward()
        results.append(source.grad)
    assert torch.equal(*results)


def test_in_place_twice_through_one_graph_is_autograds_own_error():
    out = logprobs(normal(3, V).requires_grad_() * 1.0, some_ids(3), inplace_backward=True)
    out.sum().backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_in_place_after_an_operation_that_saved_its_result_is_autograds_own_error():
    source = normal(3, V).requires_grad_()
    out = logprobs(torch.tanh(source), some_ids(3), inplace_backward=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


# what trainers wrap around a step


def a_model(dtype=torch.float32):
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 50)).to(dtype)


def step(model, hidden, ids, call=logprobs):
    return -call(model(hidden), ids, temperature=0.9, ignore_index=-100).mean()


def gradients(model, loss):
    return torch.autograd.grad(loss, list(model.parameters()))


@pytest.fixture
def batch():
    ids = some_ids(6, 5, vocab=50)
    ids[0, :3] = -100
    return normal(6, 5, 8, dtype=torch.float32), ids


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing_gives_the_same_bits(batch, reentrant):
    model, (hidden, ids) = a_model(), batch
    expected = gradients(model, step(model, hidden, ids))
    hidden = hidden.requires_grad_()  # without it, the reentrant form makes no graph
    loss = checkpoint(lambda x: step(model, x, ids), hidden, use_reentrant=reentrant)
    loss.backward()
    for parameter, gradient in zip(model.parameters(), expected, strict=True):
        assert torch.equal(parameter.grad, gradient)


def test_offloading_saved_tensors_gives_the_same_bits(batch):
    model = a_model()
    expected = gradients(model, step(model, *batch))
    moved = []

    def pack(x):
        moved.append(x.shape)
        return x.numpy(force=True).copy() if x.dtype == torch.float32 else x

    with torch.autograd.graph.saved_tensors_hooks(
        pack, lambda x: torch.from_numpy(x) if isinstance(x, np.ndarray) else x
    ):
        loss = step(model, *batch)
    assert (6, 5, 50) in moved
    for found, gradient in zip(gradients(model, loss), expected, strict=True):
        assert torch.equal(found, gradient)


def test_autocast_to_bfloat16(batch):
    model = a_model()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits = model(batch[0])
        loss = -logprobs(logits, batch[1], ignore_index=-100).mean()
    assert logits.dtype == torch.bfloat16
    assert loss.dtype == torch.float32
    (found,) = torch.autograd.grad(loss, logits, retain_graph=True)
    wide = logits.detach().double().requires_grad_()
    keep = batch[1] != -100
    expected = torch.autograd.grad(-plain(wide, batch[1].clamp_min(0))[keep].sum() / 30, wide)[0]
    torch.testing.assert_close(found.double(), expected, rtol=2**-8, atol=1e-7)
    assert all(gradient.isfinite().all() for gradient in gradients(model, loss))


def test_a_compiled_training_step_has_no_graph_break(batch):
    from torch._dynamo.utils import counters

    model, twin = a_model(), a_model()
    counters.clear()
    compiled_step = torch.compile(step, fullgraph=True)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.5) for each in (model, twin)]
    for _ in range(3):
        losses = [compiled_step(model, *batch), step(twin, *batch)]
        for loss, optimizer in zip(losses, optimizers, strict=True):
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        is_near(losses[0], losses[1], 1e-5)
    assert not counters["graph_break"]
    for found, expected in zip(model.parameters(), twin.parameters(), strict=True):
        is_near(found, expected, 1e-5)


def test_double_backward_inside_a_users_graph_is_torchs_own_error(batch):
    model = a_model()
    loss = torch.compile(step, fullgraph=True)(model, *batch)
    with pytest.raises(RuntimeError, match=r"create_graph=False|double backward"):
        torch.autograd.grad(
            sum(g.sum() for g in torch.autograd.grad(loss, list(model.parameters()), create_graph=True)),
            list(model.parameters()),
        )


SHARDED = """
    import os
    import sys
    import torch
    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard
    from xlogprobs import logprobs

    rank, file = int(sys.argv[1]), sys.argv[2]
    torch.compiler.set_stance("force_eager")  # sharding is the question here, and compilers take their time
    dist.init_process_group("gloo", init_method="file://" + file, rank=rank, world_size=2)

    def model():
        torch.manual_seed(0)
        return torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 50))

    rng = torch.Generator().manual_seed(1)
    hidden, ids = torch.randn(4, 5, 8, generator=rng), torch.randint(50, (4, 5), generator=rng)

    def loss(model, hidden, ids, in_place):
        return -logprobs(model(hidden), ids, inplace_backward=in_place).mean()

    alone = model()
    loss(alone, hidden, ids, False).backward()
    mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (2,))
    for in_place in (False, True):
        sharded = model()
        for layer in (sharded[0], sharded[2], sharded):
            fully_shard(layer, mesh=mesh)
        mine = slice(2 * rank, 2 * rank + 2)
        loss(sharded, hidden[mine], ids[mine], in_place).backward()
        for one, many in zip(alone.parameters(), sharded.parameters()):
            difference = (many.grad.full_tensor() - one.grad).abs().max().item()
            assert difference <= 1e-6, difference
    print("equal", flush=True)
    dist.barrier()
    os._exit(0)  # gloo's threads may outlive an ordinary exit, which then aborts
"""


def test_fsdp2_gradients_equal_those_of_one_process(tmp_path):
    command = [sys.executable, "-W", "ignore", "-c", textwrap.dedent(SHARDED)]
    processes = [
        subprocess.Popen(
            [*command, str(rank), str(tmp_path / "rendezvous")],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    said = [process.communicate(timeout=300) for process in processes]
    for process, (out, error) in zip(processes, said, strict=True):
        assert process.returncode == 0, error
        assert out.strip().endswith("equal")


MEMORY = """
    import sys
    from pathlib import Path
    import torch
    from xlogprobs import logprobs

    in_place = sys.argv[1] == "True"
    logits = torch.randn(512, 32768)
    ids = torch.arange(512)
    leaf = torch.zeros((), requires_grad=True)

    class Made(torch.autograd.Function):  # logits that are a result, of an operation that costs nothing
        @staticmethod
        def forward(ctx, leaf, memory):
            ctx.mark_dirty(memory)
            return memory

        @staticmethod
        def backward(ctx, gradient):
            return gradient.sum(), None

    def step():
        logprobs(Made.apply(leaf, logits.data), ids, inplace_backward=in_place).sum().backward()

    def status(field):
        line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field))
        return int(line.split()[1]) * 1024

    step()
    Path("/proc/self/clear_refs").write_text("5")
    before = status("VmRSS")
    step()
    print((status("VmHWM") - before) / logits.nbytes)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the peak of memory is read from Linux's /proc")
@pytest.mark.parametrize(("in_place", "share"), [(False, 1.02), (True, 0.05)])
def test_forward_and_backward_take_no_more_memory_than_the_gradient(in_place, share):
    command = [sys.executable, "-W", "ignore", "-c", textwrap.dedent(MEMORY), str(in_place)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) <= share


def test_pieces_that_are_overwritten_do_not_overlap():
    cpu = torch.device("cpu")
    for rows in (*range(1, 40), 255, 256, 263, 1027):
        covered = [
            row for part in compiled.pieces(rows, 1000, cpu, overlap=False) for row in range(*part.indices(rows))
        ]
        assert covered == list(range(rows))
        sizes = {part.stop - part.start for part in compiled.pieces(rows, 1000, cpu, overlap=False)}
        assert sizes <= {1, 8, 256}


def test_a_temperature_that_is_one_number_keeps_its_tangent_in_forward_mode():
    from torch.autograd import forward_ad

    logits, ids = torch.randn(4, 50, dtype=torch.float64), torch.arange(4)
    with forward_ad.dual_level():
        temperature = forward_ad.make_dual(
            torch.tensor(0.7, dtype=torch.float64), torch.tensor(1.0, dtype=torch.float64)
        )
        tangent = forward_ad.unpack_dual(logprobs(logits, ids, temperature=temperature)).tangent
        with pytest.raises(ValueError, match="scale requires a gradient"):
            logprobs(logits, ids, scale=temperature)
    step = 1e-6
    warmer, colder = (logprobs(logits, ids, temperature=0.7 + sign * step) for sign in (1, -1))
    torch.testing.assert_close(tangent, (warmer - colder) / (2 * step), atol=1e-7, rtol=1e-7)
