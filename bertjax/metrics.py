"""What the user sees: a terminal line, JSON lines and TensorBoard events, from sums over steps.

The metrics of a step are read after the next step was dispatched, so that the accelerator never
waits for the host. Sums are added up over the steps between two lines and divided once, here.

    with MetricsWriter(workdir, total_steps=..., log_every=..., alarms=Alarms(...)) as writer:
      writer.start_phase(batch_size, flops_per_example)
      for step in ...:
        with writer.timer.waiting_for_data():
          batch = next(batches)
        state, metrics = train_step(state, batch)
        writer.push(step + 1, metrics)

`writer.wait()` before a save: what it raises must keep a ruined state from being saved.
"""

import contextlib
import json
import math
import time
from collections.abc import Callable, Iterator, Mapping

import jax
from absl import logging
from etils import epath

from bertjax import chips
from bertjax.alarms import Alarms, check_finite

Number = int | float

def model_flops_per_example(
    *, hidden_size: int, num_hidden_layers: int, intermediate_size: int, vocab_size: int,
    seq_length: int, num_predictions: int,
) -> float:
  """FLOPs of one training example: three times the forward pass (the backward pass is twice it).

  Counted are the dense layers (2 per parameter and token), attention scores and contexts, and the
  MLM head at the predictions only. Not counted: embedding look-ups, elementwise operations, and
  what is computed a second time to save memory, so it is the numerator of the MFU.

  Args:
    hidden_size: D.
    num_hidden_layers: L.
    intermediate_size: F.
    vocab_size: V.
    seq_length: T, padding included.
    num_predictions: P, the slots of the head.
  """
  dense_layers = 2 * seq_length * (4 * hidden_size**2 + 2 * hidden_size * intermediate_size)
  attention = 2 * (2 * seq_length**2 * hidden_size)  # scores, then contexts
  masked_lm = num_predictions * 2 * (hidden_size**2 + hidden_size * vocab_size)
  next_sentence = 2 * (hidden_size**2 + 2 * hidden_size)  # with the pooler
  forward = num_hidden_layers * (dense_layers + attention) + masked_lm + next_sentence
  return 3.0 * forward


def means(sums: Mapping[str, Number]) -> dict[str, float]:
  """Sums of one or more steps -> losses and accuracies; the one place where they are divided.

  `X_loss_sum`, `X_correct_sum` (where hits are counted) and `X_weight` become `X_loss` and
  `X_accuracy`, `X_positive_sum` becomes `X_majority` (the rate of the more common label), and
  `loss` is the sum of the losses. A loss whose weight is 0 is absent: a batch without labels is
  neither right nor wrong.
  """
  result = {'loss': 0.0}
  for key, weight in sums.items():
    if not key.endswith('_weight') or not weight:
      continue
    name = key.removesuffix('_weight')
    result[f'{name}_loss'] = sums[f'{name}_loss_sum'] / weight
    if f'{name}_correct_sum' in sums:
      result[f'{name}_accuracy'] = sums[f'{name}_correct_sum'] / weight
    if f'{name}_positive_sum' in sums:
      share = sums[f'{name}_positive_sum'] / weight
      result[f'{name}_majority'] = max(share, 1 - share)
    result['loss'] += result[f'{name}_loss']
  return result


def heldout_means(sums: Mapping[str, Number]) -> dict[str, float]:
  """`means` of an evaluation, with `masked_lm_perplexity`: the exponential of masked_lm_loss."""
  values = means({name: float(value) for name, value in sums.items()})
  if 'masked_lm_loss' in values:
    # Beyond 700 nats the exponential overflows; such a model has no perplexity to speak of.
    values['masked_lm_perplexity'] = math.exp(min(values['masked_lm_loss'], 700.0))
  return values


