"""Every statistic and transform in torch: joint gradients, compilation and its count, memory, order, torch.func."""

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from torch._dynamo.utils import counters  # noqa: E402
from torch.autograd import gradcheck, gradgradcheck  # noqa: E402
from xlogprobs_torch import compiled  # noqa: E402

from xlogprobs import entropy, logprobs, logprobs_and_entropy, token_stats  # noqa: E402

ALL = ("logprob", "entropy", "lse")

# of torch's own, in its forward mode
pytestmark = [
    pytest.mark.usefixtures("without_kernels"),
    pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning"),
]


def normal(*shape, seed=0, scale=3.0, dtype=torch.float32):
    return (torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * scale).to(dtype)


def some_ids(*shape, vocab, seed=1):
    return torch.randint(vocab, shape, generator=torch.Generator().manual_seed(seed))


def kept(*shape, seed=2):
    """A mask that keeps two thirds, and the first entry of each row."""
    mask = torch.rand(shape, generator=torch.Generator().manual_seed(seed)) > 1 / 3
    mask[..., 0] = True
    return mask


def transforms(name, batch, vocab):
    """Options of a call on logits (*batch, vocab)."""
    per_position = torch.linspace(0.6, 1.7, int(np.prod(batch))).reshape(batch)
    options = {
        "none": {},
        "temperature": {"temperature": 0.7},
        "a temperature per position": {"temperature": per_position},
        "a negative scale": {"scale": -0.8},
        "a scale per position": {"scale": per_position - 1},
        "softcap": {"softcap": 5.0},
        "a softcap per position": {"softcap": 3 * per_position},
        "bias": {"bias": normal(vocab, seed=6)},
        "a bias per position": {"bias": normal(*batch, vocab, seed=6)},
        "mask": {"mask": kept(vocab)},
        "a mask per position": {"mask": kept(*batch, vocab)},
        "a mask per sequence": {"mask": kept(batch[0], *(1,) * (len(batch) - 1), vocab)},
    }
    options["all"] = {
        "temperature": per_position,
        "scale": 1.3,
        "softcap": 6.0,
        "bias": normal(vocab, seed=6),
        "mask": kept(batch[0], *(1,) * (len(batch) - 1), vocab),
    }
    return options[name]


NAMES = (
    "none",
    "temperature",
    "a temperature per position",
    "a negative scale",
    "a scale per position",
    "softcap",
    "a softcap per position",
    "bias",
    "a bias per position",
    "mask",
    "a mask per position",
    "a mask per sequence",
    "all",
)


def definition(logits, ids, temperature=1.0, scale=1.0, softcap=None, bias=None, mask=None):
    """(logprob, entropy, lse) of ids (..., K), in float64."""

    def column(number):
        return torch.as_tensor(number, dtype=torch.float64).unsqueeze(-1)

    z = logits.double() * column(scale)
    if softcap is not None:
        z = column(softcap) * torch.tanh(z / column(softcap))
    if bias is not None:
        z = z + bias.double()
    z = z / column(temperature)
    if mask is not None:
        z = z.masked_fill(~mask, -float("inf"))
    log_p = z.log_softmax(-1)
    held = log_p.masked_fill(log_p == -float("inf"), 0)
    return log_p.gather(-1, ids), -(log_p.exp() * held).sum(-1), z.logsumexp(-1)


def joint(logits, ids, **options):
    return tuple(token_stats(logits, ids, ALL, **options)[:3])


def kept_ids(batch, many, vocab, options):
    """Ids that the mask keeps: others have no finite logprob to compare with."""
    ids = some_ids(*batch, many, vocab=vocab)
    mask = options.get("mask")
    return ids if mask is None else torch.where(mask.expand(*batch, vocab).gather(-1, ids), ids, 0)


def assert_joint_gradient(dtype, name, vocab, in_place=False):
    batch = (3, 4)
    options = transforms(name, batch, vocab)
    logits, ids = normal(*batch, vocab, dtype=dtype), kept_ids(batch, 3, vocab, options)
    source = logits.clone().requires_grad_()
    found = joint(source * 1.0 if in_place else source, ids, inplace_backward=in_place, **options)
    wide = logits.double().requires_grad_()
    expected = definition(wide, ids, **options)
    for one, other in zip(found, expected, strict=True):
        assert one.dtype == torch.float32
        assert ((one.double() - other).abs() <= 1e-6 * other.abs().clamp_min(1)).all()
    upstream = [normal(*each.shape, seed=seed, scale=1.0) for seed, each in enumerate(found)]
    (gradient,) = torch.autograd.grad(found, source, upstream)
    (reference,) = torch.autograd.grad(expected, wide, [each.double() for each in upstream])
    assert gradient.dtype == dtype
    rounding = 0.0 if dtype == torch.float32 else torch.finfo(dtype).eps / 2
    largest = max(each.abs().max().item() for each in upstream) * 3
    assert ((gradient.double() - reference).abs() <= 2e-6 * largest + rounding * reference.abs()).all()


