"""Compiles the real train step for TPUs or NVIDIA GPUs, on a machine that has none.

  python -m bertjax.tools.aot --config configs/large.py:fast --topology v5e:4x4 --fsdp 16 \
      --batch_size 384
  python -m bertjax.tools.aot --config configs/large.py:fast --topology v5e:4x4 --fsdp 16 --search
  python -m bertjax.tools.aot --config configs/large.py --topology h200:8

It says whether the step fits, and what it does: memory by kind, collectives, FLOPs. It says nothing
about speed but the arithmetic intensity. `--search` finds the most rows for each remat policy and
the cheapest policy for the batch asked for: about three compilations for each policy.

It needs libtpu (`pip install -e '.[tpu]'`) or JAX's CUDA plugin (jax-cuda13-plugin, of the version
of jaxlib). Exit codes: 0 it fits, 1 it does not, 2 it cannot be tried.
"""

import argparse
import dataclasses
import json
import re
import sys
import time
from typing import Any

from bertjax import chips
from bertjax.tools import aot_chips
from bertjax.tools.aot_chips import AotError

_GIB = 2**30
# From nothing that is computed twice to everything, for each attention; see model.REMAT_POLICIES.
_POLICIES = {'splash': ('none', 'dense_attention', 'dense', 'full'),
             'cudnn': ('none', 'dense', 'full'), 'xla': ('none', 'dots', 'dense', 'full')}


@dataclasses.dataclass(frozen=True)
class Plan:
  """A step to compile.

  Attributes:
    settings: of the run, with the one phase that is compiled.
    bert: of the model, attention chosen.
    mesh: of the topology's devices.
    chip: what each of them is.
  """

  settings: Any
  bert: Any
  mesh: Any
  chip: aot_chips.Chip

  @property
  def rows(self) -> float:
    """Rows that one chip computes at a time."""
    phase = self.settings.phases[0]
    return phase.batch_size / (self._ways * phase.accumulate)

  @property
  def _ways(self) -> int:
    from bertjax import sharding

    return sharding.row_ways(self.mesh.shape)

  def with_remat(self, remat: str) -> 'Plan':
    return dataclasses.replace(self, bert=dataclasses.replace(self.bert, remat=remat))

  def with_rows(self, rows: int) -> 'Plan':
    phase = self.settings.phases[0]
    phase = dataclasses.replace(phase, batch_size=rows * self._ways * phase.accumulate)
    return dataclasses.replace(
        self, settings=dataclasses.replace(self.settings, phases=(phase,)))


@dataclasses.dataclass(frozen=True)
class Report:
  """What a compilation says; of one chip and one step, in bytes and FLOPs.

  Attributes:
    fits: whether it does.
    remat: the policy.
    rows: computed at a time.
    memory: bytes by kind; `peak` is what counts. Of a step that does not fit only `needed`.
    collectives: kind -> [count, bytes].
    loops: trips and collectives of a trip, for each loop.
    flops: of matrix products and attention kernels.
    model_flops: without what is computed twice.
    repeated_share: FLOPs that are computed again, as a share of the forward pass.
    rescues: instructions that the compiler added of its own accord, since memory ran short.
    hbm_bytes: read and written, an estimate.
    rematerialised: warnings of the partitioner that it had to gather a whole array.
    compile_s: seconds of wall time and of CPU time.
  """

  fits: bool
  remat: str
  rows: float
  memory: dict[str, int]
  collectives: dict[str, tuple[int, int]] = dataclasses.field(default_factory=dict)
  loops: tuple[tuple[int | None, dict[str, int]], ...] = ()
  flops: int = 0
  model_flops: int = 0
  repeated_share: float = 0.0
  rescues: int = 0
  hbm_bytes: int = 0
  rematerialised: int = 0
  compile_s: tuple[float, float] = (0.0, 0.0)


