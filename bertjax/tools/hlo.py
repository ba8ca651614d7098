"""What a compiled program does, read from its text: collectives, matrix products, loops.

XLA's own cost analysis counts the body of a loop once. Here every instruction counts as often as it
runs: a layer in `lax.scan` as often as there are layers. The text is that of one device (SPMD), so
all figures are of one chip and one call.
"""

import collections
import dataclasses
import math
import re
from collections.abc import Iterator

COLLECTIVES = ('all-reduce', 'all-gather', 'reduce-scatter', 'all-to-all', 'collective-permute')
_BYTES = {'pred': 1, 'c64': 8, 'c128': 16, 'token': 0, 'opaque': 0}
_ARRAY = re.compile(r'(\w+)\[([\d,]*)\](\{[^}]*\})?')
_INSTRUCTION = re.compile(r'\s*(ROOT )?%?([\w.\-]+) = (.*)')
_HEADER = re.compile(r'(ENTRY )?%?([\w.\-]+) \(.*\{\s*$')
_CALLED = re.compile(
    r'\b(?:calls|to_apply|true_computation|false_computation)=%?([\w.\-]+)|'
    r'\bbranch_computations=\{([^}]*)\}')
_KERNEL = re.compile(r'custom_call_target="(tpu_custom_call|__cudnn\$fmha\w+)"')
# They only name or rearrange what is there already.
_FREE = ('parameter', 'constant', 'tuple', 'get-tuple-element', 'bitcast', 'while', 'conditional',
         'call', 'after-all', 'partition-id', 'optimization-barrier')


class HloError(ValueError):
  """A text that is no compiled program."""


@dataclasses.dataclass(frozen=True)
class Shape:
  """One array of a program.

  Attributes:
    dtype: as HLO writes it: f32, bf16, s32, ...
    dims: its sizes.
    in_hbm: False for fast on-chip memory (a layout with S(1), say).
  """

  dtype: str
  dims: tuple[int, ...]
  in_hbm: bool = True

  @property
  def nbytes(self) -> int:
    bits = re.search(r'\d+', self.dtype)
    size = _BYTES.get(self.dtype, int(bits[0]) / 8 if bits else 0)
    return math.ceil(math.prod(self.dims) * size)


@dataclasses.dataclass(frozen=True)
class Instruction:
  """One line of a computation.

  Attributes:
    name: without the %.
    opcode: e.g. fusion.
    shapes: of its results.
    operands: names of other instructions.
    arguments: the text between its parentheses.
    attributes: the text behind them.
    is_root: whether its value is that of the computation.
  """

  name: str
  opcode: str
  shapes: tuple[Shape, ...]
  operands: tuple[str, ...]
  arguments: str
  attributes: str
  is_root: bool

  def attribute(self, name: str) -> str | None:
    """The computation that an attribute names, e.g. of `body=`."""
    found = re.search(rf'\b{name}=%?([\w.\-]+)', self.attributes)
    return found and found[1]


Computation = dict[str, Instruction]


@dataclasses.dataclass(frozen=True)
class Program:
  """Computations by name, and which of them is the entry."""

  computations: dict[str, Computation]
  entry: str


@dataclasses.dataclass(frozen=True)
class Traffic:
  """Collectives of one kind: how often they run, and the bytes of their larger side."""

  count: int = 0
  nbytes: int = 0


@dataclasses.dataclass(frozen=True)
class Loop:
  """A loop: its trips (None where they cannot be read), and the collectives of one trip."""

  trips: int | None
  collectives: dict[str, int]


@dataclasses.dataclass(frozen=True)
class Kernel:
  """A kernel that XLA does not see into, with the sizes of its operands.

  Of Pallas, for TPUs, by its own name, or attention of cuDNN: `__cudnn$fmha...`.
  """

  name: str
  operands: tuple[tuple[int, ...], ...]


@dataclasses.dataclass(frozen=True)
class Analysis:
  """What one device does in one call.

  Attributes:
    collectives: traffic by kind.
    loops: in the order in which they are met.
    matmul_flops: of dot and convolution instructions, two per multiplication.
    kernels: how often each of them runs; `matmul_flops` knows nothing of them.
    hbm_bytes: what instructions read from main memory and write to it: an estimate.
    rescues: instructions that the compiler added since memory ran short: repeated or compressed.
  """

  collectives: dict[str, Traffic]
  loops: tuple[Loop, ...]
  matmul_flops: int
  kernels: dict[Kernel, int]
  hbm_bytes: int
  rescues: int


