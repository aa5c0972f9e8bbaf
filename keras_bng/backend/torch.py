"""torch: all variables in a few calls; numbers that steer the step are read at once."""

from __future__ import annotations

import functools
import gc
import itertools
import math
import re
import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import keras
import numpy as np
import torch

from keras_bng.backend import common
from keras_bng.backend.common import least

kernels: Any = torch  # whose private names have stricter types than they need
# Of more squares, one sum after the other may be off in the fifth digit.
LONG = 2**12
ROW = 2**10
# The path of a variable that Keras had to name itself.
AUTOMATIC = re.compile(r"(^|/)variable(_\d+)?$")
DTYPES = {"float32": torch.float32, "float64": torch.float64}
# What every dtype here can hold in full precision lies between these.
TINY, HUGE = float(np.finfo("float32").tiny), float(np.finfo("float32").max)
# Powers of the betas are 0 by then: the rate has Keras's bias correction in it.
LATE = 2.0**30


def as_tensor(gradient: Any) -> Any:
    """See `common`."""
    is_one = isinstance(gradient, torch.Tensor)
    return gradient if is_one else keras.ops.convert_to_tensor(gradient)


def values_of(tensor: Any) -> Any:
    """See `common`."""
    return as_tensor(tensor.value if isinstance(tensor, keras.Variable) else tensor)


def times(gradient: Any, factor: Any) -> Any:
    """`normalize.times`; in one pass where the factor is a number."""
    if gradient is None:
        return None
    if isinstance(factor, torch.Tensor):
        product = gradient.to(factor.dtype) * factor
        return torch.where(factor == 0, 0.0, product).to(gradient.dtype)
    if not factor:
        return torch.zeros_like(gradient)
    wide = gradient if gradient.dtype in DTYPES.values() else gradient.float()
    return (wide * factor).to(gradient.dtype)


def one_by_one(vector: Any) -> list[Any]:
    """See `common`."""
    return list(vector.unbind()) if _is_compiling() else vector.tolist()


def _is_compiling() -> bool:
    """Whether `torch.compile` is tracing this: there are no numbers to look at."""
    return torch.compiler.is_compiling()


# Norms.


@torch.no_grad()
def block_norms(
    tensors: Sequence[Any],
    members: Sequence[Sequence[int]],
    dtype: str,
    norm: str = "l2",
    any_size: bool = True,
) -> Any:
    """See `common`."""
    if _is_compiling():
        return _compiled_norms(tensors, members, dtype, norm)
    sharded = _sharded()
    if any(isinstance(tensors[i], sharded) for block in members for i in block):
        return _norms_of_shards(tensors, members, dtype, norm, any_size)
    mine = [tensors[i].to(DTYPES[dtype]) for block in members for i in block]
    if not mine:
        return torch.zeros(len(members), dtype=DTYPES[dtype])
    measure, combine = NORMS[norm]
    norms = torch.stack(measure(mine)).tolist()
    if any_size and norm == "l2":
        floor = least(1, dtype)
        norms = [
            norm
            if norm * norm > tensor.numel() * floor and norm < math.inf
            else _careful_norm(tensor)
            for norm, tensor in zip(norms, mine)
        ]
    ends = [0, *itertools.accumulate(map(len, members))]
    by_block = [combine(*norms[a:b]) for a, b in itertools.pairwise(ends)]
    return torch.tensor(by_block, dtype=DTYPES[dtype], device=mine[0].device)


def _euclidean(tensors: list[Any]) -> list[Any]:
    while any(tensor.numel() > LONG for tensor in tensors):
        tensors = [_row_norms(t) if t.numel() > LONG else t for t in tensors]
    return kernels._foreach_norm(tensors)


def _row_norms(tensor: Any) -> Any:
    """A shorter vector that has the same norm."""
    entries = tensor.reshape(-1)
    end = entries.numel() // ROW * ROW
    norms = torch.linalg.vector_norm(entries[:end].view(-1, ROW), dim=1)
    return torch.cat([norms, entries[end:]]) if end < entries.numel() else norms


def _careful_norm(tensor: Any) -> float:
    """Where squares over- or underflow; of a layer that is dead, a look is enough."""
    if not tensor.numel():
        return 0.0
    low, high = torch.aminmax(tensor)
    largest = max(-float(low), float(high))
    if largest == 0 or not math.isfinite(largest):
        return largest
    return largest * float(_euclidean([tensor / largest])[0])