def make_plan(args: argparse.Namespace) -> Plan:
  """The step that the arguments ask for.

  Raises:
    AotError: a topology that the compiler does not know.
    ConfigError, MeshError, AttentionError: a configuration that cannot be run.
  """
  from bertjax import attention, sharding
  from bertjax import settings as settings_lib
  from bertjax.tools import doctor

  settings = doctor.load_config(args.config, ['.'])
  phase = settings.phases[args.phase]
  phase = dataclasses.replace(
      phase, **{name: getattr(args, name) or getattr(phase, name)
                for name in ('batch_size', 'seq_length', 'accumulate')})
  changes = {name: value for name in ('remat', 'attention')
             if (value := getattr(args, name)) is not None}
  settings = dataclasses.replace(
      settings, phases=(phase,), model={**settings.model, **changes},
      mesh=sharding.MeshSettings(-1, args.fsdp, args.model))
  bert = settings.bert_config(settings.data.vocab_size)
  mesh = sharding.make_mesh(settings.mesh, aot_chips.devices(args.topology))
  settings_lib.check_batches(settings, sharding.row_ways(mesh.shape))
  chip = aot_chips.chip(args.topology)
  chosen = attention.choose(
      bert, chip.platform, phase.seq_length, model_ways=mesh.shape['model'])
  return Plan(settings, dataclasses.replace(bert, attention=chosen), mesh, chip)


def compile_plan(plan: Plan, full_effort: bool = False) -> Report:
  """Compiles the step of a plan.

  Args:
    plan: what to compile.
    full_effort: as a TPU would; otherwise the compiler does not try for speed, which takes a fifth
      of the time and needs the same memory to within half a GiB. A GPU knows no such difference.

  Raises:
    AotError: cuDNN attention is to be compiled, and there is no cuDNN.
  """
  import jax

  lowered = _lower(plan)
  on_gpu = plan.chip.platform == 'gpu'
  options = None if full_effort or on_gpu else {'exec_time_optimization_effort': -1.0}
  began, began_cpu = time.perf_counter(), time.process_time()
  seconds = lambda: (time.perf_counter() - began, time.process_time() - began_cpu)
  with aot_chips.captured_stderr() as said:
    try:
      compiled = lowered.compile(compiler_options=options)
    except jax.errors.JaxRuntimeError as error:
      if 'RESOURCE_EXHAUSTED' not in str(error):
        raise
      return Report(False, plan.bert.remat, plan.rows, {'needed': _needed(str(error))},
                    compile_s=seconds())
  report = _report(plan, compiled, seconds(), said[0])
  if report.memory['peak'] <= plan.chip.memory:
    return report
  # Without a GPU, CUDA's compiler has no limit to run into.
  return dataclasses.replace(
      report, fits=False, memory={**report.memory, 'needed': report.memory['peak']})


def _lower(plan: Plan):
  """The step of train.py on shapes: nothing is allocated.

  Raises:
    AotError: see `compile_plan`.
  """
  import jax

  from bertjax import heads, objectives, optim, state, step
  from bertjax.data import loader, packing, pretrain

  settings, phase = plan.settings, plan.settings.phases[0]
  with jax.set_mesh(plan.mesh):  # in which nothing may run: its devices are not there
    graphdef, shapes = state.split(lambda rngs: heads.BertForPreTraining(plan.bert, rngs))
    optimizer = optim.make(settings.optimizer_of(0), shapes)
    like = state.abstract(shapes, optimizer, plan.mesh)
    packed, examples = phase.max_examples_per_row > 1, settings.pretrain_settings(0)
    train_step = step.TrainStep(graphdef, objectives.pretraining(packed), optimizer,
                                settings.optimizer_of(0), phase.accumulate)
    batch = pretrain.batch_shapes(examples, phase.batch_size)
    if packed:
      batch = packing.batch_shapes(examples, phase.max_examples_per_row, phase.batch_size)
    try:
      return step.jit_train_step(train_step, like).lower(
          like, loader.global_shapes(batch, plan.mesh), step.seed_word(settings.seed))
    except RuntimeError as error:
      if 'cuDNN' not in str(error):
        raise
      raise AotError(
          "cudnn attention can be compiled only where cuDNN's library is: pip install "
          'nvidia-cudnn-cu13. Or compile plain attention, which needs far more memory: '
          '--attention=xla') from error


