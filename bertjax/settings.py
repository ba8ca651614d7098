"""The configuration of pre-training as frozen dataclasses, checked before anything is built."""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any

import ml_collections

from bertjax import config as config_lib
from bertjax.config import ConfigError
from bertjax.data import bucketing, hashing
from bertjax.data.pretrain import PretrainSettings
from bertjax.job import CheckpointSettings
from bertjax.model import BertConfig
from bertjax.optim import OptimizerSettings
from bertjax.sharding import MeshSettings


@dataclasses.dataclass(frozen=True)
class DataSettings:
  """What the model reads.

  Attributes:
    path: folder of shards from `bertjax.data.build`; several, with commas, are one mixture.
    weights: share of each folder in a mixture; none means by `sampling_exponent`.
    sampling_exponent: a folder of n examples is drawn in proportion to n ** sampling_exponent.
    input: where `path` is empty: raw text (as `bertjax.data.build --input`) from which a
      tokenizer is trained and shards are built in the workdir. `builtin:docs` is the embedded
      default corpus.
    format: of `input`, as `bertjax.data.build --format`.
    language: of `input`, for splitting prose into sentences.
    tokenizer_type: 'wordpiece' or 'sentencepiece', where a tokenizer is trained.
    vocab_size: of that tokenizer.
    heldout: share of documents that are held out.
    num_workers: processes that build the shards.
    next_sentence: 'nsp', 'sop' (sentence order) or 'none'.
    masked_lm_prob: share of tokens that are predicted.
    short_seq_prob: share of documents cut into short examples.
    whole_word_masking: all pieces of a word are selected, or none.
    random_words: random replacements come from 'ordinary' entries or the whole 'vocabulary'.
  """

  path: str = ''
  weights: tuple[float, ...] = ()
  sampling_exponent: float = 1.0
  input: str = ''
  format: str = 'auto'
  language: str = 'en'
  tokenizer_type: str = 'wordpiece'
  vocab_size: int = 30522
  heldout: float = 0.01
  num_workers: int = 1
  next_sentence: str = 'nsp'
  masked_lm_prob: float = 0.15
  short_seq_prob: float = 0.1
  whole_word_masking: bool = False
  random_words: str = 'ordinary'

  def __post_init__(self):
    if not self.path and not self.input:
      raise ConfigError('no data: give --config.data.path=SHARDS (see bertjax.data.build) or '
                        '--config.data.input=TEXT')
    if self.weights and len(self.weights) != len(self.paths):
      raise ConfigError(f'data.weights has {len(self.weights)} numbers for {len(self.paths)} '
                        'folders in data.path; give one for each')
    if any(not weight > 0 for weight in self.weights):
      raise ConfigError(f'data.weights {self.weights}: every weight must be positive')
    if not 0 <= self.sampling_exponent <= 1:
      raise ConfigError(f'data.sampling_exponent is {self.sampling_exponent}; it must be in [0, 1]')

  @property
  def paths(self) -> tuple[str, ...]:
    return tuple(path for path in self.path.split(',') if path)


@dataclasses.dataclass(frozen=True)
class Phase:
  """A stretch of training at one length and batch size.

  Attributes:
    seq_length: tokens in a row.
    batch_size: rows in a global batch.
    num_steps: steps of this phase.
    accumulate: parts into which each batch is cut to save memory.
    max_examples_per_row: above 1, rows are packed with up to so many examples, which never see each
      other (data/packing.py); a batch then holds more examples, with less padding.
    seq_lengths: rows are of these lengths, ascending to seq_length, and each batch of one of them
      (data/bucketing.py): less padding, and simpler than packing; () is seq_length alone.
    max_predictions_per_seq: slots for predictions; 0 follows from length and masked_lm_prob.
    learning_rate: 0 goes on with the schedule of the phase before; otherwise a new schedule with
      this peak begins here and runs to the next phase that begins one.
    warmup_steps: of the schedule that begins here.
    restart_moments: forget Adam's moments where the phase begins.
  """

  seq_length: int
  batch_size: int
  num_steps: int
  accumulate: int = 1
  max_examples_per_row: int = 1
  seq_lengths: tuple[int, ...] = ()
  max_predictions_per_seq: int = 0
  learning_rate: float = 0.0
  warmup_steps: int = 0
  restart_moments: bool = False

  @property
  def lengths(self) -> tuple[int, ...]:
    """Those that its rows may have."""
    return self.seq_lengths or (self.seq_length,)


@dataclasses.dataclass(frozen=True)
class HeldoutSettings:
  """Evaluation on the held-out split; every 0 evaluates at the end only."""

  every: int = 1000
  max_examples: int = 4096
  batch_size: int = 0  # 0: that of the phase

  def __post_init__(self):
    if self.every < 0 or self.max_examples < 1 or self.batch_size < 0:
      raise ConfigError(
          f'heldout: every {self.every} and batch_size {self.batch_size} must not be negative, '
          f'max_examples {self.max_examples} must be at least 1')