@pytest.mark.parametrize("stance", ["force_eager", pytest.param("default", marks=pytest.mark.full)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", NAMES)
def test_the_joint_gradient_equals_the_float64_reference(name, dtype, stance):
    with torch.compiler.set_stance(stance):
        assert_joint_gradient(dtype, name, 1300)
    assert not compiled._without_compiler, "ran eagerly"


@pytest.mark.parametrize("name", ["none", "a mask per sequence", "all"])
def test_the_joint_gradient_equals_the_float64_reference_compiled(name):
    assert_joint_gradient(torch.float32, name, 1300)
    assert not compiled._without_compiler, "ran eagerly"


@pytest.mark.parametrize("stance", ["force_eager", "default"])
def test_in_place_gives_the_bits_of_the_joint_gradient(stance):
    options = transforms("all", (3, 4), 500)
    ids = kept_ids((3, 4), 2, 500, options)
    gradients = []
    with torch.compiler.set_stance(stance):
        for in_place in (True, False):
            source = normal(3, 4, 500).requires_grad_()
            found = joint(source * 1.0, ids, inplace_backward=in_place, **options)
            gradients += torch.autograd.grad(found, source, [torch.ones_like(each) for each in found])
    assert torch.equal(*gradients)


@pytest.mark.parametrize("name", NAMES)
def test_gradcheck_of_every_transform(name):
    options = transforms(name, (2, 2), 7)
    ids = kept_ids((2, 2), 2, 7, options)
    inputs = [normal(2, 2, 7, dtype=torch.float64).requires_grad_()]
    if torch.is_tensor(options.get("temperature")):
        inputs.append(options.pop("temperature").double().requires_grad_())

    def call(x, temperature=None):
        return joint(x, ids, **options, **({} if temperature is None else {"temperature": temperature}))

    with torch.compiler.set_stance("force_eager"):
        assert gradcheck(call, inputs, check_forward_ad=True)
        assert gradgradcheck(call, inputs)


def test_gradcheck_of_every_mode_with_all_transforms():
    options = transforms("all", (2, 2), 7)
    ids = kept_ids((2, 2), 2, 7, options)
    ids[0, 0] = -100
    temperature = options.pop("temperature").double().requires_grad_()

    def call(x, t):
        return joint(x, ids, temperature=t, ignore_index=-100, **options)

    inputs = [normal(2, 2, 7, dtype=torch.float64).requires_grad_(), temperature]
    with torch.compiler.set_stance("force_eager"):
        assert gradcheck(call, inputs, check_forward_ad=True, check_batched_grad=True, check_batched_forward_grad=True)
        assert gradgradcheck(call, inputs, check_fwd_over_rev=True, check_rev_over_rev=True)


@pytest.mark.parametrize("name", ["none", "a scale per position", "softcap", "bias", "all"])
def test_a_temperature_has_the_gradient_of_every_statistic(name):
    options = transforms(name, (3, 4), 50)
    ids = kept_ids((3, 4), 2, 50, options)
    options.pop("temperature", None)
    logits, scale = normal(3, 4, 50) + 100, torch.linspace(0.6, 1.7, 12).reshape(3, 4).requires_grad_()
    wide = scale.detach().double().requires_grad_()
    with torch.compiler.set_stance("force_eager"):
        (found,) = torch.autograd.grad(sum(s.sum() for s in joint(logits, ids, temperature=scale, **options)), scale)
    expected = torch.autograd.grad(sum(s.sum() for s in definition(logits, ids, temperature=wide, **options)), wide)
    torch.testing.assert_close(found.double(), expected[0], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["scale", "softcap", "bias"])
def test_a_scale_softcap_or_bias_that_requires_a_gradient_is_refused(name):
    value = torch.ones(5 if name == "bias" else (), requires_grad=True)
    with pytest.raises(ValueError, match=f"{name} requires a gradient"):
        entropy(normal(2, 5), **{name: value})


def test_masked_infinite_and_ignored_entries_have_a_gradient_of_0():
    logits, ids, mask = normal(4, 1300), torch.tensor([3, 4, -100, 5]), torch.ones(4, 1300, dtype=torch.bool)
    mask[0, 10:20] = False
    logits[0, 10:20] = torch.tensor([np.nan, np.inf, -np.inf, 0, 1, 2, 3, 4, 5, 6])
    logits[1, ::3] = -float("inf")
    logits[2, 7] = float("nan")
    logits[3] = 2.0
    for softcap in (None, 30.0):
        with torch.compiler.set_stance("force_eager"):
            source = logits.clone().requires_grad_()
            found = joint(source, ids, mask=mask, softcap=softcap, ignore_index=-100)
            (gradient,) = torch.autograd.grad(sum(each.sum() for each in found), source, create_graph=False)
            (again,) = torch.autograd.grad(
                sum(each.sum() for each in joint(source, ids, mask=mask, softcap=softcap, ignore_index=-100)),
                source,
                create_graph=True,
            )
        assert (gradient[0, 10:20] == 0).all()
        assert (gradient[1, ::3] == 0).all()
        assert (gradient[2] == 0).all()
        assert gradient.isfinite().all()
        assert [each[2].item() for each in found] == [0, 0, 0]
        torch.testing.assert_close(again, gradient, rtol=1e-5, atol=1e-6)


# compilation


def test_a_compiled_training_step_with_an_entropy_bonus_and_a_mask_has_no_graph_break():
    vocab = 200
    weight, hidden, ids = normal(vocab, 16, scale=0.3), normal(6, 5, 16, scale=1.0), some_ids(6, 5, vocab=vocab)
    ids[0, :2] = -100
    mask = kept(6, 1, vocab)

    def loss(weight, hidden, ids, mask):
        logits = (hidden @ weight.T).bfloat16()
        logprob, bonus = logprobs_and_entropy(logits, ids, mask=mask, temperature=0.9, ignore_index=-100)
        finite = torch.where(logprob == -float("inf"), 0, logprob)
        return -finite.mean() - 0.01 * bonus.mean()

    counters.clear()
    results = []
    for call in (torch.compile(loss, fullgraph=True), loss):
        source = weight.clone().requires_grad_()
        value = call(source, hidden, ids, mask)
        results.append((value.detach(), *torch.autograd.grad(value, source)))
    assert not counters["graph_break"]
    for found, expected in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


def test_inside_torch_compile_every_statistic_is_that_of_eager_code():
    logits, ids = normal(5, 300), some_ids(5, 2, vocab=300)
    options = transforms("all", (5,), 300)

    def call(x):
        return tuple(token_stats(x, ids, top_k=3, **options))

    for found, expected in zip(torch.compile(call, fullgraph=True)(logits), call(logits), strict=True):
        assert torch.equal(found, expected)


@pytest.fixture
def no_graphs_yet(monkeypatch):
    """The backend as it is before its first call."""
    monkeypatch.setattr(compiled, "_compiled", {})
    monkeypatch.setattr(compiled, "_without_compiler", set())
    counters.clear()


def graphs():
    return counters["stats"]["unique_graphs"]


@pytest.mark.usefixtures("no_graphs_yet")
def test_no_batch_or_kind_of_number_compiles_more_than_once_a_row_count():
    vocab = 200
    for batch in ((3, 4), (2, 3), (5, 2), (9, 3), (4, 8)):
        mask = kept(batch[0], 1, vocab)
        for temperature in (0.7, 0.9, torch.full(batch, 1.2)):
            for row_mask in (mask, mask.mT.contiguous().mT):
                source = normal(*batch, vocab).requires_grad_()
                out = token_stats(source, some_ids(*batch, vocab=vocab), ALL, temperature=temperature, mask=row_mask)
                sum(each.sum() for each in out[:3]).backward()
    expected = 2 * 2  # forward and backward, of pieces of 8 and of 1 row
    assert graphs() == len(compiled._compiled) <= expected


@pytest.fixture
def accelerator(no_graphs_yet, monkeypatch):
    """A CPU served as an accelerator: graphs of any number of rows, blocks of 1024."""
    policy = compiled.policy("cuda")
    monkeypatch.setattr(compiled, "policy", lambda device_type: policy)


@pytest.mark.usefixtures("accelerator")
@pytest.mark.parametrize(
    ("name", "float64"),
    [
        ("none", False),
        ("a mask per sequence", True),
        pytest.param("none", True, marks=pytest.mark.full),
        pytest.param("a mask per sequence", False, marks=pytest.mark.full),
    ],
)
def test_an_accelerators_graph_takes_any_batch(monkeypatch, float64, name):
    monkeypatch.setattr(compiled, "has_float64", lambda device: float64)
    vocab, options = 1300, transforms(name, (8, 4), 1300)
    logits, ids = normal(8, 4, vocab), kept_ids((8, 4), 1, vocab, options)
    whole = joint(logits, ids, **options)
    for found, expected in zip(whole, definition(logits, ids, **options), strict=True):
        assert ((found - expected).abs() <= 1e-6 * expected.abs().clamp_min(1)).all()
    for part in (slice(0, 1), slice(3, 5), slice(1, 8)):
        masks = {key: value[part] for key, value in options.items()}
        for found, expected in zip(joint(logits[part], ids[part], **masks), whole, strict=True):
            lone = "mask" in masks and part.stop - part.start == 1  # its mask is that of all rows: another graph
            torch.testing.assert_close(found, expected[part], atol=1e-6 * lone, rtol=1e-6 * lone)
    assert graphs() == 1 + (name != "none")  # one sequence's mask is that of all rows


# memory


@pytest.mark.parametrize("name", NAMES)
def test_only_arguments_and_numbers_of_rows_are_saved(name):
    batch, vocab = (3, 4), 2000
    options = transforms(name, batch, vocab)
    logits, ids = normal(*batch, vocab).requires_grad_(), kept_ids(batch, 2, vocab, options)
    given = {each.data_ptr() for each in (logits, *options.values()) if isinstance(each, torch.Tensor)}
    saved = []
    with (
        torch.compiler.set_stance("force_eager"),
        torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x),
    ):
        joint(logits, ids, **options)
    assert logits.data_ptr() in [x.data_ptr() for x in saved]
    assert all(x.numel() <= ids.numel() for x in saved if x.data_ptr() not in given)


# a row's bits


@pytest.mark.parametrize("stance", ["force_eager", "default"])
def test_a_row_has_the_same_bits_in_any_batch(stance):
    vocab = 1300
    options = {"temperature": 0.6, "scale": 1.1, "softcap": 20.0, "bias": normal(vocab, seed=6), "mask": kept(vocab)}
    logits, ids = normal(300, vocab), some_ids(300, vocab=vocab)
    with torch.compiler.set_stance(stance):
        whole = token_stats(logits, ids, top_k=4, **options)
        for rows in (1, 2, 3, 7, 64):
            for first in (0, 131, 300 - rows):
                part = slice(first, first + rows)
                for found, expected in zip(
                    token_stats(logits[part], ids[part], top_k=4, **options), whole, strict=True
                ):
                    assert torch.equal(found, expected[part])


# order


def order_by_definition(z, ids, count):
    """Ranks and top ids, in NumPy."""
    z = z.double().numpy()
    own = np.take_along_axis(z, ids.numpy(), -1)
    rank = 1 + (z[..., None, :] > own[..., None]).sum(-1)
    return rank, np.argsort(-z, axis=-1, kind="stable")[..., :count]


SIZES = (5, 5), (64, 3), (1300, 7), (1300, 40)  # vocabulary, top ids; each compiles graphs of its own


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("vocab", "count", "stance"),
    [
        *((*size, "force_eager") for size in SIZES),
        *(pytest.param(*size, "default", marks=[] if size == (1300, 7) else [pytest.mark.full]) for size in SIZES),
    ],
)
def test_ranks_and_top_ids_with_ties(stance, dtype, vocab, count):
    logits = normal(9, vocab, scale=0.5).mul(4).round().div(4).to(dtype)  # with many ties, 0.0 and -0.0 among them
    logits[3] = 1.0
    ids = some_ids(9, 2, vocab=vocab)
    rank, top = order_by_definition(logits, ids, count)
    with torch.compiler.set_stance(stance):
        for options in ({}, {"temperature": 0.7, "softcap": 30.0, "scale": 2.0}):
            found = token_stats(logits, ids, ("rank",), top_k=count, **options)
            assert (found.rank.numpy() == rank).all()
            assert (found.top_ids.numpy() == top).all()
            torch.testing.assert_close(found.top_logprobs, logprobs(logits, found.top_ids, **options), rtol=0, atol=0)


