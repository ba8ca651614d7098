"""One way to train, timed: the job of bertjax.main, its compiled step and its batches."""

import contextlib
import io
import os
import pathlib
import resource
import sys
import time
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import ml_collections
import numpy as np
from etils import epath
from flax import nnx
from jax.experimental import multihost_utils

from bertjax import alarms, chips, metrics, model, optim, pretraining, sharding, state
from bertjax import step as step_lib
from bertjax.config import ConfigError
from bertjax.data import build, corpus, loader
from bertjax.job import Job, Stage, Stream
from bertjax.tools import op_costs

WARM_UP = 3  # steps after the first that are not counted
# The first batches of a round were made while something else ran: nobody waits for them.
_IN_STOCK = 8
_TRACED = 3
_FOREVER = 10**9
_MADE_UP_WORDS = 300_000


class Variant:
  """A pre-training job, its step (compiled once, by `begin`), and the times of the steps it made.

  Attributes:
    name: what it is called beside others.
    job: as bertjax.main would train it.
    bert: its model, attention chosen.
    compiled: the train step.
    first_seconds: what the first step took, by part.
    rounds: of each call of `run`, seconds of each of its steps and seconds that it waited for data.
  """

  def __init__(self, name: str, values: Mapping[str, Any]):
    """Opens the data and checks all that can be checked before a compilation.

    Args:
      name: see above.
      values: a configuration with one phase, and the shards to read.

    Raises:
      One of errors.EXPECTED, in words.
    """
    self.name, self._laps = name, _Laps()
    self.job: Job = pretraining.job(ml_collections.ConfigDict(values), epath.Path('.'))
    self._seed = step_lib.seed_word(self.job.seed)
    self.stage: Stage = self.job.stages[0]
    self.stream: Stream = self.stage.open()
    if len(self.stream.shapes) > 1:
      raise ConfigError(f'{name or "phases[0]"}.seq_lengths: the bench times rows of one length; '
                        'leave it out, and give their length as seq_length')
    self._laps.end('open_data')
    self.first_seconds = self._laps.seconds
    self.rounds: list[tuple[list[float], list[float]]] = []
    self._counts: list[tuple[int, int]] = []
    self._loss = float('nan')

  def begin(self) -> None:
    """Compiles the step and makes the first one."""
    laps = self._laps
    laps.go_on()
    self._batches = loader.device_batches(
        _counted(self.stream.batches(0, _FOREVER), self._counts), self.job.mesh)
    batch = next(self._batches)
    laps.end('first_batch')
    with jax.set_mesh(self.job.mesh):
      graphdef, shapes = state.split(self.job.build)
      self.bert: model.BertConfig = nnx.merge(graphdef, shapes).masked_lm.config
      optimizer = optim.make(self.stage.optimizer, shapes)
      like = state.abstract(shapes, optimizer, self.job.mesh)
      jitted = step_lib.jit_train_step(
          step_lib.TrainStep(graphdef, self.stage.objective, optimizer, self.stage.optimizer,
                             self.stage.accumulate), like)
      lowered = jitted.lower(like, loader.global_shapes(self.stream.shapes[0], self.job.mesh),
                             self._seed)
      laps.end('trace')
      self.compiled = lowered.compile()
      laps.end('compile')
      self._state = jax.block_until_ready(
          state.create(self.job.build, self.job.seed, optimizer, like))
      laps.end('init')
      self._state, last = self.compiled(self._state, batch, self._seed)
      jax.block_until_ready(last)
      laps.end('first_run')

  def run(self, steps: int, record: bool = True) -> None:
    """Makes steps as train.py does: the metrics of one are read when the next is dispatched.

    Raises:
      NonFiniteError: a loss is NaN or infinite.
    """
    seconds, waits, pending = [], [], None
    last = time.perf_counter()
    for _ in range(steps):
      began = time.perf_counter()
      batch = next(self._batches)
      waits.append(time.perf_counter() - began)
      with jax.set_mesh(self.job.mesh):
        self._state, dispatched = self.compiled(self._state, batch, self._seed)
      if pending is not None:
        last = self._arrived(pending, last, seconds)
      pending = dispatched
    self._arrived(pending, last, seconds)
    if record:
      self.rounds.append((seconds, waits))

  def _arrived(self, step_metrics, last: float, seconds: list[float]) -> float:
    values = {name: float(value) for name, value in jax.device_get(dict(step_metrics)).items()}
    now = time.perf_counter()
    seconds.append(now - last)
    alarms.check_finite(len(self._counts), values)
    self._loss = metrics.means(values)['loss']
    return now

  def trace(self, folder: str) -> list[op_costs.Cost]:
    """Writes a profile of a few steps to a folder; returns what costs how much."""
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0  # it would slow down the loop
    with jax.profiler.trace(folder, profiler_options=options):
      self.run(_TRACED, record=False)
    return op_costs.groups(pathlib.Path(folder), self.compiled.as_text(), _TRACED)

  def pipeline_rate(self, seconds: float = 1.0) -> tuple[float, float]:
    """Examples and real tokens that this process's pipeline makes a second, while nothing trains.

    Its first batches, which had all the time, do not count.
    """
    counts: list[tuple[int, int]] = []
    batches = _counted(self.stream.batches(len(self._counts), _FOREVER), counts)
    for _ in range(_IN_STOCK):
      next(batches)
    counts.clear()
    began = now = time.perf_counter()
    while now < began + seconds or not counts:
      next(batches)
      now = time.perf_counter()
    examples, tokens = np.sum(counts, 0) / (now - began)
    return float(examples), float(tokens)

  def report(self) -> dict[str, Any]:
    """All figures, of all processes together, for JSON (every process must ask)."""
    seconds = np.concatenate([round_seconds for round_seconds, _ in self.rounds])
    median = float(np.median(seconds))
    counts = multihost_utils.process_allgather(np.asarray(self._counts, np.int64).mean(0))
    ways = sharding.row_ways(self.job.mesh.shape)
    own_share = len(sharding.own_rows(self.job.mesh, ways)) / ways  # of the batch
    examples, tokens = (counts.reshape(-1, 2).mean(0) / own_share).tolist()
    phase = self.job.metadata['config']['phases'][0]
    flops = self.stage.flops_per_row(self.stream.mean_length) * self.stage.batch_size
    peak = chips.peak_flops(jax.devices()[0].device_kind)
    rate = flops / median / self.job.mesh.size
    memory = self.compiled.memory_analysis()
    return {
        'name': self.name, **{key: phase[key] for key in (
            'batch_size', 'seq_length', 'accumulate', 'max_examples_per_row')},
        **{key: getattr(self.bert, key) for key in (
            'attention', 'remat', 'dtype', 'hidden_dropout_prob', 'attention_probs_dropout_prob')},
        'mesh': dict(self.job.mesh.shape), 'own_share': own_share, 'steps': len(seconds),
        'step_ms': {'median': 1e3 * median} | {
            f'p{q}': 1e3 * float(np.percentile(seconds, q)) for q in (10, 90)},
        'rows_per_second': self.stage.batch_size / median, 'examples_per_second': examples / median,
        'real_tokens_per_second': tokens / median,
        'real_token_share': tokens / (phase['batch_size'] * phase['seq_length']),
        'examples_per_row': examples / self.stage.batch_size,
        'model_flops_per_step': flops, 'model_flops_per_second_and_device': rate,
        'mfu': rate / peak if peak else None, 'wait_share': self._wait_share(),
        'first_step_seconds': self.first_seconds,
        'compiled_bytes': {'arguments': memory.argument_size_in_bytes,
                           'temporaries': memory.temp_size_in_bytes},
        'loss': self._loss}

  def _wait_share(self) -> float | None:
    """Share of the time that the loop waited for data; None: too few steps in a row to say."""
    counted = [(seconds[_IN_STOCK:], waits[_IN_STOCK:]) for seconds, waits in self.rounds]
    total = sum(sum(seconds) for seconds, _ in counted)
    return min(1.0, sum(sum(waits) for _, waits in counted) / total) if total else None