class StepTimer:
  """Seconds per step without the first, which compiles, and without evaluation and saving.

  Attributes:
    first_step_seconds: from construction or `restart` to the end of the first step; None before.
  """

  def __init__(self, clock: Callable[[], float] = time.monotonic):
    self._clock = clock
    self.restart()

  def restart(self) -> None:
    """Forgets everything: the next step is a first one again (a new phase compiles again)."""
    self.first_step_seconds = None
    self._began = self._clock()
    self._steps = 0
    self._reset_window()

  def step_done(self) -> None:
    """To be called when a step has ended, which is when its metrics have arrived."""
    now = self._clock()
    if self.first_step_seconds is None:
      self.first_step_seconds = now - self._began
      self._began = now
      self._reset_window()
    else:
      self._steps += 1
      self._window_steps += 1

  @contextlib.contextmanager
  def excluded(self) -> Iterator[None]:
    """Time inside is no training: evaluation, saving."""
    start = self._clock()
    try:
      yield
    finally:
      self._excluded += self._clock() - start

  @contextlib.contextmanager
  def waiting_for_data(self) -> Iterator[None]:
    """Time inside is the loop waiting for its next batch."""
    start = self._clock()
    try:
      yield
    finally:
      self._data_wait += self._clock() - start

  def window(self) -> tuple[float, float] | None:
    """(seconds per step, share of it spent waiting for data) since the last call, or None."""
    steps, seconds = self._window_steps, self._clock() - self._window_began - self._excluded
    data_wait = self._data_wait
    self._reset_window()
    if not steps or seconds <= 0:
      return None
    return seconds / steps, min(1.0, data_wait / seconds)

  def seconds_per_step(self) -> float | None:
    """Of the wall clock since the first step, evaluation and saving included: for the ETA."""
    return (self._clock() - self._began) / self._steps if self._steps else None

  def _reset_window(self) -> None:
    self._window_began = self._clock()
    self._window_steps = 0
    self._excluded = 0.0
    self._data_wait = 0.0


class JsonLines:
  """metrics.jsonl: one JSON object a line, in the order of the steps, each flushed at once.

  Args:
    path: the file.
    restored_step: the step that training goes on from. Records beyond it, and a last line that a
      kill cut short, are taken away first, so the file tells one history.
  """

  def __init__(self, path: epath.PathLike, restored_step: int = 0):
    self._path = epath.Path(path)
    if self._path.exists():
      self._cut(restored_step)

  def write(self, record: Mapping[str, object]) -> None:
    """Appends one record. Numbers that are not finite are refused (ValueError): not JSON."""
    line = json.dumps(record, allow_nan=False)
    # Opened for each record: it is in the file when this returns, on object stores as well.
    with self._path.open('a', encoding='utf-8') as file:
      file.write(line + '\n')

  def _cut(self, restored_step: int) -> None:
    lines = self._path.read_text(encoding='utf-8').split('\n')
    kept = []
    for number, line in enumerate(lines, start=1):
      if not line:
        continue
      try:
        record = json.loads(line)
        step = record['step']
      except (ValueError, TypeError, KeyError):
        # Only a kill in the middle of a write leaves such a line, and what it said comes again.
        logging.warning('%s, line %d: not a record, dropped', self._path, number)
        continue
      # What belongs to the restored step itself is written again, but for what its steps led to.
      if step < restored_step or (
          step == restored_step and record.get('split') in ('train', 'alarm')):
        kept.append(line + '\n')
    text = ''.join(kept)
    if text != '\n'.join(lines):
      logging.info('%s: cut back to step %d', self._path, restored_step)
      whole = self._path.with_name(self._path.name + '.tmp')
      whole.write_text(text, encoding='utf-8')
      whole.replace(self._path)