@dataclasses.dataclass(frozen=True)
class Settings:
  """All of a pre-training run. `model` lacks vocab_size until the tokenizer is known."""

  model: Mapping[str, Any]
  data: DataSettings
  phases: tuple[Phase, ...]
  optimizer: Mapping[str, Any]
  mesh: MeshSettings = MeshSettings()
  checkpoint: CheckpointSettings = CheckpointSettings()
  heldout: HeldoutSettings = HeldoutSettings()
  seed: int = 0
  init_from: str = ''
  log_every: int = 100

  @property
  def num_steps(self) -> int:
    return sum(phase.num_steps for phase in self.phases)

  def starts(self) -> tuple[int, ...]:
    """The step at which each phase begins."""
    starts = [0]
    for phase in self.phases[:-1]:
      starts.append(starts[-1] + phase.num_steps)
    return tuple(starts)

  def bert_config(self, vocab_size: int) -> BertConfig:
    """The model's sizes, with the tokenizer's vocabulary.

    Raises:
      ConfigError: sizes that do not fit together or a vocabulary smaller than the tokenizer's.
    """
    asked = self.model.get('vocab_size', 0)
    if asked and asked < vocab_size:
      raise ConfigError(f'model.vocab_size is {asked}, but the tokenizer has {vocab_size} entries; '
                        'leave it out to follow the tokenizer')
    values = {**self.model, 'vocab_size': asked or vocab_size}
    config = config_lib.build(BertConfig, values, 'model')
    longest = max(phase.seq_length for phase in self.phases)
    if longest > config.max_position_embeddings:
      raise ConfigError(f'a phase has seq_length {longest}, but model.max_position_embeddings is '
                        f'{config.max_position_embeddings}; raise it to {longest}')
    return config

  def optimizer_of(self, phase: int) -> OptimizerSettings:
    """The optimizer of a phase, with the length of the schedule that the phase is part of."""
    first = max(i for i in range(phase + 1) if self.phases[i].learning_rate or i == 0)
    last = next((i for i in range(first + 1, len(self.phases)) if self.phases[i].learning_rate),
                len(self.phases))
    values = dict(self.optimizer) | {'num_steps': sum(p.num_steps for p in self.phases[first:last])}
    if self.phases[first].learning_rate:
      values |= {'learning_rate': self.phases[first].learning_rate,
                 'warmup_steps': self.phases[first].warmup_steps}
    return config_lib.build(OptimizerSettings, values, 'optimizer')

  def pretrain_settings(self, phase: int) -> PretrainSettings:
    """What shapes the examples of a phase."""
    data, here = self.data, self.phases[phase]
    try:
      return PretrainSettings(
          seq_length=here.seq_length, max_predictions_per_seq=here.max_predictions_per_seq,
          masked_lm_prob=data.masked_lm_prob, short_seq_prob=data.short_seq_prob,
          next_sentence=data.next_sentence, whole_word_masking=data.whole_word_masking,
          random_words=data.random_words,
          # Not seed + phase: that would be the draws of phase 0 of another seed.
          seed=hashing.fold_int(self.seed, phase) if phase else self.seed)
    except ValueError as error:
      raise ConfigError(f'data, phase {phase}: {error}') from error


def from_config(config: ml_collections.ConfigDict | Mapping[str, Any]) -> Settings:
  """Checks a configuration whole, before anything is built.

  Raises:
    ConfigError: an unknown key, a value of the wrong type or sizes that do not fit, with the mend.
  """
  values = config_lib.plain(config)
  sections = {'data': DataSettings, 'mesh': MeshSettings, 'checkpoint': CheckpointSettings,
              'heldout': HeldoutSettings}
  for name, cls in sections.items():
    values[name] = config_lib.build(cls, values.get(name, {}), name)
  phases = values.get('phases', ())
  if not phases:
    raise ConfigError('phases is empty: give at least one of seq_length, batch_size, num_steps')
  values['phases'] = tuple(
      config_lib.build(Phase, phase, f'phases[{i}]') for i, phase in enumerate(phases))
  settings = config_lib.build(Settings, values, '')
  settings.bert_config(settings.model.get('vocab_size', 0) or 1)
  if settings.model.get('dtype') == 'float16':
    raise ConfigError('model.dtype float16 would need loss scaling to train; use bfloat16')
  if settings.log_every < 1:
    raise ConfigError(f'log_every is {settings.log_every}; it must be at least 1')
  for i, phase in enumerate(settings.phases):
    for name in ('seq_length', 'batch_size', 'num_steps', 'accumulate',
                 'max_examples_per_row'):
      if getattr(phase, name) < 1:
        raise ConfigError(f'phases[{i}].{name} is {getattr(phase, name)}; it must be at least 1')
    _check_lengths(phase, f'phases[{i}]')
    if phase.warmup_steps and not phase.learning_rate:
      raise ConfigError(f'phases[{i}].warmup_steps is {phase.warmup_steps}, but the phase begins '
                        f'no schedule: set phases[{i}].learning_rate, or optimizer.warmup_steps')
    if phase.restart_moments and i == 0:
      raise ConfigError('phases[0].restart_moments: there are no moments before the first phase')
    if phase.batch_size % phase.accumulate:
      raise ConfigError(f'phases[{i}]: batch_size {phase.batch_size} is not divisible by '
                        f'accumulate {phase.accumulate}')
    settings.optimizer_of(i)
    settings.pretrain_settings(i)
  return settings