def _needed(message: str) -> int:
  """The bytes that a step which does not fit would need, as far as the compiler says; else 0."""
  found = re.search(r'\(([\d.]+)([MG])\) exceeds|Used ([\d.]+)([MG]) of', message)
  if not found:
    return 0
  number, unit = (part for part in found.groups() if part)
  return int(float(number) * {'M': 2**20, 'G': _GIB}[unit])


def _report(plan: Plan, compiled, seconds: tuple[float, float], said: str) -> Report:
  from bertjax import metrics
  from bertjax.tools import hlo

  found = hlo.analyse(compiled.as_text())
  memory = compiled.memory_analysis()
  bert, examples = plan.bert, plan.settings.pretrain_settings(0)
  model_flops = plan.rows * plan.settings.phases[0].accumulate * metrics.model_flops_per_example(
      hidden_size=bert.hidden_size, num_hidden_layers=bert.num_hidden_layers,
      intermediate_size=bert.intermediate_size, vocab_size=bert.padded_vocab_size,
      seq_length=examples.seq_length, num_predictions=examples.num_predictions)
  model_flops /= plan.mesh.shape['model']
  kernels = [(count, *_kernel_products(kernel)) for kernel, count in found.kernels.items()]
  flops = found.matmul_flops + sum(count * one * done for count, one, done, _ in kernels)
  repeated = found.matmul_flops - model_flops + sum(
      count * one * needed for count, one, _, needed in kernels)
  return Report(
      fits=True, remat=bert.remat, rows=plan.rows,
      memory={'arguments': memory.argument_size_in_bytes, 'outputs': memory.output_size_in_bytes,
              'donated': memory.alias_size_in_bytes, 'temporaries': memory.temp_size_in_bytes,
              'code': memory.generated_code_size_in_bytes, 'peak': memory.peak_memory_in_bytes},
      collectives={kind: (traffic.count, traffic.nbytes)
                   for kind, traffic in found.collectives.items()},
      loops=tuple((loop.trips, loop.collectives) for loop in found.loops),
      flops=flops, model_flops=round(model_flops),
      repeated_share=max(0.0, repeated / (model_flops / 3)), rescues=found.rescues,
      hbm_bytes=found.hbm_bytes,
      rematerialised=said.lower().count('involuntary full rematerialization'), compile_s=seconds)


def _kernel_products(kernel) -> tuple[int, int, int]:
  """FLOPs of a [T, T] product of an attention kernel, how many it does, how many the model counts.

  The backward kernel computes the scores again, as it must: it never had them in memory.
  """
  dims = next(dims for dims in kernel.operands if len(dims) == 4)
  if kernel.name.startswith('__cudnn'):  # [B, T, N, H], and not splash's [B, N, T, H]
    dims = (dims[0], dims[2], dims[1], dims[3])
  rows, heads, length, width = dims
  backward = 'dkv' in kernel.name or 'Backward' in kernel.name
  return 2 * rows * heads * length**2 * width, *((5, 4) if backward else (2, 2))


# --- Search --------------------------------------------------------------------------------------


def search(plan: Plan, full_effort: bool = False, tell=lambda report: None) -> list[Report]:
  """The most rows a chip that each remat policy takes, from the cheapest policy on.

  Args:
    plan: mesh, model and length; its rows are where the search begins.
    full_effort: see `compile_plan`.
    tell: is called with every try.
  """
  found, rows = [], max(1, round(plan.rows))
  for policy in _POLICIES[plan.bert.attention]:
    report = _most_rows(plan.with_remat(policy), rows, full_effort, tell)
    if report is not None:
      found.append(report)
      rows = max(rows, int(report.rows))  # the next policy keeps less
  return found


def _most_rows(plan: Plan, rows: int, full_effort: bool, tell) -> Report | None:
  """To within a row or a thirty-second; None if not one fits. `rows` is the first try."""
  tried: list[Report] = []
  for _ in range(6):
    tried.append(compile_plan(plan.with_rows(rows), full_effort))
    tell(tried[-1])
    best = max((one for one in tried if one.fits), key=lambda one: one.rows, default=None)
    below = int(best.rows) if best else 0
    above = min((int(one.rows) for one in tried if not one.fits), default=None)
    rows = max(1, _expected_rows(plan.chip.memory, tried))
    if above is not None and rows >= above:  # there is no such line, or it ends there
      rows = (below + above) // 2
    if rows <= below + below // 32:
      break
  return best