class MetricsWriter:
  """Reads the metrics of each step one step late and writes a line every `log_every` steps.

  Every process must push, since every process reads the metrics and stops on a bad one; process 0
  alone writes. A context manager: leaving it without an error writes what is still pending.

  Args:
    workdir: gets metrics.jsonl and tensorboard/.
    total_steps: of the whole run.
    log_every: steps between two lines. The first step has a line of its own.
    alarms: fed with every step.
    restored_step: updates already made when this run begins.
    baselines: constants that the curves are compared with, e.g. `unigram_entropy`; written in a
      record of the split 'start'.
    timer: to be given in tests.
  """

  def __init__(
      self, workdir: epath.PathLike, *, total_steps: int, log_every: int, alarms: Alarms,
      restored_step: int = 0, baselines: Mapping[str, Number] | None = None,
      timer: StepTimer | None = None,
  ):
    self.timer = timer or StepTimer()
    self._total_steps = total_steps
    self._log_every = log_every
    self._alarms = alarms
    self._pending = None  # (step, metrics on the device)
    self._sums = {}
    self._steps = 0
    self._jsonl = self._tensorboard = None
    if jax.process_index() == 0:
      workdir = epath.Path(workdir)
      workdir.mkdir(parents=True, exist_ok=True)
      self._jsonl = JsonLines(workdir / 'metrics.jsonl', restored_step)
      self._tensorboard = _open_tensorboard(workdir / 'tensorboard', restored_step)
      self.write('start', restored_step, dict(baselines or {}) | {'total_steps': total_steps})

  def __enter__(self):
    return self

  def __exit__(self, kind, value, traceback):
    try:
      if kind is None:
        self._finish_window()
    finally:
      if self._tensorboard is not None:
        self._tensorboard.close()

  def start_phase(self, batch_size: Number, flops_per_example: Number) -> None:
    """Says what a step is from here on; the next step is taken to compile.

    Args:
      batch_size: examples of the global batch, of packed rows on average.
      flops_per_example: see `model_flops_per_example`.
    """
    self._finish_window()
    self._batch_size = batch_size
    self._peak_examples_per_second = None
    peak = chips.peak_flops(jax.devices()[0].device_kind)
    if peak is not None:
      self._peak_examples_per_second = peak * jax.device_count() / flops_per_example
    else:
      logging.info(
          'No MFU: the peak of %r is not known (see bertjax/chips.py).',
          jax.devices()[0].device_kind,
      )
    self.timer.restart()

  def push(self, step: int, metrics: Mapping[str, jax.Array]) -> None:
    """Hands over the metrics of a step just dispatched and reads those of the step before.

    Args:
      step: updates made, this one included.
      metrics: float32 scalars: sums, weights, `grad_norm` and `learning_rate`.

    Raises:
      alarms.NonFiniteError: of the step before.
    """
    self.wait()
    self._pending = step, metrics

  def wait(self) -> None:
    """Reads what was pushed last; when it returns, that step has ended and was finite."""
    if self._pending is None:
      return
    (step, metrics), self._pending = self._pending, None
    host = {name: float(value) for name, value in jax.device_get(dict(metrics)).items()}
    first = self.timer.first_step_seconds is None
    self.timer.step_done()
    for message in self._alarms.update(step, host):
      self._warn(step, message)
    rate = host.pop('learning_rate')
    for name, value in host.items():
      self._sums[name] = self._sums.get(name, 0.0) + value
    self._steps += 1
    self._last_step, self._last_rate = step, rate
    if first or step % self._log_every == 0 or step == self._total_steps:
      self._log(step, first)

  def write_evaluation(
      self, split: str, step: int, scores: Mapping[str, Number | None]
  ) -> None:
    """Says and writes the scores on one split; an undefined one (None) is null in the record.

    Raises:
      alarms.NonFiniteError: one of them is not finite.
    """
    defined = {name: value for name, value in scores.items() if value is not None}
    check_finite(step, defined, weights_of=step)
    name = 'held-out' if split == 'heldout' else split
    self._say(f'{self._head(step)}  {name}  {_scores_text(scores)}')
    self.write(split, step, scores)

  def write(self, split: str, step: int, values: Mapping[str, Number | None]) -> None:
    """Writes one record to metrics.jsonl and TensorBoard (process 0)."""
    if self._jsonl is None:
      return
    self._jsonl.write({'split': split, 'step': step} | {k: _short(v) for k, v in values.items()})
    for name, value in values.items():
      if value is not None:
        self._tensorboard.add_scalar(f'{split}/{name}', value, step)
    self._tensorboard.flush()

  def _finish_window(self) -> None:
    self.wait()
    if self._steps:
      self._log(self._last_step)

  def _log(self, step: int, first: bool = False) -> None:
    values = means(self._sums)
    values['grad_norm'] = self._sums['grad_norm'] / self._steps
    values['learning_rate'] = self._last_rate
    values['steps'] = self._steps
    speed = self.timer.window()
    if first:
      values['first_step_seconds'] = self.timer.first_step_seconds
    if speed is not None:
      seconds, values['data_wait'] = speed
      values['sequences_per_second'] = self._batch_size / seconds
      if self._peak_examples_per_second is not None:
        values['mfu'] = values['sequences_per_second'] / self._peak_examples_per_second
    self._sums, self._steps = {}, 0
    self._say(self._line(step, values))
    self.write('train', step, values)

  def _line(self, step: int, values: Mapping[str, Number]) -> str:
    text = (
        f'{self._head(step)}  {_losses_text(values)}  lr {values["learning_rate"]:.2e}  '
        f'grad_norm {values["grad_norm"]:6.3f}'
    )
    if 'first_step_seconds' in values:
      text += f'  (first step: {values["first_step_seconds"]:.1f} s)'
    if 'sequences_per_second' not in values:
      return text
    text += f'  {_speed(values["sequences_per_second"])} seq/s'
    if 'mfu' in values:
      text += f'  MFU {values["mfu"]:5.1%}'
    text += f'  wait {values["data_wait"]:4.0%}'
    seconds = self.timer.seconds_per_step()
    return f'{text}  ETA {duration((self._total_steps - step) * seconds)}'

  def _head(self, step: int) -> str:
    total = f'{self._total_steps:,}'
    return f'step {step:>{len(total)},}/{total}'

  def _say(self, text: str) -> None:
    if self._jsonl is not None:
      logging.info('%s', text)

  def _warn(self, step: int, message: str) -> None:
    if self._jsonl is not None:
      logging.warning('ALARM at step %d: %s', step, message)
      self._jsonl.write({'split': 'alarm', 'step': step, 'message': message})


