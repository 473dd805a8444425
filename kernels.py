"""Triton kernels for CUDA GPUs: a SwiGLU with its residual and its norm as one kernel.

mix() stands in for model.mix, and computes the same up to rounding. The hidden activations, many times the
size of x, stay on chip in the forward pass; the backward pass computes them again. Only a compiler and
Triton's interpreter (TRITON_INTERPRET=1, on the CPU) have run this code; no GPU has.

Letters as in model.py: B sequences, L positions, D channels; H hidden channels of a SwiGLU; N = B * L rows.
BL, BD, BH and BN are the sizes of tiles, powers of 2. A product is summed in float32.
"""
import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

import model


@triton.jit
def tile(pointer, rows, columns, height, width):
    """Loads rows and columns of a row-major matrix [height, width]; zeros outside of it."""
    inside = (rows[:, None] < height) & (columns[None, :] < width)
    return tl.load(pointer + rows[:, None] * width + columns[None, :], mask=inside, other=0.0)


@triton.jit
def store(pointer, rows, columns, height, width, value):
    """Writes value to rows and columns of a row-major matrix [height, width], and nothing outside of it."""
    inside = (rows[:, None] < height) & (columns[None, :] < width)
    value = value.to(pointer.dtype.element_ty)
    tl.store(pointer + rows[:, None] * width + columns[None, :], value, mask=inside)


@triton.jit
def swiglu_slopes(gate, up, grad):
    """Returns the gradients of gate and up, where grad is the gradient of silu(gate) * up."""
    sigmoid = tl.sigmoid(gate)
    return grad * up * sigmoid * (1 + gate * (1 - sigmoid)), grad * gate * sigmoid


@triton.jit
def positions_kernel(x, gate_up, down, y, scale, L: tl.constexpr, D: tl.constexpr, H: tl.constexpr,
                     BL: tl.constexpr, BD: tl.constexpr, BH: tl.constexpr):
    """Writes y = norm(x + SwiGLU over positions) for BD channels of a sequence, and the norm's scale [B, D].

    x, y: [B, L, D]; gate_up: [2 H, BL] and down: [BL, H], padded with zeros.
    """
    b = tl.program_id(0).to(tl.int64)
    row, d, h = tl.arange(0, BL), tl.program_id(1) * BD + tl.arange(0, BD), tl.arange(0, BH)
    inputs = tile(x + b * L * D, row, d, L, D)
    total = inputs.to(tl.float32)
    # BH hidden channels at a time: they are computed, used and forgotten on the chip
    for first in range(0, H, BH):
        gate = tl.dot(tile(gate_up, first + h, row, 2 * H, BL), inputs)
        up = tl.dot(tile(gate_up, H + first + h, row, 2 * H, BL), inputs)
        hidden = (gate * tl.sigmoid(gate) * up).to(inputs.dtype)
        total = tl.dot(tile(down, row, first + h, BL, H), hidden, total)
    # the root mean square over the positions, as in model.py
    norm = tl.rsqrt(tl.sum(total * total, 0) / L + 1e-5)
    store(y + b * L * D, row, d, L, D, total * norm[None, :])
    tl.store(scale + b * D + d, norm, mask=d < D)


@triton.jit
def channels_kernel(x, gate_up, down, y, scale, N, D: tl.constexpr, H: tl.constexpr,
                    BN: tl.constexpr, BD: tl.constexpr, BK: tl.constexpr, BH: tl.constexpr):
    """Writes y = norm(x + SwiGLU over channels) for BN rows, and the norm's scale [N].

    x, y: [N, D]; gate_up: [2 H, D]; down: [D, H]. BD: D or more; BK: how many channels are summed at a time.
    """
    n = tl.program_id(0).to(tl.int64) * BN + tl.arange(0, BN)
    d, k, h = tl.arange(0, BD), tl.arange(0, BK), tl.arange(0, BH)
    total = tile(x, n, d, N, D).to(tl.float32)
    for first in range(0, H, BH):
        gate, up = tl.zeros((BN, BH), tl.float32), tl.zeros((BN, BH), tl.float32)
        # a whole row of x does not stay on the chip beside the sum: BK channels of it are read at a time
        for depth in range(0, D, BK):
            inputs = tile(x, n, depth + k, N, D)
            gate = tl.dot(inputs, tile(gate_up, first + h, depth + k, 2 * H, D).T, gate)
            up = tl.dot(inputs, tile(gate_up, H + first + h, depth + k, 2 * H, D).T, up)
        hidden = (gate * tl.sigmoid(gate) * up).to(x.dtype.element_ty)
        total = tl.dot(hidden, tile(down, d, first + h, D, H).T, total)
    norm = tl.rsqrt(tl.sum(total * total, 1) / D + 1e-5)
    store(y, n, d, N, D, total * norm[:, None])
    tl.store(scale + n, norm, mask=n < N)