def test_masked_entries_have_no_place_before_kept_ones():
    logits, mask = normal(6, 500), kept(6, 500)
    ids = some_ids(6, 1, vocab=500)
    rank, top = order_by_definition(logits.masked_fill(~mask, -float("inf")), ids, 10)
    with torch.compiler.set_stance("force_eager"):
        found = token_stats(logits, ids, ("rank",), top_k=10, mask=mask)
    assert (found.rank.numpy() == rank).all()
    assert (found.top_ids.numpy() == top).all()


def test_a_row_without_an_order_has_rank_0_and_no_top_ids():
    logits, ids = normal(5, 200), torch.tensor([1, 2, -100, 3, 4])
    logits[0, 7], logits[1, 199], logits[3] = float("nan"), float("inf"), -float("inf")
    with torch.compiler.set_stance("force_eager"):
        found = token_stats(logits, ids, ("rank",), top_k=2, ignore_index=-100)
    assert found.rank[:4].tolist() == [0, 0, 0, 0]
    assert (found.top_ids[:4] == -1).all()
    assert found.rank[4] > 0
    assert found.top_ids[4].tolist() == logits[4].topk(2).indices.tolist()


def test_top_logprobs_have_gradients():
    logits = normal(3, 40, dtype=torch.float64).requires_grad_()
    with torch.compiler.set_stance("force_eager"):
        (found,) = torch.autograd.grad(token_stats(logits, None, (), top_k=3).top_logprobs.sum(), logits)
    wide = logits.detach().requires_grad_()
    (expected,) = torch.autograd.grad(wide.log_softmax(-1).topk(3).values.sum(), wide)
    torch.testing.assert_close(found, expected)