class _Laps:
  """Seconds of the parts of something, in turn."""

  def __init__(self):
    self.seconds: dict[str, float] = {}
    self.go_on()

  def go_on(self) -> None:
    self._last = time.perf_counter()

  def end(self, part: str) -> None:
    now = time.perf_counter()
    self.seconds[part], self._last = now - self._last, now


def _counted(
    batches: Iterator[dict[str, np.ndarray]], counts: list[tuple[int, int]]
) -> Iterator[dict[str, np.ndarray]]:
  """The batches; examples and real tokens of each are added to `counts`."""
  for batch in batches:
    packed = batch.get('segment_ids')
    real = batch['attention_mask'] if packed is None else packed
    examples = len(real) if packed is None else packed.max(1).sum()
    counts.append((int(examples), int(np.count_nonzero(real))))
    yield batch


def compare(variants: list[Variant], steps: int, rounds: int) -> None:
  """Times the variants in turn, again and again: what disturbs one disturbs the others."""
  for variant in variants:
    variant.run(WARM_UP, record=False)
  for _ in range(rounds):
    for variant in variants:
      variant.run(steps)


def ratio(variant: Variant, base: Variant) -> float:
  """Step time of one variant as a multiple of another's: the median over the rounds."""
  pairs = zip(variant.rounds, base.rounds, strict=True)
  return float(np.median([np.median(one[0]) / np.median(other[0]) for one, other in pairs]))


