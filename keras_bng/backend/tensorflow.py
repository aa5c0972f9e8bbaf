"""TensorFlow: fused kernels, norms in a graph and under XLA, compiled eager steps."""

from __future__ import annotations

import contextlib
import functools
import socket
import time
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from keras_bng.backend import common
from keras_bng.backend.common import (
    SMALL,
    Rows,
    call_one,
    careful_norms,
    is_sparse,
    norms_of,
    other_norms,
    summed,
    tiny,
    with_values,
)

WINDOW = 256  # of a vector, in `one_by_one`
# A gradient with more entries than this is worth not copying.
LARGE = 2**18


def values_of(tensor: Any) -> Any:
    """See `common`."""
    if is_sparse(tensor):
        return tensor.values
    if isinstance(tensor, keras.Variable):
        tensor = tensor.value
    return tf.convert_to_tensor(tensor)  # that of Keras returns a `tf.Variable`


def with_shape(gradient: Any, weight: Any) -> Any:
    """See `common`."""
    if gradient is None or is_sparse(gradient) or gradient.shape.is_fully_defined():
        return gradient
    return tf.ensure_shape(gradient, weight.shape)


def times(gradient: Any, factor: Any) -> Any:
    """`normalize.times` in one pass."""
    if gradient is None:
        return None
    if is_sparse(gradient):
        return with_values(gradient, times(gradient.values, factor))
    product = tf.math.multiply_no_nan(tf.cast(gradient, factor.dtype), factor)
    return tf.cast(product, gradient.dtype)


