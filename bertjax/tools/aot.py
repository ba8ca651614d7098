"""Compiles the real train step for a real TPU topology, on a machine without a TPU.

  python -m bertjax.tools.aot --config configs/large.py:fast --topology v5e:4x4 --fsdp 16 \
      --batch_size 384
  python -m bertjax.tools.aot --config configs/large.py:fast --topology v5e:4x4 --fsdp 16 --search

It says whether the step fits, and what it does: memory by kind, collectives, FLOPs. It says nothing
about speed but the arithmetic intensity. `--search` finds the most rows for each remat policy and
the cheapest policy for the batch asked for; every try is one compilation.

It needs libtpu (`pip install -e '.[tpu]'`). Exit codes: 0 it fits, 1 it does not, 2 it cannot be
tried.
"""

import argparse
import contextlib
import dataclasses
import importlib.util
import json
import os
import re
import sys
import tempfile
import time
from typing import Any

# libtpu reads these when it is loaded. One process is no reason to lock out the next, and there is
# no metadata server to ask what machine this is.
_ENVIRONMENT = {'ALLOW_MULTIPLE_LIBTPU_LOAD': '1', 'TPU_SKIP_MDS_QUERY': '1',
                'TPU_ACCELERATOR_TYPE': 'v5litepod-4', 'TPU_WORKER_HOSTNAMES': 'localhost',
                'TPU_STDERR_LOG_LEVEL': '1', 'JAX_PLATFORMS': 'cpu'}
_GIB = 2**30
# Main memory that a program may use (GiB) and its bandwidth (bytes/s), of one JAX device.
# Source: cloud.google.com/tpu/docs/system-architecture-tpu-vm; XLA keeps a quarter of a GiB.
_MEMORY = {'v4': (31.75, 1228e9), 'v5e': (15.75, 819e9), 'v5p': (94.75, 2765e9),
           'v6e': (31.25, 1640e9)}
# From nothing that is computed twice to everything.
_POLICIES = ('none', 'dense_attention', 'dense', 'full')


class AotError(ValueError):
  """What cannot be tried; the message says the mend."""


@dataclasses.dataclass(frozen=True)
class Plan:
  """A step to compile.

  Attributes:
    settings: of the run, with the one phase that is compiled.
    bert: of the model, attention chosen.
    mesh: of the topology's devices.
    generation: of the chips: v4, v5e, v5p or v6e.
  """

  settings: Any
  bert: Any
  mesh: Any
  generation: str

  @property
  def rows(self) -> float:
    """Rows that one chip computes at a time."""
    phase = self.settings.phases[0]
    return phase.batch_size / (self._ways * phase.accumulate)

  @property
  def _ways(self) -> int:
    return self.mesh.shape['data'] * self.mesh.shape['fsdp']

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
  hbm_bytes: int = 0
  rematerialised: int = 0
  compile_s: tuple[float, float] = (0.0, 0.0)