def _largest(*norms: float) -> float:
    """`max` does not see every NaN."""
    return math.nan if any(map(math.isnan, norms)) else max(norms, default=0.0)


def _absolute_sums(tensors: list[Any]) -> list[Any]:
    """`_foreach_norm` adds up one after the other, which loses digits."""
    return [tensor.sum() for tensor in kernels._foreach_abs(tensors)]


def _largest_of_each(tensors: list[Any]) -> list[Any]:
    zero = tensors[0].new_zeros(())
    return [
        torch.linalg.vector_norm(tensor, math.inf) if tensor.numel() else zero
        for tensor in tensors
    ]


# What measures each tensor, and what makes one norm of several.
NORMS: dict[str, Any] = {
    "l2": (_euclidean, math.hypot),
    "l1": (_absolute_sums, lambda *norms: math.fsum(norms)),
    "max": (_largest_of_each, _largest),
}


def _sharded() -> Any:
    """The class of tensors that are dealt out to processes."""
    return _class_of("torch.distributed.tensor", "DTensor")


def _class_of(module: str, name: str) -> Any:
    """Nothing, unless somebody has imported it and can have made one of it."""
    return getattr(sys.modules.get(module), name, ())


def _norms_of_shards(
    tensors: Sequence[Any], members: Any, dtype: str, norm: str, any_size: bool
) -> Any:
    """Of the whole blocks. Each process measures its part of all of them, and one
    collective makes them known (one for each dimension of a mesh that deals out)."""
    local = list(tensors)
    groups: dict[Any, list[list[int]]] = {(): [[] for _ in members]}
    for number, block in enumerate(members):
        for i in block:
            local[i], processes = _part_of(tensors[i])
            empty: list[list[int]] = [[] for _ in members]
            groups.setdefault(processes, empty)[number].append(i)
    combine = NORMS[norm][1]
    found = []
    for processes, of_them in groups.items():
        if any(of_them):
            norms = block_norms(local, of_them, dtype, norm, any_size)
            for group in processes:
                parts = [torch.empty_like(norms) for _ in range(group.size())]
                torch.distributed.all_gather(parts, norms, group=group)
                norms = _column_by_column(combine, parts)
            found.append(norms)
    return _column_by_column(combine, found)


def _part_of(tensor: Any) -> tuple[Any, tuple[Any, ...]]:
    """What this process has of a tensor, and the groups of those that have the rest."""
    if not isinstance(tensor, _sharded()):
        return tensor, ()
    if any(kind.is_partial() for kind in tensor.placements):
        from torch.distributed.tensor import Replicate

        kinds = [Replicate() if k.is_partial() else k for k in tensor.placements]
        tensor = tensor.redistribute(placements=kinds)
    groups = [
        tensor.device_mesh.get_group(dimension)
        for dimension, kind in enumerate(tensor.placements)
        if not kind.is_replicate()
    ]
    return tensor.to_local(), tuple(groups)


def _column_by_column(combine: Any, rows: list[Any]) -> Any:
    if len(rows) == 1:
        return rows[0]
    columns = zip(*torch.stack(rows).tolist())
    return torch.tensor([combine(*column) for column in columns]).to(rows[0])


def _compiled_norms(tensors: Any, members: Any, dtype: str, norm: str) -> Any:
    if dtype == "float64" or norm != "l2":
        from keras_bng.normalize import block_norms  # which needs this module first

        return block_norms(tensors, members, dtype, norm)
    device = keras.ops.convert_to_tensor(0.0).device
    zero = torch.zeros((), dtype=torch.float64, device=device)
    sums = [
        sum((tensors[i].double().square().sum() for i in block), zero)
        for block in members
    ]
    return torch.stack(sums).sqrt().to(DTYPES[dtype])


# The update.


