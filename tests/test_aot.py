"""scripts/aot.py at tiny sizes: what the TPU compiler says, broken forks, prices, wrong input and kills."""
import contextlib
import glob
import io
import json
import os
import shutil
import signal
import subprocess
import sys
import time

import pytest

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path[:0] = [ROOT, os.path.join(ROOT, "scripts")]
import aot  # noqa: E402
import bench  # noqa: E402
import configurator  # noqa: E402
import train  # noqa: E402

if sys.version_info < (3, 11):
    pytest.importorskip("jax", reason="the TPU compiler needs Python 3.11")
pytestmark = pytest.mark.xla

TINY = ["--hidden_size=64", "--num_heads=2", "--puzzle_emb_ndim=64", "--puzzle_emb_len=2", "--H_cycles=2",
        "--L_cycles=2", "--halt_max_steps=4", "--global_batch_size=16"]


def run(*flags):
    """(the figures of the last line, all that is printed), in this process."""
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        aot.main(list(flags))
    text = printed.getvalue()
    return json.loads(text.splitlines()[-1]), text


@pytest.fixture(scope="module", autouse=True)
def xla_optimises():
    """Without the flag of conftest.py, which is for the CPU's compiler."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("XLA_FLAGS", raising=False)
        yield


@pytest.fixture(scope="module")
def compiled():
    """TINY in two micro-batches a chip, on four chips."""
    return run(*TINY, "--slices=v5e:2x2", "--micro_batch_size=2")


def test_what_a_tpu_makes_of_the_step(compiled):
    found, text = compiled
    f, e = found["v5e:2x2"]["train"], found["v5e:2x2"]["eval"]
    assert f["collectives"] == [["all-reduce", f["collectives"][0][1]]] and e["collectives"] == []
    c = configurator.configure(train.__file__, TINY)
    model = train.TRM(train.TRMConfig.of(c, seq_len=81, vocab_size=11))
    # All at once: gradients of the weights and the puzzle embedding, uses of its row, METRICS, stop requests.
    reduced = sum(p.numel() for p in model.parameters()) + 64 + 1 + len(train.METRICS) + 1
    assert f["collectives"][0][1] == pytest.approx(4 * reduced, abs=8)  # torch_xla's token rides along
    carry = 2 * 4 * 83 * 64 * 2  # z_H and z_L of 4 sequences a chip
    assert carry < 1e9 * f["arguments_gb"] - 16 * reduced < 3 * carry
    assert f["batch_per_chip"] == 4 and 0 < f["hbm_gb"] and f["free_gb"] > 10 and "fits" in text
    assert not f["float64_products"]
    assert f["arithmetic_ms"] < e["estimated_ms"] < f["estimated_ms"] < 100
    assert f"the compiler estimates {f['estimated_ms']:.1f} ms" in text


def test_the_counted_flops_are_the_compilers(compiled):
    """The compiler counts the loop over the two micro-batches once."""
    for f in compiled[0]["v5e:2x2"].values():
        assert 2 * f["compiler_tflop"] == pytest.approx(f["tflop"], rel=0.1)


FORKED_LINE = "logits = self.lm_head(z_H[:, self.prefix:])"


@pytest.fixture
def fork(tmp_path, monkeypatch):
    """A function that copies the project with another FORKED_LINE, and returns its number in model.py."""
    def make(line):
        (tmp_path / "scripts").mkdir()
        for path in [*glob.glob(os.path.join(ROOT, "*.py")), aot.__file__]:
            shutil.copy(path, tmp_path / os.path.relpath(path, ROOT))
        source = (tmp_path / "model.py").read_text()
        assert FORKED_LINE in source
        source = source.replace(FORKED_LINE, line, 1)
        (tmp_path / "model.py").write_text(source)
        monkeypatch.setattr(aot, "ROOT", str(tmp_path))
        monkeypatch.setattr(aot, "HERE", str(tmp_path / "scripts"))  # which tracing and compiling import
        return source.splitlines().index(f"        {line}") + 1

    return make


def test_a_fork_with_a_dynamic_shape_learns_where(fork):
    number = fork("logits = self.lm_head(z_H[z_H[:, 0, 0] > 0][:, self.prefix:])")
    with contextlib.redirect_stdout(io.StringIO()) as printed, pytest.raises(SystemExit) as exit:
        aot.main([*TINY, "--slices=v5e:1x1"])
    assert exit.value.code == 1
    lines = [line for line in printed.getvalue().splitlines() if "depends on data" in line]
    assert any(f"model.py:{n}" in lines[0] for n in (number, number + 1, number + 2)), lines
    assert "fault" in json.loads(printed.getvalue().splitlines()[-1])["v5e:1x1"]["train"]


def test_a_fork_with_float64_learns_where(fork):
    number = fork("logits = z_H[:, self.prefix:].double() @ self.lm_head.weight.double().T")
    words = f"float64 matrix product, which TPUs emulate many times slower: model.py:{number}"
    assert words in description("eval")


def test_a_batch_that_does_not_fit():
    assert "exceeds available HBM" in description("train", "--global_batch_size=100000")


def description(step, *flags):
    """What is printed for one step on one chip."""
    _, c, flags = bench.configure(aot.__file__, [*TINY, *flags])
    return aot.description(step, aot.compile_steps(c, flags, "v5e:1x1", [step])[step])


# Without the compiler.

HLO = """HloModule step