def _check_lengths(phase: Phase, name: str) -> None:
  """Rows of several lengths: those that bucketing.py takes, and no packed rows."""
  if not phase.seq_lengths:
    return
  try:
    bucketing.check(phase.seq_lengths, phase.seq_length)
  except ValueError as error:
    raise ConfigError(f'{name}.{error}') from error
  if phase.max_examples_per_row > 1:
    raise ConfigError(f'{name}: rows are either packed (max_examples_per_row) or of several '
                      'lengths (seq_lengths); packing leaves less padding')


def check_batches(settings: Settings, batch_ways: int) -> None:
  """Refuses batches that the mesh cannot divide.

  Args:
    settings: the run.
    batch_ways: over how many devices the batch axis is split (data * fsdp).

  Raises:
    ConfigError: naming the phase and the nearest batch size that fits.
  """
  for i, phase in enumerate(settings.phases):
    ways = batch_ways * phase.accumulate
    if phase.batch_size % ways:
      near = max(ways, round(phase.batch_size / ways) * ways)
      raise ConfigError(
          f'phases[{i}].batch_size {phase.batch_size} is not divisible by data * fsdp * '
          f'accumulate = {ways}; try {near}')


# What a workdir may be resumed with although it was started with something else: none of it changes
# which weights come out (up to the rounding of another mesh), or it lies in the future.
MAY_CHANGE = ('mesh', 'checkpoint', 'heldout', 'log_every', 'model.remat', 'model.scan_unroll',
              'model.attention', 'data.num_workers', 'data.path', 'init_from')


def differences(stored: Mapping[str, Any], current: Mapping[str, Any], step: int) -> list[str]:
  """Where a stored configuration and the current one differ in what matters, a line each.

  `data.path` may change because the content hash of the data is compared instead. Phases that have
  not begun at `step` may change if the schedule of those that have stays the same.
  """
  before, now = from_config(stored), from_config(current)
  # A phase that was saved at its first step has not begun: what it starts anew is started then.
  begun = lambda settings: [i for i, start in enumerate(settings.starts()) if start < step]
  old, new = (_comparable(settings, begun(settings)) for settings in (before, now))
  return [f'{key}: stored {old.get(key, "absent")}, now {new.get(key, "absent")}'
          for key in sorted({*old, *new}) if old.get(key) != new.get(key)]


def to_json(settings: Settings) -> dict[str, Any]:
  """The resolved configuration, every default written out, as JSON holds it."""
  values = dataclasses.asdict(settings)
  phase_model = dataclasses.asdict(settings.bert_config(settings.model.get('vocab_size', 0) or 1))
  if not settings.model.get('vocab_size', 0):
    phase_model['vocab_size'] = 0
  values['model'] = phase_model
  optimizer = dataclasses.asdict(settings.optimizer_of(0))
  values['optimizer'] = {k: v for k, v in optimizer.items() if k != 'num_steps'}
  return json.loads(json.dumps(values))


def _comparable(settings: Settings, begun: Sequence[int]) -> dict[str, Any]:
  values = to_json(settings)
  phases = values.pop('phases')
  optimizer = values.pop('optimizer')
  flat = dict(config_lib.flatten(values))
  flat |= {f'optimizer.{k}': v for k, v in optimizer.items()
           if k not in ('learning_rate', 'warmup_steps')}
  for i in begun:
    flat |= {f'phases[{i}].{k}': v for k, v in phases[i].items() if k != 'accumulate'}
    resolved = settings.optimizer_of(i)
    for name in ('learning_rate', 'warmup_steps', 'num_steps'):
      flat[f'phases[{i}] schedule {name}'] = getattr(resolved, name)
  return {key: value for key, value in flat.items()
          if not any(key == free or key.startswith(free + '.') for free in MAY_CHANGE)}