@torch.no_grad()
def update(
    base: str,
    settings: dict[str, Any],
    gradients: Sequence[Any],
    factors: Sequence[Any],
    variables: Sequence[Any],
    states: Sequence[Sequence[Any]],
    rate: Any,
    step: Any,
) -> list[int]:
    """See `common`."""
    everything = list(range(len(variables)))
    values = [v.value for v in variables]
    state_values = [[v.value for v in kind] for kind in states]
    if base == "SGD" and _is_compiling():
        _traced_sgd(settings, values, gradients, factors, state_values, rate)
        return []
    if base not in KERNELS or _is_compiling():
        return everything
    of_all = not isinstance(rate, list)
    rates = [_number(rate)] * len(values) if of_all else list(map(_number, rate))
    done: set[int] = set()
    for members in _groups([gradients, values, *state_values]):
        if has_fused_kernels(values[members[0]].device.type):
            KERNELS[base](
                Group(
                    settings,
                    [values[i] for i in members],
                    [gradients[i] for i in members],
                    [factors[i] for i in members],
                    [[kind[i] for i in members] for kind in state_values],
                    [rates[i] for i in members],
                    _number(step),
                )
            )
            done.update(members)
    return [i for i in everything if i not in done] if len(done) < len(values) else []


def _groups(kinds: list[Sequence[Any]]) -> list[list[int]]:
    """The positions of what a kernel takes together: gradients, variables and state.

    Halves are for the plain path, with its epsilon.
    """
    first = kinds[0][0]
    if all(_fit(kind, first.dtype, first.device) for kind in kinds):
        return [list(range(len(kinds[0])))]
    groups: dict[Any, list[int]] = {}
    for i, tensors in enumerate(zip(*kinds)):
        dtype, device = tensors[0].dtype, tensors[0].device
        if _fit(tensors, dtype, device):
            groups.setdefault((dtype, device), []).append(i)
    return list(groups.values())


def _fit(tensors: Sequence[Any], dtype: Any, device: Any) -> bool:
    return (
        dtype in DTYPES.values()
        and {torch.Tensor, torch.nn.Parameter}.issuperset(map(type, tensors))
        and all(t.dtype is dtype for t in tensors)
        and all(t.device == device for t in tensors)
        and all(map(torch.Tensor.is_contiguous, tensors))
    )


@functools.cache
def has_fused_kernels(device: str) -> bool:
    """Whether this torch has them for this kind of device."""
    one = [torch.ones(1, device=device)]
    arguments = {"weight_decay": 0.0, "maximize": False, "lr": 0.1}
    try:
        kernels._fused_sgd_(
            one,
            one,
            one,
            **arguments,
            momentum=0.9,
            dampening=0.0,
            nesterov=False,
            is_first_step=False,
        )
        kernels._fused_adam_(
            one,
            one,
            one,
            one,
            [],
            one,
            **arguments,
            beta1=0.9,
            beta2=0.9,
            eps=1.0,
            amsgrad=False,
        )
    except (AttributeError, NotImplementedError, RuntimeError):
        return False
    return True


def _number(x: Any) -> float:
    x = x.value if isinstance(x, keras.Variable) else x
    return x.item() if isinstance(x, torch.Tensor) else float(x)


def _scaled(gradients: Sequence[Any], factors: Sequence[float]) -> list[Any]:
    """Copies of the gradients times their factors; 0 where that is 0, and not NaN."""
    scaled = list(kernels._foreach_mul(gradients, factors))
    for i, factor in enumerate(factors):
        if factor == 0:
            scaled[i] = torch.zeros_like(gradients[i])
    return scaled


def _traced_sgd(
    settings: Any, values: Any, gradients: Any, factors: Any, states: Any, rate: Any
) -> None:
    """For `torch.compile`: Keras's own reads the rate, which breaks the graph."""
    rate = keras.ops.convert_to_tensor(rate)
    steps = [
        -rate * (g if factor is None else times(g, factor))
        for g, factor in zip(gradients, factors)
    ]
    if not states:
        kernels._foreach_add_(values, steps)
        return
    (momentums,) = states
    kernels._foreach_mul_(momentums, settings["momentum"])
    kernels._foreach_add_(momentums, steps)
    if settings["nesterov"]:
        kernels._foreach_add_(values, steps)
        kernels._foreach_add_(values, momentums, alpha=settings["momentum"])
    else:
        kernels._foreach_add_(values, momentums)


class Group(NamedTuple):
    """Variables of one dtype and device; lists have an entry for each of them."""

    settings: dict[str, Any]
    values: list[Any]
    gradients: list[Any]
    factors: list[float | None]
    states: list[list[Any]]
    rates: list[float]
    step: float

    def normalized(self) -> list[Any]:
        """The gradients times their factors."""
        if all(factor is None for factor in self.factors):
            return self.gradients
        return _scaled(self.gradients, [1.0 if f is None else f for f in self.factors])


# Kernels: of a base optimizer, on a group. All its rates are one but for `AdagradBNG`.