%sliced (param_0: f32[24,1000], param_1: s32[]) -> f32[1000] {
  %param_0 = f32[24,1000]{1,0} parameter(0)
  %param_1 = s32[] parameter(1)
  %dynamic-slice.1 = f32[1,1000]{1,0} dynamic-slice(%param_0, %param_1), dynamic_slice_sizes={1,1000}
  ROOT %bitcast.1 = f32[1000]{0} bitcast(%dynamic-slice.1)
}

%body (arg: (s32[], f32[24,1000])) -> (s32[], f32[24,1000]) {
  %arg = (s32[], f32[24,1000]{1,0}) parameter(0)
  %i = s32[] get-tuple-element(%arg), index=0
  %xs = f32[24,1000]{1,0} get-tuple-element(%arg), index=1
  %fusion.1 = f32[1000]{0} fusion(%xs, %i), calls=%sliced, backend_config={"estimated_cycles":"100"}
  %near = bf16[1000]{0:T(256)S(1)} convert(%fusion.1)
  ROOT %tuple.1 = (s32[], f32[24,1000]{1,0}) tuple(%i, %xs)
}

%condition (arg.1: (s32[], f32[24,1000])) -> pred[] {
  %arg.1 = (s32[], f32[24,1000]{1,0}) parameter(0)
  %constant.24 = s32[]{:T(128)} constant(24)
  %i.1 = s32[] get-tuple-element(%arg.1), index=0
  ROOT %compare.1 = pred[] compare(%i.1, %constant.24), direction=LT
}

ENTRY %main (p0: (s32[], f32[24,1000])) -> (s32[], f32[24,1000]) {
  %p0 = (s32[], f32[24,1000]{1,0}) parameter(0)
  ROOT %while.1 = (s32[], f32[24,1000]{1,0}) while(%p0), condition=%condition, body=%body
}
"""


def test_hbm_traffic_of_a_program():
    """24 times: the fusion's slice, read and written, its index; the result, read for what stays in VMEM."""
    assert aot.moved_bytes(*aot.read_program(HLO)) == 24 * (4000 + 4000 + 4 + 4000)
    assert aot.hbm_shape_bytes("(f32[2,3]{1,0}, bf16[4]{0:S(1)}, pred[])") == 25
    assert aot.shape_bytes("(f32[2,3]{1,0}, bf16[4]{0:S(1)}, pred[])") == 33


def test_cycles_of_a_program():
    bodies, entry = aot.read_program(HLO)
    assert entry == "main" and aot.estimated_cycles(bodies, entry) == 24 * 100


