"""What Inductor and Triton make of train.py's steps for a GPU that is not there; scripts/aot.py calls this.

torch.compile needs a driver. So a step is traced on the CPU with tensors that have no values, split into a
forward and a backward graph as torch.compile does, and moved to a pretended GPU; Inductor lowers it, Triton
compiles each kernel to machine code with its own ptxas. Nothing runs. All that is private to torch and Triton
is in this file.
"""
import contextlib
import importlib.metadata
import importlib.util
import json
import os
import re
import subprocess
import sys
import traceback
from collections import Counter
from types import SimpleNamespace

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path.insert(0, ROOT)
import configurator  # before torch: see there
import torch
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

import bench
import train
from device import one_line, open_device

TRIED = dict(torch="2.9.1", triton="3.5.1")  # other versions have other private parts
# As NVIDIA's data sheets and its programming guide state them: compute capability, multiprocessors, bytes of
# memory and its bytes/s, shared memory of a block, dense FLOP/s in 16 bits with sums in float32.
FACTS = "name capability units memory bandwidth shared peak"
CARDS = {
    "h100": ("NVIDIA H100 80GB HBM3", (9, 0), 132, 80e9, 3350e9, 232448, 989e12),
    "a100": ("NVIDIA A100-SXM4-80GB", (8, 0), 108, 80e9, 2039e9, 166912, 312e12),
    "rtx4090": ("NVIDIA GeForce RTX 4090", (8, 9), 128, 24e9, 1008e9, 101376, 165.2e12),
    "t4": ("Tesla T4", (7, 5), 40, 16e9, 320e9, 65536, 65e12),
}
CARDS = {card: SimpleNamespace(**dict(zip(FACTS.split(), facts))) for card, facts in CARDS.items()}
CONTEXT = 0.6e9  # bytes that CUDA and cuBLAS take before the first tensor, about


def untried():
    """How the installed versions differ from those that were tried, or ""."""
    found = {name: importlib.metadata.version(name).partition("+")[0]
             for name in TRIED if importlib.util.find_spec(name)}
    return "" if found == TRIED else f"installed is {found}, and this needs private parts of {TRIED}"


def compile_step(flags, path, step, name):
    """Compiles a step, train or eval, for CARDS[name]. Prints the figures as a line of JSON."""
    c, card = configurator.configure(train.__file__, flags), CARDS[name]
    if card.capability < (8, 0) and c.forward_dtype == "bfloat16":  # as device.py does
        c.forward_dtype = "float16"
    try:
        call, fixed, size = first_call(c, path, step, card)
        pretend(card)
        graphs = on_gpu(*trace(call, step == "train"))
        parts = [lower(card, *graph) for graph in graphs]
        own = own_kernels(card, graphs)
    except Exception as e:
        print(json.dumps(dict(compiled=False, fault=f"{place(e)}{type(e).__name__}: {one_line(e)}")))
        return
    faults = [*map(compile_kernel, sum((part.sources for part in parts), []))]
    faults += [f"{name}: {figures.pop('fault')}" for name, figures in own.items() if "fault" in figures]
    loops, fixed = c.global_batch_size // size, fixed + CONTEXT
    peak, kinds = max(part.peak for part in parts), sum((part.kinds for part in parts), Counter())
    sizes = [n for n in range(1, c.global_batch_size + 1) if c.global_batch_size % n == 0
             and fixed + n * peak / size <= card.memory]
    print(json.dumps(dict(
        compiled=not any(faults),
        forward_dtype=c.forward_dtype,
        kernels=len(faults),
        operations=loops * sum(part.operations for part in parts),
        launches=loops * sum(part.launches for part in parts),
        hbm_gb=loops * sum(part.bytes for part in parts) / 1e9,
        estimated_ms=loops * kinds.total(),
        kinds_ms={kind: round(loops * ms, 3) for kind, ms in kinds.most_common()},
        peak_gb=(fixed + peak) / 1e9,
        free_gb=(card.memory - fixed - peak) / 1e9,
        micro_batch_size=size,
        largest_micro_batch_size=max(sizes, default=0),
        own_kernels=own) | (dict(fault=next(filter(None, faults))) if any(faults) else {})))