def matmul_rate(seconds: float = 1.0) -> float:
  """Dense bfloat16 FLOP/s that one device reaches on a large product, for as long as that."""
  device = jax.local_devices()[0]
  size, repeats = (1024, 1) if device.platform == 'cpu' else (8192, 20)
  # Scaled, so that the numbers stay as they are; zeros would cost a chip less power.
  draw = lambda seed: jax.device_put(jax.random.normal(
      jax.random.key(seed), (size, size), jnp.bfloat16) * size**-0.5, device)
  many = jax.jit(lambda x, y: jax.lax.fori_loop(0, repeats, lambda _, x: x @ y, x))
  x, y = draw(0) * size**0.5, draw(1)
  jax.block_until_ready(many(x, y))
  times, end = [], time.perf_counter() + seconds
  while len(times) < 3 or time.perf_counter() < end:
    began = time.perf_counter()
    jax.block_until_ready(many(x, y))
    times.append(time.perf_counter() - began)
  return 2 * size**3 * repeats / float(np.median(times))


def peak_memory() -> tuple[int, str]:
  """Most bytes in use so far, and of what: of the first device, or of this process."""
  found = jax.local_devices()[0].memory_stats() or {}
  if 'peak_bytes_in_use' in found:
    return found['peak_bytes_in_use'], 'first device'
  unit = 1 if sys.platform == 'darwin' else 1024
  return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit, 'host process'


def make_up_data(folder: pathlib.Path, vocab_size: int) -> str:
  """Shards of random words in sentences and documents as long as those of English prose.

  Args:
    folder: empty; all is written below it.
    vocab_size: of the tokenizer, special entries included.

  Returns:
    The folder of the shards.
  """
  draw = np.random.default_rng(0)
  special = ['[PAD]', '[UNK]', '[CLS]', '[SEP]', '[MASK]']
  words = [f'w{number}' for number in range(max(100, vocab_size - len(special)))]
  lengths = np.clip(draw.lognormal(3.1, 0.5, _MADE_UP_WORDS // 24), 1, 400).astype(int)
  ends = set(np.cumsum(np.clip(draw.lognormal(2.8, 1.0, len(lengths)), 1, 5000)).astype(int))
  lines = []
  for number, length in enumerate(lengths):
    lines.append(' '.join(words[i] for i in draw.integers(len(words), size=length)))
    if number in ends:
      lines.append('')
  (folder / 'text.txt').write_text('\n'.join(lines), encoding='utf-8')
  (folder / 'vocab.txt').write_text('\n'.join([*special, *words, '']), encoding='utf-8')
  with contextlib.redirect_stderr(io.StringIO()):  # nobody asked for this build
    build.build(build.BuildSettings(
        inputs=(os.fspath(folder / 'text.txt'),), tokenizer=os.fspath(folder / 'vocab.txt'),
        output=os.fspath(folder / 'shards'), read=corpus.ReadSettings(format='sentences')))
  return os.fspath(folder / 'shards')
