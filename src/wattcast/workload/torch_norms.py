"""ATen calls over rows and windows -> operators: softmax, norms, pooling."""

from __future__ import annotations

from math import prod

from wattcast.workload.graph import Elementwise, LayerNorm, Layout, Operator, RmsNorm, Softmax
from wattcast.workload.pointwise import elementwise
from wattcast.workload.strides import contiguous, layout_of
from wattcast.workload.symbolic import Tensor
from wattcast.workload.torch_call import Call


def softmax(call: Call) -> list[Operator]:
    """Over one dimension, and its gradient."""
    back = "backward" in call.name
    x = call.inputs[0]
    axis = next(v for v in call.args if isinstance(v, int) and not isinstance(v, bool))
    dim = x.shape[axis] if x.shape else 1
    out = None if call.out.dtype is x.dtype else call.out.dtype
    return [*_row_major(x), Softmax(max(x.numel // dim, 1), dim, dtype=x.dtype, out_dtype=out, backward=back)]


def layer_norm(call: Call) -> list[Operator]:
    """Over the last dimensions, by mean and variance or by mean square alone."""
    back = "backward" in call.name
    x = call.inputs[1] if back else call.inputs[0]
    shape = next(v for v in call.args if isinstance(v, (list, tuple)) and v and isinstance(v[0], int))
    dim = prod(shape)
    kind = RmsNorm if "rms" in call.name else LayerNorm
    return [*_row_major(x), kind(x.numel // dim, dim, dtype=x.dtype, backward=back)]


def _row_major(x: Tensor) -> list[Operator]:
    """Kernels over rows copy an input that does not lie in rows; PyTorch does so inside the call."""
    if x.is_contiguous:
        return []
    rows = Tensor(x.tape, x.shape, contiguous(x.shape), x.dtype, x.storage)
    return [elementwise("copy", (x,), rows, x.dtype, layout_of(x.shape, rows.strides, [(x.shape, x.strides)]))]


def group_norm(call: Call) -> list[Operator]:
    """Each group of channels of each picture is a row."""
    back = "backward" in call.name
    x = call.inputs[1] if back else call.inputs[0]
    numbers = [v for v in call.args if isinstance(v, int) and not isinstance(v, bool)]
    batch, groups = numbers[0], numbers[3]
    rows = batch * groups
    return [*_row_major(x), LayerNorm(rows, x.numel // rows, dtype=x.dtype, backward=back)]


def batch_norm(call: Call) -> list[Operator]:
    """Of each channel over all pictures."""
    back = "backward" in call.name
    x = call.inputs[1] if back else call.inputs[0]
    last = len(x.shape) > 2 and x.strides[1] == 1 != x.shape[1]
    layout = Layout.TRANSPOSED if last else Layout.CONTIGUOUS
    training = "no_training" not in call.name and True in call.args
    function = "batchnorm_grad" if back else "batchnorm_train" if training else "batchnorm"
    read = 4 * call.inputs[0].byte if back else None
    pixels = prod(x.shape[2:])
    return [Elementwise(function, x.numel, dtype=x.dtype, layout=layout, read=read, rows=x.shape[1], run=pixels)]


def pool(call: Call) -> list[Operator]:
    """The largest or the mean of windows."""
    if "backward" in call.name:
        grad = call.inputs[0]
        read = grad.byte + sum(t.byte for t in call.inputs[2:])
        planes = prod(call.out.shape[:-2])
        return [Elementwise("pool_grad", call.out.numel, dtype=grad.dtype, read=read, rows=planes)]
    x = call.inputs[0]
    write = sum(t.byte for t in call.outs)
    return [Elementwise("pool", x.numel, dtype=x.dtype, write=write, rows=prod(x.shape[:-2]))]