def _sgd(group: Group) -> None:
    values, rates, settings = group.values, group.rates, group.settings
    factors = [1.0 if f is None else f for f in group.factors]
    lengths = [-f * rate for f, rate in zip(factors, rates)]
    if all(not f or TINY < abs(x) < HUGE for f, x in zip(factors, lengths)):
        steps = _scaled(group.gradients, lengths)
    else:
        steps = list(kernels._foreach_mul(group.normalized(), -rates[0]))
    if not group.states:
        kernels._foreach_add_(values, steps)
        return
    # Keras has the rate in the momentum: a step of -1 along what torch takes for it.
    kernels._fused_sgd_(
        values,
        steps,
        group.states[0],
        weight_decay=0.0,
        momentum=settings["momentum"],
        lr=-1.0,
        dampening=0.0,
        nesterov=settings["nesterov"],
        maximize=False,
        is_first_step=False,
    )


def _adam(group: Group) -> None:
    settings = group.settings
    beta_1, beta_2 = settings["beta_1"], settings["beta_2"]
    # In the variables' precision, as Keras: at the first steps that is seen.
    betas = torch.tensor([beta_1, beta_2], dtype=group.values[0].dtype, device="cpu")
    power_1, power_2 = betas.pow(group.step).tolist()
    rate = group.rates[0] * math.sqrt(1 - power_2) / (1 - power_1)
    late = torch.full((), LATE, device=group.values[0].device)
    kernels._fused_adam_(
        group.values,
        group.normalized(),
        *group.states[:2],
        group.states[2] if settings["amsgrad"] else [],
        [late] * len(group.values),
        lr=rate,
        beta1=beta_1,
        beta2=beta_2,
        weight_decay=0.0,
        eps=settings["epsilon"],
        amsgrad=settings["amsgrad"],
        maximize=False,
    )


def _adagrad(group: Group) -> None:
    gradients, (sums,) = group.normalized(), group.states
    kernels._foreach_addcmul_(sums, gradients, gradients)
    roots = kernels._foreach_add(sums, group.settings["epsilon"])
    kernels._foreach_sqrt_(roots)
    kernels._foreach_addcdiv_(group.values, gradients, roots, value=-group.rates[0])


def _adagrad_bng(group: Group) -> None:
    gradients, (sums,) = group.normalized(), group.states
    kernels._foreach_addcmul_(sums, gradients, gradients)
    roots = kernels._foreach_sqrt(sums)
    kernels._foreach_add_(roots, group.settings["delta"])
    steps = kernels._foreach_mul(gradients, group.rates)
    kernels._foreach_addcdiv_(group.values, steps, roots, value=-1.0)


def _rmsprop(group: Group) -> None:
    gradients, rate, settings = group.normalized(), group.rates[0], group.settings
    velocities, *others = group.states
    rho, momentum = settings["rho"], settings["momentum"]
    kernels._foreach_mul_(velocities, rho)
    kernels._foreach_addcmul_(velocities, gradients, gradients, value=1 - rho)
    roots = kernels._foreach_add(velocities, settings["epsilon"])
    if settings["centered"]:
        means = others.pop()
        kernels._foreach_lerp_(means, gradients, 1 - rho)
        kernels._foreach_addcmul_(roots, means, means, value=-1.0)
    kernels._foreach_sqrt_(roots)
    if momentum > 0:
        kernels._foreach_mul_(others[0], momentum)
        kernels._foreach_addcdiv_(others[0], gradients, roots, value=rate)
        kernels._foreach_sub_(group.values, others[0])
    else:
        kernels._foreach_addcdiv_(group.values, gradients, roots, value=-rate)


KERNELS: dict[str, Any] = {
    "SGD": _sgd,
    "Adam": _adam,
    "Adagrad": _adagrad,
    "RMSprop": _rmsprop,
    "AdagradBNG": _adagrad_bng,
}


@torch.no_grad()
def reset(accumulators: Sequence[Any]) -> bool:
    """Not by multiplying them by 0, as Keras does: a NaN would stay for ever."""
    for accumulator in accumulators:
        if accumulator is not None:
            accumulator.value.zero_()
    return True


# Several processes.