@triton.jit
def positions_inputs_kernel(x, gate_up, down, y, scale, dy, dx, dr, L: tl.constexpr, D: tl.constexpr,
                            H: tl.constexpr, BL: tl.constexpr, BD: tl.constexpr, BH: tl.constexpr):
    """Writes positions_kernel's gradients: dx for x, and dr for the norm's input, both [B, L, D]."""
    b = tl.program_id(0).to(tl.int64)
    row, d, h = tl.arange(0, BL), tl.program_id(1) * BD + tl.arange(0, BD), tl.arange(0, BH)
    inputs = tile(x + b * L * D, row, d, L, D)
    output = tile(y + b * L * D, row, d, L, D).to(tl.float32)
    total = tile(dy + b * L * D, row, d, L, D).to(tl.float32)
    # backward through the norm, whose output y is at hand
    total -= output * (tl.sum(total * output, 0) / L)[None, :]
    total *= tl.load(scale + b * D + d, mask=d < D, other=0.0)[None, :]
    grad = total.to(inputs.dtype)
    store(dr + b * L * D, row, d, L, D, grad)
    # backward through the SwiGLU, whose hidden channels are computed again; total begins with the residual's
    for first in range(0, H, BH):
        gate_weight = tile(gate_up, first + h, row, 2 * H, BL)
        up_weight = tile(gate_up, H + first + h, row, 2 * H, BL)
        hidden_grad = tl.dot(tile(down, row, first + h, BL, H).T, grad)
        gate, up = swiglu_slopes(tl.dot(gate_weight, inputs), tl.dot(up_weight, inputs), hidden_grad)
        total = tl.dot(gate_weight.T, gate.to(inputs.dtype), total)
        total = tl.dot(up_weight.T, up.to(inputs.dtype), total)
    store(dx + b * L * D, row, d, L, D, total)


@triton.jit
def positions_weights_kernel(x, gate_up, down, dr, sums, B, COUNT: tl.constexpr, L: tl.constexpr,
                             D: tl.constexpr, H: tl.constexpr, BL: tl.constexpr, BD: tl.constexpr,
                             BH: tl.constexpr):
    """Writes positions_kernel's gradients for BH rows of gate_up and down^T [3 H, BL].

    Program (i, p) of (H / BH, P) sums over the p-th COUNT tiles of BD channels: sums is [P, 3 H, BL].
    """
    h, row, d = tl.program_id(0) * BH + tl.arange(0, BH), tl.arange(0, BL), tl.arange(0, BD)
    # the weights of these hidden channels stay on the chip, and so do the sums
    gate_weight, up_weight = tile(gate_up, h, row, 2 * H, BL), tile(gate_up, H + h, row, 2 * H, BL)
    down_weight = tile(down, row, h, BL, H).T
    gate_sum, up_sum = tl.zeros((BH, BL), tl.float32), tl.zeros((BH, BL), tl.float32)
    down_sum = tl.zeros((BH, BL), tl.float32)
    tiles: tl.constexpr = (D + BD - 1) // BD  # of a sequence
    for i in range(COUNT):
        i += tl.program_id(1) * COUNT
        b, columns = i // tiles, i % tiles * BD + d
        length = tl.where(b < B, L, 0)  # no rows past the last sequence
        inputs = tile(x + b.to(tl.int64) * L * D, row, columns, length, D)
        grad = tile(dr + b.to(tl.int64) * L * D, row, columns, length, D)
        # the hidden channels again, and the gradients of gate and up
        gate, up = tl.dot(gate_weight, inputs), tl.dot(up_weight, inputs)
        hidden = (gate * tl.sigmoid(gate) * up).to(inputs.dtype)
        gate, up = swiglu_slopes(gate, up, tl.dot(down_weight, grad))
        gate_sum = tl.dot(gate.to(inputs.dtype), inputs.T, gate_sum)
        up_sum = tl.dot(up.to(inputs.dtype), inputs.T, up_sum)
        down_sum = tl.dot(hidden, grad.T, down_sum)
    sums += tl.program_id(1) * 3 * H * BL
    store(sums, h, row, 3 * H, BL, gate_sum)
    store(sums, H + h, row, 3 * H, BL, up_sum)
    store(sums, 2 * H + h, row, 3 * H, BL, down_sum)


def has_wgmma():
    """Returns True if the GPU has Hopper's matmuls: larger tiles then spill no registers."""
    return torch.cuda.is_available() and torch.cuda.get_device_capability() >= (9, 0)


# The operators, which torch.compile keeps as they are. With these sizes of tiles no register spills:
# tests/compile_kernels.py prints what a compiler makes of them.

@torch.library.custom_op("trm::positions", mutates_args=())
def positions(x: Tensor, gate_up: Tensor, down: Tensor) -> tuple[Tensor, Tensor]:
    """Returns y and scale of positions_kernel."""
    (B, L, D), (BL, H) = x.shape, down.shape
    y, scale = torch.empty_like(x), x.new_empty((B, D), dtype=torch.float32)
    BD, BH = (128, 32) if has_wgmma() else (64, 64)
    positions_kernel[B, triton.cdiv(D, BD)](
        x, gate_up, down, y, scale, L, D, H, BL, BD, BH, num_warps=8, num_stages=2)
    return y, scale