def one_by_one(vector: Any) -> list[Any]:
    """See `common`."""
    count = vector.shape[0]
    if not compiled_for_cpu():
        return tf.unstack(vector, count)
    # XLA compiles a kernel once for all variables of one shape, unless each reads
    # another entry of a vector. So a constant mask takes the entries out beforehand.
    masks = np.eye(WINDOW, dtype=bool)
    padded = tf.pad(vector, [[0, -count % WINDOW]])
    windows = tf.unstack(tf.reshape(padded, (-1, WINDOW)))
    zeros = tf.zeros((WINDOW,), vector.dtype)
    return [
        tf.reduce_sum(tf.where(masks[i % WINDOW], windows[i // WINDOW], zeros))
        for i in range(count)
    ]


def compiled_for_cpu() -> bool:
    return under_xla() and not has_gpu()


def has_gpu() -> bool:
    return bool(tf.config.list_logical_devices("GPU"))


def under_xla() -> bool:
    """Whether TensorFlow is tracing a function that XLA will compile."""
    return not tf.executing_eagerly() and bool(
        tf.__internal__.get_enclosing_xla_context()
    )


def unconverted(function: Any) -> Any:
    """See `common`."""
    return tf.autograph.experimental.do_not_convert(function)


# Norms.


def block_norms(
    tensors: Sequence[Any],
    members: Sequence[Sequence[int]],
    dtype: str,
    norm: str = "l2",
    any_size: bool = True,
) -> Any:
    """See `common`."""
    rows = Rows(tensors, members)
    if not rows.groups:
        return tf.zeros((len(members),), dtype)
    if under_xla() and dtype == "float32" and norm != "max":
        # Squares of float32 fit into float64: there is nothing that must be repeated.
        entry, root = {"l2": (tf.square, tf.sqrt), "l1": (tf.abs, tf.identity)}[norm]
        return tf.cast(root(rows.by_block(_sums_for_xla(rows, entry))), dtype)
    if norm != "l2":
        return other_norms(rows, dtype, norm)
    if under_xla():
        return norms_of(rows, dtype, any_size, summed(tf.square, dtype), _xla_cond)
    cond = call_one if tf.executing_eagerly() else graph_if
    return norms_of(rows, dtype, any_size, _squares(dtype), cond, _careful_norms)


def _squares(dtype: str) -> Callable[[Any, bool], Any]:
    def squares(group: Any, is_stack: bool) -> Any:
        group = tf.cast(group, dtype)
        if is_stack:
            return tf.reduce_sum(tf.square(group), 1)
        return 2 * tf.nn.l2_loss(group)  # of all that there is, the fastest

    return squares


def _careful_norms(rows: Any, sums: Any, limit: Any, cond: Any, squares: Any) -> Any:
    if cond is call_one:
        return careful_norms(rows, sums, limit, cond, squares)
    return _traced_careful_norms(sums.dtype)(rows, sums, limit)


@functools.cache
def _traced_careful_norms(dtype: Any) -> Any:
    """Traced once for tensors of any shape: it is long, and hardly ever runs."""
    squares = _squares(dtype.name)
    return tf.function(
        lambda rows, sums, limit: careful_norms(rows, sums, limit, graph_if, squares),
        input_signature=[
            tf.TensorSpec(shape, dtype) for shape in ([None] * 2, [None], [])
        ],
        autograph=False,
    )


def graph_if(condition: Any, if_true: Any, if_false: Any, *inputs: Any) -> Any:
    """`tf.cond` as a call: merged into the graph around it, it would slow each step."""
    then_branch, else_branch = (
        tf.function(function, autograph=False).get_concrete_function(*inputs)
        for function in (if_true, if_false)
    )
    outputs = tf.nest.flatten(else_branch.structured_outputs)
    found = tf.raw_ops.StatelessIf(
        cond=condition,
        input=tf.nest.flatten(inputs),
        Tout=[x.dtype for x in outputs],
        then_branch=then_branch,
        else_branch=else_branch,
        output_shapes=[x.shape for x in outputs],
    )
    return tf.nest.pack_sequence_as(else_branch.structured_outputs, found)


def _xla_cond(condition: Any, if_true: Any, if_false: Any, *inputs: Any) -> Any:
    return tf.cond(condition, lambda: if_true(*inputs), lambda: if_false(*inputs))


def _sums_for_xla(rows: Rows, entry: Any) -> Any:
    """The sum of `entry` of each row in float64, as XLA adds up fastest on a CPU.

    It adds up to 32 rows with vectors, on all cores; more rows, or what is in a row,
    with several kernels and a copy. But for `abs` it would merge the steps again.
    """
    wide = [tf.cast(group, "float64") for group in rows.groups]
    parts = [tf.reduce_sum(entry(x), 1) for x in wide[: rows.stacks]]
    alike: dict[int, list[Any]] = {}
    for i, x in enumerate(wide[rows.stacks :]):
        if None in x.shape:  # sparse rows, whose number is not known yet
            columns = tf.reshape(tf.reduce_sum(entry(x)), (1,))
        else:
            columns = _sum_of_32_rows(entry(tf.reshape(x, (-1,))))
        if columns.shape[0] > SMALL:
            columns = tf.reduce_sum(tf.abs(columns), keepdims=True)
        alike.setdefault(columns.shape[0], []).append((i, columns))
    order = [i for group in alike.values() for i, _ in group]
    sums = [
        tf.reduce_sum(tf.abs(tf.stack([columns for _, columns in group])), 1)
        for group in alike.values()
    ]
    if sums:
        parts.append(tf.gather(tf.concat(sums, 0), np.argsort(order)))
    return tf.concat(parts, 0)


def _sum_of_32_rows(x: Any) -> Any:
    rest = x.shape[0] % 32
    sums = tf.reduce_sum(tf.reshape(x[rest:], (32, -1)), 0)
    return tf.concat([sums, x[:rest]], 0) if rest else sums


# The update.


def summed_over_replicas(sum_over_replicas: Any, gradients: Any, variables: Any) -> Any:
    """The gradients of the whole batch."""
    pairs = sum_over_replicas(list(zip(gradients, variables)))
    return [gradient for gradient, _ in pairs]


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
    if base not in KERNELS or (settings.get("amsgrad") and under_xla()):
        return list(range(len(variables)))
    mine = [i for i, (g, v) in enumerate(zip(gradients, variables)) if _fits(g, v)]
    if not mine:
        return list(range(len(variables)))
    kernel = functools.cache(lambda dtype: KERNELS[base](settings, step, dtype))
    rates = rate if isinstance(rate, list) else [rate] * len(variables)
    grads, parts = [gradients[i] for i in mine], [factors[i] for i in mine]
    if base in FOLDED and not tf.executing_eagerly() and not under_xla():
        grads, parts, folded = _folded(FOLDED[base], grads, parts, rates[0])
    else:
        folded = [None] * len(mine)
    grads = [g if f is None else times(g, f) for g, f in zip(grads, parts)]

    def apply(
        gradient: Any, variable: Any, rate: Any, factor: Any, *state: Any
    ) -> None:
        dtype = variable.dtype.base_dtype
        handles = [v.handle for v in (variable, *state)]
        kernel(dtype)(handles, gradient, tf.cast(rate, dtype), factor)

    each(
        apply,
        grads,
        [variables[i] for i in mine],
        [rates[i] for i in mine],
        folded,
        *([kind[i].value for i in mine] for kind in states),
    )
    return [i for i in range(len(variables)) if i not in set(mine)]


def _fits(gradient: Any, variable: Any) -> bool:
    """Whether a kernel takes these. Halves are for the plain path, with its epsilon."""
    return (
        not is_sparse(gradient)
        and gradient.dtype in (tf.float32, tf.float64)
        and gradient.dtype.name == keras.backend.standardize_dtype(variable.dtype)
    )


def each(
    step: Any,
    gradients: Any,
    variables: Any,
    rates: Any,
    *others: Any,
) -> None:
    """See `common`; `others` are given to the step, too. On replicas, as Keras does."""
    values = [v.value if isinstance(v, keras.Variable) else v for v in variables]

    def first(variable: Any, gradient: Any, *rest: Any) -> None:
        step(gradient, variable, *rest)

    def all_of_them(strategy: Any, arguments: Any) -> None:
        for variable, *rest in arguments:
            strategy.extended.update(variable, first, args=tuple(rest), group=False)

    tf.__internal__.distribute.interim.maybe_merge_call(
        all_of_them,
        tf.distribute.get_strategy(),
        list(zip(values, gradients, rates, *others)),
    )


def _folded(
    limits: tuple[float, float], gradients: Any, factors: Any, rate: Any
) -> tuple[list[Any], list[Any], list[Any]]:
    """Leaves factors of large gradients to the kernel, which spares copies of them.

    Only those of a block that is 0 or was dropped, or where something is out of range,
    are scaled after all. Gradients, factors to scale them by, and those for the kernel.
    """
    large = [
        i
        for i, (g, f) in enumerate(zip(gradients, factors))
        if f is not None and g.dtype == f.dtype and g.shape.num_elements() > LARGE
    ]
    folded: list[Any] = [None] * len(factors)
    if not large:
        return gradients, factors, folded
    found = tf.stack([factors[i] for i in large])
    low, high = (tf.constant(limit, found.dtype) for limit in limits)
    rates = tf.cast(rate, found.dtype) * found
    fits = tf.math.is_finite(rates) & (abs(rates) >= tiny(rates.dtype.name))
    folds = fits & (found >= low) & (found <= high)

    def scaled(folds: Any, factors: Any, gradients: Any) -> list[Any]:
        scale = _traced_times(found.dtype)
        each_of_them = zip(gradients, tf.unstack(factors), tf.unstack(folds))
        return [tf.ensure_shape(scale(g, *rest), g.shape) for g, *rest in each_of_them]

    def untouched(folds: Any, factors: Any, gradients: Any) -> list[Any]:
        return gradients

    large_ones = [gradients[i] for i in large]
    all_fold = tf.reduce_all(folds)
    result = graph_if(all_fold, untouched, scaled, folds, found, large_ones)
    for_kernel = tf.unstack(tf.where(folds, found, tf.ones_like(found)))
    gradients, factors = list(gradients), list(factors)
    for i, gradient, factor in zip(large, result, for_kernel):
        gradients[i], factors[i], folded[i] = gradient, None, factor
    return gradients, factors, folded


@functools.cache
def _traced_times(dtype: Any) -> Any:
    """`times`, unless the factor is folded; traced once for gradients of any shape."""

    def scale(gradient: Any, factor: Any, folds: Any) -> Any:
        return tf.cond(folds, lambda: gradient, lambda: times(gradient, factor))

    shapes: Any = [(None, dtype), ([], dtype), ([], tf.bool)]
    signature = [tf.TensorSpec(*shape) for shape in shapes]
    return tf.function(scale, input_signature=signature, autograph=False)


# Which kernels take a factor instead of a scaled gradient, and between which limits:
# it is squared for the last two, as the gradient is.
FOLDED = {"SGD": (1e-37, 1e37), "Adagrad": (1e-6, 1e6), "RMSprop": (1e-6, 1e6)}

# Kernels: of a base optimizer's settings and the number of this update, what updates a
# variable. `handles` are those of the variable and of its state, in Keras's order.


def _sgd(settings: Any, step: Any, dtype: Any) -> Any:
    momentum = tf.constant(settings["momentum"], dtype)

    def apply(handles: Any, gradient: Any, rate: Any, factor: Any) -> None:
        rate = _product(rate, factor)
        if len(handles) == 1:
            tf.raw_ops.ResourceApplyGradientDescent(
                var=handles[0], alpha=rate, delta=gradient
            )
        else:
            tf.raw_ops.ResourceApplyKerasMomentum(
                var=handles[0],
                accum=handles[1],
                lr=rate,
                grad=gradient,
                momentum=momentum,
                use_nesterov=settings["nesterov"],
            )

    return apply


def _adam(settings: Any, step: Any, dtype: Any) -> Any:
    names = ("beta_1", "beta_2", "epsilon")
    beta_1, beta_2, epsilon = (tf.constant(settings[name], dtype) for name in names)
    step = tf.cast(step, dtype)
    shared = {
        "beta1_power": tf.pow(beta_1, step),
        "beta2_power": tf.pow(beta_2, step),
        "beta1": beta_1,
        "beta2": beta_2,
        "epsilon": epsilon,
    }

    def apply(handles: Any, gradient: Any, rate: Any, factor: Any) -> None:
        of_variable = dict(zip(("var", "m", "v", "vhat"), handles))
        kernel = (
            tf.raw_ops.ResourceApplyAdamWithAmsgrad
            if settings["amsgrad"]
            else tf.raw_ops.ResourceApplyAdam
        )
        kernel(**of_variable, grad=gradient, lr=rate, **shared)

    return apply


def _adagrad_bng(settings: Any, step: Any, dtype: Any) -> Any:
    delta = tf.constant(settings["delta"], dtype)

    def apply(handles: Any, gradient: Any, rate: Any, factor: Any) -> None:
        tf.raw_ops.ResourceApplyAdagradV2(
            var=handles[0], accum=handles[1], lr=rate, epsilon=delta, grad=gradient
        )

    return apply


def _adagrad(settings: Any, step: Any, dtype: Any) -> Any:
    epsilon = tf.constant(settings["epsilon"], dtype)

    def apply(handles: Any, gradient: Any, rate: Any, factor: Any) -> None:
        variable, accumulator = handles
        _add(accumulator, _product(factor, factor), tf.square(gradient))
        total = tf.raw_ops.ReadVariableOp(resource=accumulator, dtype=dtype)
        _add(
            variable, -_product(rate, factor), gradient * tf.math.rsqrt(total + epsilon)
        )

    return apply


def _rmsprop(settings: Any, step: Any, dtype: Any) -> Any:
    names = ("rho", "momentum", "epsilon")
    rho, momentum, epsilon = (tf.constant(settings[name], dtype) for name in names)

    def apply(handles: Any, gradient: Any, rate: Any, factor: Any) -> None:
        if settings["momentum"] > 0:
            gradient = gradient if factor is None else factor * gradient
            of_variable = dict(zip(("var", "ms", "mom", "mg"), handles))
            kernel = (
                tf.raw_ops.ResourceApplyCenteredRMSProp
                if settings["centered"]
                else tf.raw_ops.ResourceApplyRMSProp
            )
            shared = {"rho": rho, "momentum": momentum, "epsilon": epsilon}
            kernel(**of_variable, grad=gradient, lr=rate, **shared)
            return
        variable, velocity, *means = handles
        squares = _mean(velocity, rho, tf.square(gradient), _product(factor, factor))
        denominator = squares + epsilon
        for mean in means:
            denominator -= tf.square(_mean(mean, rho, gradient, factor))
        step = gradient * tf.math.rsqrt(denominator)
        _add(variable, -_product(rate, factor), step)

    return apply


def _product(a: Any, b: Any) -> Any:
    """Of two numbers, of which one may be None, for 1."""
    return a if b is None else b if a is None else a * b


def _add(variable: Any, factor: Any, delta: Any) -> None:
    """`variable += factor * delta` in one pass."""
    factor = tf.cast(1.0 if factor is None else factor, delta.dtype)
    tf.raw_ops.ResourceApplyGradientDescent(var=variable, alpha=-factor, delta=delta)


def _mean(variable: Any, rho: Any, new: Any, factor: Any) -> Any:
    """`variable = rho * variable + (1 - rho) * factor * new`, and its value."""
    old = tf.raw_ops.ReadVariableOp(resource=variable, dtype=new.dtype)
    tf.raw_ops.AssignVariableOp(resource=variable, value=rho * old)
    _add(variable, _product(1 - rho, factor), new)
    return tf.raw_ops.ReadVariableOp(resource=variable, dtype=new.dtype)


KERNELS: dict[str, Any] = {
    "SGD": _sgd,
    "Adam": _adam,
    "Adagrad": _adagrad,
    "RMSprop": _rmsprop,
    "AdagradBNG": _adagrad_bng,
}


def counts_here(counter: Any) -> bool:
    """See `common`. A counter built outside of the strategy's scope is one for all."""
    replica = tf.distribute.get_replica_context()
    if replica is None or replica.num_replicas_in_sync == 1:
        return True
    if isinstance(counter.value, tf.distribute.DistributedValues):
        return True
    number = replica.replica_id_in_sync_group
    if tf.is_tensor(number):
        number = tf.get_static_value(number)  # None on a TPU: it is not known yet
    return number in (None, 0)


# A step called eagerly.


def is_eager() -> bool:
    """See `common`. With a strategy, `merge_call` cannot be in a function."""
    return tf.executing_eagerly() and not tf.distribute.has_strategy()


def compiled(function: Any, with_xla: bool) -> Any:
    """A function as one graph, traced once for all that it is called with."""
    return tf.function(
        function, jit_compile=with_xla or None, reduce_retracing=True, autograph=False
    )


def as_input(number: Any) -> Any:
    """A number as something that a compiled function is not traced again for."""
    return number if tf.is_tensor(number) else tf.constant(np.asarray(number))


def called_in_python(function: Any, vectors: list[Any]) -> Any:
    """Within a graph: a vector like the first, from Python, at each step."""
    first = vectors[0]
    return tf.ensure_shape(tf.py_function(function, vectors, first.dtype), first.shape)


def is_first_process() -> bool:
    """See `common`. By `TF_CONFIG`: the chief, or the first worker."""
    resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver()
    jobs = resolver.cluster_spec().jobs
    first = "chief" if "chief" in jobs else "worker"
    return not jobs or (resolver.task_type == first and not resolver.task_id)


# What the tools need, to look into a step.


def strategy_of(variable: Any) -> Any:
    """See `common`."""
    of_variable = getattr(variable.value, "distribute_strategy", None)
    return of_variable or tf.distribute.get_strategy()


def record_slots(shapes: Sequence[Any], strategy: Any) -> list[Any] | None:
    """See `common`. Made outside of the function that is being traced."""
    inside = tf.distribute.has_strategy() and tf.distribute.get_replica_context()
    scope = contextlib.nullcontext() if inside else strategy.scope()
    with tf.init_scope(), scope:
        return [
            keras.Variable(
                np.full(shape, -1),
                trainable=False,
                dtype=dtype,
                aggregation="only_first_replica",
            )
            for shape, dtype in shapes
        ]


def reader(variable: Any) -> tuple[Callable[[], np.ndarray], Callable[[], Any]]:
    """Reads a variable, in a quarter of the time of `variable.numpy`; sets it to -1."""
    value = getattr(variable.value, "values", [variable.value])[0]  # of replicas
    with tf.init_scope():  # a trace may be on its way
        empty = tf.fill(value.shape, tf.constant(-1, value.dtype))
    read, assign = tf.raw_ops.ReadVariableOp, tf.raw_ops.AssignVariableOp
    return (
        lambda: read(resource=value.handle, dtype=value.dtype).numpy(),
        lambda: assign(resource=value.handle, value=empty),
    )


def is_known(tensor: Any) -> bool:
    """See `common`."""
    return is_eager()


def send(
    receive: Callable[[Any, Any], None], number: Any, due: Any, rows: Callable[[], Any]
) -> None:
    """See `common`."""
    if tf.distribute.has_strategy():  # all replicas have found the same
        replica = tf.distribute.get_replica_context().replica_id_in_sync_group
        due = tf.logical_and(due, tf.equal(replica, 0))
    if tf.executing_eagerly():
        return common.send(receive, number, due, rows)

    def received(*found: Any) -> np.int64:
        receive(*found)
        return np.int64(0)

    def send_now() -> Any:
        return tf.numpy_function(received, [number, rows()], tf.int64)

    send_now() if due is True else tf.cond(
        due, send_now, lambda: tf.constant(0, tf.int64)
    )


def event_writers() -> Callable[[Any], tuple[Any, Any, Any]]:
    """See `common`. A file of events is one of records, which are written faster."""
    return _event_writer


def _event_writer(log_dir: Any) -> tuple[Any, Any, Any]:
    log_dir.mkdir(parents=True, exist_ok=True)
    name = f"events.out.tfevents.{time.time():.6f}.{socket.gethostname()}"
    file = tf.io.TFRecordWriter(str(log_dir / name))
    new_event = tf.compat.v1.Event

    def write(event: Any) -> None:
        file.write(event.SerializeToString())

    write(new_event(wall_time=time.time(), file_version="brain.Event:2"))
    return new_event, write, file.flush


def keeper(variable: Any) -> Callable[[], Any]:
    """See `common`."""
    parts = [(part, part.numpy()) for part in parts_of(variable.value)]
    return lambda: [part.assign(value) for part, value in parts]


def parts_of(array: Any) -> list[Any]:
    """See `common`."""
    is_dealt_out = isinstance(array, tf.distribute.DistributedValues)
    return list(array.values) if is_dealt_out else [array]