def analyse(text: str) -> Analysis:
  """Reads the text of a compiled program (`compiled.as_text()`).

  Raises:
    HloError: there is no entry computation in it.
  """
  program = parse(text)
  loops: list[tuple[str, int | None]] = []
  times = _executions(program, program.entry, loops)
  flops, kernels = 0, collections.Counter()
  for name, count in times.items():
    computation = program.computations[name]
    for instruction in computation.values():
      flops += count * _flops(instruction, computation)
      target = _KERNEL.search(instruction.attributes)
      if target:
        name = target[1] if 'cudnn' in target[1] else re.sub(r'\.\d+$', '', instruction.name)
        operands = tuple(_operand(computation, one).dims for one in instruction.operands)
        kernels[Kernel(name, operands)] += count
  return Analysis(
      collectives=_traffic(program, times),
      loops=tuple(
          Loop(trips, {kind: traffic.count for kind, traffic in
                       _traffic(program, _executions(program, body, [])).items()})
          for body, trips in loops),
      matmul_flops=flops, kernels=dict(kernels),
      hbm_bytes=sum(count * _hbm_bytes(program, name) for name, count in times.items()
                    if name in _scheduled(program)),
      rescues=sum('.remat' in name for computation in program.computations.values()
                  for name in computation))


# --- Text to instructions ------------------------------------------------------------------------


def parse(text: str) -> Program:
  """The computations of a program.

  Raises:
    HloError: there is no entry computation in the text.
  """
  computations, entry, current = {}, None, None
  for line in text.splitlines():
    if current is None:
      header = _HEADER.match(line)
      if header:
        current = computations[header[2]] = {}
        entry = header[2] if header[1] else entry
    elif line == '}':  # attributes may go over several lines that begin with one
      current = None
    else:
      instruction = _instruction(line)
      if instruction:
        current[instruction.name] = instruction
  if entry is None:
    raise HloError('there is no ENTRY computation: this is not the text of a compiled program')
  return Program(computations, entry)


def _instruction(line: str) -> Instruction | None:
  found = _INSTRUCTION.match(line)
  if not found:
    return None
  rest = found[3]
  end = _closing(rest, 0) + 1 if rest.startswith('(') else rest.find(' ')
  opcode = re.match(r' *([\w\-]+)\(', rest[end:])
  if not opcode:
    return None
  shapes = tuple(
      Shape(dtype, tuple(int(n) for n in dims.split(',') if n),
            re.search(r'S\([1-9]', layout) is None)
      for dtype, dims, layout in _ARRAY.findall(rest[:end]))
  start = end + opcode.end()
  stop = _closing(rest, start - 1)
  arguments = rest[start:stop]
  return Instruction(found[2], opcode[1], shapes, tuple(re.findall(r'%([\w.\-]+)', arguments)),
                     arguments, rest[stop + 1:], bool(found[1]))


def _closing(text: str, start: int) -> int:
  """Where the parenthesis at `start` closes; the end of the text if it does not."""
  depth = 0
  for match in re.finditer(r'[()]', text[start:]):
    depth += 1 if match[0] == '(' else -1
    if depth == 0:
      return start + match.start()
  return len(text)


def _operand(computation: Computation, name: str) -> Shape:
  """The (first) shape of an operand."""
  found = computation.get(name)
  return found.shapes[0] if found and found.shapes else Shape('token', ())


# --- How often an instruction runs ---------------------------------------------------------------


def _executions(
    program: Program, root: str, loops: list[tuple[str, int | None]]
) -> dict[str, int]:
  """How often each computation runs when `root` runs once; `loops` receives bodies and trips."""
  times: dict[str, int] = collections.defaultdict(int)

  def visit(name: str, count: int):
    if name not in program.computations:
      return
    times[name] += count
    for instruction in program.computations[name].values():
      if instruction.opcode == 'while':
        trips = _trips(program, instruction)
        loops.append((instruction.attribute('body'), trips))
        visit(instruction.attribute('body'), count * (1 if trips is None else trips))
      for called in _called(instruction):
        visit(called, count)

  visit(root, 1)
  return dict(times)