def test_a_plan_counts_steps_hours_and_bytes():
    f, text = run(os.path.join(ROOT, "config", "baseline.py"), "--plan=v5e:2x4", "--rate=10000")
    assert f["steps"] == 8138 and f["hours"] == pytest.approx(8138 * 6144 / 1e4 / 3600, rel=1e-4)
    assert f["measured"] and "measured" in text
    assert f["checkpoint_gb"] == pytest.approx(16 * f["parameters"] / 1e9, rel=1e-4) and f["checkpoints"] == 9
    assert f["evaluations"] == 9  # the last interval ends with the run, which has its own


def test_a_plan_without_the_compiler(monkeypatch):
    monkeypatch.setattr(aot, "has_compiler", lambda: False)
    f, text = run(os.path.join(ROOT, "config", "baseline.py"), "--plan=v5e:2x4")
    assert f["examples_per_sec"] == pytest.approx(8 * 197e12 / 42.7245e9, rel=1e-4) and not f["measured"]
    assert "pip install jax libtpu" in text


@pytest.mark.parametrize("flags,words", [
    ([], ["--slices", "--plan"]),
    (["--slices=v5e:2x2", "--plan=v5e:2x2"], ["--slices", "--plan"]),
    (["--slices=v9:2x2"], ["v9:2x2", "v5e:2x4"]),
    (["--slices=v5e:0x2"], ["v5e:0x2"]),
    (["--slice=v5e:2x2"], ["slice", "closest"]),
    (["--slices=v5e:2x4", "--global_batch_size=12"], ["12", "multiple of 8"]),
    (["--slices=v5e:2x2", "--rate=5"], ["--rate", "--plan"]),
    (["--plan=v5e"], ["v5e"]),
    (["--plan=v5e:2x4,v6e:2x2"], ["v5e:2x4,v6e:2x2"]),
    (["--plan=v5e:2x4", "--rate=-1"], ["--rate=-1.0", "above 0"]),
    (["--plan=v5e:2x4", "--global_batch_size=12"], ["12", "multiple of 8"]),
    (["--plan=v5e:2x4", "--hidden_size=-1"], ["hidden_size"]),
    (["config/nowhere.py", "--plan=v5e:2x4"], ["config/nowhere.py"]),
], ids=lambda x: " ".join(x) or "nothing" if isinstance(x, list) else "")
def test_wrong_input(flags, words, capsys):
    with pytest.raises(SystemExit) as exit:
        configurator.command(lambda: aot.main([*TINY, *flags]), aot.__file__)
    error = capsys.readouterr().err
    assert exit.value.code == 2
    assert len(error.splitlines()) == 1 and error.startswith("aot.py: ")
    assert all(word in error for word in words), error


# A kill of the command ends what it started.

def processes():
    """{process id: (its parent's, its command line)}."""
    found = {}
    for name in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            with open(f"/proc/{name}/stat") as stat, open(f"/proc/{name}/cmdline") as command:
                found[int(name)] = (int(stat.read().rpartition(")")[2].split()[1]), command.read())
    return found


def descendants(pid):
    """{process id: command line} of the children of a process, and theirs."""
    found = {}
    for child, (parent, command) in processes().items():
        if parent == pid:
            found |= {child: command} | descendants(child)
    return found


@pytest.mark.skipif(not os.path.isdir("/proc"), reason="needs /proc")
@pytest.mark.parametrize("phase", ["spawn_main", "compile_step"])  # a replica that traces; the compiler
def test_a_kill_ends_the_children(phase):
    command = [sys.executable, aot.__file__, *TINY, "--slices=v5e:1x1"]
    process = subprocess.Popen(command)
    deadline, children = time.monotonic() + 300, {}
    while not any(phase in command for command in children.values()):
        assert process.poll() is None and time.monotonic() < deadline
        children = descendants(process.pid)
        time.sleep(0.1)
    process.send_signal(signal.SIGKILL)
    process.wait()
    deadline = time.monotonic() + 60
    while children.keys() & processes().keys():
        assert time.monotonic() < deadline, children
        time.sleep(0.1)
