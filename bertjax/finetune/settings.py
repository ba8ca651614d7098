"""The configuration of a fine-tuning as frozen dataclasses, checked before anything is built."""

import dataclasses
import json
from collections.abc import Mapping
from typing import Any

import ml_collections

from bertjax import config as config_lib
from bertjax.config import ConfigError
from bertjax.data import bucketing
from bertjax.optim import OptimizerSettings
from bertjax.sharding import MeshSettings

MODES = ('train', 'eval', 'predict')


@dataclasses.dataclass(frozen=True)
class SaveSettings:
  """Checkpoints to resume from; `every` 0 saves once an epoch. The best model is kept besides."""

  every: int = 0
  keep_last: int = 1


@dataclasses.dataclass(frozen=True)
class EvaluateSettings:
  """Evaluation on the dev data.

  Attributes:
    every: steps between evaluations; 0: once an epoch.
    metric: the score that picks the best model; '' is the task's first.
    patience: evaluations without a better score after which training ends; 0: never early.
    batch_size: 0: that of training.
  """

  every: int = 0
  metric: str = ''
  patience: int = 0
  batch_size: int = 0


@dataclasses.dataclass(frozen=True)
class HeadSettings:
  """The head; see heads.HeadConfig."""

  dropout: float = 0.1
  layers: str = 'last'

  def __post_init__(self):
    if self.layers not in ('last', 'weighted_sum'):
      raise ConfigError(f"head.layers is {self.layers!r}; it must be 'last' or 'weighted_sum'")
    if not 0 <= self.dropout < 1:
      raise ConfigError(f'head.dropout is {self.dropout}; it must be in [0, 1)')


@dataclasses.dataclass(frozen=True)
class Settings:
  """All of a fine-tuning run.

  Attributes:
    data: the task's own settings.
    init_from: a checkpoint: sizes, tokenizer and weights are from there.
    from_scratch: take sizes and tokenizer only, and begin with random weights.
    mode: 'train'; 'eval' prints the scores of a checkpoint; 'predict' writes files of predictions.
    seed: of head, order of the examples and dropout.
    seeds: several runs, one for each.
    learning_rates: several runs, one for each (and each seed).
    batch_size: examples of a global batch.
    accumulate: parts into which a batch is cut to save memory.
    num_epochs: passes over the training data.
    seq_length: examples are cut to so many tokens; long contexts of SQuAD and tagged sentences
      become several windows.
    seq_lengths: the lengths of rows, ascending to seq_length; () chooses a few that leave the least
      padding (examples.choose_lengths).
    warmup_share: of all steps.
    model: what to change in the checkpoint's model: dropout rates and speed settings.
  """

  data: Any
  init_from: str = ''
  from_scratch: bool = False
  mode: str = 'train'
  seed: int = 0
  seeds: tuple[int, ...] = ()
  learning_rates: tuple[float, ...] = ()
  batch_size: int = 32
  accumulate: int = 1
  num_epochs: int = 3
  seq_length: int = 128
  seq_lengths: tuple[int, ...] = ()
  warmup_share: float = 0.1
  log_every: int = 50
  model: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  head: HeadSettings = HeadSettings()
  optimizer: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  mesh: MeshSettings = MeshSettings()
  checkpoint: SaveSettings = SaveSettings()
  evaluate: EvaluateSettings = EvaluateSettings()

  def __post_init__(self):
    if self.mode not in MODES:
      raise ConfigError(f'mode is {self.mode!r}; it must be one of {", ".join(MODES)}')
    for name in ('batch_size', 'accumulate', 'num_epochs', 'log_every'):
      if getattr(self, name) < 1:
        raise ConfigError(f'{name} is {getattr(self, name)}; it must be at least 1')
    if min(self.seed, *self.seeds, 0) < 0:
      raise ConfigError(f'seed {self.seed}, seeds {self.seeds}: they must not be negative')
    for name in ('seeds', 'learning_rates'):
      values = getattr(self, name)
      if len(set(values)) < len(values):
        raise ConfigError(f'{name} is {values}; name each once')
    if self.seq_length < 8:
      raise ConfigError(f'seq_length is {self.seq_length}; it must be at least 8')
    if self.seq_lengths:
      try:
        bucketing.check(self.seq_lengths, self.seq_length)
      except ValueError as error:
        raise ConfigError(str(error)) from None
    if self.batch_size % self.accumulate:
      raise ConfigError(f'batch_size {self.batch_size} is not divisible by accumulate '
                        f'{self.accumulate}')
    if not 0 <= self.warmup_share < 1:
      raise ConfigError(f'warmup_share is {self.warmup_share}; it must be in [0, 1)')
    for name in ('every', 'patience', 'batch_size'):
      if getattr(self.evaluate, name) < 0:
        raise ConfigError(f'evaluate.{name} must not be negative')
    if self.checkpoint.every < 0 or self.checkpoint.keep_last < 1:
      raise ConfigError('checkpoint.every must not be negative, checkpoint.keep_last at least 1')

  def optimizer_settings(self, num_steps: int) -> OptimizerSettings:
    """The optimizer with a schedule of `num_steps`."""
    values = dict(self.optimizer) | {
        'num_steps': num_steps, 'warmup_steps': round(self.warmup_share * num_steps)}
    return config_lib.build(OptimizerSettings, values, 'optimizer')