def make_plan(args: argparse.Namespace) -> Plan:
  """The step that the arguments ask for.

  Raises:
    AotError: a topology that libtpu does not know.
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
  mesh = sharding.make_mesh(settings.mesh, _devices(args.topology))
  settings_lib.check_batches(settings, mesh.shape['data'] * mesh.shape['fsdp'], 1)
  chosen = attention.choose(bert, 'tpu', phase.seq_length, model_ways=mesh.shape['model'])
  bert = dataclasses.replace(bert, attention=chosen)
  return Plan(settings, bert, mesh, args.topology.split(':')[0])


def _devices(topology: str) -> list:
  """The devices of a topology that is nowhere near.

  Raises:
    AotError: no such topology.
  """
  from jax.experimental import topologies

  if topology.split(':')[0] not in _MEMORY:
    raise AotError(f'--topology {topology}: known are {", ".join(_MEMORY)}, e.g. v5e:4x4')
  # Both cores of a v4 chip are one device, as on Cloud TPU; libtpu's default is a device for each.
  options = {'chip_config_name': 'megacore'} if topology.startswith('v4:') else {}
  try:
    with _captured_stderr():
      found = topologies.get_topology_desc(platform='tpu', topology_name=topology, **options)
  except Exception as error:  # libtpu raises what it likes
    raise AotError(f'--topology {topology}: libtpu says: {str(error).splitlines()[0]}') from error
  return list(found.devices)


def compile_plan(plan: Plan, full_effort: bool = False) -> Report:
  """Compiles the step of a plan.

  Args:
    plan: what to compile.
    full_effort: as a TPU would; otherwise the compiler does not try for speed, which takes a fifth
      of the time and needs the same memory to within half a GiB.
  """
  import jax

  lowered = _lower(plan)
  options = None if full_effort else {'exec_time_optimization_effort': -1.0}
  began, began_cpu = time.perf_counter(), time.process_time()
  with _captured_stderr() as said:
    try:
      compiled = lowered.compile(compiler_options=options)
    except jax.errors.JaxRuntimeError as error:
      if 'RESOURCE_EXHAUSTED' not in str(error):
        raise
      return Report(False, plan.bert.remat, plan.rows, {'needed': _needed(str(error))})
  seconds = (time.perf_counter() - began, time.process_time() - began_cpu)
  return _report(plan, compiled, seconds, said[0])


def _lower(plan: Plan):
  """The step of train.py on shapes: nothing is allocated."""
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
                                settings.optimizer_of(0), settings.seed, phase.accumulate)
    batch = pretrain.batch_shapes(examples, phase.batch_size)
    if packed:
      batch = packing.batch_shapes(examples, phase.max_examples_per_row, phase.batch_size)
    return step.jit_train_step(train_step, like).lower(
        like, loader.global_shapes(batch, plan.mesh))


def _needed(message: str) -> int:
  """The bytes that a step which does not fit would need, as far as the compiler says; else 0."""
  found = re.search(r'\(([\d.]+)([MG])\) exceeds|Used ([\d.]+)([MG]) of', message)
  if not found:
    return 0
  number, unit = (part for part in found.groups() if part)
  return int(float(number) * {'M': 2**20, 'G': _GIB}[unit])


@contextlib.contextmanager
def _captured_stderr():
  """What C++ writes to stderr meanwhile, in a list that is filled at the end."""
  said: list[str] = []
  sys.stderr.flush()
  with tempfile.TemporaryFile() as file:
    saved = os.dup(2)
    os.dup2(file.fileno(), 2)
    try:
      yield said
    finally:
      os.dup2(saved, 2)
      os.close(saved)
      file.seek(0)
      said.append(file.read().decode('utf-8', 'replace'))


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
      repeated_share=max(0.0, repeated / (model_flops / 3)), hbm_bytes=found.hbm_bytes,
      rematerialised=said.lower().count('involuntary full rematerialization'), compile_s=seconds)


def _kernel_products(kernel) -> tuple[int, int, int]:
  """FLOPs of one [T, T] product of the splash kernel, how many it does, how many the model counts.

  The backward kernel computes the scores again, as it must: it never had them in memory.
  """
  rows, heads, length, width = next(dims for dims in kernel.operands if len(dims) == 4)
  return 2 * rows * heads * length**2 * width, *((5, 4) if 'dkv' in kernel.name else (2, 2))


# --- Search --------------------------------------------------------------------------------------


def search(plan: Plan, full_effort: bool = False, tell=lambda report: None) -> list[Report]:
  """The most rows a chip that each remat policy takes, from the cheapest policy on.

  Args:
    plan: mesh, model and length; its rows are where the search begins.
    full_effort: see `compile_plan`.
    tell: is called with every try.
  """
  found = [_most_rows(plan.with_remat(policy), full_effort, tell) for policy in _POLICIES]
  return [report for report in found if report is not None]


def _most_rows(plan: Plan, full_effort: bool, tell) -> Report | None:
  limit, fitting, too_many = _MEMORY[plan.generation][0] * _GIB, [], None
  rows = max(1, round(plan.rows))
  for _ in range(8):
    report = compile_plan(plan.with_rows(rows), full_effort)
    tell(report)
    if report.fits:
      fitting = sorted([*fitting, report], key=lambda one: one.rows)[-2:]
    else:
      too_many = min(rows, too_many or rows)
    below = int(fitting[-1].rows) if fitting else 0
    if too_many is not None and too_many - below <= max(1, below // 32):
      break
    # Memory grows with the rows along a line: two that fit say where it ends.
    if len(fitting) == 2:
      (less, more) = fitting
      slope = (more.memory['peak'] - less.memory['peak']) / (more.rows - less.rows)
      rows = int(more.rows + max(1, (limit - more.memory['peak']) / max(slope, 1)))
    else:
      rows = 2 * below or rows // 2
    if too_many is not None:
      rows = min(rows, too_many - 1)
    if rows <= below:
      break
  return fitting[-1] if fitting else None


# --- What is printed -----------------------------------------------------------------------------


def describe(plan: Plan, report: Report) -> str:
  """A report in words."""
  phase, (limit, bandwidth) = plan.settings.phases[0], _MEMORY[plan.generation]
  gib = {kind: f'{nbytes / _GIB:.2f}' for kind, nbytes in report.memory.items()}
  lines = [
      f'{plan.generation}, {plan.mesh.size} chips, mesh {dict(plan.mesh.shape)}; '
      f'{plan.bert.num_hidden_layers} layers of {plan.bert.hidden_size}, attention '
      f'{plan.bert.attention}, remat {report.remat}',
      f'batch        {phase.batch_size} x {phase.seq_length}, accumulated over '
      f'{phase.accumulate}: {report.rows:g} rows a chip at a time']
  if not report.fits:
    return '\n'.join([*lines, (
        f'DOES NOT FIT {gib["needed"]} GiB are needed, and a chip has {limit}. Take a policy that '
        f'keeps less (--remat, of {", ".join(_POLICIES)}), cut the batch into parts '
        '(--accumulate), take a smaller one, or split the state over more chips (--fsdp); --search '
        'tries them')])
  collectives = ', '.join(f'{kind} {count} ({nbytes / 1e9:.3f} GB)' for kind, (count, nbytes)
                          in sorted(report.collectives.items())) or 'none'
  loops = '; '.join(f'{trips} x {collectives or "no collectives"}'
                    for trips, collectives in report.loops)
  from bertjax import metrics

  peak_flops = metrics.peak_flops(plan.mesh.devices.flat[0].device_kind) or float('nan')
  return '\n'.join([
      *lines,
      f'FITS         peak {gib["peak"]} of {limit} GiB a chip',
      f'memory       arguments {gib["arguments"]}, outputs {gib["outputs"]} of which donated '
      f'{gib["donated"]}, temporaries {gib["temporaries"]}, code {gib["code"]} GiB',
      f'collectives  {collectives}',
      f'loops        {loops}',
      f'FLOPs        {report.flops / 1e12:.3f} T a step and chip; the model needs '
      f'{report.model_flops / 1e12:.3f} T, {report.repeated_share:.1%} of the forward pass is '
      'computed again',
      f'intensity    {report.flops / report.hbm_bytes:.0f} FLOP a byte of main memory; the chip '
      f'has {peak_flops / bandwidth:.0f}',
      f'compiled in  {report.compile_s[0]:.0f} s ({report.compile_s[1]:.0f} s of CPU time), '
      f'"involuntary full rematerialization" {report.rematerialised} times'])


def main(argv: list[str] | None = None) -> int:
  """Prints the report; 0 if the step fits, 1 if not, 2 if it cannot be tried."""
  parser = argparse.ArgumentParser(description=__doc__.split('\n')[0])
  parser.add_argument('--config', required=True, help='e.g. configs/large.py:fast')
  parser.add_argument('--topology', required=True, help='e.g. v5e:4x4; of v4, v5e, v5p, v6e')
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
  if importlib.util.find_spec('libtpu') is None:
    print("libtpu is not installed; it compiles for TPUs on any Linux machine: pip install -e "
          "'.[tpu]'", file=sys.stderr)
    return 2
  for name, value in _ENVIRONMENT.items():
    os.environ.setdefault(name, value)

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
  tell = lambda report: print(
      f'  tried remat {report.remat}, {report.rows:g} rows a chip: '
      f'{"fits" if report.fits else "does not fit"}', file=sys.stderr)
  found = search(plan, args.full_effort, tell)
  cheapest = next((report for report in found if report.rows >= plan.rows), None)
  if args.json:
    print(json.dumps({'most_rows': [dataclasses.asdict(report) for report in found],
                      'cheapest': cheapest and cheapest.remat}))
    return 0 if cheapest else 1
  for report in found:
    print(f'remat {report.remat:16} at most {report.rows:g} rows a chip '
          f'({report.memory["peak"] / _GIB:.2f} GiB), {report.repeated_share:.1%} of the forward '
          'pass computed again')
  print(f'For {plan.rows:g} rows a chip: ' + (
      f'remat {cheapest.remat}' if cheapest else 'none of them fits; see --accumulate and --fsdp'))
  return 0 if cheapest else 1


if __name__ == '__main__':
  sys.exit(main())
