"""Where the time of a compiled step goes, from a profile of it: its costliest operations."""

import collections
import dataclasses
import pathlib
import re
from collections.abc import Iterator

import jax

from bertjax.tools import hlo

_CONTROL = ('while', 'conditional', 'call')  # what they run has events of its own
_MATMUL = re.compile(r'gemm|matmul|nvjet|cutlass|xmma|cublas|convolution', re.IGNORECASE)
_ATTENTION = re.compile(r'fmha|flash|splash|sdpa', re.IGNORECASE)
# What JAX's transformations and control flow add to the names of scopes.
_NO_SCOPE = re.compile(r'(jit|jvp|eval_jaxpr|transpose|vmap|while|body|cond|closed_call|checkpoint|'
                       r'remat\w*|rematted_computation|custom_\w+|shard_map)\b.*')


@dataclasses.dataclass(frozen=True)
class Cost:
  """Operations of one kind in one part of the model.

  Attributes:
    name: e.g. 'backward layer/attention mul'; of a fusion, its last operation.
    kind: 'matmul' (with what is fused to it), 'attention' (a fused kernel), 'collective', 'other'.
    milliseconds: a step and device (of CPUs: of all threads together).
    share: of the time of all operations.
  """

  name: str
  kind: str
  milliseconds: float
  share: float


def groups(folder: pathlib.Path, program: str, steps: int) -> list[Cost]:
  """All groups of operations in a profile, the costliest first; none if it holds none.

  Args:
    folder: written by `jax.profiler.trace`; its latest profile counts.
    program: text of the compiled step.
    steps: how many of them were traced.
  """
  files = sorted(folder.rglob('*.xplane.pb'), key=lambda file: file.stat().st_mtime)
  if not files:
    return []
  parsed = hlo.parse(program)
  known = {name: (one, _kind(one, parsed)) for computation in parsed.computations.values()
           for name, one in computation.items()}
  # Kernels of a GPU may carry only their own name, in which a dot is an underscore.
  known |= {re.sub(r'[.\-]', '_', name): found for name, found in known.items()}
  nanoseconds: collections.Counter[tuple[str, str]] = collections.Counter()
  planes, is_host = _planes(jax.profiler.ProfileData.from_file(str(files[-1])))
  for name, duration in _events(planes, is_host):
    instruction, kind = known.get(name, (None, _kind_of_name(name)))
    if instruction is None:
      nanoseconds[re.sub(r'[\d_.]+$', '', name), kind] += duration
    elif instruction.opcode not in _CONTROL:
      nanoseconds[_label(instruction), kind] += duration
  total = sum(nanoseconds.values())
  return [Cost(name, kind, value / 1e6 / steps / len(planes), value / total)
          for (name, kind), value in nanoseconds.most_common()]


def _planes(profile: jax.profiler.ProfileData) -> tuple[list, bool]:
  """The devices of a profile, and whether they are the CPUs of the host."""
  planes = list(profile.planes)
  devices = [plane for plane in planes if re.match(r'/device:(GPU|TPU)', plane.name)]
  return devices or [plane for plane in planes if plane.name == '/host:CPU'], not devices


def _events(planes: list, is_host: bool) -> Iterator[tuple[str, float]]:
  """Name and nanoseconds of each event that is an operation."""
  for plane in planes:
    lines = list(plane.lines)
    operations = [line for line in lines if line.name == 'XLA Ops']  # of a TPU: others repeat them
    for line in operations or lines:
      for event in line.events:
        name = dict(event.stats).get('hlo_op') or (None if is_host else event.name)
        # On a TPU an event's name is the text of the instruction.
        if name and event.duration_ns:
          yield re.match(r'%?([^ =]*)', str(name))[1], event.duration_ns


def _kind(instruction: hlo.Instruction, program: hlo.Program) -> str:
  if instruction.opcode.removesuffix('-start').removesuffix('-done') in hlo.COLLECTIVES:
    return 'collective'
  inside = program.computations.get(instruction.attribute('calls') or '', {})
  if any(one.opcode in ('dot', 'convolution') for one in (instruction, *inside.values())):
    return 'matmul'
  if instruction.opcode == 'custom-call':
    target = re.search(r'custom_call_target="([^"]*)"', instruction.attributes)
    return _kind_of_name(target[1] if target else '')
  return 'other'


def _kind_of_name(name: str) -> str:
  if _ATTENTION.search(name):
    return 'attention'
  if _MATMUL.search(name):
    return 'matmul'
  return 'collective' if 'nccl' in name.lower() else 'other'


def _label(instruction: hlo.Instruction) -> str:
  """Direction, part of the model and operation, from the name that JAX gave to it."""
  found = re.search(r'op_name="([^";]*)', instruction.attributes)
  if not found:
    return instruction.opcode
  *path, operation = found[1].split('/')
  scopes = []
  for part in path:
    part = re.sub(r'^(?:transpose\(|jvp\()+|\)+$', '', part) if 'jvp(' in part else part
    if part and not _NO_SCOPE.fullmatch(part):
      scopes.append(part)
  where = '/'.join(scopes)
  if 'jvp(' not in found[1]:
    return f'update {operation}' if not scopes else f'{where} {operation}'
  direction = 'backward' if 'transpose(' in found[1] else 'forward'
  return ' '.join(part for part in (direction, where, operation) if part)