def from_config(
    config: ml_collections.ConfigDict | Mapping[str, Any], data: type
) -> Settings:
  """Checks a configuration whole.

  Args:
    config: as configs/finetune/*.py.
    data: the dataclass of the task's `data` section.

  Raises:
    ConfigError: an unknown key, a value of the wrong type or sizes that do not fit, with the mend.
  """
  values = config_lib.plain(config)
  sections = {'data': data, 'mesh': MeshSettings, 'checkpoint': SaveSettings,
              'evaluate': EvaluateSettings, 'head': HeadSettings}
  for name, cls in sections.items():
    values[name] = config_lib.build(cls, values.get(name, {}), name)
  for name, types in (('seeds', (int,)), ('learning_rates', (int, float)), ('seq_lengths', (int,))):
    if name in values and not isinstance(values[name], tuple):  # --config.seeds=7 gives a number
      values[name] = (values[name],)
    if any(type(value) not in types for value in values.get(name, ())):
      raise ConfigError(f'{name} is {values[name]}; {types[-1].__name__} is needed for each')
  settings = config_lib.build(Settings, values, '')
  for name in ('warmup_steps', 'num_steps'):
    if name in settings.optimizer:
      raise ConfigError(f'optimizer.{name} follows from num_epochs and warmup_share; set these')
  settings.optimizer_settings(1)
  return settings


# What a workdir may be resumed with although it was started with something else.
_MAY_CHANGE = ('mesh', 'checkpoint', 'log_every', 'mode', 'seeds', 'learning_rates', 'init_from',
               'evaluate.batch_size', 'model.remat', 'model.scan_unroll', 'model.attention',
               'data.path', 'data.train', 'data.dev', 'data.test')


def to_json(settings: Settings) -> dict[str, Any]:
  """The resolved configuration, as JSON holds it."""
  return json.loads(json.dumps(dataclasses.asdict(settings)))


def differences(stored: Mapping[str, Any], current: Mapping[str, Any]) -> list[str]:
  """Where two resolved configurations differ in what matters, a line each.

  Paths may change: the content of the data is compared by its hash.
  """
  old, new = (
      {key: value for key, value in config_lib.flatten(values)
       if not any(key == free or key.startswith(free + '.') for free in _MAY_CHANGE)}
      for values in (stored, current))
  return [f'{key}: stored {old.get(key, "absent")}, now {new.get(key, "absent")}'
          for key in sorted({*old, *new}) if old.get(key) != new.get(key)]