def place(error):
    """The line of ours that an error is about, as "model.py:7: ", or ""."""
    calls, nodes, trace = traceback.extract_tb(error.__traceback__), [], error.__traceback__
    while trace:  # Inductor fails at a node of the graph, which knows the line that made it
        nodes += [v for v in trace.tb_frame.f_locals.values() if isinstance(v, torch.fx.Node)]
        trace = trace.tb_next
    stacks = "".join(node.meta.get("stack_trace") or "" for node in nodes)
    ours = re.findall(rf'File "{re.escape(ROOT)}/(\w+\.py)", line (\d+)', stacks)
    ours = ours or [(os.path.basename(f.filename), f.lineno) for f in calls
                    if os.path.dirname(f.filename) == ROOT]
    return f"{ours[-1][0]}:{ours[-1][1]}: " if ours else ""


# The graph.

class Called(Exception):
    """Carries the arguments of a call that was not made."""


def first_call(c, path, step, card):
    """(supervision_step with the arguments that Run gives it, bytes that the run keeps, sequences)"""
    wanted, c.compile, c.kernels = c.kernels, "off", "off"  # of the CPU
    device = open_device("cpu", c)
    device.kernels = wanted == "on" and card.capability >= (8, 0) and c.forward_dtype != "float32"
    run, next_inputs = bench.new_run(c, device, path)
    function = run.supervision_step

    def note(*args, **kwargs):
        raise Called(args, kwargs)

    run.supervision_step = note
    state = sum(t.nbytes for t in tree_leaves(run.state) if torch.is_tensor(t))
    try:
        if step == "train":
            run.train_step(run.state, next_inputs())
        else:
            run.eval_step(*bench.evaluation_of(run, path))
    except Called as e:
        args, kwargs = e.args
    weights = sum(t.nbytes for t in args[2].values())
    # Beside the state: the weights that are cast, and in training the sums of the gradients, flattened.
    fixed = state + weights + (12 * run.num_parameters if step == "train" else 0)
    return (function, args, kwargs), fixed, c.micro_batch_size or run.batch_size


def trace(call, training):
    """A call as a graph on CPU tensors without values; its arguments; their mode; its forward pass's outputs.

    With gradients of the weights if training. On the CPU, since autograd would ask a GPU for its stream.
    """
    from torch._inductor.decomposition import select_decomp_table
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.proxy_tensor import make_fx
    function, (c, model, *args), kwargs = call
    mode, outputs = FakeTensorMode(allow_non_fake_inputs=True), []
    for layer in model.modules():
        if hasattr(layer, "attend"):
            layer.attend = lambda q, k, v: torch.ops.aten._scaled_dot_product_flash_attention(q, k, v)[0]
    buffers = dict(model.named_buffers())
    tensors, structure = tree_flatten((buffers, args, kwargs))
    is_tensor = [torch.is_tensor(t) for t in tensors]
    fakes = [mode.from_tensor(t.detach()) for t in tensors if torch.is_tensor(t)]

    def joint(*flat):
        *given, tangent = flat
        given = iter(given)
        filled = [next(given) if known else t for t, known in zip(tensors, is_tensor)]
        buffers, args, kwargs = tree_unflatten(filled, structure)
        for name, t in buffers.items():
            module, _, name = name.rpartition(".")
            model.get_submodule(module)._buffers[name] = t
        leaves = {name: t.detach().requires_grad_(training) for name, t in args[0].items()}
        with torch.set_grad_enabled(training):
            loss, *others = function(c, model, leaves, *args[1:], **kwargs)
            forward = tree_leaves((loss.detach(), others))
            outputs.append(len(forward))
            return forward + list(torch.autograd.grad(loss, list(leaves.values()), tangent)
                                  if training else [])

    with mode:
        fakes.append(torch.empty(()))
    with mode, torch.no_grad():
        graph = make_fx(joint, decomposition_table=select_decomp_table(), record_stack_traces=True,
                        _allow_non_fake_inputs=True)(*fakes)
    graph.graph.eliminate_dead_code()
    return graph, fakes, mode, outputs[-1] if training else 0


def on_gpu(graph, fakes, mode, outputs):
    """[(graph, inputs, mode)] of the same on the GPU: forward and backward apart, if there are outputs."""
    from torch._functorch.partitioners import min_cut_rematerialization_partition
    from torch.fx.passes.fake_tensor_prop import FakeTensorProp
    for node in graph.graph.nodes:
        if "device" in node.kwargs:
            node.kwargs = {**node.kwargs, "device": torch.device("cuda", 0)}
    placeholders = graph.graph.find_nodes(op="placeholder")
    for i, node in enumerate(placeholders):
        last = i == len(placeholders) - 1
        node.target = node.name = "tangents_1" if last else f"primals_{i + 1}"
    graph.recompile()
    with mode:
        fakes = [torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="cuda") for t in fakes]
        FakeTensorProp(graph, mode).propagate(*fakes)
    if not outputs:
        return [(graph, fakes, mode)]
    parts = min_cut_rematerialization_partition(graph, fakes, num_fwd_outputs=outputs)
    return [(part, [node.meta["val"] for node in part.graph.find_nodes(op="placeholder")], mode)
            for part in parts]


