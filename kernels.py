"""Triton kernels for CUDA GPUs: a SwiGLU with its residual and its norm as one kernel.

mix() stands in for model.mix, and computes the same up to rounding. The hidden activations, many times the
size of x, stay on chip in the forward pass; the backward pass computes them again, with torch. Only a
compiler and Triton's interpreter (TRITON_INTERPRET=1, on the CPU) have run this code; no GPU has.

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

# ---------------------------------------------------------------------------------------------------------
# The kernels

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
def positions_kernel(x, gate_up, down, y, scale, L: tl.constexpr, D: tl.constexpr, H: tl.constexpr,
                     BL: tl.constexpr, BD: tl.constexpr, BH: tl.constexpr):
    """Writes y = norm(x + SwiGLU over positions) for BD channels of a sequence, and the norm's scale [B, D].

    x, y: [B, L, D]; gate_up: [2 H, BL] and down: [BL, H], padded with zeros.
    """
    b = tl.program_id(0).to(tl.int64)
    row = tl.arange(0, BL)
    d = tl.program_id(1) * BD + tl.arange(0, BD)
    h = tl.arange(0, BH)
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
    d = tl.arange(0, BD)
    k = tl.arange(0, BK)
    h = tl.arange(0, BH)
    total = tile(x, n, d, N, D).to(tl.float32)
    for first in range(0, H, BH):
        gate = tl.zeros((BN, BH), tl.float32)
        up = tl.zeros((BN, BH), tl.float32)
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


# ---------------------------------------------------------------------------------------------------------
# The operators, which torch.compile keeps as they are. With these sizes of tiles no register spills:
# tests/compile_kernels.py prints what a compiler makes of them.

def has_wgmma():
    """Returns True if the GPU has Hopper's matmuls: larger tiles then spill no registers."""
    return torch.cuda.is_available() and torch.cuda.get_device_capability() >= (9, 0)


@torch.library.custom_op("trm::positions", mutates_args=())
def positions(x: Tensor, gate_up: Tensor, down: Tensor) -> tuple[Tensor, Tensor]:
    """Returns norm(x + SwiGLU(x)) over the positions of x [B, L, D], and the norm's scale [B, D]."""
    B, L, D = x.shape
    H = down.shape[1]
    # rows of 97 numbers would not be aligned
    BL = max(16, triton.next_power_of_2(L))
    gate_up = F.pad(gate_up, (0, BL - L))
    down = F.pad(down, (0, 0, 0, BL - L))

    y = torch.empty_like(x)
    scale = x.new_empty((B, D), dtype=torch.float32)
    BD, BH = (128, 32) if has_wgmma() else (64, 64)
    positions_kernel[B, triton.cdiv(D, BD)](
        x, gate_up, down, y, scale, L, D, H, BL, BD, BH, num_warps=8, num_stages=2)
    return y, scale


@torch.library.custom_op("trm::channels", mutates_args=())
def channels(x: Tensor, gate_up: Tensor, down: Tensor) -> tuple[Tensor, Tensor]:
    """Returns norm(x + SwiGLU(x)) over the channels of x [N, D], and the norm's scale [N]."""
    N, D = x.shape
    H = down.shape[1]
    y = torch.empty_like(x)
    scale = x.new_empty(N, dtype=torch.float32)
    BD = triton.next_power_of_2(D)
    BK, BH = (64, 64) if has_wgmma() else (128, 16)
    channels_kernel[triton.cdiv(N, 64),](
        x, gate_up, down, y, scale, N, D, H, 64, BD, BK, BH, num_warps=8, num_stages=2)
    return y, scale


def save(ctx, inputs, output):
    """Keeps what the backward pass needs."""
    ctx.save_for_backward(*inputs, *output)


def gradients(ctx, dy, _):
    """Returns the gradients of x, gate_up and down of either operator."""
    x, gate_up, down, y, scale = ctx.saved_tensors
    across = x.ndim == 3
    if across:  # positions last, and a row for each channel
        B, L, D = x.shape
        x, y, dy = (t.mT.reshape(-1, L) for t in (x, y, dy))

    # backward through the norm
    slope = (dy.float() * y.float()).mean(1, keepdim=True)
    dr = (scale.view(-1, 1) * (dy.float() - y.float() * slope)).to(x.dtype)

    # backward through the SwiGLU, whose hidden channels are computed again
    gate, up = (x @ gate_up.T).float().chunk(2, dim=1)
    sigmoid = torch.sigmoid(gate)
    hidden = (gate * sigmoid * up).to(x.dtype)
    dhidden = (dr @ down).float()
    dgate = dhidden * up * sigmoid * (1 + gate * (1 - sigmoid))
    dup = dhidden * gate * sigmoid
    dgate_up = torch.cat((dgate, dup), dim=1).to(x.dtype)

    dx = dr + dgate_up @ gate_up
    if across:
        dx = dx.view(B, D, L).mT
    return dx, dgate_up.T @ x, dr.T @ hidden


# what torch.compile must know of the operators: the shapes of their results, and their gradients
positions.register_fake(lambda x, gate_up, down: (
    torch.empty_like(x), x.new_empty((len(x), x.shape[2]), dtype=torch.float32)))
channels.register_fake(lambda x, gate_up, down: (
    torch.empty_like(x), x.new_empty(len(x), dtype=torch.float32)))
positions.register_autograd(gradients, setup_context=save)
channels.register_autograd(gradients, setup_context=save)


@register_flop_formula([torch.ops.trm.positions, torch.ops.trm.channels])
def flops(x, gate_up, down, out_shape=None, **_):
    """Counts the FLOP of the three matmuls of a forward pass."""
    return 2 * 3 * torch.Size(x).numel() * down[1]


def mix(x, mlp, across=False):
    """Computes model.mix by the kernels. Sizes that they do not fit go through model.mix."""
    gate_up = mlp.gate_up_proj.weight
    down = mlp.down_proj.weight
    D = x.shape[2]
    if down.shape[1] % 64 or (x.shape[1] > 128 if across else D > 512):
        return model.mix(x, mlp, across)
    if across:
        return positions(x.contiguous(), gate_up, down)[0]
    return channels(x.reshape(-1, D), gate_up, down)[0].view(x.shape)