def duration(seconds: Number) -> str:
  """'45s', '12m 05s', '3h 20m' or '2d 07h': two units, as much as an estimate deserves."""
  seconds = round(seconds)
  for size, unit, below, below_size in (
      (86400, 'd', 'h', 3600), (3600, 'h', 'm', 60), (60, 'm', 's', 1)
  ):
    if seconds >= size:
      return f'{seconds // size}{unit} {seconds % size // below_size:02d}{below}'
  return f'{seconds}s'


def _losses_text(values: Mapping[str, Number]) -> str:
  """The total, then each loss by name (but for the one there is) with its accuracy, if any."""
  names = [key.removesuffix('_loss') for key in values if key.endswith('_loss')]
  text = f'loss {values["loss"]:7.4f}'
  for name in names:
    text += f'  {name}'
    if len(names) > 1 and name != 'next_sentence':  # two classes: the accuracy says it better
      text += f' {values[f"{name}_loss"]:7.4f}'
    if f'{name}_accuracy' in values:
      text += f' acc {values[f"{name}_accuracy"]:.3f}'
  return text


def _scores_text(scores: Mapping[str, Number | None]) -> str:
  if 'masked_lm_loss' in scores:
    return _losses_text(scores)
  return '  '.join(f'{name} {"undefined" if value is None else format(value, ".4f")}'
                   for name, value in scores.items())


def _speed(value: Number) -> str:
  return f'{value:7,.0f}' if value >= 1000 else f'{value:7.1f}'


def _short(value: Number | None) -> Number | None:
  """Seven digits: all that a float32 holds, in half of the file."""
  return value if value is None or isinstance(value, int) else float(f'{value:.7g}')


def _open_tensorboard(folder: epath.Path, restored_step: int):
  # Imported here: it takes a third of a second that a tool which only reads metrics need not pay.
  import tensorboardX

  # TensorBoard hides what an earlier run wrote from purge_step on.
  purge = restored_step + 1 if folder.exists() else None
  return tensorboardX.SummaryWriter(str(folder), purge_step=purge)