def _called(instruction: Instruction) -> Iterator[str]:
  for single, branches in _CALLED.findall(instruction.attributes):
    yield from [single] if single else re.findall(r'[\w.\-]+', branches)


def _trips(program: Program, loop: Instruction) -> int | None:
  known = re.search(r'"known_trip_count":\{"n":"(\d+)"\}', loop.attributes)
  if known:
    return int(known[1])
  # The counter starts at 0, as that of `lax.scan`, and runs for as long as it is below a constant.
  condition = program.computations[loop.attribute('condition')]
  test = next(one for one in condition.values() if one.is_root)
  limit = [condition[name].arguments for name in test.operands
           if condition[name].opcode == 'constant']
  counter = [_index(condition[name]) for name in test.operands
             if condition[name].opcode == 'get-tuple-element']
  if test.opcode != 'compare' or 'direction=LT' not in test.attributes or not (limit and counter):
    return None
  step = _step(program.computations[loop.attribute('body')], counter[0])
  return step and -(-int(limit[0]) // step)


def _step(body: Computation, counter: int) -> int | None:
  """What one trip adds to an element of the loop's state; XLA may have unrolled it."""
  state = next(one for one in body.values() if one.is_root)
  value, total = body[state.operands[counter]], 0
  while value.opcode in ('add', 'copy'):
    total += sum(int(body[name].arguments) for name in value.operands
                 if body[name].opcode == 'constant')
    value = next(body[name] for name in value.operands if body[name].opcode != 'constant')
  same = value.opcode == 'get-tuple-element' and _index(value) == counter
  return total if same and total else None


def _index(element: Instruction) -> int:
  return int(re.search(r'\bindex=(\d+)', element.attributes)[1])


# --- Collectives ---------------------------------------------------------------------------------


def _traffic(program: Program, times: dict[str, int]) -> dict[str, Traffic]:
  total: dict[str, Traffic] = {}
  seen = set()
  for name, count in times.items():
    for instruction in program.computations[name].values():
      kind = instruction.opcode.removesuffix('-start')
      if kind not in COLLECTIVES:
        continue
      # A TPU's asynchronous collective is written out where it starts, where it ends and in what
      # runs meanwhile, always with the same channel.
      channel = re.search(r'\bchannel_id=(\d+)', instruction.attributes)
      if channel and channel[1] in seen:
        continue
      seen.add(channel and channel[1])
      if kind == 'all-reduce' and 'all-reduce-scatter' in name:
        kind = 'reduce-scatter'  # of which a TPU keeps only its share
      operands = (_operand(program.computations[name], one).nbytes for one in instruction.operands)
      nbytes = max(*(shape.nbytes for shape in instruction.shapes), *operands, 0)
      if len(instruction.operands) > 1:  # several arrays in one
        nbytes = max(sum(shape.nbytes for shape in instruction.shapes), 0)
      before = total.get(kind, Traffic())
      total[kind] = Traffic(before.count + count, before.nbytes + count * nbytes)
  return total


# --- Matrix products -----------------------------------------------------------------------------


def _flops(instruction: Instruction, computation: Computation) -> int:
  if instruction.opcode == 'dot':
    lhs = _operand(computation, instruction.operands[0]).dims
    axes = re.search(r'lhs_contracting_dims=\{([\d,]*)\}', instruction.attributes)
    contracted = [int(axis) for axis in axes[1].split(',') if axis] if axes else []
    return 2 * math.prod(instruction.shapes[0].dims) * math.prod(lhs[axis] for axis in contracted)
  if instruction.opcode == 'convolution':
    return _convolution_flops(instruction, computation)
  return 0


def _convolution_flops(instruction: Instruction, computation: Computation) -> int:
  """On a TPU every matrix product is a convolution, with its batch axes as spatial ones."""
  labels = re.search(r'dim_labels=(\w+)_(\w+)->(\w+)', instruction.attributes)
  lhs, rhs = (_operand(computation, name).dims for name in instruction.operands[:2])
  out = instruction.shapes[0].dims
  window = _window(instruction.attributes, sum(label.isdigit() for label in labels[1]))
  total = 2 * rhs[labels[2].index('i')] * out[labels[3].index('b')] * out[labels[3].index('f')]
  for axis, (size, stride, low, dilate, kernel_dilate) in enumerate(window):
    length = (lhs[labels[1].index(str(axis))] - 1) * dilate + 1
    # Positions of the window that meet an element and not padding or a gap.
    total *= sum(
        0 <= (at := o * stride - low + k * kernel_dilate) < length and at % dilate == 0
        for o in range(out[labels[3].index(str(axis))]) for k in range(size))
  return total


def _window(attributes: str, axes: int) -> list[tuple[int, int, int, int, int]]:
  """Of each spatial axis: size, stride, padding before, dilation of the input and the kernel."""
  text = re.search(r'window=\{([^}]*)\}', attributes)
  values = dict(part.split('=') for part in text[1].split()) if text else {}

  def numbers(name: str, default: int) -> list[int]:
    if name not in values:
      return [default] * axes
    return [int(part.split('_')[0]) for part in values[name].split('x')]

  return list(zip(numbers('size', 1), numbers('stride', 1), numbers('pad', 0),
                  numbers('lhs_dilate', 1), numbers('rhs_dilate', 1), strict=True))


# --- Main memory ---------------------------------------------------------------------------------


def _scheduled(program: Program) -> set[str]:
  """The entry and the bodies of loops: their values are arrays in memory, those of fusions are not.
  """
  found, todo = set(), [program.entry]
  while todo:
    name = todo.pop()
    if name in found or name not in program.computations:
      continue
    found.add(name)
    for instruction in program.computations[name].values():
      if instruction.opcode in ('while', 'conditional', 'call'):
        todo += [instruction.attribute('body') or '', *_called(instruction)]
  return found


def _hbm_bytes(program: Program, name: str) -> int:
  computation, total = program.computations[name], 0
  for instruction in computation.values():
    if instruction.opcode in _FREE or instruction.opcode.endswith('-done'):
      continue
    total += _written(program, instruction)
    for number, operand in enumerate(instruction.operands):
      if _operand(computation, operand).in_hbm:
        total += _read(program, computation, instruction, number)
  return total


def _written(program: Program, instruction: Instruction) -> int:
  fused = program.computations.get(instruction.attribute('calls') or '')
  if not fused:
    in_place = instruction.opcode == 'dynamic-update-slice'  # `_read` counts the update twice
    return 0 if in_place else sum(shape.nbytes for shape in instruction.shapes if shape.in_hbm)
  root = next(one for one in fused.values() if one.is_root)
  results = [fused[name] for name in root.operands] if root.opcode == 'tuple' else [root]
  return sum(_stored(program, fused, result)
             for shape, result in zip(instruction.shapes, results, strict=False) if shape.in_hbm)


def _stored(program: Program, fused: Computation, result: Instruction) -> int:
  """The bytes of a fusion's result; of one that is updated in place the update."""
  while result.opcode == 'bitcast':
    result = fused[result.operands[0]]
  if result.opcode == 'dynamic-update-slice':
    return _operand(fused, result.operands[1]).nbytes
  inner = program.computations.get(result.attribute('calls') or '')
  if inner and len(result.shapes) == 1:
    return _stored(program, inner, next(one for one in inner.values() if one.is_root))
  return result.shapes[0].nbytes if result.shapes else 0


def _read(program: Program, computation: Computation, user: Instruction, number: int) -> int:
  """What `user` reads of its operand: of one that it only slices, the slices."""
  whole = _operand(computation, user.operands[number]).nbytes
  if user.opcode in ('dynamic-slice', 'gather') and number == 0:
    return min(whole, user.shapes[0].nbytes)
  if user.opcode == 'dynamic-update-slice':
    return (0, 2 * whole)[number] if number < 2 else whole
  fused = program.computations.get(user.attribute('calls') or '')
  if not fused:
    return whole
  inside = next((one for one in fused.values()
                 if one.opcode == 'parameter' and one.arguments == str(number)), None)
  return min(whole, sum(_uses(program, fused, inside))) if inside else whole


def _uses(program: Program, fused: Computation, value: Instruction) -> Iterator[int]:
  for user in fused.values():
    for number, name in enumerate(user.operands):
      if name != value.name:
        continue
      if user.opcode == 'bitcast':
        yield from _uses(program, fused, user)
      elif user.opcode == 'dynamic-update-slice':
        yield 0 if number == 0 else value.shapes[0].nbytes
      else:
        yield _read(program, fused, user, number)