# The compilers.

def pretend(card):
    """Answers for the card what torch and Triton would ask its driver."""
    import torch._dynamo.device_interface as interface
    import torch._dynamo.utils
    import torch._inductor.config as config
    import torch._inductor.fx_passes.post_grad as post_grad
    import torch._inductor.runtime.triton_helpers as helpers
    import torch._inductor.scheduler as scheduler
    import torch._inductor.utils as utils
    import torch._subclasses.fake_tensor as fake_tensor
    import triton
    from triton.backends.compiler import GPUTarget
    major, minor = card.capability
    properties = SimpleNamespace(
        name=card.name, major=major, minor=minor, multi_processor_count=card.units, warp_size=32,
        total_memory=int(card.memory), regs_per_multiprocessor=65536, gcnArchName="", is_integrated=False,
        max_threads_per_multi_processor={(7, 5): 1024, (8, 9): 1536}.get(card.capability, 2048), uuid="",
        shared_memory_per_block=49152, shared_memory_per_block_optin=card.shared, L2_cache_size=1 << 25,
        shared_memory_per_multiprocessor=card.shared + 1024)
    answers = dict(is_available=True, device_count=1, current_device=0, get_device_properties=properties,
                   get_device_capability=card.capability, is_initialized=True, _lazy_init=None,
                   synchronize=None, is_bf16_supported=major >= 8, set_rng_state=None,
                   get_rng_state=torch.zeros(16, dtype=torch.uint8), _exchange_device=0,
                   _maybe_exchange_device=0)
    cuda = interface.CudaInterface  # it copied functions of torch.cuda
    for name, answer in [*answers.items(), ("get_compute_capability", 10 * major + minor)]:
        for owner in (torch.cuda, cuda, cuda.Worker):
            if owner is torch.cuda or hasattr(owner, name):
                setattr(owner, name, staticmethod(lambda *_, answer=answer, **__: answer))
    torch._C._cuda_exchangeDevice = torch._C._cuda_getCurrentRawStream = lambda _: 0
    fake_tensor.init_gpu_context = lambda *_: None
    torch._dynamo.utils.preserve_rng_state = contextlib.nullcontext
    post_grad.reinplace_inplaceable_ops = lambda *_: None
    helpers.set_driver_to_gpu = lambda: None
    config.compile_threads, config.fx_graph_cache, config.use_static_cuda_launcher = 1, False, False
    for module in (utils, scheduler):
        module.get_gpu_dram_gbps = lambda: card.bandwidth / 1e9
        module.get_device_tflops = lambda dtype: card.peak / 1e12
    limits = dict(max_shared_mem=card.shared, multiprocessor_count=card.units, max_num_regs=65536,
                  warpSize=32, sm_clock_rate=10 ** 6, mem_clock_rate=10 ** 6, mem_bus_width=1024)
    triton.runtime.driver.set_active(SimpleNamespace(
        get_current_target=lambda: GPUTarget("cuda", 10 * major + minor, 32), get_current_device=lambda: 0,
        get_current_stream=lambda *_: 0, get_active_torch_device=lambda: torch.device("cuda", 0),
        get_device_capability=lambda *_: card.capability,
        utils=SimpleNamespace(get_device_properties=lambda _: limits)))


