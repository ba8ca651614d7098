"""Fine-tunes on SWAG (official CSV) or HellaSwag (JSON lines): which of four endings is right.

  python -m bertjax.finetune.swag --config=configs/finetune/swag.py --config.init_from=ckpt/ \
      --config.data.train=train.csv --config.data.dev=val.csv --workdir=runs/swag
"""

import dataclasses

from etils import epath

from bertjax import command
from bertjax.config import ConfigError
from bertjax.data import swag
from bertjax.finetune import run as run_lib
from bertjax.finetune import settings as settings_lib
from bertjax.finetune.job import Origin
from bertjax.finetune.settings import Settings
from bertjax.finetune.task import Split, Task, asked_file


@dataclasses.dataclass(frozen=True)
class SwagData:
  """Files of SWAG or HellaSwag: train, dev, and test for mode=predict."""

  train: str = ''
  dev: str = ''
  test: str = ''


def load(settings: Settings, origin: Origin) -> Task:
  """The task with what its mode needs: train and dev, dev, or what is to be predicted."""
  data, mode = settings.data, settings.mode

  def split(name: str, path: str) -> Split:
    rows = swag.read(path, labelled=mode != 'predict')
    file = f'{epath.Path(path).stem}.csv'

    def write(outputs, folder: epath.Path) -> list[epath.Path]:
      swag.write_predictions(rows, outputs, folder / file)
      return [folder / file]

    score = None if rows.labels is None else lambda outputs: swag.scores(outputs, rows.labels)
    return Split(name, swag.encode(rows, origin.tokenizer, settings.seq_length), score, write)

  asked = asked_file(data, mode)
  splits = (split(*asked),) if asked else ()
  train = None
  if mode == 'train':
    if not data.train:
      raise ConfigError('no training data: set data.train to a file of SWAG or HellaSwag')
    rows = swag.read(data.train)
    if rows.labels is None:
      raise swag.SwagError(f'{data.train}: no labels to learn from; name the training file')
    train = swag.encode(rows, origin.tokenizer, settings.seq_length)
  guessing = {'accuracy': 1 / swag.NUM_CHOICES}
  return Task('swag', 'choice', (), 'accuracy', train, splits, guessing)


def fine_tune(config, workdir: str) -> int:
  """What `--config.mode` says; returns the exit code."""
  return run_lib.run(settings_lib.from_config(config, SwagData), workdir, load)


if __name__ == '__main__':
  command.run(fine_tune)
