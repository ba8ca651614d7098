"""Fine-tunes a tagger on CoNLL columns: named entities (BIO, IOB1) or any tag a word.

  python -m bertjax.finetune.tagging --config=configs/finetune/tagging.py --config.init_from=ckpt/ \
      --config.data.train=train.conll --config.data.dev=dev.conll --workdir=runs/ner
"""

import dataclasses

from etils import epath

from bertjax import command
from bertjax.config import ConfigError
from bertjax.data import tagging
from bertjax.evals import entity_scores
from bertjax.finetune import run as run_lib
from bertjax.finetune import settings as settings_lib
from bertjax.finetune.job import Origin, need_kind
from bertjax.finetune.settings import Settings
from bertjax.finetune.task import Split, Task, asked_file


@dataclasses.dataclass(frozen=True)
class TaggingData:
  """The data.

  Attributes:
    train, dev, test: files of CoNLL columns; test may lack the tags.
    scheme: 'auto', 'bio', 'iob1' or 'plain' (tags that are no entities). 'auto' goes by the tags of
      the training file, and stays with the model.
    token_column, tag_column: from 0; negative from the end.
    test_has_tags: False reads a test file whose columns hold no tags.
    stride: pieces from one window of a long sentence to the next; 0: as in training, there half a
      window.
  """

  train: str = ''
  dev: str = ''
  test: str = ''
  scheme: str = 'auto'
  token_column: int = 0
  tag_column: int = -1
  test_has_tags: bool = True
  stride: int = 0


def load(settings: Settings, origin: Origin) -> Task:
  """The task with what its mode needs: train and dev, dev, or what is to be predicted."""
  data, mode = settings.data, settings.mode
  tag_column = data.tag_column if mode != 'predict' or data.test_has_tags else None
  read = lambda path, scheme=data.scheme: tagging.read(
      path, scheme=scheme, token_column=data.token_column, tag_column=tag_column)
  encode = lambda sentences, labels, training=False: tagging.encode(
      sentences, origin.tokenizer, labels, settings.seq_length, stride or None, training)
  train, scheme, stride = None, data.scheme, data.stride
  if mode == 'train':
    if not data.train:
      raise ConfigError('no training data: set data.train to a file of CoNLL columns')
    sentences = read(data.train)
    scheme = sentences.scheme
    labels = tagging.label_list(sentences)
    stored = origin.head.get('labels', [])
    if origin.head['kind'] == 'tagging' and sorted(stored) == sorted(labels):
      labels = list(stored)  # names, not numbers, connect data and head
    train = encode(sentences, labels, training=True).examples
  else:
    need_kind(origin, 'tagging')
    stored = origin.head.get('stride', 0)
    if not stride and stored <= settings.seq_length - 2:  # shorter windows have no use for it
      stride = stored
    if scheme == 'auto':  # a small file may not show it
      scheme = origin.head.get('scheme', 'auto')
    labels = list(origin.head.get('labels', []))

  def split(name: str, path: str) -> tuple[Split, tagging.Sentences]:
    sentences = read(path, scheme)
    windows = encode(sentences, labels)
    file = f'{epath.Path(path).stem}.conll'

    def write(outputs, folder: epath.Path) -> list[epath.Path]:
      tagging.write_predictions(sentences, tagging.predictions(windows, outputs), folder / file)
      return [folder / file]

    score = None if sentences.tags is None else (
        lambda outputs: _scores(sentences, tagging.predictions(windows, outputs)))
    return Split(name, windows.examples, score, write), sentences

  asked = asked_file(data, mode)
  found = (split(*asked),) if asked else ()
  baseline = {}
  if found and found[0][1].tags is not None:
    sentences = found[0][1]
    common = max(labels, key=[tag for row in sentences.tags for tag in row].count)
    baseline = _scores(sentences, [[common] * len(row) for row in sentences.tokens])
  metric = 'token_accuracy' if scheme == 'plain' else 'f1'
  return Task('tagging', 'tagging', tuple(labels), metric, train,
              tuple(one for one, _ in found), baseline, {'scheme': scheme, 'stride': stride})


def _scores(sentences: tagging.Sentences, predicted: list[list[str]]) -> dict[str, float]:
  if sentences.scheme != 'plain':
    return entity_scores.scores(sentences.tags, predicted)
  pairs = [a == b for gold, row in zip(sentences.tags, predicted, strict=True)
           for a, b in zip(gold, row, strict=True)]
  return {'token_accuracy': sum(pairs) / len(pairs)}


def fine_tune(config, workdir: str) -> int:
  """What `--config.mode` says; returns the exit code."""
  return run_lib.run(settings_lib.from_config(config, TaggingData), workdir, load)


if __name__ == '__main__':
  command.run(fine_tune)