@torch.library.custom_op("trm::positions_backward", mutates_args=())
def positions_backward(x: Tensor, gate_up: Tensor, down: Tensor, y: Tensor, scale: Tensor,
                       dy: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the gradient of x, and one [3 H, BL] for gate_up and down^T, float32."""
    (B, L, D), (BL, H), parts = x.shape, down.shape, min(32, len(x))
    # the weights' gradients are summed in up to 32 parts, so that enough programs run at a time
    dx, dr = torch.empty_like(x), torch.empty_like(x)
    sums = x.new_empty((parts, 3 * H, BL), dtype=torch.float32)
    positions_inputs_kernel[B, triton.cdiv(D, 64)](
        x, gate_up, down, y, scale, dy, dx, dr, L, D, H, BL, 64, 32, num_warps=8, num_stages=1)
    count = triton.cdiv(B * triton.cdiv(D, 32), parts)
    positions_weights_kernel[H // 64, parts](
        x, gate_up, down, dr, sums, B, count, L, D, H, BL, 32, 64, num_warps=8, num_stages=2)
    return dx, sums.sum(0)


@torch.library.custom_op("trm::channels", mutates_args=())
def channels(x: Tensor, gate_up: Tensor, down: Tensor) -> tuple[Tensor, Tensor]:
    """Returns y and scale of channels_kernel."""
    (N, D), H = x.shape, down.shape[1]
    y, scale = torch.empty_like(x), x.new_empty(N, dtype=torch.float32)
    BD, (BK, BH) = triton.next_power_of_2(D), (64, 64) if has_wgmma() else (128, 16)
    channels_kernel[triton.cdiv(N, 64),](
        x, gate_up, down, y, scale, N, D, H, 64, BD, BK, BH, num_warps=8, num_stages=2)
    return y, scale


# what torch.compile must know of them: the shapes of their results and their gradients
positions.register_fake(lambda x, gate_up, down: (
    torch.empty_like(x), x.new_empty((len(x), x.shape[2]), dtype=torch.float32)))
positions_backward.register_fake(lambda x, gate_up, down, y, scale, dy: (
    torch.empty_like(x), x.new_empty((3 * down.shape[1], len(down)), dtype=torch.float32)))
channels.register_fake(lambda x, gate_up, down: (
    torch.empty_like(x), x.new_empty(len(x), dtype=torch.float32)))


def save(ctx, inputs, output):
    """Keeps what the backward pass needs."""
    ctx.save_for_backward(*inputs, *output)


def positions_gradients(ctx, dy, _):
    """Returns the gradients of x, gate_up and down of positions()."""
    x, gate_up, down, y, scale = ctx.saved_tensors
    dx, weights = positions_backward(x, gate_up, down, y, scale, dy.contiguous())
    dgate_up, ddown = weights.split([len(gate_up), len(gate_up) // 2])
    return dx, dgate_up.to(x.dtype), ddown.T.to(x.dtype)


def channels_gradients(ctx, dy, _):
    """Returns the gradients of x, gate_up and down of channels().

    The matmuls are torch's, whose rate no kernel of ours beats.
    """
    x, gate_up, down, y, scale = ctx.saved_tensors
    # backward through the norm
    slope = (dy.float() * y.float()).mean(1, keepdim=True)
    dr = (scale.unsqueeze(1) * (dy.float() - y.float() * slope)).to(x.dtype)
    # backward through the SwiGLU, whose hidden channels are computed again
    gate, up = (x @ gate_up.T).float().chunk(2, dim=1)
    grad, sigmoid = (dr @ down).float(), torch.sigmoid(gate)
    hidden = (gate * sigmoid * up).to(x.dtype)
    slopes = grad * up * sigmoid * (1 + gate * (1 - sigmoid)), grad * gate * sigmoid
    dgate_up = torch.cat(slopes, dim=1).to(x.dtype)
    return dr + dgate_up @ gate_up, dgate_up.T @ x, dr.T @ hidden


positions.register_autograd(positions_gradients, setup_context=save)
channels.register_autograd(channels_gradients, setup_context=save)


@register_flop_formula([torch.ops.trm.positions, torch.ops.trm.positions_backward, torch.ops.trm.channels])
def flops(x, gate_up, down, *backward, out_shape=None, **_):
    """Counts the FLOP of matmuls: three forward; eleven backward, of which five repeat others."""
    numbers = x[0] * x[-1] * (x[1] if len(x) == 3 else 1)
    return 2 * numbers * down[1] * (11 if backward else 3)


def mix(x, mlp, across=False):
    """Computes model.mix by the kernels. Sizes that they do not fit go through model.mix."""
    gate_up, down, length = mlp.gate_up_proj.weight, mlp.down_proj.weight, x.shape[1]
    if down.shape[1] % 64 or (length > 128 if across else x.shape[2] > 512):
        return model.mix(x, mlp, across)
    if across:
        padding = max(16, triton.next_power_of_2(length)) - length  # rows of 97 are not aligned
        gate_up, down = F.pad(gate_up, (0, padding)), F.pad(down, (0, 0, 0, padding))
        return positions(x.contiguous(), gate_up, down)[0]
    return channels(x.reshape(-1, x.shape[2]), gate_up, down)[0].view(x.shape)