# torch.func


def test_vmap_over_logits_and_every_transform():
    size, batch, vocab = 3, (2, 2), 40
    logits, ids = normal(size, *batch, vocab), some_ids(size, *batch, vocab=vocab)
    masks, biases = kept(size, vocab), normal(size, 2, 1, vocab, seed=6)
    numbers = torch.tensor([0.5, 1.0, 2.0])
    per_position = torch.linspace(0.5, 2, 4).reshape(batch)

    def call(x, i, mask, bias, temperature, scale):
        return tuple(
            token_stats(x, i, top_k=2, mask=mask, bias=bias, temperature=temperature, scale=scale, softcap=9.0)
        )

    with torch.compiler.set_stance("force_eager"):
        for arguments, in_dims in (
            ((logits, ids, masks, biases, numbers, per_position), (0, 0, 0, 0, 0, None)),
            ((logits.movedim(0, 2), ids, masks.T, biases[0], per_position, numbers), (2, 0, 1, None, None, 0)),
            ((logits[0], ids[0], masks, biases.movedim(0, 1), 0.7, 1.3), (None, None, 0, 1, None, None)),
        ):

            def one(n, arguments=arguments, in_dims=in_dims):
                return [a if d is None else a.select(d, n) for a, d in zip(arguments, in_dims, strict=True)]

            found = torch.func.vmap(call, in_dims=in_dims)(*arguments)
            for n in range(size):
                for each, expected in zip(found, call(*one(n)), strict=True):
                    assert torch.equal(each[n], expected)