def _expected_rows(limit: float, tried: list[Report]) -> int:
  """Where memory, which grows with the rows along a line, meets the limit."""
  fitting = sorted((one for one in tried if one.fits), key=lambda one: one.rows)[-2:]
  if not fitting:
    least = min(tried, key=lambda one: one.rows)
    return int(least.rows * (limit / least.memory['needed'] if least.memory['needed'] else 0.5))
  last = fitting[-1]
  # Of one try it is known that without any row its arguments are left.
  rows, nbytes = 0, last.memory['arguments']
  if len(fitting) == 2:
    rows, nbytes = fitting[0].rows, fitting[0].memory['peak']
  slope = (last.memory['peak'] - nbytes) / (last.rows - rows)
  # Small steps say little about large ones.
  return int(min(last.rows + (limit - last.memory['peak']) / max(slope, 1), 8 * last.rows))


# --- What is printed -----------------------------------------------------------------------------


def describe(plan: Plan, report: Report) -> str:
  """A report in words."""
  phase, chip = plan.settings.phases[0], plan.chip
  on_gpu = chip.platform == 'gpu'
  noun, limit = 'GPU' if on_gpu else 'chip', f'{chip.memory / _GIB:.2f}'
  gib = {kind: f'{nbytes / _GIB:.2f}' for kind, nbytes in report.memory.items()}
  lines = [
      f'{chip.generation}, {plan.mesh.size} {noun}s, mesh {dict(plan.mesh.shape)}; '
      f'{plan.bert.num_hidden_layers} layers of {plan.bert.hidden_size}, attention '
      f'{plan.bert.attention}, remat {report.remat}',
      f'batch        {phase.batch_size} x {phase.seq_length}, accumulated over '
      f'{phase.accumulate}: {report.rows:g} rows a {noun} at a time']
  if not report.fits:
    lines.append(
        f'DOES NOT FIT {gib["needed"]} GiB are needed, and a {noun} has {limit}. Take a policy '
        f'that keeps less (--remat, of {", ".join(_POLICIES[plan.bert.attention])}), cut the batch '
        'into parts (--accumulate), take a smaller one, or split the state over more '
        f'{noun}s (--fsdp); --search tries the policies')
  else:
    lines.append(f'FITS         peak {gib["peak"]} of {limit} GiB a {noun}')
  if 'arguments' in report.memory:
    lines += _details(plan, report, gib, noun)
  return '\n'.join([*lines, *(_warnings(plan) if on_gpu else ())])


def _repeats(report: Report) -> str:
  """Short of memory, XLA computes again what the policy would have kept."""
  own = (f' (memory ran short: {report.rescues} instructions more by the compiler\'s own choice)'
         if report.rescues else '')
  return f'{report.repeated_share:.1%} of the forward pass is computed again{own}'


def _details(plan: Plan, report: Report, gib: dict[str, str], noun: str) -> list[str]:
  collectives = ', '.join(f'{kind} {count} ({nbytes / 1e9:.3f} GB)' for kind, (count, nbytes)
                          in sorted(report.collectives.items())) or 'none'
  loops = '; '.join(f'{trips} x {collectives or "no collectives"}'
                    for trips, collectives in report.loops)
  peak_flops = chips.peak_flops(plan.mesh.devices.flat[0].device_kind) or float('nan')
  return [
      f'memory       arguments {gib["arguments"]}, outputs {gib["outputs"]} of which donated '
      f'{gib["donated"]}, temporaries {gib["temporaries"]}, code {gib["code"]} GiB',
      f'collectives  {collectives}',
      f'loops        {loops}',
      f'FLOPs        {report.flops / 1e12:.3f} T a step and {noun}; the model needs '
      f'{report.model_flops / 1e12:.3f} T, {_repeats(report)}',
      f'intensity    {report.flops / report.hbm_bytes:.0f} FLOP a byte of main memory; the {noun} '
      f'has {peak_flops / plan.chip.bandwidth:.0f}',
      f'compiled in  {report.compile_s[0]:.0f} s ({report.compile_s[1]:.0f} s of CPU time), '
      f'"involuntary full rematerialization" {report.rematerialised} times']