def lower(card, graph, arguments, mode):
    """What Inductor makes of a graph: its kernels, and its own count of operations, bytes, ms and memory."""
    import torch._inductor.compile_fx as compile_fx
    import torch._inductor.ir as ir
    import torch._inductor.memory as memory
    import torch._inductor.scheduler as scheduler
    from torch._inductor.graph import GraphLowering
    found = SimpleNamespace()

    class Lowered(Exception):
        """Instead of loading the program, which would ask for a GPU."""

    def keep(self):
        code, _ = self.codegen()
        nodes = [node for node in self.scheduler.nodes if not isinstance(
            node, scheduler.NopKernelSchedulerNode) and not isinstance(node.node, ir.MultiOutput)]
        costs = [(kind(node), *cost(node, card)) for node in nodes]
        freeable = memory.get_freeable_input_buf(self.scheduler.nodes, set(self.graph_inputs))
        peak = memory.estimate_peak_memory(self.scheduler.nodes, freeable, set(self.get_output_names()))[0]
        kept = sum(t.nbytes for t in arguments if torch.is_tensor(t)) - sum(
            buffer.mpi_buffer.size_free for buffer in freeable.values())
        text = getattr(code, "value", code)
        sources = re.findall(r"async_compile\.triton\('(\w+)', '''(.*?)''', device_str", text, re.S)
        found.kinds = Counter()
        for name, _, ms in costs:
            found.kinds[name] += ms
        calls = r"\n +(?:buf\d+ = )?(?:triton_\w+\.run|extern_kernels\.|torch\.ops\.)"
        found.operations, found.launches = len(nodes), len(re.findall(calls, text))
        found.bytes, found.peak = sum(size for _, size, _ in costs), peak + kept
        found.sources = [source for _, source in sources]
        raise Lowered

    GraphLowering.compile_to_module = keep
    try:
        with mode, torch._guards.tracing(torch._guards.TracingContext(mode)):
            compile_fx.compile_fx_inner(graph, arguments)
    except Exception:
        if not vars(found):
            raise
    return found


def kind(node):
    """What an operation of the program is, for people."""
    name = getattr(node.node, "python_kernel_name", None) or "pointwise and reductions"
    return re.sub(r"^(extern_kernels|torch\.ops\.\w+)\.|\.default$", "", name)


def cost(node, card):
    """(bytes, ms) of an operation, each tensor counted once."""
    import torch._inductor.ir as ir
    from torch._inductor.fx_utils import count_flops_fx
    if not isinstance(node.node, ir.FallbackKernel):
        return node.get_read_write_buffers_sizes(), node.get_estimated_runtime()
    origin = next(n for n in node.node.origins if n.target is node.node.op_overload)
    values = [n.meta["val"] for n in origin.all_input_nodes] + [origin.meta["val"]]
    size = sum(t.nbytes for t in tree_leaves(values) if torch.is_tensor(t))
    return size, 1e3 * max((count_flops_fx(origin) or 0) / card.peak, size / card.bandwidth)


def own_kernels(card, graphs):
    """Compiles what graphs use of kernels.py: {name: figures, with a "fault" where it cannot run}."""
    from triton.runtime.jit import JITFunction, MockTensor

    import kernels
    found, run = {}, JITFunction.run

    def compile_only(kernel, *args, grid, warmup, **options):
        args = [MockTensor(t.dtype, t.shape) if torch.is_tensor(t) else t for t in args]
        code = run(kernel, *args, grid=grid, warmup=True, **options)
        found[kernel.__name__] = ptxas(code.asm["ptx"]) | dict(shared=code.metadata.shared)
        if code.metadata.shared > card.shared:
            found[kernel.__name__]["fault"] = f"needs {code.metadata.shared} bytes of shared memory"

    JITFunction.run = compile_only
    for graph, _, mode in graphs:
        for node in graph.graph.nodes:
            if getattr(node.target, "namespace", "") == "trm":
                operator = getattr(kernels, node.target.name().partition("::")[2])
                with mode:
                    operator._init_fn(*(n.meta["val"] for n in node.args))
    JITFunction.run = run
    return found


def ptxas(text):
    """{"registers": of a thread, "spilled": bytes} of a kernel in PTX."""
    import triton
    program = os.path.join(os.path.dirname(triton.__file__), "backends", "nvidia", "bin", "ptxas")
    arch = re.search(r"\.target (\w+)", text)[1]
    command = [program, "-v", f"-arch={arch}", "-o", os.devnull, "/dev/stdin"]
    done = subprocess.run(command, input=text, text=True, capture_output=True, check=True)
    numbers = re.findall(r"Used (\d+) registers|(\d+) bytes spill stores", done.stderr)
    return dict(registers=max(int(a) for a, _ in numbers if a), spilled=sum(int(b) for _, b in numbers if b))


def compile_kernel(source):
    """Compiles one of Inductor's kernels to machine code: what went wrong, or ""."""
    from torch._inductor.codecache import PyCodeCache
    name = re.findall(r"\ndef (triton_\w+)", source)[-1]
    try:
        tuner = getattr(PyCodeCache.load(source), name)
        assert tuner._precompile_config(tuner.configs[0]).kernel.asm["cubin"]
    except Exception as e:
        return f"{name}: {type(e).__name__}: {one_line(e)}"
    return ""