def test_the_transforms_of_torch_func_on_the_joint_output():
    options = transforms("all", (2, 2), 7)
    ids = kept_ids((2, 2), 2, 7, options)
    logits, change = normal(2, 2, 7, dtype=torch.float64), normal(2, 2, 7, seed=4, dtype=torch.float64)

    def ours(x):
        return joint(x, ids, **options)

    def theirs(x):
        return definition(x, ids, **options)

    func = torch.func
    with torch.compiler.set_stance("force_eager"):
        for transform in (
            lambda f: func.jvp(f, (logits,), (change,)),
            lambda f: func.jacrev(f)(logits),
            lambda f: func.jacfwd(f)(logits),
            lambda f: func.hessian(lambda x: sum((s**2).sum() for s in f(x)))(logits),
            lambda f: func.jacfwd(func.jacfwd(lambda x: sum((s**2).sum() for s in f(x))))(logits),
        ):
            torch.testing.assert_close(transform(ours), transform(theirs), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("batch", [(), (0,), (2, 0)])
@pytest.mark.parametrize("many", [None, (), (2,), (0,)])
def test_a_lone_row_and_an_empty_batch_have_every_statistic(batch, many):
    logits = normal(*batch, 20).requires_grad_()
    ids = None if many is None else some_ids(*batch, *many, vocab=20)
    want = ("entropy", "lse") if ids is None else (*ALL, "rank")
    with torch.compiler.set_stance("force_eager"):
        found = token_stats(logits, ids, want, top_k=2)
        sum(each.sum() for each in found[:3] if each is not None).backward()
    assert found.entropy.shape == found.lse.shape == batch
    assert found.top_ids.shape == found.top_logprobs.shape == (*batch, 2)
    assert logits.grad.shape == logits.shape
    if ids is not None:
        assert found.logprob.shape == found.rank.shape == ids.shape