STATE_IN_WHOLE = (
    "Keras keeps the state of an optimizer whole on each process, which does not fit "
    "parameters that are dealt out to them (`DTensor`s, of `fully_shard` for example): "
    "its own optimizers cannot train them either, unless they have no state. Use "
    "SGDNG(momentum=0.0) without accumulation and averages, or `keras_bng.normalize` "
    "before the step of an optimizer of torch, or DistributedDataParallel. "
    "docs/devices.md has the loops. Received: {}, whose state is {}"
)
KERAS_LAYER_SHARDED = (
    "`fully_shard` has no effect on layers of Keras: {} still has all of {!r}, and "
    "every process would train its own. Call `fully_shard` on a module of torch, and "
    "put that into a keras.layers.TorchModuleWrapper; or use DistributedDataParallel. "
    "docs/devices.md has the loops."
)


def is_first_process() -> bool:
    """See `common`."""
    distributed = torch.distributed
    if not (distributed.is_available() and distributed.is_initialized()):
        return True
    return distributed.get_rank() == 0


def check_shards(variables: Sequence[Any], state: Sequence[Any]) -> None:
    """See `common`."""
    is_sharded = {id(v): isinstance(v.value, _sharded()) for v in variables}
    as_large = [v.path for v in state if v.shape]
    if any(is_sharded.values()) and as_large:
        name = next(v.path for v in variables if is_sharded[id(v)])
        raise ValueError(STATE_IN_WHOLE.format(name, ", ".join(as_large)))
    by_torch = _class_of("torch.distributed.fsdp", "FSDPModule")
    if not by_torch:
        return
    for layer in gc.get_objects():
        if issubclass(type(layer), by_torch) and issubclass(
            type(layer), keras.layers.Layer
        ):
            for variable in layer.weights:
                if not is_sharded.get(id(variable), True):
                    text = KERAS_LAYER_SHARDED.format(layer.name, variable.path)
                    raise ValueError(text)


# What the tools need, to look into a step.


def as_they_are(weights: list[Any]) -> list[Any]:
    """See `common`."""
    return [weight.clone() for weight in weights]


def paths_of(variables: Sequence[Any], paths: list[str]) -> list[str]:
    """See `common`. A `TorchModuleWrapper` names no variable itself.

    No variable leads to its wrapper, so the wrappers are looked for in memory.
    """
    if not any(map(AUTOMATIC.search, paths)):
        return paths
    in_modules: dict[int, str] = {}
    for layer in gc.get_objects():
        # Not `isinstance`, which asks an object for its class: dead proxies raise.
        if not issubclass(type(layer), keras.layers.TorchModuleWrapper):
            continue
        module = getattr(layer, "module", None)
        if module is None:  # its `__init__` has failed
            continue
        _show_shards(module)
        names = {id(p): name for name, p in module.named_parameters()}
        for variable in layer.weights:
            name = names.get(id(variable.value))
            if name is not None and AUTOMATIC.search(variable.path):
                scope = variable.path.rpartition("/")[0]
                above = layer.path or f"{scope}/{layer.name}".lstrip("/")
                in_modules[id(variable)] = f"{above}/{name.replace('.', '/')}"
    return [in_modules.get(id(v), path) for v, path in zip(variables, paths)]


def _show_shards(module: Any) -> None:
    """After a forward pass, `fully_shard` has whole weights in place of its own."""
    for part in module.modules():
        if isinstance(part, _class_of("torch.distributed.fsdp", "FSDPModule")):
            part.reshard()


class Calls(common.Calls):
    """See `common`."""

    def train(self, batch: Any) -> dict[str, Any]:
        self.model.train()
        self.model.reset_metrics()
        return self.train_function([batch])

    def test(self, batch: Any) -> dict[str, Any]:
        self.model.eval()
        self.model.reset_metrics()
        return self.test_function([batch])


def keeper_beside(model: Any) -> Callable[[], Any]:
    """See `common`: modes, gradients, buffers, and the random state, too.

    Dropout without a seed draws from the latter.
    """
    # By name: Keras makes those that hold parameters anew.
    modes = {name: module.training for name, module in model.named_modules()}
    gradients = [(weight, weight.grad) for weight in model.parameters()]
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    random = torch.get_rng_state()
    on_gpus = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []

    def put_back() -> None:
        for name, module in model.named_modules():
            module.training = modes.get(name, model.training)
        for weight, gradient in gradients:
            weight.grad = gradient
        for buffer, value in buffers:
            buffer.copy_(value)
        torch.set_rng_state(random)
        if on_gpus:
            torch.cuda.set_rng_state_all(on_gpus)

    return put_back
