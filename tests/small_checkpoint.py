"""Checkpoints, data and settings so small that whole fine-tunings fit into a test."""

import contextlib
import copy
import dataclasses
import functools
import json
import pathlib
from unittest import mock

import jax
import numpy as np
from jax.experimental.compilation_cache import compilation_cache
from ml_collections import ConfigDict

from bertjax import checkpoint, heads, sharding, state
from bertjax.data import tokenizer
from bertjax.model import BertConfig

WORDS = (
    'river', 'mill', 'bell', 'tower', 'clerk', 'copper', 'barrel', 'lantern', 'winter', 'bread',
    'baker', 'boat', 'harbor', 'storm', 'gull', 'road', 'stone', 'field', 'north', 'south')
# What the labels of the tests hang on.
MARKS = ('red', 'blue', 'green', 'anna', 'smith', 'rome', 'who', 'what', 'colour', 'is', 'it')
VOCABULARY = ('[PAD]', '[UNK]', '[CLS]', '[SEP]', '[MASK]', *WORDS, *MARKS)
SIZES = {
    'hidden_size': 32, 'num_hidden_layers': 2, 'num_attention_heads': 2, 'intermediate_size': 64,
    'max_position_embeddings': 64,
    # A large range makes attention uneven from the start: the toys are learnt sooner.
    'initializer_range': 0.2,
}


def make(
    folder: pathlib.Path, kind: str = 'encoder', labels=(), vocabulary=VOCABULARY, params=None,
) -> pathlib.Path:
  """A checkpoint with random weights, as bertjax.convert makes them; returns its folder."""
  text = ''.join(f'{word}\n' for word in vocabulary).encode()
  files = {'vocab.txt': text, 'tokenizer_config.json': b'{"do_lower_case": true}'}
  config = BertConfig(vocab_size=len(vocabulary), **SIZES)
  if params is None:
    params = random_params(config, kind, len(labels))
  scratch = folder.parent / f'{folder.name}_tokenizer'
  scratch.mkdir(parents=True)
  for name, content in files.items():
    (scratch / name).write_bytes(content)
  checkpoint.save_params(folder, 0, params, {
      'config': {'model': dataclasses.asdict(config)}, 'data_hash': '',
      'tokenizer_hash': tokenizer.load(scratch).hash(),
      'head': {'kind': kind, 'labels': list(labels)}}, scratch)
  return folder


def random_params(config: BertConfig, kind: str, num_outputs: int = 0) -> state.Params:
  if kind == 'encoder':
    build = lambda rngs: heads.BertEncoder(config, rngs)
  elif kind == 'pretraining':
    build = lambda rngs: heads.BertForPreTraining(config, rngs)
  else:
    build = lambda rngs: heads.HEADS[kind](config, heads.HeadConfig(kind, num_outputs), rngs)
  return jax.device_get(jax.jit(lambda: state.init_params(build, 0))())


def shrink(config: ConfigDict, init_from, **data) -> ConfigDict:
  """A recipe of configs/finetune for toys: short rows, a high rate, no dropout."""
  config.init_from = str(init_from)
  config.seq_length, config.seq_lengths = 32, (16, 32)
  config.batch_size, config.num_epochs = 8, 4
  config.optimizer.learning_rate = 3e-3
  config.model.update({'hidden_dropout_prob': 0.0, 'attention_probs_dropout_prob': 0.0})
  config.head.dropout = 0.0
  config.log_every = 10
  config.data.update({key: str(value) if isinstance(value, pathlib.Path) else value
                      for key, value in data.items()})
  return config


def changed(config: ConfigDict, changes: dict | None = None, **top) -> ConfigDict:
  """A copy with other values, by dotted names as on the command line."""
  config = copy.deepcopy(config)
  config.update_from_flattened_dict((changes or {}) | top)
  return config


@contextlib.contextmanager
def devices(number: int):
  """Meshes are made over the first so many devices; small programs are quickest on one."""
  few = functools.partial(sharding.make_mesh, devices=jax.devices()[:number])
  with mock.patch.object(sharding, 'make_mesh', few):
    yield


@contextlib.contextmanager
def quick_programs(folder: pathlib.Path):
  """One device, and programs that were compiled before are taken from a folder.

  Compiling is nearly all of the work of these tests, and many runs have the same programs.
  """
  settings = {'jax_compilation_cache_dir': str(folder),
              'jax_persistent_cache_min_compile_time_secs': 0.2,
              'jax_persistent_cache_min_entry_size_bytes': 0}
  before = {name: getattr(jax.config, name) for name in settings}
  for name, value in settings.items():
    jax.config.update(name, value)
  compilation_cache.reset_cache()
  try:
    with devices(1):
      yield
  finally:
    for name, value in before.items():
      jax.config.update(name, value)
    compilation_cache.reset_cache()


def sentence(draw, *marks: str, length: int = 6) -> str:
  """Words in any order, the marks among them."""
  words = [draw.choice(WORDS) for _ in range(length - len(marks))] + list(marks)
  draw.shuffle(words)
  return ' '.join(words)


def records(workdir: pathlib.Path, split: str) -> list[dict]:
  lines = (workdir / 'metrics.jsonl').read_text(encoding='utf-8').splitlines()
  return [record for record in map(json.loads, lines) if record['split'] == split]


def best_scores(workdir: pathlib.Path) -> dict:
  return checkpoint.read_metadata(workdir / 'best')['scores']


def files(folder: pathlib.Path) -> dict[str, bytes]:
  """Every file below a folder by its path."""
  return {str(path.relative_to(folder)): path.read_bytes()
          for path in sorted(folder.rglob('*')) if path.is_file()}


def assert_close(left: dict, right: dict) -> None:
  """Scores of two evaluations are the same."""
  assert left.keys() == right.keys()
  for name, value in left.items():
    if isinstance(value, float):
      np.testing.assert_allclose(right[name], value, rtol=1e-6, atol=1e-6, err_msg=name)
    else:
      assert right[name] == value, name