def _warnings(plan: Plan) -> list[str]:
  """What compiling for a GPU that is not there does not show."""
  lines = [
      f'memory of a GPU: JAX takes {aot_chips.memory_fraction():.0%} of it '
      '(XLA_PYTHON_CLIENT_MEM_FRACTION); the compiler itself refuses nothing here',
      'This proves nothing about speed: XLA chooses its kernels by timing them on a GPU, and there '
      'was none.']
  if plan.bert.attention == 'cudnn':
    lines.append('cuDNN plans its kernels on a GPU: the memory they work in is not counted')
  return lines


def main(argv: list[str] | None = None) -> int:
  """Prints the report; 0 if the step fits, 1 if not, 2 if it cannot be tried."""
  parser = argparse.ArgumentParser(description=__doc__.split('\n')[0])
  parser.add_argument('--config', required=True, help='e.g. configs/large.py:fast')
  parser.add_argument('--topology', required=True,
                      help=f'e.g. v5e:4x4 or h200:8; of {", ".join(aot_chips.KNOWN)}')
  parser.add_argument('--phase', type=int, default=-1, help='which one; default: the last')
  parser.add_argument('--batch_size', type=int, help='default: that of the phase')
  parser.add_argument('--seq_length', type=int, help='default: that of the phase')
  parser.add_argument('--accumulate', type=int, help='default: that of the phase')
  parser.add_argument('--fsdp', type=int, default=1, help='chips that share the state')
  parser.add_argument('--model', type=int, default=1, help='chips that share a layer')
  parser.add_argument('--remat', help='another policy than the configuration\'s')
  parser.add_argument('--attention', help='another one than the configuration\'s')
  parser.add_argument('--search', action='store_true', help='the most rows of each remat policy')
  parser.add_argument('--full_effort', action='store_true', help='compile as a TPU would')
  parser.add_argument('--json', action='store_true')
  args = parser.parse_args(argv)
  try:
    aot_chips.prepare(args.topology)
  except AotError as error:
    print(error, file=sys.stderr)
    return 2

  from bertjax import errors

  try:
    return _run(args)
  except (AotError, *errors.EXPECTED) as error:
    print(error, file=sys.stderr)
    return 2


def _run(args: argparse.Namespace) -> int:
  plan = make_plan(args)
  if not args.search:
    report = compile_plan(plan, args.full_effort)
    print(json.dumps(dataclasses.asdict(report)) if args.json else describe(plan, report))
    return 0 if report.fits else 1
  found = search(plan, args.full_effort, _tell)
  cheapest = next((report for report in found if report.rows >= plan.rows), None)
  if args.json:
    print(json.dumps({'most_rows': [dataclasses.asdict(report) for report in found],
                      'cheapest': cheapest and cheapest.remat}))
    return 0 if cheapest else 1
  for report in found:
    print(f'remat {report.remat:16} at most {report.rows:g} rows a chip '
          f'({report.memory["peak"] / _GIB:.2f} GiB), {_repeats(report)}')
  print(f'For {plan.rows:g} rows a chip: ' + (
      f'remat {cheapest.remat}' if cheapest else 'none of them fits; see --accumulate and --fsdp'))
  return 0 if cheapest else 1


def _tell(report: Report):
  nbytes = report.memory['peak' if report.fits else 'needed']
  print(f'  tried remat {report.remat}, {report.rows:g} rows a chip: '
        f'{"fits" if report.fits else "does not fit"}, {nbytes / _GIB:.2f} GiB '
        f'({report.compile_s[1]:.0f} s of CPU time)', file=sys.stderr, flush=True)


if __name__ == '__main__':
  sys.exit(main())
